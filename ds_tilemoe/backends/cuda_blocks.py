"""Symmetric blocks: the memory of a rank that its peers write into. Made by all ranks together.

NVSHMEM allocates on the whole world at once. Groups that are smaller than the world therefore make
their heaps in the same calls, with blocks of one size.

Shape letters: W ranks of a group.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe import transport
from ds_tilemoe.backends.cuda_heap import CudaHeap, lasting
from ds_tilemoe.backends.cuda_plan import HeapNeeds
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.symmetric_heap import gather, group_timeout_s, in_step

MOST_SECONDS = 1e9  # in nanoseconds it is still an int64
# Symmetric blocks of this process by number, which is equal on all ranks; the heap of each, so that
# a block whose heap is gone on every rank can be given back when all ranks meet.
_blocks: dict[int, tuple[transport.Transport, weakref.ref[CudaHeap], Tensor]] = {}
_next_block = 0
# By id, what owns memory that a CUDA graph reads: nobody tells us when it is replayed last.
_captured: dict[int, object] = {}


def world_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that make memory together with ``group``: all; a group of one does it alone."""
    return None if group is None else dist.group.WORLD


def keep_for_graphs(heap: CudaHeap, *owners: object) -> None:
    """From now on the heap is as it is: it is not replaced while it works, and never freed.

    Args:
        owners: of what else a captured call reads; they live as long.
    """
    heap.is_captured = True
    _captured.update({id(owner): owner for owner in (heap, *owners)})


@lasting
def open_heap(
    needs: HeapNeeds,
    library: ctypes.CDLL,
    device: torch.device,
    group: dist.ProcessGroup | None,
    wait_timeout_s: float,
) -> CudaHeap:
    """A new heap, zeroed on every rank. A collective of the world, but for a group of one.

    Args:
        needs: equal on all ranks of the world.

    Raises:
        CapacityError: a rank has too little memory; on every rank.
        BuildError: NVSHMEM does not start; on every rank.
        TileMoEError: a peer's memory is not mapped, or a rank fails otherwise; on every rank.
    """
    world = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    everyone = world_of(group)
    what = f"the buffers of {needs.max_tokens} tokens a rank"

    def make() -> CudaHeap:
        torch.cuda.synchronize(device)  # whatever may be at the blocks that are given back
        return CudaHeap(needs, library, device, rank, world)

    # The local memory first: it may not be there, which is said before a peer waits.
    heap = in_step(make, everyone, what)
    link = block = None
    if group is not None:
        link = transport.start(library)
        block = _allocate(link, heap)

    def connect() -> None:
        if group is None:
            own = heap.room(heap.offsets.block_bytes)
            heap.connect(own, [own.data_ptr()])
        else:
            assert link is not None
            assert block is not None
            _connect(heap, group, link, block)
        heap.view.wait_timeout_ns = int(wait_timeout_s * 1e9)
        torch.cuda.synchronize(device)

    in_step(connect, everyone, what)  # no peer writes into a block that is not zeroed yet
    return heap


def _allocate(link: transport.Transport, heap: CudaHeap) -> Tensor:
    """A symmetric block for the heap. A collective of the world."""
    global _next_block
    _free_abandoned_blocks(link)
    block = link.allocate(heap.offsets.block_bytes)
    _blocks[_next_block] = (link, weakref.ref(heap), block)
    _next_block += 1
    return block


def _connect(
    heap: CudaHeap, group: dist.ProcessGroup, link: transport.Transport, block: Tensor
) -> None:
    """Gives the heap its block, zeroed, and the addresses of its peers' ones. Local."""
    block.zero_()
    ranks = [dist.get_global_rank(group, peer) for peer in range(heap.world)]
    addresses = [link.peer_pointer(block, peer) for peer in ranks]
    missing = [peer for peer, address in zip(ranks, addresses, strict=True) if address is None]
    if missing:
        raise TileMoEError(
            f"the memory of ranks {missing} is not mapped on its GPU; wanted GPUs that reach each"
            " other by NVLink or PCIe peer access"
        )
    heap.connect(block, [address for address in addresses if address is not None], ranks)


def _free_abandoned_blocks(link: transport.Transport) -> None:
    """Gives back blocks whose heap no rank has any more, and at which no kernel is. A collective of
    the world."""
    for number in [n for n, (owner, _, _) in _blocks.items() if owner is not link]:
        del _blocks[number]  # that NVSHMEM has been closed, and its memory with it
    mine = {number for number, (_, heap, _) in _blocks.items() if heap() is None}
    for number in sorted(set.intersection(*gather(mine, dist.group.WORLD))):
        link.free(_blocks.pop(number)[2])


def exchange_timeout_ns(group: dist.ProcessGroup | None) -> int:
    """For a peer that has not come yet: the process group's own timeout."""
    return int(min(group_timeout_s(group, "cuda"), MOST_SECONDS) * 1e9)
