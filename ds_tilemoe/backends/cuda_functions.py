"""The functions of the CUDA library: prototypes, and an exception for a cudaError_t.

Structs: cuda_abi.py. A cudaError_t is an int32 that the caller gives to :func:`check`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_void_p
from typing import Any

from ds_tilemoe.backends.cuda_abi import (
    BlockOffsets,
    BlockShape,
    CombineParams,
    ErrorRecord,
    ExchangeParams,
    PlanKernelParams,
    ProducerKind,
    ProducerParams,
    RankView,
    ShipParams,
)
from ds_tilemoe.errors import TileMoEError

# Name -> (result, arguments); a cudaError_t is an int32 that the caller checks.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tilemoe_load": (c_int32, ()),
    "tilemoe_block_offsets": (None, (POINTER(BlockShape), POINTER(BlockOffsets))),
    "tilemoe_half_bytes": (c_int64, (c_int32,)),
    "tilemoe_state_bytes": (c_int64, (c_int32,)),
    "tilemoe_exchange_launch": (c_int32, (POINTER(ExchangeParams), c_void_p)),
    "tilemoe_record_launch": (c_int32, (POINTER(RankView), c_void_p, c_void_p)),
    "tilemoe_say_heard": (c_int32, (POINTER(RankView), c_void_p)),
    "tilemoe_make_tensor_map": (
        c_int32,
        (c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32),
    ),
    "tilemoe_set_counters": (None, (POINTER(ProducerParams), c_int32)),
    "tilemoe_producer_b_box_rows": (c_int32, (ProducerKind,)),
    "tilemoe_producer_group_bands": (c_int32, (ProducerKind, c_int32, c_int32)),
    "tilemoe_producer_launch": (
        c_int32,
        (POINTER(ProducerParams), ProducerKind, c_int32, c_void_p),
    ),
    "tilemoe_consumer_launch": (c_int32, (POINTER(ShipParams), c_int32, c_void_p)),
    "tilemoe_combine_launch": (c_int32, (POINTER(CombineParams), c_void_p)),
    "tilemoe_copy_engine_make": (
        c_int32,
        (POINTER(RankView), c_int32, c_int32, c_int64, POINTER(c_void_p)),
    ),
    "tilemoe_copy_engine_free": (None, (c_void_p,)),
    "tilemoe_copy_engine_fetch": (c_int32, (c_void_p, POINTER(PlanKernelParams), c_void_p)),
    "tilemoe_fail_group": (
        c_int32,
        (POINTER(RankView), POINTER(ErrorRecord), c_void_p),
    ),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions of a loaded library their prototypes, and returns it."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def check(status: int, what: str) -> None:
    """Raise if a call of the library gave an error."""
    if status:
        raise TileMoEError(f"{what} gave cudaError {status} (see cudaGetErrorString)")
