"""The operator by the CUDA kernels, launched one by one so that each can be timed alone.

What this file takes from the backend is the memory, params and launches of one layer; nothing else
in ``benches`` knows them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benches.calls import OperatorShape, Routed, Sample, Settings, Variant, random_rows
from benches.clock import Lead
from benches.ranks import World
from benches.records import BenchError
from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import FrontGemm, LayerShape
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.backends.cuda_copy import CopyEngine
from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_layer import Split
from ds_tilemoe.backends.cuda_plan import plan_params, tail_waves
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.routing import Places
from ds_tilemoe.stats import IterationStats

NAN = float("nan")
NO_FRONT = 64  # width of rows that nobody dispatches
COUNTS_US = 2000.0  # in which counts come to the host and copies are queued
_MOVERS = {
    "sm": abi.Mover.SM,
    "none": abi.Mover.NONE,
    "copy_engine": abi.Mover.COPY_ENGINE,
    "sequential": abi.Mover.SEQUENTIAL,
    "split": abi.Mover.SEQUENTIAL,
}


class Front(NamedTuple):
    """GEMM 1 in front of the operator, for "split" to time alone.

    activation: "gelu", "silu" or "relu". ups: [E_l, K, H] each, (up,) or (gate, up).
    """

    activation: str
    ups: tuple[Tensor, ...]


class _Expert:
    """An expert by its matrices; kernels make all of it."""

    down_bias = None

    def __init__(self, down: Tensor, front: FrontGemm | None) -> None:
        self.down_weight, self.front_gemm = down, front


class _Routes(NamedTuple):
    """Routes on the device, as CudaLayer.prepare wants them; nobody reads the rows of ``x``."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    places: Places


class CudaOperator:
    """``calls.Operator`` by the kernels of the CUDA backend.

    Args:
        world: the ranks.
        shape, dtype, settings: of the operator; tile_n "auto" is the backend's own.
        routings: what calls name by number; one with fewer tokens than counts only moves rows.
        weights: [E_l, N, K].
        front: GEMM 1; None = GEMM 2's rows are random.
    """

    def __init__(
        self,
        world: World,
        shape: OperatorShape,
        dtype: torch.dtype,
        settings: Settings,
        routings: Sequence[Routed],
        weights: Tensor,
        front: Front | None = None,
    ) -> None:
        self._world, self._has_front = world, front is not None
        config = TileOverlapConfig(backend="cuda", **settings._asdict())
        self._backend = backend = CudaBackend(world.group, config)
        hidden = front.ups[0].shape[2] if front else NO_FRONT
        experts = world.ranks * shape.local_experts
        # "nccl": GEMM 1 finds its rows in place.
        layer_shape = LayerShape(
            "operator", experts, shape.topk, hidden, shape.k, shape.n, dtype, "cuda", "nccl"
        )
        # Room for the rows that come back, also where a routing has counts without tokens.
        rows = max(int(routed.counts.sum(axis=1).max()) for routed in routings)
        backend.ensure([layer_shape], -(-rows // shape.topk))
        heap = backend._heap
        assert heap is not None
        self._heap = heap
        self._layer = backend._layer(heap, layer_shape, False)
        self._split = Split(
            num_consumer_ctas=0,
            local_tail_waves=tail_waves(config),
            bands_per_segment=settings.bands_per_segment,
            mover=abi.Mover.NONE,
        )
        self.plan_params = plan_params(layer_shape, config, world.rank, world.ranks, backend.sms)
        self.weights = weights
        fronts: list[FrontGemm | None] = [None] * shape.local_experts
        if front is not None:
            nothing = (None,) * len(front.ups)
            fronts = [
                FrontGemm(front.activation, tuple(up[e] for up in front.ups), nothing)
                for e in range(shape.local_experts)
            ]
            self._layer.rows.normal_()  # as dispatch would leave them; zeros would be faster
        self._experts = [_Expert(w, f) for w, f in zip(weights, fronts, strict=True)]
        used = max(build_plan(self.plan_params, routed.counts).sizes.rows for routed in routings)
        seed = 17 + world.rank
        self._source = random_rows((used, shape.k), 1.0, dtype, seed, world.device)
        self._routings = [self._on_device(routed, hidden, dtype) for routed in routings]
        self._lead = Lead()
        self._engine: CopyEngine | None = None
        # A place for the stats of each call that has not been waited for.
        self._unfinished: list[list[IterationStats]] = []
        self._spare: list[list[torch.cuda.Event]] = []
        self._y: Tensor | None = None
        caller = backend._caller
        self._timeout_ns = caller._group_timeout_ns
        self._beside = (caller._side.cuda_stream, tuple(e.cuda_event for e in caller._events))
        library = backend._library
        library.tilemoe_scale_launch.argtypes = [ctypes.POINTER(abi.ScaleParams), ctypes.c_void_p]

    @property
    def rows(self) -> Tensor:
        return self._layer.hidden

    @property
    def y(self) -> Tensor:
        assert self._y is not None, "no call yet"
        return self._y

    def enqueue(self, variant: Variant, routing: int) -> Callable[[], Sample]:
        """See ``calls.Operator``.

        All hosts begin together, on idle devices. The device sleeps until the host has launched all
        of the call; a sample is NaN where that was not long enough. A's rows are written anew, as
        GEMM 1 would leave the L2. The count exchange brings the ranks together on the device, and
        the clock starts behind it. With "copy_engine" the device sleeps there instead, as long on
        all ranks: where GEMM 1 would be, while the host waits for the counts.
        """
        stream = torch.cuda.current_stream().cuda_stream
        events = self._events()
        routes = self._routings[routing]
        is_engine = variant.mover == "copy_engine"
        if is_engine and self._engine is None:
            self._engine = CopyEngine(self._heap)
        self._world.together()
        self._world.sleep(0 if is_engine else self._lead.us)
        began = time.perf_counter_ns()
        self._layer.hidden[: len(self._source)].copy_(self._source)
        call = self._layer.prepare(routes.x, self._experts, *routes[1:])
        self._call = call  # its tensors live until the next one
        self._y = call.y
        split = self._split._replace(num_consumer_ctas=variant.ctas, mover=_MOVERS[variant.mover])
        is_split = variant.mover == "split"
        if is_split:  # behind one that nothing follows, so that the ranks are together
            self._exchange(len(call.x), split, stream)
            events[5].record()
        self._exchange(len(call.x), split, stream)
        handle = None
        if is_engine:
            assert self._engine is not None
            handle = self._engine.handle
            assert handle is not None
            self._layer.fetch_counts(handle, stream)
            self._world.sleep(COUNTS_US)
        events[0].record()
        if is_split:
            self._launch_apart(variant.ctas, events, stream)
        else:
            events[1].record()
            side, events_of_side = self._beside
            self._layer.launch_combine(split, False, side, events_of_side, stream, handle)
        events[4].record()
        if not is_engine:  # else the device's sleep is in it
            self._lead.took(began)
        late = events[0].query()
        told: list[IterationStats] = []
        self._unfinished.append(told)

        def us(start: int, end: int, is_told: bool = True) -> float:
            return events[start].elapsed_time(events[end]) * 1e3 if is_told else NAN

        def read() -> Sample:
            if late:
                self._spare.append(events)
                return Sample(*[NAN] * len(Sample._fields))
            stats = told[0]
            sample = Sample(
                total=us(1, 4),
                exchange=us(5, 0, is_split),
                front=us(0, 1, is_split and self._has_front),
                gemm=us(1, 2, is_split),
                copy=us(2, 3, is_split),
                scale=us(3, 4, is_split),
                end=stats.producer_end / 1e3,
                arrival=stats.last_arrival / 1e3,
                backlog=stats.backlog_at_producer_end,
                drained=stats.chunks_drained,
            )
            self._spare.append(events)
            return sample

        return read

    def finish(self) -> None:
        """See ``calls.Operator``.

        Raises:
            DeadlineError: a kernel has waited in vain.
            BenchError: not every call has left its record.
        """
        self._world.synchronize()
        self._heap.bring_record()
        self._heap.failures.raise_heard("bench.py operator")
        records = self._heap.ring.poll()
        if len(records) != len(self._unfinished):
            raise BenchError(f"{len(self._unfinished)} calls have left {len(records)} records")
        for told, record in zip(self._unfinished, records, strict=True):
            told.append(record.iteration)
        self._unfinished.clear()

    def _events(self) -> list[torch.cuda.Event]:
        """Six."""
        return self._spare.pop() if self._spare else self._world.events(6)

    def _exchange(self, tokens: int, split: Split, stream: int) -> None:
        self._layer.launch_exchange(0, tokens, True, split, None, self._timeout_ns, stream)

    def _launch_apart(self, ctas: int, events: list[torch.cuda.Event], stream: int) -> None:
        """GEMM 1 if there is one, GEMM 2, the consumer, scale, each behind the other."""
        library, layer, sms = self._backend._library, self._layer, self._backend.sms
        if self._has_front:
            layer.launch_front(stream)
        events[1].record()
        layer._down.set_grid(sms)
        params = layer._combine
        params.producer = layer._down.params
        params.producer.drain = 0
        check(library.tilemoe_producer_launch(params.producer, params.kind, sms, stream), "GEMM 2")
        events[2].record()
        check(library.tilemoe_consumer_launch(params.producer.ship, ctas, stream), "the consumer")
        events[3].record()
        check(library.tilemoe_scale_launch(params.scale, stream), "scale")

    def _on_device(self, routed: Routed, hidden: int, dtype: torch.dtype) -> _Routes:
        device = self._world.device
        ids, positions, weights, counts = (
            torch.from_numpy(array).to(device)
            for array in (
                routed.ids,
                routed.positions,
                routed.weights,
                routed.counts[self._world.rank],
            )
        )
        order = np.argsort(routed.ids.ravel(), kind="stable") // routed.ids.shape[1]
        sources = torch.from_numpy(order.astype(np.int32)).to(device)
        x = torch.zeros(len(ids), hidden, dtype=dtype, device=device)
        return _Routes(x, ids, weights, Places(positions, sources, counts))
