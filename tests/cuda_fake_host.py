"""What a host without a GPU plays beside the fake CUDA library: streams, captures, transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_tilemoe.symmetric_heap import gather

if TYPE_CHECKING:
    from cuda_library_fake import FakeLibrary

WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "unique")


class FakeLink:
    """Of the transport: symmetric memory that only its own rank can reach."""

    def __init__(self) -> None:
        self.freed = 0
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.sizes = gather(nbytes, dist.group.WORLD)
        assert len(set(self.sizes)) == 1, "NVSHMEM wants one size on all ranks of the world"
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def free(self, block: Tensor) -> None:
        self.freed += 1

    def peer_pointer(self, block: Tensor, rank: int) -> int:
        return block.data_ptr() if rank == dist.get_rank() else 1


class NoWaits(TorchFunctionMode):
    """Refuses what would wait for a device; not inside the library."""

    def __init__(self, library: FakeLibrary) -> None:
        super().__init__()
        self._library = library

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = getattr(function, "__name__", "")
        assert self._library.inside or name not in WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the current stream is captured in a graph."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


class Stream:
    cuda_stream = 1

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._library.log.append("waits")
