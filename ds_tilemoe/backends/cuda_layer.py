"""What the CUDA backend keeps of one layer: bounds of its plan, its two GEMMs, params of kernels.

Shape letters: T tokens of this rank, K top-k, E experts, E_l of this rank, W ranks, N output width.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Expert, FrontGemm, LayerShape
from ds_tilemoe.backends.cuda_gemm import GroupedGemm
from ds_tilemoe.backends.cuda_heap import CudaHeap, HeapNeeds
from ds_tilemoe.combine_plan import plan_bounds
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, PlanError
from ds_tilemoe.plan_abi import INT32_MAX, Layout, PlanParams, PlanSizes

CHUNK_BYTES = 64 * 1024
# At most this wide, tiles of 128 columns beside the consumer save a wave: docs/gpu-notes.md.
NARROW = 1024
# All local bands last re-reads weights: 28 % of the GEMM at 64 local experts, 4 % at 32, nothing at
# 16, and two waves cover the copy's tail in each: docs/gpu-notes.md.
AUTO_TAIL_WAVES = 2
LAYOUTS = {"auto": Layout.COMPACT, "compact": Layout.COMPACT, "aligned": Layout.ALIGNED}


def down_tile_n(config: TileOverlapConfig, out: int) -> int:
    """Columns of a tile of GEMM 2."""
    if config.tile_n != "auto":
        return config.tile_n
    return 128 if out <= NARROW else 256


def tail_waves(config: TileOverlapConfig) -> int | str:
    """Waves of local tiles that go last: a number or "all"."""
    waves = config.local_tail_waves
    return AUTO_TAIL_WAVES if waves == "auto" else waves


def plan_params(
    shape: LayerShape, config: TileOverlapConfig, rank: int, world: int, sms: int
) -> PlanParams:
    """What a plan of this layer depends on besides the counts."""
    joined, waves = config.bands_per_segment, tail_waves(config)
    n_tiles = -(-shape.out // down_tile_n(config, shape.out))
    return PlanParams(
        world=world,
        rank=rank,
        local_experts=shape.num_experts // world,
        tile_m=abi.TILE_M,
        layout=LAYOUTS[config.layout],
        bands_per_segment=1 if joined == "auto" else joined,
        local_tail_bands=-1 if waves == "all" else min(waves * -(-sms // n_tiles), INT32_MAX),
        chunk_rows=max(1, CHUNK_BYTES // (shape.out * shape.dtype.itemsize)),
    )


def most_rows_in(shape: LayerShape, params: PlanParams, max_tokens: int) -> int:
    """Rows that a rank may be sent: a token goes to an expert at most once."""
    return params.world * max_tokens * min(shape.topk, params.local_experts)


def bounds_of(shape: LayerShape, params: PlanParams, max_tokens: int) -> PlanSizes:
    """Of every plan of this layer at ``max_tokens`` tokens a rank.

    Raises:
        CapacityError: more rows than the kernels can count.
    """
    problem = ""
    try:
        bounds = plan_bounds(params, most_rows_in(shape, params, max_tokens))
        if bounds.rows > INT32_MAX:
            problem = f"{bounds.rows} rows, wanted at most {INT32_MAX}"
    except PlanError as error:
        problem = str(error)
    if problem:
        raise CapacityError(
            f"layer {shape.name} at max_tokens_per_rank {max_tokens}: {problem}; set a smaller"
            " max_tokens_per_rank"
        )
    return bounds


def needs_of(shape: LayerShape, bounds: PlanSizes, max_tokens: int) -> HeapNeeds:
    """What one layer wants of the heap."""
    size = shape.dtype.itemsize
    return HeapNeeds(
        max_experts=shape.num_experts,
        max_tokens=max_tokens,
        recv_bytes=max_tokens * shape.topk * shape.out * size,
        rows_bytes=bounds.rows * shape.hidden * size,
        hidden_bytes=bounds.rows * shape.ffn * size,
        out_bytes=bounds.rows * shape.out * size,
        bands=bounds.bands,
        segments=bounds.segments,
        chunks=bounds.chunks,
    )


class CudaLayer:
    """Params of one layer's kernels on one heap.

    Attributes:
        local_experts: E_l.
        rows_in: most rows that dispatch may bring.
        rows: [rows, H], what dispatch fills. ``hidden``: [rows, F], what GEMM 2 reads.
        exchange, combine: params of the launches; what changes from call to call is set there.
    """

    def __init__(
        self,
        shape: LayerShape,
        heap: CudaHeap,
        params: PlanParams,
        bounds: PlanSizes,
        config: TileOverlapConfig,
    ) -> None:
        self.shape, self._heap, self._bounds = shape, heap, bounds
        self.local_experts = params.local_experts
        self.rows_in = bounds.valid_rows
        self.rows = self._matrix(heap.rows, shape.hidden)
        self.hidden = self._matrix(heap.hidden, shape.ffn)
        self._fronts: dict[tuple[str, int], GroupedGemm] = {}
        self._down = self._gemm(
            self.hidden,
            self._matrix(heap.out, shape.out),
            tile_n=down_tile_n(config, shape.out),
        )
        self.exchange = abi.ExchangeParams(view=heap.view, plan=heap.plan)
        self.exchange.counts = heap.plan.counts
        self.exchange.layer = fingerprint(shape, config)
        plan = self.exchange.plan
        plan.params = abi.PlanParams(*dataclasses.astuple(params))
        plan.capacity = abi.PlanCapacity(bounds.rows, bounds.bands, bounds.segments, bounds.chunks)
        self.combine = abi.aligned(abi.CombineParams)
        self.combine.kind = self._down.kind
        out = heap.out.data_ptr()
        ship = abi.ShipParams(
            view=heap.view,
            segments=plan.view.segments,
            chunks=plan.view.chunks,
            rows=out,
            row_bytes=shape.out * shape.dtype.itemsize,
            n_tiles=self._down.n_tiles,
        )
        self._down.params.ship = ship
        scale = self.combine.scale
        scale.view = heap.view
        scale.run_row = plan.view.run_row
        scale.arrival_target = plan.view.arrival_target
        scale.recv_row = plan.view.recv_row
        scale.rows = out
        scale.topk, scale.n = shape.topk, shape.out
        scale.local_experts = self.local_experts
        scale.dtype = abi.DTYPES[shape.dtype]

    def set_down(self, experts: Sequence[Expert], grid: int) -> None:
        """The weights and the tile order of GEMM 2 into ``combine``."""
        self._down.set_operands([e.down_weight for e in experts], [e.down_bias for e in experts])
        self._down.set_grid(grid)
        self.combine.producer = self._down.params

    def front(self, fronts: Sequence[FrontGemm], grid: int) -> GroupedGemm:
        """GEMM 1 with these weights, ready to be launched."""
        key = (fronts[0].activation, len(fronts[0].weights))
        if key not in self._fronts:
            self._fronts[key] = self._gemm(
                self.rows,
                self.hidden,
                tile_n=256,
                gated=len(fronts[0].weights) == 2,
                activation=fronts[0].activation,
                front=True,
            )
        gemm = self._fronts[key]
        matrices = range(len(fronts[0].weights))
        gemm.set_operands(
            [front.weights[i] for i in matrices for front in fronts],
            [front.biases[i] for i in matrices for front in fronts],
        )
        gemm.set_grid(grid)
        return gemm

    def _gemm(self, a: Tensor, d: Tensor, **options: object) -> GroupedGemm:
        return GroupedGemm(
            self._heap,
            self.shape.dtype,
            a=a.data_ptr(),
            d=d.data_ptr(),
            rows=self._bounds.rows,
            n=d.shape[1],
            k=a.shape[1],
            experts=self.local_experts,
            **options,  # type: ignore[arg-type]
        )

    def _matrix(self, buffer: Tensor, columns: int) -> Tensor:
        numbers = self._bounds.rows * columns
        typed = buffer[: numbers * self.shape.dtype.itemsize].view(self.shape.dtype)
        return typed.view(self._bounds.rows, columns)


def common_front(experts: Sequence[Expert]) -> list[FrontGemm] | None:
    """The fronts of all experts if one GEMM with one activation makes them."""
    fronts = [expert.front_gemm for expert in experts]
    known = [front for front in fronts if front is not None]
    if len(known) < len(fronts) or len({(f.activation, len(f.weights)) for f in known}) != 1:
        return None
    return known


def fingerprint(shape: LayerShape, config: TileOverlapConfig) -> int:
    """Equal on ranks that run the same layer."""
    text = f"{shape}{LAYOUTS[config.layout].name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
