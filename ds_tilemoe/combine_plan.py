"""Which rows of a rank go where, and after which bands: the reference of all planners.

Pure integers from C (counts[source rank, global expert], kept rows). csrc/planner/planner.cpp makes
the same bytes. A plan is proved by ``check`` (one rank) and ``check_all`` (the whole group), which
follow the definitions row range by row range and share no code with the builder.

Shape letters: E experts of the group, W ranks, B bands, S segments, C chunks (or the counts).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import PlanError
from .layout import Layouts, build_layouts, owners_in_layout, valid_rows_of_bands
from .plan_abi import (
    BAND_DTYPE,
    CHUNK_DTYPE,
    INT32_MAX,
    SEGMENT_DTYPE,
    CombinePlan,
    Int64Array,
    Layout,
    PlanParams,
    PlanSizes,
    StructArray,
    as_counts,
)
from .plan_check import check, check_all
from .schedule import Schedule, build_schedule

__all__ = [
    "BAND_DTYPE",
    "CHUNK_DTYPE",
    "SEGMENT_DTYPE",
    "CombinePlan",
    "Layout",
    "PlanParams",
    "PlanSizes",
    "build_plan",
    "check",
    "check_all",
    "plan_bounds",
]


def build_plan(params: PlanParams, counts: npt.ArrayLike) -> CombinePlan:
    """Builds the combine plan of ``params.rank``, in O(W * E + bands + segments + chunks).

    Args:
        params: the rank, its group and the options.
        counts: C[source rank, expert], kept rows, integers of at most 32 bits, [W, E].

    Returns:
        The plan. Source: paper sections 3.2.3 and 3.3.2.

    Raises:
        PlanError: the counts are malformed, or a length does not fit 32 bits.
    """
    wide = as_counts(params, counts)
    layouts = build_layouts(params, wide)
    rank, own = params.rank, params.own_experts
    expert_row = layouts.expert_row[rank]
    band_count = int(expert_row[-1]) // params.tile_m
    _fits("bands", band_count, "a larger tile_m")

    schedule = build_schedule(params, layouts)
    bands = np.empty(band_count, BAND_DTYPE)
    bands["row"] = schedule.band_row
    bands["expert"] = schedule.band_expert
    valid = valid_rows_of_bands(params, wide, band_count)
    bands["rows"] = valid[schedule.band_row // params.tile_m]

    recv_row = np.zeros((params.world, params.experts + 1), np.int64)
    np.cumsum(wide, axis=1, out=recv_row[:, 1:])
    segments = _build_segments(params, wide, layouts, schedule, recv_row)
    chunks = _build_chunks(params, segments)

    arrival_target = wide[rank].reshape(params.world, -1).sum(axis=1)
    arrival_target[rank] = 0
    sizes = PlanSizes(
        rows=int(expert_row[-1]),
        valid_rows=int(wide[:, own].sum()),
        bands=len(bands),
        remote_bands=int(schedule.remote_bands.sum()),
        segments=len(segments),
        chunks=len(chunks),
    )
    return CombinePlan(
        params=params,
        sizes=sizes,
        expert_row=expert_row.copy(),
        run_row=layouts.run_row[own].copy(),
        bands=bands,
        segments=segments,
        chunks=chunks,
        arrival_target=arrival_target,
        dispatch_row=layouts.run_row[:, rank].copy(),
        recv_row=recv_row[rank].copy(),
    )


def _build_segments(
    params: PlanParams,
    counts: Int64Array,
    layouts: Layouts,
    schedule: Schedule,
    recv_row: Int64Array,
) -> StructArray:
    """Cuts the remote runs, in schedule order, at band edges.

    A run's cuts follow each other in (last band, src_row) order, and so do runs of one expert and
    experts in schedule order, so nothing is left to sort.
    """
    tile_m, joined = params.tile_m, params.bands_per_segment
    remote_owners = owners_in_layout(params)[:-1]
    experts = np.repeat(schedule.experts, params.world - 1)
    owners = np.tile(remote_owners, params.local_experts)
    run_rows = counts[owners, params.own_experts.start + experts]
    experts, owners, run_rows = (a[run_rows > 0] for a in (experts, owners, run_rows))

    # In rows and bands of the run's expert.
    row_of_expert = layouts.expert_row[params.rank][experts]
    global_expert = params.own_experts.start + experts
    begin = layouts.run_row[global_expert, owners] - row_of_expert
    end = begin + run_rows
    band_of_expert = schedule.first_band[experts]
    band, last_band = begin // tile_m, (end - 1) // tile_m
    pieces = last_band - band + 1
    first = band_of_expert + band == 0
    last = (band_of_expert + last_band == schedule.last_remote_band) & (pieces > first)
    middle = -(-(pieces - first - last) // joined)
    cuts = first + middle + last
    total = int(cuts.sum())
    _fits("segments", total, "a larger tile_m or bands_per_segment")

    run = np.repeat(np.arange(len(cuts)), cuts)
    cut = np.arange(total) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    from_band = (band + first)[run] + (cut - first[run]) * joined
    to_band = np.minimum(from_band + joined, (last_band + 1 - last)[run])
    alone = first[run] & (cut == 0)
    from_band[alone], to_band[alone] = 0, 1
    alone = last[run] & (cut == cuts[run] - 1)
    from_band[alone], to_band[alone] = last_band[run][alone], last_band[run][alone] + 1
    from_row = np.maximum(from_band * tile_m, begin[run])
    to_row = np.minimum(to_band * tile_m, end[run])

    segments = np.empty(total, SEGMENT_DTYPE)
    segments["src_row"] = row_of_expert[run] + from_row
    segments["dst_row"] = (recv_row[owners, global_expert] - begin)[run] + from_row
    segments["rows"] = to_row - from_row
    segments["owner"] = owners[run]
    segments["band_begin"] = band_of_expert[run] + from_band
    segments["band_count"] = to_band - from_band
    return segments


def _build_chunks(params: PlanParams, segments: StructArray) -> StructArray:
    """Cuts every segment as evenly as it goes, longer chunks first."""
    rows = segments["rows"]
    per_segment = (rows - 1) // params.chunk_rows + 1
    total = int(per_segment.sum(dtype=np.int64))
    _fits("chunks", total, "a larger chunk_rows")
    size = rows // per_segment
    longer = rows - size * per_segment
    segment = np.repeat(np.arange(len(segments), dtype=np.int32), per_segment)
    first_chunk = np.cumsum(per_segment, dtype=np.int32) - per_segment
    index = np.arange(total, dtype=np.int32) - np.repeat(first_chunk, per_segment)
    longer, size = np.repeat(longer, per_segment), np.repeat(size, per_segment)
    chunks = np.empty(total, CHUNK_DTYPE)
    chunks["segment"] = segment
    chunks["row"] = index * size + np.minimum(index, longer)
    chunks["rows"] = size + (index < longer)
    return chunks


def plan_bounds(params: PlanParams, max_rows_in: int) -> PlanSizes:
    """Upper bounds of a plan's sizes over all counts, for buffers made once.

    They hold for every ``bands_per_segment`` and ``local_tail_bands``. The proof stands beside
    ``plan_bounds`` in csrc/planner/planner.cpp.

    Args:
        params: the group and the options; ``rank`` does not matter.
        max_rows_in: most rows that all ranks together, this one included, send to this rank.

    Returns:
        The bounds, each of them for itself: no single plan need reach all of them.

    Raises:
        PlanError: ``max_rows_in`` is negative, or a bound does not fit 32 bits.
    """
    if max_rows_in < 0:
        raise PlanError(f"max_rows_in: got {max_rows_in}, wanted 0 or more")
    tile_m, peers = params.tile_m, params.world - 1
    aligned = params.layout is Layout.ALIGNED
    experts = min(params.local_experts, max_rows_in)
    runs = min(params.local_experts * params.world, max_rows_in)
    remote_runs = min(params.local_experts * peers, max_rows_in)
    nonempty = runs if aligned else experts
    bands = nonempty + (max_rows_in - nonempty) // tile_m
    remote_bands = segments = chunks = 0
    if peers:
        nonempty = remote_runs if aligned else experts
        remote_bands = nonempty + (max_rows_in - nonempty) // tile_m
        edges = (max_rows_in - -(-remote_runs // peers)) // tile_m
        segments = remote_bands if aligned else min(remote_runs + edges, max_rows_in)
        chunks = segments + (max_rows_in - segments) // params.chunk_rows
    _fits("bands", bands, "a larger tile_m")
    _fits("segments", segments, "a larger tile_m")
    _fits("chunks", chunks, "a larger chunk_rows")
    return PlanSizes(bands * tile_m, max_rows_in, bands, remote_bands, segments, chunks)


def _fits(what: str, got: int, fix: str) -> None:
    if got > INT32_MAX:
        raise PlanError(f"{what}: got {got}, wanted at most {INT32_MAX}; use {fix}")
