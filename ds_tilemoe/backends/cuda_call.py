"""One call of one layer: its launches in their order, and what happens if something goes wrong.

Shape letters: T tokens of this rank, N output width.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends import nccl_dispatch
from ds_tilemoe.backends.base import Expert, LayerChange
from ds_tilemoe.backends.cuda_blocks import exchange_timeout_ns, keep_for_graphs
from ds_tilemoe.backends.cuda_errors import describe, overfull
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.backends.cuda_layer import Call, CudaLayer
from ds_tilemoe.backends.cuda_plan import LAYOUTS
from ds_tilemoe.backends.cuda_split import Splits
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, RankFailure, TileMoEError

# What a rank says of itself in its count row: csrc/planner/exchange.h.
_FAILED, _CHANGED = 1, 2
_LOOK_S = 5e-5  # between two looks at a device that is waited for


class Caller:
    """Runs the calls of a group's layers on this rank.

    Args:
        group: None for a group of one.
        rank: in the group.
        config: the ``tile_overlap`` block.
        library: the loaded CUDA library.
        device: this rank's GPU.
        splits: chooses the split of each call.

    Attributes:
        stream: of the last call that was not captured.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        config: TileOverlapConfig,
        library: ctypes.CDLL,
        device: torch.device,
        splits: Splits,
    ) -> None:
        self._group, self._rank, self._config = group, rank, config
        self._library, self._device, self._splits = library, device, splits
        self._group_timeout_ns = exchange_timeout_ns(group)
        # Both streams' kernels run at once; the consumer's CTAs come first where an SM is free.
        self._side = torch.cuda.Stream(device, priority=-1)
        self._urgent = torch.cuda.Stream(device, priority=-1)  # nothing waits in front there
        self._events = [torch.cuda.Event() for _ in range(2)]
        for event in self._events:
            event.record(self._side)  # an event has no handle before
        self._side_handles = (
            self._side.cuda_stream,
            (self._events[0].cuda_event, self._events[1].cuda_event),
        )
        self.stream: torch.cuda.Stream | None = None

    def enter_stream(self, capturing: bool) -> torch.cuda.Stream:
        """The current stream, behind the group's call before: its layers run one after another."""
        stream = torch.cuda.current_stream(self._device)
        if capturing:
            return stream  # whoever replays the graph puts it in order
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
        return stream

    def run(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        call: Call,
        experts: Sequence[Expert],
        mover: str,
        stream: torch.cuda.Stream,
        capturing: bool,
    ) -> Tensor:
        """All launches of a call that this rank has rows for; [T, N], not there yet."""
        tokens, handle = call.x.shape[0], stream.cuda_stream
        wanted = None
        name = layer.shape.name
        with self.peers_hear(heap, name, capturing), self.range("count exchange"):
            split = self._splits.choose(layer, tokens, mover, capturing)
            if capturing:
                keep_for_graphs(heap)
                if split.mover is abi.Mover.SM:
                    wanted = self._splits.wanted_word(layer, tokens)
            layer.launch_exchange(
                0, tokens, call.places, split, wanted, self._group_timeout_ns, handle
            )
            heap.launched += not capturing
        counts = None if layer.is_fused else self._await_counts(heap, layer)
        with self.peers_hear(heap, name, capturing):
            if counts is not None:
                self._dispatch(heap, layer, call, counts)
            with self.range("front"):
                if counts is None or layer.has_front_gemm:
                    layer.launch_front(handle)
                else:
                    layout = LAYOUTS[self._config.layout]
                    nccl_dispatch.run_fronts(
                        experts, counts, self._rank, layout, layer.rows, layer.hidden
                    )
            with self.range("down and combine"):
                side, events = self._side_handles
                layer.launch_combine(split, wanted is not None, side, events, handle)
        return call.y

    def withdraw(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        tokens: int,
        problem: BaseException,
        mover: str,
        stream: torch.cuda.Stream,
        capturing: bool,
    ) -> NoReturn:
        """Tells the peers that this rank has no rows in this call, and raises why.

        Raises:
            RankFailure: ``problem`` is a LayerChange, and not every rank has one.
            Otherwise ``problem``.
        """
        if capturing:
            raise problem  # nothing runs
        # With status 0 the peers judge by the tokens, and only too many of them end the call.
        is_too_long = isinstance(problem, CapacityError) and tokens > heap.needs.max_tokens
        status = 0 if is_too_long else _FAILED
        if isinstance(problem, LayerChange):
            status = _CHANGED
            self.settle(heap)  # so that what follows is all that the kernels have to tell
            self.raise_before(heap, f"layer {layer.shape.name}")
        with self.peers_hear(heap, layer.shape.name, capturing):
            split = self._splits.choose(layer, tokens, mover, capturing)
            layer.launch_exchange(
                status, tokens, None, split, None, self._group_timeout_ns, stream.cuda_stream
            )
            heap.launched += 1
        if status == _CHANGED:
            self._await_change(heap, layer, problem, stream)
        raise problem

    def raise_before(self, heap: CudaHeap, where: str) -> None:
        """In front of a call: raise what earlier ones have told, and end the heap's use.

        When a rank hears of a failure depends on how far its host has run ahead, so ranks would
        raise in front of different calls, and be out of step from then on.
        """
        heap.failures.hear()
        if heap.failures.unread is not None:
            self._condemn(heap)
        heap.failures.raise_heard(where)

    def settle(self, heap: CudaHeap) -> None:
        """Wait for the device, and hear all that there is to hear.

        A call behind a failed one may wait for a rank that does not come: its heap is condemned.
        """
        failures = heap.failures
        while self.stream is not None and not self.stream.query():
            failures.hear()
            if failures.unread is not None and heap.launched > failures.unread:
                self._condemn(heap)
                break
            time.sleep(_LOOK_S)
        torch.cuda.synchronize(self._device)
        failures.hear()
        if not failures.cause:
            self._condemn_if_behind(heap)
        if not failures.cause and (record := heap.group_failure()) is not None:
            failures.cause = describe(record)

    def _condemn_if_behind(self, heap: CudaHeap) -> None:
        unread = heap.failures.unread
        if unread is not None and heap.epoch() > unread and heap.group_failure() is None:
            self._condemn(heap)

    def _condemn(self, heap: CudaHeap) -> None:
        """The group fails by the failure that is unread here; waits of all ranks end."""
        if not heap.failures.cause:
            heap.failures.condemn()
            self._fail_group(heap)

    def _fail_group(self, heap: CudaHeap) -> None:
        record = abi.ErrorRecord(
            outcome=abi.Outcome.HOST_FAILURE, rank=self._rank, peer=self._rank, band=-1
        )
        self._library.tilemoe_fail_group(heap.view, record, self._urgent.cuda_stream)

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A part of a call for profilers, where ``stats`` is asked for."""
        if not self._config.stats:
            return contextlib.nullcontext()
        return torch.cuda.nvtx.range(f"ds_tilemoe {name}")

    def _await_change(
        self, heap: CudaHeap, layer: CudaLayer, change: BaseException, stream: torch.cuda.Stream
    ) -> None:
        """Returns if every rank has said that its layer has changed; else raises on this rank."""
        stream.synchronize()
        record, where = heap.failures.take(), f"layer {layer.shape.name}"
        if record is None or record.outcome != abi.Outcome.RANK_FAILURE:
            heap.failures.tell(record)
            heap.failures.raise_heard(where)
            raise TileMoEError(f"{where}: the count exchange has told nothing")
        if record.seen == heap.world:
            return
        said = heap.statuses(record.epoch)
        others = [rank for rank, status in enumerate(said) if status != _CHANGED]
        raise RankFailure(
            f"{where}: on rank {self._rank} of the group it is called in another way than before,"
            f" and not on ranks {others}; change dtype, autocast, dropout and experts on all ranks"
            " in the same call"
        ) from change

    @contextlib.contextmanager
    def peers_hear(self, heap: CudaHeap, name: str, capturing: bool) -> Iterator[None]:
        """Whatever goes wrong inside ends the peers' waits at once, and the heap's use."""
        try:
            yield
        except BaseException as error:
            if not capturing:  # else nothing has run
                heap.failures.cause = (
                    f"rank {self._rank} of the group failed in layer {name}:"
                    f" {type(error).__name__}: {error}"
                )
                self._fail_group(heap)
            raise

    def _await_counts(self, heap: CudaHeap, layer: CudaLayer) -> nccl_dispatch.Counts:
        """The counts on the host; raises what the exchange has found."""
        shape = (heap.world, layer.shape.num_experts)
        number = shape[0] * shape[1]
        counts = nccl_dispatch.await_counts(
            heap.counts[:number].view(shape),
            heap.counts_on_host[:number].view(shape),
            heap.expert_row[: layer.local_experts + 1],
        )
        where = f"layer {layer.shape.name}"
        heap.failures.hear()
        self._condemn_if_behind(heap)  # else it is this call's, and all ranks raise here
        heap.failures.raise_heard(where)
        # A rank that cannot hold its rows has told it all by itself.
        heap.failures.cause = overfull(counts.on_host, layer.rows_in)
        heap.failures.raise_heard(where)
        return counts

    def _dispatch(
        self, heap: CudaHeap, layer: CudaLayer, call: Call, counts: nccl_dispatch.Counts
    ) -> None:
        run_row = heap.run_row[: layer.shape.num_experts].view(layer.local_experts, heap.world)
        with self.range("dispatch"):
            nccl_dispatch.dispatch(
                call.x, call.places.sources, counts, run_row, self._rank, self._group, layer.rows
            )
