"""Memory of one expert-parallel group on this rank: plan arrays, GEMM buffers, words for the host.

The symmetric block beside them: cuda_blocks.py. Offsets inside a block and the reuse rule:
csrc/common/control.h. The only allocators of the backend.

Shape letters: E experts of the group, W ranks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.cuda_errors import Failures
from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_plan import HeapNeeds
from ds_tilemoe.backends.cuda_records import RING_BYTES, RecordRing
from ds_tilemoe.plan_abi import BAND_DTYPE, CHUNK_DTYPE, SEGMENT_DTYPE

# Memory that outlives a call, and views of it, are made outside of inference mode: a later call,
# under no_grad, could not write into a tensor that was made inside.
lasting = torch.inference_mode(False)

_STATUS_OFFSET = 24  # of CountRow::status
_CODE_OFFSET, _RECORD_OFFSET = 4, 8  # of Failure::code and its record, first in a block


class CudaHeap:
    """The memory of this rank. cuda_blocks.open_heap makes it, on all ranks together.

    Attributes:
        needs: what it was made for.
        view: this rank's view of the group, for every kernel's params.
        plan: where the planner writes; for the params of a layer's exchange.
        counts: [W * max_experts] int32, room for C; ``counts_on_host`` its page-locked copy.
        hidden, out: uint8 GEMM buffers, shared by all layers of the group, as is ``rows``.
        pes: device address of [W] int32, the transport's numbers of the ranks; or None.
        ring: records of the calls.
        failures: what the kernels have told this host.
        names: of the layers, by fingerprint.
        is_captured: a CUDA graph holds its addresses.
        router_start_address: where a router writes the time when it began.
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
        names: dict[int, str] = {}
        self.names = names
        self.is_captured = False
        self.pes: int | None = None
        self._memory: list[Tensor] = []
        experts = needs.max_experts
        self.counts = self._room(4 * world * experts).view(torch.int32)
        self.counts_on_host = page_locked(4 * world * experts).view(torch.int32)
        self.hidden = self._room(needs.hidden_bytes)
        self.out = self._room(needs.out_bytes)
        self.run_row = self._room(8 * experts).view(torch.int64)
        self.expert_row = self._room(8 * (experts + 1)).view(torch.int64)
        self._state = self._room(library.tilemoe_state_bytes(needs.bands))
        self._told = page_locked(128)
        self._records = page_locked(RING_BYTES)
        self.ring = RecordRing(self._records.numpy())
        self.offsets = abi.BlockOffsets()
        shape = abi.BlockShape(world, experts, needs.slots, needs.recv_bytes, needs.dispatch_bytes)
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
        self.plan.front_bands = self._address(4 * needs.bands)
        self.plan.counts = self.counts.data_ptr()
        self.view = abi.RankView(world=world, rank=rank, offsets=self.offsets)
        self.view.state = self._state.data_ptr()
        self.view.half_bytes = library.tilemoe_half_bytes(needs.bands)
        self.view.host_error = self._told.data_ptr()
        self.router_start_address = self.view.state + abi.State.router_start_ns.offset
        self.failures = Failures(
            self._told.data_ptr(),
            world,
            lambda fingerprint: names.get(fingerprint, "that is not known here"),
            functools.partial(_say_heard, library, self.view, device),
        )

    def connect(
        self, block: Tensor, addresses: Sequence[int], pes: Sequence[int] | None = None
    ) -> None:
        """Takes the blocks.

        Args:
            block: [block_bytes] uint8, this rank's own; kept alive by its owner.
            addresses: of the ranks' blocks on this device.
            pes: the transport's numbers of the ranks.
        """
        self._block = block
        self.view.blocks = self._table(addresses, torch.int64)
        if pes is not None:
            self.pes = self._table(pes, torch.int32)

    @property
    def rows(self) -> Tensor:
        """The room in front of GEMM 1, uint8: peers write into it."""
        first = self.offsets.dispatch
        return self._block[first : first + self.needs.dispatch_bytes]

    @property
    def records_address(self) -> int:
        """Of the ring, as kernels see it."""
        return self._records.data_ptr()

    def bring_record(self) -> None:
        """The record of the last call, which else the next one brings. The device is idle."""
        stream = torch.cuda.current_stream(self.device)
        status = self.library.tilemoe_record_launch(
            self.view, self.records_address, stream.cuda_stream
        )
        check(status, "the launch that brings a record")
        stream.synchronize()

    def statuses(self, epoch: int) -> list[int]:
        """What each rank said of itself in the count exchange of ``epoch``. Waits for the device.

        Right until this rank launches the next exchange: behind it a peer may write the half anew.
        """
        half = epoch % 2 * self.world
        found = []
        for source in range(self.world):
            row = self.offsets.counts + (half + source) * self.offsets.count_row_bytes
            word = self._block[row + _STATUS_OFFSET : row + _STATUS_OFFSET + 4]
            found.append(int(word.view(torch.int32).item()))
        return found

    def group_failure(self) -> abi.ErrorRecord | None:
        """What has failed the group, from this rank's own block. Waits for the device.

        The host's word may hold another failure and then cannot take this one.
        """
        size = _RECORD_OFFSET + ctypes.sizeof(abi.ErrorRecord)
        found = self._block[:size].cpu().numpy().tobytes()
        if not any(found[_CODE_OFFSET:_RECORD_OFFSET]):
            return None
        return abi.ErrorRecord.from_buffer_copy(found, _RECORD_OFFSET)

    def room(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 of zeroed device memory that lives as long as the heap."""
        return self._room(nbytes)

    def _room(self, nbytes: int) -> Tensor:
        # Never empty: a kernel's params want an address.
        memory = torch.zeros(max(nbytes, 16), dtype=torch.uint8, device=self.device)
        self._memory.append(memory)
        return memory

    def _address(self, nbytes: int) -> int:
        return self._room(nbytes).data_ptr()

    def _table(self, numbers: Sequence[int], dtype: torch.dtype) -> int:
        table = torch.tensor(numbers, dtype=dtype, device=self.device)
        self._memory.append(table)
        return table.data_ptr()


def _say_heard(library: ctypes.CDLL, view: abi.RankView, device: torch.device) -> None:
    """See ``Failures``. No call may be queued. Waits for the current stream. ``device`` must be the
    current one: a default stream has the handle 0, which stands for the current device's.

    Not a method of the heap, which would hold itself: memory has to go before new memory comes.
    """
    stream = torch.cuda.current_stream(device)
    status = library.tilemoe_say_heard(view, stream.cuda_stream)
    check(status, "the word that a failure has been heard of")
    stream.synchronize()  # the next call may be on another one


def page_locked(nbytes: int) -> Tensor:
    """Host memory that kernels write into and copies need not wait for, zeroed."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
