"""What NVSHMEM's symmetric heap can still hold, so that it is never asked for more.

By the rules of NVSHMEM 3.4 (src/host/mem/mem_heap.cpp, custom_malloc.cpp; whether it uses CUDA VMM:
src/host/init/init.cu): with CUDA VMM the heap takes device memory in pieces. A block lies in the
first gap that it fits; if there is none, pieces for all of it are added at the end. A heap that may
not grow so far unmaps itself, and the process ends of it. Without CUDA VMM the heap has one size,
and a block that does not fit is just refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

LIMIT, PIECE = "NVSHMEM_MAX_MEMORY_PER_GPU", "NVSHMEM_CUMEM_GRANULARITY"
FIXED, FIXED_SIZE = "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_SYMMETRIC_SIZE"
KIND, ALIGNED = "NVSHMEM_HEAP_KIND", "NVSHMEM_ENABLE_ALIGNED_MALLOC"
_DEFAULTS = {LIMIT: 128 << 30, PIECE: 512 << 20, FIXED_SIZE: 1 << 30}  # of NVSHMEM 3.4.5
ALIGNMENT = 512  # of blocks, in bytes
_LEAST_PIECE, _LARGEST_PIECE = 2 << 20, 2 << 30  # by CUDA, by NVSHMEM

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(.?)", re.DOTALL)
_SHIFTS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class Settings(NamedTuple):
    """NVSHMEM's own settings.

    Attributes:
        fixed_by: why the heap does not grow, as it uses no CUDA VMM; "" where it does.
        limit: bytes that it stays below, rounded up to pieces.
        piece: bytes of device memory that it takes at once.
        fixed_size: bytes of a heap that does not grow.
    """

    fixed_by: str
    limit: int
    piece: int
    fixed_size: int


def read_settings(environment: Mapping[str, str], has_vmm: bool) -> Settings:
    """What NVSHMEM reads when it starts.

    Args:
        has_vmm: the GPU has CUDA VMM, and GPUDirect RDMA with it; NVSHMEM asks for both.

    Raises:
        ValueError: a size that NVSHMEM refuses too, or aligned blocks.
    """
    if _is_on(environment, ALIGNED):
        raise ValueError(
            f"{ALIGNED}: got {environment[ALIGNED]!r}; wanted 0, as with it NVSHMEM asks"
            f" {PIECE} more for each block than is foreseen here; fix: unset it on all ranks"
        )
    limit, piece, fixed_size = (_size(environment, name) for name in (LIMIT, PIECE, FIXED_SIZE))
    piece = min(max(piece, _LEAST_PIECE), _LARGEST_PIECE)
    fixed_by = ""
    if _is_on(environment, FIXED):
        fixed_by = FIXED
    elif environment.get(KIND, "").upper() == "SYSMEM":
        fixed_by = f"{KIND}=SYSMEM"
    elif not has_vmm:
        fixed_by = "the GPU has no CUDA VMM with GPUDirect RDMA"
    return Settings(fixed_by, _round_up(limit, piece), piece, fixed_size)


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    """Any other word stands for yes, also an empty one."""
    return environment.get(name, "0")[:1] not in set("0NnFf")


def _size(environment: Mapping[str, str], name: str) -> int:
    """A number and at most one letter; what follows the letter is ignored."""
    text = environment.get(name)
    if text is None:
        return _DEFAULTS[name]
    found = _NUMBER.match(text)
    shift = _SHIFTS.get(found[2].lower()) if found else None
    if found is None or shift is None or float(found[1]) < 0:
        raise ValueError(f"{name}: got {text!r}; wanted a number of bytes, or one with K, M, G, T")
    return math.ceil(float(found[1]) * (1 << shift))


class Room:
    """The heap of this process, which grows. All ranks' are alike. It is ours alone: a block that
    others have made since the start counts only as far as ours lie behind it.

    Args:
        base: address of the heap.
        first: address of the first block that is not NVSHMEM's own. Of its own it frees none, and
            only the first is larger than a piece, so behind them less than a piece is free.
        settings: see there.
    """

    def __init__(self, base: int, first: int, settings: Settings) -> None:
        self._base, self._first, self._settings = base, first, settings
        self._end = base  # of the pieces
        self._extend(first + ALIGNMENT)
        self._blocks: dict[int, int] = {}  # address -> bytes

    @property
    def available(self) -> int:
        """Bytes of the largest block that can be made."""
        return max(*self._gaps(), self._left)

    def growth(self, nbytes: int) -> int:
        """Bytes of device memory that a block of ``nbytes`` makes NVSHMEM take."""
        if any(gap >= nbytes for gap in self._gaps()):
            return 0
        return _round_up(nbytes, self._settings.piece)

    def limit_for(self, nbytes: int) -> int:
        """The least limit with which a block of ``nbytes`` could be made now."""
        return self._end - self._base + self.growth(nbytes) + self._settings.piece

    def take(self, address: int, nbytes: int) -> None:
        """NVSHMEM has made a block."""
        self._end += self.growth(nbytes)
        self._blocks[address] = _round_up(nbytes, ALIGNMENT)
        self._extend(address + nbytes)  # whatever has been foreseen, so much there is

    def release(self, address: int) -> None:
        """NVSHMEM has freed a block; it keeps the device memory."""
        del self._blocks[address]

    @property
    def _left(self) -> int:
        """Bytes by which the heap may still grow: it has to stay below its limit."""
        return max(0, self._base + self._settings.limit - self._settings.piece - self._end)

    def _extend(self, address: int) -> None:
        whole = self._base + _round_up(address - self._base, self._settings.piece)
        self._end = max(self._end, whole)

    def _gaps(self) -> Iterator[int]:
        """Bytes that lie free in front of each block and behind the last."""
        at = self._first
        for address in sorted(self._blocks):
            yield address - at
            at = address + self._blocks[address]
        yield self._end - at


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
