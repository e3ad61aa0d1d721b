"""One call of one layer: its launches in their order, and what happens if something goes wrong.

Shape letters: T tokens of this rank, N output width.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends import nccl_dispatch
from ds_tilemoe.backends.base import Expert, LayerChange
from ds_tilemoe.backends.cuda_blocks import exchange_timeout_ns
from ds_tilemoe.backends.cuda_copy import CopyEngine
from ds_tilemoe.backends.cuda_errors import overfull
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.backends.cuda_layer import Call, CudaLayer
from ds_tilemoe.backends.cuda_plan import LAYOUTS
from ds_tilemoe.backends.cuda_split import Splits
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, RankFailure, TileMoEError

# What a rank says of itself in its count row: csrc/planner/exchange.h.
_FAILED, _CHANGED = 1, 2
NO_CONTEXT = contextlib.nullcontext()


class PeersHear:
    """See :meth:`Caller.peers_hear`. A class, since a generator costs more in each forward."""

    def __init__(self, caller: Caller, heap: CudaHeap, name: str, capturing: bool) -> None:
        self._caller, self._heap, self._name = caller, heap, name
        self._capturing = capturing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._capturing:  # else nothing has run
            self._caller.fail(self._heap, self._name, error)


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
        self._index = device.index
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
        self._engine: CopyEngine | None = None
        self.stream: torch.cuda.Stream | None = None
        self._handle: int | None = None  # of it

    def enter_stream(self) -> int:
        """The current stream's cudaStream_t, behind the group's call before: its layers run one
        after another."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        if handle == self._handle or torch.cuda.is_current_stream_capturing():
            return handle  # whoever replays a graph puts it in order
        stream = torch.cuda.current_stream(self._device)
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream, self._handle = stream, handle
        return handle

    def run(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        call: Call,
        experts: Sequence[Expert],
        mover: str,
        stream: int,
        capturing: bool,
    ) -> Tensor:
        """All launches of a call that this rank has rows for; [T, N], not there yet.

        Args:
            stream: a cudaStream_t.
        """
        tokens, wanted, engine = call.x.shape[0], None, None
        peers_hear = self.peers_hear(heap, layer.shape.name, capturing)
        with peers_hear, self.range("count exchange"):
            split = self._splits.choose(layer, tokens, mover, capturing)
            if capturing and split.mover is abi.Mover.SM:
                wanted = self._splits.wanted_word(layer, tokens)
            if split.mover is abi.Mover.COPY_ENGINE:
                engine = self._engine_of(heap)
            layer.launch_exchange(0, tokens, True, split, wanted, self._group_timeout_ns, stream)
            if engine is not None:
                layer.fetch_counts(engine, stream)
        counts = None if layer.is_fused else self._await_counts(heap, layer)
        with peers_hear:
            if counts is not None:
                self._dispatch(heap, layer, call, counts)
            with self.range("front"):
                if counts is None or layer.has_front_gemm:
                    layer.launch_front(stream)
                else:
                    layout = LAYOUTS[self._config.layout]
                    nccl_dispatch.run_fronts(
                        experts, counts, self._rank, layout, layer.rows, layer.hidden
                    )
            with self.range("down and combine"):
                side, events = self._side_handles
                layer.launch_combine(split, wanted is not None, side, events, stream, engine)
        return call.y

    def _engine_of(self, heap: CudaHeap) -> int:
        if self._engine is None or not self._engine.is_of(heap):
            self._engine = CopyEngine(heap)
        assert self._engine.handle is not None
        return self._engine.handle

    def withdraw(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        tokens: int,
        problem: BaseException,
        mover: str,
        stream: int,
        capturing: bool,
    ) -> NoReturn:
        """Tells the peers that this rank has no rows in this call, and raises why.

        Args:
            stream: a cudaStream_t.

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
                status, tokens, False, split, None, self._group_timeout_ns, stream
            )
        if status == _CHANGED:
            self._await_change(heap, layer, problem)
        raise problem

    def raise_before(self, heap: CudaHeap, where: str) -> None:
        """In front of a call: raise what earlier ones have told, and end the heap's use.

        When a rank hears of a failure depends on how far its host has run ahead, so ranks would
        raise in front of different calls, and be out of step from then on.
        """
        failures = heap.failures
        failures.hear()
        if failures.unread is not None and not failures.cause:
            failures.condemn()
            late = failures.unread
            self._fail_group(heap, abi.Outcome.OUT_OF_STEP, late.peer, late.epoch)
        failures.raise_heard(where)

    def settle(self, heap: CudaHeap) -> None:
        """Wait for the device, and hear all that there is to hear. No call owes its record then.

        No call that is queued behind a failed one waits for a rank that does not come: the device
        fails the group in front of it (State::unheard in csrc/common/control.h).
        """
        torch.cuda.synchronize(self._device)
        heap.bring_record()
        heap.failures.hear()
        if not heap.failures.cause:
            heap.failures.tell(heap.group_failure())

    def _fail_group(self, heap: CudaHeap, outcome: abi.Outcome, peer: int, seen: int = 0) -> None:
        """Waits of all ranks end."""
        record = abi.ErrorRecord(outcome=outcome, rank=self._rank, peer=peer, band=-1, seen=seen)
        self._library.tilemoe_fail_group(heap.view, record, self._urgent.cuda_stream)

    def range(self, name: str) -> contextlib.AbstractContextManager[object]:
        """A part of a call for profilers, where ``stats`` is asked for."""
        if not self._config.stats:
            return NO_CONTEXT
        return torch.cuda.nvtx.range(f"ds_tilemoe {name}")

    def _await_change(self, heap: CudaHeap, layer: CudaLayer, change: BaseException) -> None:
        """Returns if every rank has said that its layer has changed; else raises on this rank."""
        assert self.stream is not None  # the call's
        self.stream.synchronize()
        record, where = heap.failures.take(), f"layer {layer.shape.name}"
        if record is None or record.outcome != abi.Outcome.RANK_FAILURE:
            heap.failures.tell(record)
            heap.failures.raise_heard(where)
            raise TileMoEError(f"{where}: the count exchange has told nothing")
        heap.failures.say_heard()
        if record.seen == heap.world:
            return
        said = heap.statuses(record.epoch)
        others = [rank for rank, status in enumerate(said) if status != _CHANGED]
        raise RankFailure(
            f"{where}: on rank {self._rank} of the group it is called in another way than before,"
            f" and not on ranks {others}; change dtype, autocast, dropout, gate and experts on"
            " all ranks in the same call"
        ) from change

    def peers_hear(self, heap: CudaHeap, name: str, capturing: bool) -> PeersHear:
        """Whatever goes wrong inside ends the peers' waits at once, and the heap's use."""
        return PeersHear(self, heap, name, capturing)

    def fail(self, heap: CudaHeap, name: str, error: BaseException) -> None:
        """The group fails by what this host has raised in a layer."""
        heap.failures.cause = (
            f"rank {self._rank} of the group failed in layer {name}:"
            f" {type(error).__name__}: {error}"
        )
        self._fail_group(heap, abi.Outcome.HOST_FAILURE, self._rank)

    def _await_counts(self, heap: CudaHeap, layer: CudaLayer) -> nccl_dispatch.Counts:
        """The counts on the host; raises what the exchange has found."""
        shape = (heap.world, layer.shape.num_experts)
        number = shape[0] * shape[1]
        with self.peers_hear(heap, layer.shape.name, capturing=False):
            counts = nccl_dispatch.await_counts(
                heap.counts[:number].view(shape),
                heap.counts_on_host[:number].view(shape),
                heap.expert_row[: layer.local_experts + 1],
            )
        where = f"layer {layer.shape.name}"
        heap.failures.hear()
        if heap.failures.unread is not None:  # of a call before, or of this: then all raise here
            heap.failures.tell(heap.group_failure())
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
            assert call.outgoing is not None
            nccl_dispatch.dispatch(
                call.x,
                call.places.sources,
                counts,
                run_row,
                self._rank,
                self._group,
                layer.rows,
                (call.outgoing, layer.out),
            )
