"""The plan of one layer on CUDA: what it depends on besides the counts, and room for every plan.

Shape letters: T tokens of this rank, K top-k, E experts, E_l of this rank, W ranks, N output width.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import LayerShape, bands_per_segment
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
# Of 132 SMs; so many fill a link while GEMM 1 has the others: docs/gpu-notes.md. Where few rows
# travel, csrc/dispatch lets all CTAs send.
AUTO_DISPATCH_CTAS = 4
LAYOUTS = {"auto": Layout.COMPACT, "compact": Layout.COMPACT, "aligned": Layout.ALIGNED}


@dataclass(frozen=True)
class HeapNeeds:
    """What a heap must hold; equal on every rank.

    Attributes:
        max_experts: E of the layer with most experts.
        max_tokens: tokens a rank that the rest was computed for.
        slots: tile_m-row slots of the longest layout.
        recv_bytes: room of the block for the rows that peers send back.
        dispatch_bytes: room of the block for a layout's rows in front of GEMM 1.
        hidden_bytes, out_bytes: of a layout's rows in front of GEMM 2 and behind it.
        bands, segments, chunks: of a plan.
    """

    max_experts: int = 0
    max_tokens: int = 0
    slots: int = 0
    recv_bytes: int = 0
    dispatch_bytes: int = 0
    hidden_bytes: int = 0
    out_bytes: int = 0
    bands: int = 0
    segments: int = 0
    chunks: int = 0

    def union(self, other: HeapNeeds) -> HeapNeeds:
        """The smallest needs that cover both."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return HeapNeeds(*(max(pair) for pair in pairs))

    @property
    def nbytes(self) -> int:
        """Of the buffers that matter, for messages."""
        return self.recv_bytes + self.dispatch_bytes + self.hidden_bytes + self.out_bytes


def down_tile_n(config: TileOverlapConfig, out: int) -> int:
    """Columns of a tile of GEMM 2, but in calls that :func:`fewer_columns` is for."""
    if config.tile_n != "auto":
        return config.tile_n
    return 128 if out <= NARROW else 256


def fewer_columns(
    config: TileOverlapConfig, n: int, bands: int, local_experts: int, sms: int
) -> bool:
    """Whether a GEMM should have tiles of 128 columns instead of 256: where it only reads weights
    (a band an expert at most), the more evenly its waves spread them over the SMs the faster.

    Args:
        n: columns of its output.
        bands: of the call.
        local_experts: E_l.
    """
    if config.tile_n != "auto" or bands > local_experts:
        return False
    return -(-bands * -(-n // 128) // sms) < 2 * -(-bands * -(-n // 256) // sms)


def expected_bands(shape: LayerShape, local_experts: int, tokens: int) -> int:
    """Bands of a call, were its peers' calls as long and all experts as busy."""
    rows = tokens * shape.topk
    return max(-(-rows // abi.TILE_M), min(local_experts, rows))


def dispatch_ctas(config: TileOverlapConfig, sms: int) -> int:
    """CTAs of GEMM 1 that send rows to peers before they make tiles."""
    wanted = config.num_dispatch_ctas
    return max(1, AUTO_DISPATCH_CTAS * sms // 132) if wanted == "auto" else min(wanted, sms)


def tail_waves(config: TileOverlapConfig) -> int | str:
    """Waves of local tiles that go last: a number or "all"."""
    waves = config.local_tail_waves
    if waves != "auto":
        return waves
    # Its last copy is a quarter of what a peer gets, and takes several waves: docs/gpu-notes.md.
    return "all" if config.mover == "copy_engine" else AUTO_TAIL_WAVES


def tail_bands(waves: int | str, n_tiles: int, sms: int) -> int:
    """Local bands that go last, of so many waves; -1 is all of them."""
    return -1 if waves == "all" else min(int(waves) * -(-sms // n_tiles), INT32_MAX)


def plan_params(
    shape: LayerShape, config: TileOverlapConfig, rank: int, world: int, sms: int
) -> PlanParams:
    """What a plan of this layer depends on besides the counts."""
    n_tiles = -(-shape.out // down_tile_n(config, shape.out))
    return PlanParams(
        world=world,
        rank=rank,
        local_experts=shape.num_experts // world,
        tile_m=abi.TILE_M,
        layout=LAYOUTS[config.layout],
        bands_per_segment=bands_per_segment(config),
        local_tail_bands=tail_bands(tail_waves(config), n_tiles, sms),
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
        slots=-(-bounds.rows // abi.TILE_M),
        recv_bytes=max_tokens * shape.topk * shape.out * size,
        dispatch_bytes=bounds.rows * shape.hidden * size,
        hidden_bytes=bounds.rows * shape.ffn * size,
        out_bytes=bounds.rows * shape.out * size,
        bands=bounds.bands,
        segments=bounds.segments,
        chunks=bounds.chunks,
    )


def fingerprint(shape: LayerShape, config: TileOverlapConfig) -> int:
    """Equal on ranks that run the same layer."""
    text = f"{shape}{LAYOUTS[config.layout].name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
