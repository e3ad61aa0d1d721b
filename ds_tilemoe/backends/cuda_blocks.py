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
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.backends.cuda_plan import HeapNeeds
from ds_tilemoe.errors import CapacityError, TileMoEError
from ds_tilemoe.symmetric_heap import gather, group_timeout_s

MOST_SECONDS = 1e9  # in nanoseconds it is still an int64
# Symmetric blocks of this process by number, which is equal on all ranks; the heap of each, so that
# a block whose heap is gone on every rank can be given back when all ranks meet.
_blocks: dict[int, tuple[transport.Transport, weakref.ref[CudaHeap], Tensor]] = {}
_next_block = 0
# Heaps whose addresses a CUDA graph holds: nobody tells us when it is replayed for the last time.
_captured: list[CudaHeap] = []


def world_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks that make memory together with ``group``: all; a group of one does it alone."""
    return None if group is None else dist.group.WORLD


def keep_for_graphs(heap: CudaHeap) -> None:
    """From now on the heap is as it is: it is neither replaced while it works nor ever freed."""
    if not heap.is_captured:
        heap.is_captured = True
        _captured.append(heap)


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
        TileMoEError: a peer's memory is not mapped; on every rank.
    """
    world = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    everyone = world_of(group)
    heap, problem = None, ""
    try:
        # Of the local memory first: it may not be there, which is said before a peer waits.
        heap = CudaHeap(needs, library, device, rank, world)
    except torch.OutOfMemoryError as error:
        problem = str(error).partition("\n")[0]
    for peer, text in enumerate(gather(problem, everyone)):
        if text:
            raise CapacityError(
                f"rank {peer}: the buffers of {needs.max_tokens} tokens a rank do not fit its GPU"
                f" ({text}); set a smaller max_tokens_per_rank"
            )
    assert heap is not None
    if group is None:
        block = heap.room(heap.offsets.block_bytes)
        heap.connect(block, [block.data_ptr()])
    else:
        _connect(heap, group)
    heap.view.wait_timeout_ns = int(wait_timeout_s * 1e9)
    torch.cuda.synchronize(device)
    gather(None, everyone)  # no peer writes into a block that is not zeroed yet
    return heap


def _connect(heap: CudaHeap, group: dist.ProcessGroup) -> None:
    """Gives the heap a symmetric block, and the addresses of its peers' ones."""
    global _next_block
    link = transport.start(heap.library)
    free_abandoned_blocks(link)
    block = link.allocate(heap.offsets.block_bytes)
    block.zero_()
    _blocks[_next_block] = (link, weakref.ref(heap), block)
    _next_block += 1
    ranks = [dist.get_global_rank(group, peer) for peer in range(heap.world)]
    addresses = [link.peer_pointer(block, peer) for peer in ranks]
    missing = [peer for peer, address in zip(ranks, addresses, strict=True) if address is None]
    for peer, found in enumerate(gather(missing, dist.group.WORLD)):
        if found:
            raise TileMoEError(
                f"rank {peer}: the memory of ranks {found} is not mapped on its GPU; wanted GPUs"
                " that reach each other by NVLink or PCIe peer access"
            )
    heap.connect(block, [address for address in addresses if address is not None], ranks)


def free_abandoned_blocks(link: transport.Transport) -> None:
    """Gives back blocks whose heap no rank has any more. A collective of the world."""
    for number in [n for n, (owner, _, _) in _blocks.items() if owner is not link]:
        del _blocks[number]  # that NVSHMEM has been closed, and its memory with it
    torch.cuda.synchronize()
    mine = {number for number, (_, heap, _) in _blocks.items() if heap() is None}
    for number in sorted(set.intersection(*gather(mine, dist.group.WORLD))):
        link.free(_blocks.pop(number)[2])


def exchange_timeout_ns(group: dist.ProcessGroup | None) -> int:
    """For a peer that has not come yet: the process group's own timeout."""
    return int(min(group_timeout_s(group, "cuda"), MOST_SECONDS) * 1e9)
