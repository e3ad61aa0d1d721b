"""The kernels of csrc as a backend: GEMM 2 and the return of its rows side by side on the GPU.

Counts, plan, GEMMs, combine and scale run on the device. Dispatch does not yet: it goes through the
process group's all_to_all (nccl_dispatch.py), which wants the counts on the host, so each forward
waits once for the device, behind the count exchange. A failure known by then is raised on every
rank; one behind it is written to the host by the kernels, which fill the result with NaN, and the
next forward raises it, or ``failure()``.

Shape letters: T tokens of this rank, K top-k, E experts of the group, W ranks, N output width.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends import nccl_dispatch
from ds_tilemoe.backends.base import Expert, LayerShape, local_problem
from ds_tilemoe.backends.cuda_errors import describe, leaves_heap_usable, overfull, refusal
from ds_tilemoe.backends.cuda_gemm import check
from ds_tilemoe.backends.cuda_heap import CudaHeap, HeapNeeds, exchange_timeout_ns, open_heap
from ds_tilemoe.backends.cuda_layer import (
    LAYOUTS,
    CudaLayer,
    bounds_of,
    common_front,
    needs_of,
    plan_params,
    tail_waves,
)
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import DeadlineError, TileMoEError
from ds_tilemoe.op_builder import CUDATileMoEBuilder
from ds_tilemoe.plan_abi import Int64Array, Layout, PlanParams
from ds_tilemoe.routing import Routing
from ds_tilemoe.stats import IterationStats
from ds_tilemoe.symmetric_heap import gather

# About as many SMs fill an NVLink (18 links of an H200); more only slow the GEMM.
AUTO_CONSUMER_CTAS = 8
_MOVERS = {
    "auto": abi.Mover.SM,
    "sm": abi.Mover.SM,
    "none": abi.Mover.NONE,
    "sequential": abi.Mover.SEQUENTIAL,
}


class CudaBackend:
    """``Backend`` of one expert-parallel group on the current CUDA device.

    Args:
        group: the group, of all ranks of the job; None for a group of one.
        config: the ``tile_overlap`` block.

    Attributes:
        mover: see ``Backend``. May be set between calls, on each rank alone.
    """

    name = "cuda"

    def __init__(self, group: dist.ProcessGroup | None, config: TileOverlapConfig) -> None:
        self.group = group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.config = config
        self.tile_m = abi.TILE_M
        self.mover: str = config.mover
        self.device = current_device()
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._library = abi.bind(CUDATileMoEBuilder().load())
        check(self._library.tilemoe_load(), "loading the kernels")
        # Both streams' kernels run at once; the consumer's CTAs come first where an SM is free.
        self._side = torch.cuda.Stream(self.device, priority=-1)
        self._events = [torch.cuda.Event() for _ in range(2)]
        for event in self._events:
            event.record(self._side)  # an event has no handle before
        self._heap: CudaHeap | None = None
        self._layers: dict[LayerShape, CudaLayer] = {}
        self._cause = ""
        self._stream: torch.cuda.Stream | None = None
        self._has_stats = False
        self._in_call = threading.Lock()

    # -- heap -------------------------------------------------------------------------------

    def ensure(self, shapes: Sequence[LayerShape], max_tokens: int) -> None:
        """See ``Backend.ensure``."""
        held = HeapNeeds() if self._heap is None else self._heap.needs
        usable = self._heap is not None and not self.failure()
        # What one rank still holds need not be what another holds: all take the union.
        offers = gather((held, usable), self.group)
        tokens = max(max_tokens, *(needs.max_tokens for needs, _ in offers))
        wanted = functools.reduce(HeapNeeds.union, (needs for needs, _ in offers))
        for shape in shapes:
            bounds = bounds_of(shape, self._params(shape), tokens)
            wanted = wanted.union(needs_of(shape, bounds, tokens))
        if all(offer == (wanted, True) for offer in offers):
            return
        torch.cuda.synchronize(self.device)
        self._layers.clear()
        self._heap = None  # the old memory goes before the new comes
        self._heap = open_heap(
            wanted, self._library, self.device, self.group, self.config.wait_timeout_s
        )
        self._cause = ""

    @property
    def chosen(self) -> dict[str, object]:
        """What "auto" stands for in every layer; tile_n depends on the layer's width."""
        config = self.config
        joined = config.bands_per_segment
        return {
            "backend": self.name,
            "layout": LAYOUTS[config.layout].name.lower(),
            "tile_m": self.tile_m,
            "num_consumer_ctas": self._num_consumers(),
            "bands_per_segment": 1 if joined == "auto" else joined,
            "local_tail_waves": tail_waves(config),
            "mover": "sm" if config.mover == "auto" else config.mover,
        }

    def failure(self) -> str:
        """See ``Backend.failure``. Waits for the device."""
        torch.cuda.synchronize(self.device)
        self._hear()
        return self._cause

    @property
    def last_stats(self) -> IterationStats | None:
        """See ``Backend.last_stats``."""
        if not self._has_stats or self._heap is None or self._stream is None:
            return None
        self._stream.synchronize()
        stats = self._heap.stats
        return IterationStats(*(getattr(stats, name) for name in IterationStats._fields))

    # -- one layer --------------------------------------------------------------------------

    def forward(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: Tensor,
        routing: Routing | Exception,
    ) -> Tensor:
        """See ``Backend.forward``. In order of the current stream."""
        if self._heap is None:
            raise TileMoEError(f"layer {shape.name}: the backend has no heap; call ensure() first")
        if not self._in_call.acquire(blocking=False):
            raise TileMoEError(
                f"layer {shape.name}: another thread is inside a layer of the same group; the "
                "layers of a group must run one after another"
            )
        try:
            with torch.cuda.device(self.device):
                return self._forward(self._heap, shape, experts, x, routing)
        finally:
            self._in_call.release()

    def _forward(
        self,
        heap: CudaHeap,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: Tensor,
        routing: Routing | Exception,
    ) -> Tensor:
        self._hear()
        if self._cause:
            raise self._failed(shape)
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # the group's layers run one after another
        self._stream = stream
        layer = self._layer(heap, shape)
        problem = local_problem(shape, x, routing, str(self.device))
        try:
            if problem is None:
                assert isinstance(routing, Routing)
                ids = routing.expert_ids.to(torch.int32).contiguous()
            else:
                ids = torch.empty(0, shape.topk, dtype=torch.int32, device=self.device)
            places = nccl_dispatch.find_places(ids, shape.num_experts)
            counts, first_rows = self._exchange(heap, layer, places, len(ids), problem)
        except BaseException as error:
            self._cause = f"{type(error).__name__}: {error}"  # the peers wait for counts
            raise
        record = heap.take_error()
        if record is not None:
            self._cause = "" if leaves_heap_usable(record) else describe(record)
            if self._cause:
                raise self._failed(shape)
            raise refusal(record, shape, problem, self.group) from problem
        self._cause = overfull(counts, layer.rows_in)  # its rank has told all by itself
        if self._cause:
            raise self._failed(shape)
        assert isinstance(routing, Routing)
        try:
            nccl_dispatch.dispatch(
                x.contiguous(),
                places,
                shape.topk,
                counts,
                self._counts_of(heap, shape),
                heap.run_row[: shape.num_experts].view(layer.local_experts, self.world),
                self.rank,
                self.group,
                layer.rows,
            )
            self._front(layer, experts, counts, first_rows)
            return self._combine(heap, layer, experts, ids, places.positions, routing)
        except BaseException as error:
            # Peers wait for this rank's rows, until their deadline.
            self._cause = (
                f"rank {self.rank} of the group failed in layer {shape.name}:"
                f" {type(error).__name__}: {error}"
            )
            raise

    def _exchange(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        places: nccl_dispatch.Places,
        tokens: int,
        problem: Exception | None,
    ) -> tuple[Int64Array, list[int]]:
        """Count exchange and plan; C [W, E] and expert_row [E / W + 1] on the host."""
        params = layer.exchange
        params.own_counts = places.counts.data_ptr()
        params.tokens = tokens
        params.max_tokens = heap.needs.max_tokens
        params.group_timeout_ns = exchange_timeout_ns(self.group)
        params.status = int(problem is not None)
        assert self._stream is not None
        check(
            self._library.tilemoe_exchange_launch(params, self._stream.cuda_stream),
            "the launch of the count exchange",
        )
        on_device = self._counts_of(heap, layer.shape)
        on_host = heap.counts_on_host[: on_device.numel()].view(on_device.shape)
        on_host.copy_(on_device, non_blocking=True)
        first_rows = heap.expert_row[: layer.local_experts + 1].tolist()  # waits for the device
        return on_host.numpy().astype(np.int64), first_rows

    def _front(
        self,
        layer: CudaLayer,
        experts: Sequence[Expert],
        counts: Int64Array,
        first_rows: list[int],
    ) -> None:
        """Everything before the down projection: one kernel, or expert by expert in torch."""
        fronts = common_front(experts)
        if fronts is not None:
            gemm = layer.front(fronts, self.sms)
            assert self._stream is not None
            status = self._library.tilemoe_producer_launch(
                gemm.params, gemm.kind, self.sms, self._stream.cuda_stream
            )
            check(status, "the launch of GEMM 1")
            return
        own = counts[:, self.rank * len(experts) : (self.rank + 1) * len(experts)]
        aligned = LAYOUTS[self.config.layout] is Layout.ALIGNED
        for e, valid in enumerate(own.sum(axis=0).tolist()):
            if valid:
                # Pad rows between runs of the aligned layout go with it: nobody reads the result.
                rows = slice(first_rows[e], first_rows[e + 1] if aligned else first_rows[e] + valid)
                layer.hidden[rows].copy_(experts[e].front(layer.rows[rows]))

    def _combine(
        self,
        heap: CudaHeap,
        layer: CudaLayer,
        experts: Sequence[Expert],
        ids: Tensor,
        positions: Tensor,
        routing: Routing,
    ) -> Tensor:
        """GEMM 2 beside the return of its rows, then the weighted sum."""
        y = torch.empty(len(ids), layer.shape.out, dtype=layer.shape.dtype, device=self.device)
        weights = routing.weights.float().contiguous()
        mover, params = _MOVERS[self.mover], layer.combine
        consumers = self._num_consumers()
        if mover is abi.Mover.SM and self.world == 1:
            mover = abi.Mover.NONE  # nothing to ship
        layer.set_down(experts, self.sms - consumers if mover is abi.Mover.SM else self.sms)
        params.mover, params.num_consumer_ctas, params.sms = mover, consumers, self.sms
        params.consumer_stream = self._side.cuda_stream
        params.begin, params.end = (event.cuda_event for event in self._events)
        self._has_stats = self.config.stats or mover is abi.Mover.SEQUENTIAL
        scale = params.scale
        scale.expert_ids, scale.positions = ids.data_ptr(), positions.data_ptr()
        scale.weights, scale.y = weights.data_ptr(), y.data_ptr()
        scale.stats = heap.stats_address if self._has_stats else None
        scale.tokens = len(ids)
        assert self._stream is not None
        status = self._library.tilemoe_combine_launch(params, self._stream.cuda_stream)
        check(status, "the launch of GEMM 2 and the combine")
        return y

    # -- failures ---------------------------------------------------------------------------

    def _hear(self) -> None:
        """Keep what a kernel has told the host since the last look. Does not wait."""
        record = None if self._heap is None else self._heap.take_error()
        if record is not None and not self._cause:
            self._cause = describe(record)

    def _failed(self, shape: LayerShape) -> DeadlineError:
        return DeadlineError(
            f"layer {shape.name}: the expert-parallel group has failed: {self._cause}. "
            "ds_tilemoe.apply() on all ranks makes a new heap."
        )

    # -- choices ----------------------------------------------------------------------------

    def _layer(self, heap: CudaHeap, shape: LayerShape) -> CudaLayer:
        if shape not in self._layers:
            params = self._params(shape)
            bounds = bounds_of(shape, params, heap.needs.max_tokens)
            self._layers[shape] = CudaLayer(shape, heap, params, bounds, self.config)
        return self._layers[shape]

    def _params(self, shape: LayerShape) -> PlanParams:
        return plan_params(shape, self.config, self.rank, self.world, self.sms)

    def _counts_of(self, heap: CudaHeap, shape: LayerShape) -> Tensor:
        """C [W, E] on the device."""
        count = self.world * shape.num_experts
        return heap.counts[:count].view(self.world, shape.num_experts)

    def _num_consumers(self) -> int:
        config = self.config
        wanted = config.num_consumer_ctas
        wanted = AUTO_CONSUMER_CTAS if wanted == "auto" else wanted
        most = self.sms - 1 if config.max_consumer_ctas == "auto" else config.max_consumer_ctas
        return max(config.min_consumer_ctas, min(wanted, most))


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
