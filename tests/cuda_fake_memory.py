"""Memory of the fake CUDA library: what lies at an address, and behind a tensor map."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {0: torch.bfloat16, 1: torch.float16}
COUNT_ROW, RECV = 64, 4096  # bytes of a count row without counts; offset of the receive room
SMS = 132


def memory(address: int, dtype: Any, *shape: int) -> Any:
    """What lies at an address, as numpy or torch sees it; writable."""
    is_torch = isinstance(dtype, torch.dtype)
    size = (dtype if is_torch else np.dtype(dtype)).itemsize * int(np.prod(shape))
    if size == 0:
        return (torch.empty if is_torch else np.empty)(shape, dtype=dtype)
    assert address
    raw = (ctypes.c_uint8 * size).from_address(address)
    if is_torch:
        return torch.frombuffer(raw, dtype=dtype).view(shape)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def mapped(tensor_map: Any, box_rows: int, dtype: int) -> Tensor:
    """The matrix of a map; asserts that it was made for this box and type."""
    base, made_for, rows, cols, box = list(tensor_map.words)[:5]
    assert (made_for, box) == (dtype, box_rows)
    return memory(base, DTYPES[dtype], rows, cols)
