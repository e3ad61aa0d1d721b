"""NVSHMEM's symmetric heap, played on the CPU: where its blocks lie, and what it dies of."""

from __future__ import annotations

MIB, GIB = 1 << 20, 1 << 30
PIECE = 512 * MIB


class Died(Exception):
    """NVSHMEM does not survive this."""


class NvshmemHeap:
    """As in NVSHMEM 3.4.5, src/host/mem: mem_heap.cpp and, as to free chunks, custom_malloc.cpp.

    Args:
        own: bytes of NVSHMEM's own blocks, made at its start.
        limit: of a heap that grows, in bytes.
        fixed: bytes of a heap that does not.
        base: address of the heap.
    """

    def __init__(
        self,
        own: tuple[int, ...] = (500 * MIB, 2048, 64),
        limit: int = 128 * GIB,
        fixed: int | None = None,
        base: int = 0x7F1234200000,
    ) -> None:
        self.base, self.limit, self.physical = base, limit, 0
        self.grows = fixed is None
        self.chunks: dict[int, int] = {}  # free, address -> bytes
        self.used: dict[int, int] = {}
        self.environment = {"NVSHMEM_MAX_MEMORY_PER_GPU": str(limit)}
        if fixed is not None:
            name = "NVSHMEM_SYMMETRIC_SIZE"
            self.environment = {"NVSHMEM_DISABLE_CUDA_VMM": "1", name: str(fixed)}
            self.limit = -(-(fixed + sum(own)) // PIECE) * PIECE
            self.add_free_chunk(base, self.limit)
        for nbytes in own:
            self.malloc(nbytes)

    def malloc(self, nbytes: int) -> int:
        address = self.fit(nbytes)
        if address == 0 and self.grows:
            pieces = -(-nbytes // PIECE) * PIECE
            if self.physical + pieces >= self.limit:
                raise Died
            self.add_free_chunk(self.base + self.physical, pieces)
            self.physical += pieces
            address = self.fit(nbytes)
        return address

    def fit(self, nbytes: int) -> int:
        nbytes = -(-nbytes // 512) * 512
        for address, size in sorted(self.chunks.items()):
            if size >= nbytes:
                del self.chunks[address]
                if size > nbytes:
                    self.chunks[address + nbytes] = size - nbytes
                self.used[address] = nbytes
                return address
        return 0

    def free(self, address: int) -> None:
        self.add_free_chunk(address, self.used.pop(address))

    def add_free_chunk(self, address: int, size: int) -> None:
        for start, before in list(self.chunks.items()):
            if start + before == address:
                del self.chunks[start]
                address, size = start, size + before
        size += self.chunks.pop(address + size, 0)
        self.chunks[address] = size

    def peer_pointer(self, address: int, rank: int) -> int | None:
        return address if self.base <= address < self.base + self.limit else None
