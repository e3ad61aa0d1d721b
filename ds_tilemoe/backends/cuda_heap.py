"""Device memory of one expert-parallel group: a symmetric block a rank, plan arrays, GEMM buffers.

Offsets inside a block and the reuse rule: csrc/common/control.h. The only allocator of the backend.

Shape letters: E experts of the group, W ranks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe import transport
from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.errors import CapacityError, TileMoEError
from ds_tilemoe.plan_abi import BAND_DTYPE, CHUNK_DTYPE, SEGMENT_DTYPE
from ds_tilemoe.symmetric_heap import gather, group_timeout_s


@dataclass(frozen=True)
class HeapNeeds:
    """What a heap must hold; equal on every rank.

    Attributes:
        max_experts: E of the layer with most experts.
        max_tokens: tokens a rank that the rest was computed for.
        recv_bytes: room of the block for the rows that peers send back.
        rows_bytes, hidden_bytes, out_bytes: of a layout's rows in front of GEMM 1, GEMM 2 and
            behind it.
        bands, segments, chunks: of a plan.
    """

    max_experts: int = 0
    max_tokens: int = 0
    recv_bytes: int = 0
    rows_bytes: int = 0
    hidden_bytes: int = 0
    out_bytes: int = 0
    bands: int = 0
    segments: int = 0
    chunks: int = 0

    def union(self, other: HeapNeeds) -> HeapNeeds:
        """The smallest needs that cover both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return HeapNeeds(*(max(pair) for pair in pairs))


class CudaHeap:
    """The memory of this rank; a collective of the group makes it. See :func:`open_heap`.

    Attributes:
        needs: what it was made for.
        view: this rank's view of the group, for every kernel's params.
        counts: [W * max_experts] int32, room for C; ``counts_on_host`` its page-locked copy.
        rows, hidden, out: uint8 GEMM buffers, shared by all layers of the group.
    """

    def __init__(
        self,
        needs: HeapNeeds,
        library: ctypes.CDLL,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        self.needs = needs
        self.library = library
        self.device = device
        self.world = world
        # Of the local memory first: it may not be there, which has to be said before a peer waits.
        self._memory: list[Tensor] = []
        experts = needs.max_experts
        self.counts = self._room(4 * world * experts).view(torch.int32)
        self.counts_on_host = page_locked(4 * world * experts).view(torch.int32)
        self.rows = self._room(needs.rows_bytes)
        self.hidden = self._room(needs.hidden_bytes)
        self.out = self._room(needs.out_bytes)
        self.run_row = self._room(8 * experts).view(torch.int64)
        self.expert_row = self._room(8 * (experts + 1)).view(torch.int64)
        self._state = self._room(library.tilemoe_state_bytes(needs.bands))
        self._pinned = page_locked(256)
        address = self._pinned.data_ptr()
        self._error = abi.ErrorRecord.from_address(address)
        self._stats = abi.IterationStats.from_address(address + 128)
        self.offsets = abi.BlockOffsets()
        shape = abi.BlockShape(world, experts, needs.recv_bytes)
        library.tilemoe_block_offsets(shape, self.offsets)
        self.plan = abi.PlanKernelParams()
        view = self.plan.view
        view.expert_row, view.run_row = self.expert_row.data_ptr(), self.run_row.data_ptr()
        view.bands = self._address(needs.bands * BAND_DTYPE.itemsize)
        view.segments = self._address(needs.segments * SEGMENT_DTYPE.itemsize)
        view.chunks = self._address(needs.chunks * CHUNK_DTYPE.itemsize)
        view.arrival_target = self._address(8 * world)
        view.dispatch_row = self._address(8 * experts)
        view.recv_row = self._address(8 * (experts + 1))
        self.plan.sizes = self._address(ctypes.sizeof(abi.PlanSizes))
        self.plan.overflow = self._address(4)
        self.plan.counts = self.counts.data_ptr()
        self.view = abi.RankView(world=world, rank=rank, offsets=self.offsets)
        self.view.state = self._state.data_ptr()
        self.view.half_bytes = library.tilemoe_half_bytes(needs.bands)
        self.view.host_error = address

    @property
    def stats_address(self) -> int:
        """Where scale writes the times of an iteration: page-locked host memory."""
        return ctypes.addressof(self._stats)

    @property
    def stats(self) -> abi.IterationStats:
        """What stands there; of a forward whose end the caller has waited for."""
        return self._stats

    def take_error(self) -> abi.ErrorRecord | None:
        """What a kernel has told the host, once. It is whole as soon as its outcome is there."""
        if self._error.outcome == abi.Outcome.OK:
            return None
        record = abi.ErrorRecord.from_buffer_copy(self._error)
        self._error.outcome = abi.Outcome.OK
        return record

    def connect(self, blocks: list[int]) -> None:
        """Takes the addresses, on this device, of the ranks' blocks."""
        table = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        self._memory.append(table)
        self.view.blocks = table.data_ptr()

    def _room(self, nbytes: int) -> Tensor:
        # Never empty: a kernel's params want an address.
        memory = torch.zeros(max(nbytes, 16), dtype=torch.uint8, device=self.device)
        self._memory.append(memory)
        return memory

    def _address(self, nbytes: int) -> int:
        return self._room(nbytes).data_ptr()


# Symmetric blocks of this process by number, which is equal on all ranks; the heap of each, so that
# a block whose heap is gone on every rank can be given back when all ranks meet.
_blocks: dict[int, tuple[transport.Transport, weakref.ref[CudaHeap], Tensor]] = {}
_next_block = 0


def open_heap(
    needs: HeapNeeds,
    library: ctypes.CDLL,
    device: torch.device,
    group: dist.ProcessGroup | None,
    wait_timeout_s: float,
) -> CudaHeap:
    """A new heap, zeroed on every rank. A collective of the group, which is the whole world.

    Raises:
        CapacityError: a rank has too little memory; on every rank.
        BuildError: NVSHMEM does not start; on every rank.
        TileMoEError: a peer's memory is not mapped; on every rank.
    """
    world = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    heap, problem = None, ""
    try:
        heap = CudaHeap(needs, library, device, rank, world)
    except torch.OutOfMemoryError as error:
        problem = str(error).partition("\n")[0]
    for peer, text in enumerate(gather(problem, group)):
        if text:
            raise CapacityError(
                f"rank {peer} of the group: the buffers of {needs.max_tokens} tokens a rank do not"
                f" fit its GPU ({text}); set a smaller max_tokens_per_rank"
            )
    assert heap is not None
    if group is None:
        heap.connect([heap._address(heap.offsets.block_bytes)])
    else:
        heap.connect(_symmetric_block(heap, group, rank))
    heap.view.wait_timeout_ns = int(wait_timeout_s * 1e9)
    torch.cuda.synchronize(device)
    gather(None, group)  # no peer writes into a block that is not zeroed yet
    return heap


def _symmetric_block(heap: CudaHeap, group: dist.ProcessGroup, rank: int) -> list[int]:
    """Addresses of all ranks' new blocks on this device."""
    global _next_block
    link = transport.start(heap.library)
    free_abandoned_blocks(link, group)
    block = link.allocate(heap.offsets.block_bytes)
    block.zero_()
    _blocks[_next_block] = (link, weakref.ref(heap), block)
    _next_block += 1
    ranks = [dist.get_global_rank(group, peer) for peer in range(heap.world)]
    addresses = [link.peer_pointer(block, peer) for peer in ranks]
    missing = [peer for peer, address in enumerate(addresses) if address is None]
    for peer, found in enumerate(gather(missing, group)):
        if found:
            raise TileMoEError(
                f"rank {peer} of the group: the memory of ranks {found} is not mapped on its GPU;"
                " wanted GPUs that reach each other by NVLink or PCIe peer access"
            )
    return [address for address in addresses if address is not None]


def free_abandoned_blocks(link: transport.Transport, group: dist.ProcessGroup) -> None:
    """Gives back blocks whose heap no rank has any more. A collective of the world."""
    for number in [n for n, (owner, _, _) in _blocks.items() if owner is not link]:
        del _blocks[number]  # that NVSHMEM has been closed, and its memory with it
    torch.cuda.synchronize()
    mine = {number for number, (_, heap, _) in _blocks.items() if heap() is None}
    for number in sorted(set.intersection(*gather(mine, group))):
        link.free(_blocks.pop(number)[2])


def exchange_timeout_ns(group: dist.ProcessGroup | None) -> int:
    """For a peer that has not come yet: the process group's own timeout."""
    return int(group_timeout_s(group, "cuda") * 1e9)


def page_locked(nbytes: int) -> Tensor:
    """Host memory that kernels write into and copies need not wait for, zeroed."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
