"""What the CUDA backend keeps of one layer: its two GEMMs, params of kernels, and their launches.

Shape letters: T tokens of this rank, K top-k, E experts, E_l of this rank, W ranks, H hidden,
F ffn, N output width, M rows of the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Expert, Experts, LayerShape
from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_gemm import LayerGemms, readable
from ds_tilemoe.backends.cuda_heap import CudaHeap, lasting
from ds_tilemoe.backends.cuda_plan import fingerprint, tail_bands
from ds_tilemoe.backends.cuda_routes import FusedRouting, Routes
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.cost_model import Work
from ds_tilemoe.plan_abi import PlanParams, PlanSizes
from ds_tilemoe.routing import Places


class Split(NamedTuple):
    """How a rank sends its rows back in one call; its own business.

    Attributes:
        num_consumer_ctas: SMs of the consumer kernel.
        local_tail_waves: waves of local tiles that go last, or "all".
        bands_per_segment: see plan_abi.PlanParams.
        mover: abi.Mover.
    """

    num_consumer_ctas: int
    local_tail_waves: int | str
    bands_per_segment: int
    mover: abi.Mover


class Call(NamedTuple):
    """One call's tensors, to be held until its last launch.

    Attributes:
        y: [T, N], what scale writes.
        x: [T, H], as kernels read it.
        places: of the routes.
        held: what else the params point to.
        outgoing: [T * K, H], room for the rows that go out by NCCL; else None.
    """

    y: Tensor
    x: Tensor
    places: Places
    held: tuple[Tensor, ...]
    outgoing: Tensor | None


class CudaLayer:
    """Params of one layer's kernels on one heap.

    Attributes:
        shape: the layer.
        fingerprint: of the layer, as kernels and records have it.
        local_experts: E_l.
        rows_in: most rows that dispatch may bring.
        rows: [M, H], what dispatch fills. ``hidden``: [M, F], what GEMM 2 reads. ``out``: [M, N],
            what it writes; in front of it, room for the rows that come by NCCL, as N is H.
        is_fused: rows come by GEMM 1's kernel.
        work: GEMM 2, as the cost model sees it.
    """

    @lasting
    def __init__(
        self,
        shape: LayerShape,
        heap: CudaHeap,
        params: PlanParams,
        bounds: PlanSizes,
        config: TileOverlapConfig,
        sms: int,
    ) -> None:
        self.shape, self._heap, self._bounds, self._sms = shape, heap, bounds, sms
        self._config = config
        self.fingerprint = fingerprint(shape, config)
        self.local_experts = params.local_experts
        self.rows_in = bounds.valid_rows
        self.rows = self._matrix(heap.rows, shape.hidden)
        self.hidden = self._matrix(heap.hidden, shape.ffn)
        self.is_fused = shape.dispatch == "fused"
        self.out = self._matrix(heap.out, shape.out)
        self._gemms = LayerGemms(shape, heap, config, self.rows, self.hidden, self.out, sms)
        self._tiling = self._gemms.tiling(0)  # of the call at hand
        self._front, self._down = self._tiling.front, self._tiling.down
        self._split: Split | None = None  # that the params have
        self._own_counts = heap.plan.counts
        self._stamp: object | None = None  # of the experts whose operands the GEMMs have
        self._exchange = abi.ExchangeParams(view=heap.view, plan=heap.plan)
        self._exchange.layer = self.fingerprint
        self._exchange.max_tokens = heap.needs.max_tokens
        self._exchange.records = heap.records_address
        self._is_behind_front = False  # GEMM 2 of the call at hand, of a GEMM 1 that dispatches
        plan = self._exchange.plan
        plan.params = abi.PlanParams(*dataclasses.astuple(params))
        plan.capacity = abi.PlanCapacity(bounds.rows, bounds.bands, bounds.segments, bounds.chunks)
        self._plan_params = plan.params  # a view, as is the next
        self._combine = self._make_combine()
        self._scale = self._combine.scale
        self._combine.kind = self._down.kind
        row_bytes = shape.out * shape.dtype.itemsize
        self.work = Work(
            tile_m=params.tile_m,
            tile_n=self._gemms.wide_down.kind.tile_n,
            n_tiles=self._gemms.wide_down.n_tiles,
            k=shape.ffn,
            row_bytes=row_bytes,
            chunk_bytes=params.chunk_rows * row_bytes,
            local_experts=params.local_experts,
            world=params.world,
        )
        heap.names[self.fingerprint] = shape.name

    def keep_operands(self) -> None:
        """The graph that the call at hand is captured in goes on reading these experts."""
        self._gemms.keep_operands()

    def is_small(self, tokens: int) -> bool:
        """Whether GEMM 2 of a call with so many tokens has no more tiles than the GPU has SMs."""
        return self._gemms.tiling(tokens).is_small

    def prepare(
        self, x: Tensor, experts: Sequence[Expert], ids: Tensor, weights: Tensor, places: Places
    ) -> Call:
        """Makes all that the launches need, so that little can go wrong between them.

        Args:
            x: [T, H].
            experts: E_l.
            ids: [T, K] int32, contiguous.
            weights: [T, K].
            places: of these routes.
        """
        weights = weights.float().contiguous()
        tensors = (ids, weights, places.positions, places.sources, places.counts)
        routes = Routes(*(tensor.data_ptr() for tensor in tensors))
        self._exchange.behind_router = 0
        return self._prepare(x, experts, routes, places, (ids, weights))

    def prepare_fused(self, x: Tensor, experts: Sequence[Expert], routing: FusedRouting) -> Call:
        """As :meth:`prepare`, of our own router's routes, which ask for no tensor."""
        self._exchange.behind_router = 1
        return self._prepare(x, experts, routing.at, routing, ())

    def _prepare(
        self,
        x: Tensor,
        experts: Sequence[Expert],
        routes: Routes,
        places: Places,
        held: tuple[Tensor, ...],
    ) -> Call:
        x = readable(x)
        tokens = x.shape[0]
        y = torch.empty(tokens, self.shape.out, dtype=self.shape.dtype, device=self._heap.device)
        stamp = experts.stamp if isinstance(experts, Experts) else None
        if stamp is None or stamp is not self._stamp:
            self._stamp = None
            if self._gemms.take(experts):
                self._stamp = stamp
        tiling = self._gemms.tiling(tokens)
        if tiling is not self._tiling:
            self._tiling, self._front, self._down = tiling, tiling.front, tiling.down
            self._combine.kind = tiling.down.kind
            self._split = None
        if self._front is not None:
            dispatch = self._front.dispatch
            dispatch.x, dispatch.sources = x.data_ptr(), routes.sources
        self._own_counts = routes.counts
        scale = self._scale
        scale.expert_ids, scale.weights = routes.expert_ids, routes.weights
        scale.positions = routes.positions
        scale.y, scale.tokens = y.data_ptr(), tokens
        outgoing = None
        if not self.is_fused:
            outgoing = torch.empty(
                tokens * self.shape.topk, x.shape[1], dtype=x.dtype, device=x.device
            )
        return Call(y, x, places, held, outgoing)

    @property
    def has_front_gemm(self) -> bool:
        """Whether GEMM 1 makes the front of the call at hand."""
        return self._front is not None

    def launch_exchange(
        self,
        status: int,
        tokens: int,
        has_routes: bool,
        split: Split,
        wanted_ctas: int | None,
        group_timeout_ns: int,
        stream: int,
    ) -> None:
        """Count exchange and plan.

        Args:
            status: 0, or why this rank has no rows: see exchange.h.
            tokens: T.
            has_routes: the call was prepared; else its counts do not matter.
            wanted_ctas: address of a page-locked word that takes the place of the split's number.
            group_timeout_ns: for a peer that has not come yet.
            stream: a cudaStream_t, as below.
        """
        params = self._exchange
        params.own_counts = self._own_counts if has_routes else params.plan.counts
        params.behind_router &= has_routes
        self._is_behind_front = False
        params.status, params.tokens = status, tokens
        params.group_timeout_ns = group_timeout_ns
        params.wanted_ctas = wanted_ctas
        if split is not self._split:
            self._split, plan = split, self._plan_params
            params.consumer_ctas = split.num_consumer_ctas
            plan.bands_per_segment = split.bands_per_segment
            waves, n_tiles = split.local_tail_waves, self._down.n_tiles
            plan.local_tail_bands = tail_bands(waves, n_tiles, self._sms)
        check(
            self._heap.library.tilemoe_exchange_launch(params, stream),
            "the launch of the count exchange",
        )

    def fetch_counts(self, engine: int, stream: int) -> None:
        """The counts of the exchange on their way to the host, which waits for them in
        :meth:`launch_combine` with the mover COPY_ENGINE.

        Args:
            engine: handle of the heap's CopyEngine.
        """
        check(
            self._heap.library.tilemoe_copy_engine_fetch(engine, self._exchange.plan, stream),
            "the copy of the counts to the host",
        )

    def launch_front(self, stream: int) -> None:
        """Dispatch, unless it has taken place, and GEMM 1."""
        gemm = self._front
        assert gemm is not None
        gemm.set_grid(self._sms)
        self._is_behind_front = self.is_fused
        check(
            self._heap.library.tilemoe_producer_launch(gemm.params, gemm.kind, self._sms, stream),
            "the launch of GEMM 1",
        )

    def launch_combine(
        self,
        split: Split,
        on_device: bool,
        side: int,
        events: tuple[int, int],
        stream: int,
        engine: int | None = None,
    ) -> None:
        """GEMM 2 beside the return of its rows, then the weighted sum.

        Args:
            on_device: the split's number is the most, and the wanted word decides.
            side: stream of the consumer; events: begin and end of it.
            engine: handle, for the mover COPY_ENGINE; the host waits for the counts here.
        """
        params, down = self._combine, self._down
        beside = split.mover is abi.Mover.SM and not on_device
        down.set_grid(self._sms - split.num_consumer_ctas if beside else self._sms)
        params.producer = down.params
        params.producer.behind_front = self._is_behind_front
        params.mover, params.num_consumer_ctas = split.mover, split.num_consumer_ctas
        params.device_split = int(on_device and split.mover is abi.Mover.SM)
        params.consumer_stream = side
        params.begin, params.end = events
        params.copy_engine = engine
        check(
            self._heap.library.tilemoe_combine_launch(params, stream),
            "the launch of GEMM 2 and the combine",
        )

    def _make_combine(self) -> abi.CombineParams:
        heap, shape, plan = self._heap, self.shape, self._heap.plan
        params = abi.aligned(abi.CombineParams)
        params.sms = self._sms
        params.transport, params.pes = abi.Transport.MAPPED, heap.pes
        if self._config.transport == "nvshmem" and heap.pes is not None:
            params.transport = abi.Transport.PUT
        out = heap.out.data_ptr()
        for gemm in self._gemms.downs:
            gemm.params.ship = abi.ShipParams(
                view=heap.view,
                segments=plan.view.segments,
                chunks=plan.view.chunks,
                rows=out,
                row_bytes=shape.out * shape.dtype.itemsize,
                n_tiles=gemm.n_tiles,
            )
        scale = params.scale
        scale.view = heap.view
        scale.run_row = plan.view.run_row
        scale.arrival_target = plan.view.arrival_target
        scale.recv_row = plan.view.recv_row
        scale.rows = out
        scale.topk, scale.n = shape.topk, shape.out
        scale.local_experts = self.local_experts
        scale.dtype = abi.DTYPES[shape.dtype]
        return params

    def _matrix(self, buffer: Tensor, columns: int) -> Tensor:
        numbers = self._bounds.rows * columns
        typed = buffer[: numbers * self.shape.dtype.itemsize].view(self.shape.dtype)
        return typed.view(self._bounds.rows, columns)
