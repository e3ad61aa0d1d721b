"""Python mirror of ``csrc/plan_abi.h``: same fields, same order, same bytes.

Shape letters: E experts of the group, W ranks, B bands. tests/test_plan_abi.py compares the two.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from .errors import PlanError

Int64Array = npt.NDArray[np.int64]
StructArray = npt.NDArray[np.void]
INT32_MAX = 2**31 - 1


class Layout(enum.IntEnum):
    """Where the pad rows of a rank's layout are."""

    COMPACT = 0
    ALIGNED = 1


PARAMS_DTYPE = np.dtype(
    [
        ("world", "<i4"),
        ("rank", "<i4"),
        ("local_experts", "<i4"),
        ("tile_m", "<i4"),
        ("layout", "<i4"),
        ("bands_per_segment", "<i4"),
        ("local_tail_bands", "<i4"),
        ("chunk_rows", "<i4"),
    ]
)
SIZES_DTYPE = np.dtype(
    [
        ("rows", "<i8"),
        ("valid_rows", "<i8"),
        ("bands", "<i4"),
        ("remote_bands", "<i4"),
        ("segments", "<i4"),
        ("chunks", "<i4"),
    ]
)
BAND_DTYPE = np.dtype([("row", "<i8"), ("expert", "<i4"), ("rows", "<i4")])
SEGMENT_DTYPE = np.dtype(
    [
        ("src_row", "<i8"),
        ("dst_row", "<i8"),
        ("rows", "<i4"),
        ("owner", "<i4"),
        ("band_begin", "<i4"),
        ("band_count", "<i4"),
    ]
)
CHUNK_DTYPE = np.dtype([("segment", "<i4"), ("row", "<i4"), ("rows", "<i4")])
ITERATION_DTYPE = np.dtype(
    [
        (name, "<i8")
        for name in (
            "first_segment_ready",
            "producer_end",
            "last_put",
            "last_arrival",
            "segments",
            "backlog_at_producer_end",
            "chunks_drained",
            "idle_spins",
            "epoch",
        )
    ]
)
TIMES_DTYPE = np.dtype(
    [
        (name, "<i8")
        for name in (
            "router_start",
            "exchange_end",
            "front_start",
            "front_end",
            "down_start",
            "down_end",
            "last_arrival",
            "scale_end",
        )
    ]
)
CALL_RECORD_DTYPE = np.dtype(
    [
        ("iteration", ITERATION_DTYPE),
        ("times", TIMES_DTYPE),
        ("layer", "<u8"),
        ("tokens", "<i8"),
        ("rows", "<i8"),
        ("remote_rows", "<i8"),
        ("consumer_ctas", "<i4"),
        ("bands", "<i4"),
        ("epoch", "<u8"),
    ]
)
CALL_RECORDS = 256  # slots of the ring of call records


def _field_error(name: str, got: object, wanted: str) -> PlanError:
    return PlanError(f"PlanParams.{name}: got {got!r}, wanted {wanted}")


@dataclass(frozen=True)
class PlanParams:
    """Everything a plan depends on besides the counts.

    All ranks of a group agree on every field but ``rank``, ``bands_per_segment``,
    ``local_tail_bands`` and ``chunk_rows``, which only shape a rank's own sending.

    Args:
        world: W, ranks of the expert-parallel group.
        rank: this rank inside the group.
        local_experts: experts a rank; global expert = rank * local_experts + local expert.
        tile_m: rows of a band.
        layout: ``Layout.COMPACT`` or ``Layout.ALIGNED`` (the paper's Algorithm 1).
        bands_per_segment: most bands of a middle segment (the paper's mgb).
        local_tail_bands: local bands that go last; -1 is all of them (the paper's rule).
        chunk_rows: most rows of a chunk.

    Raises:
        PlanError: a value is out of range; names field, value got and value wanted.
    """

    world: int
    rank: int
    local_experts: int
    tile_m: int
    layout: Layout
    bands_per_segment: int
    local_tail_bands: int
    chunk_rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise _field_error("layout", self.layout, "Layout.COMPACT or Layout.ALIGNED")
        lowest = {"rank": 0, "local_tail_bands": -1}
        for field in fields(self):
            if field.name == "layout":
                continue
            low = lowest.get(field.name, 1)
            got = getattr(self, field.name)
            wanted = f"an integer from {low} to {INT32_MAX}"
            if isinstance(got, bool):
                raise _field_error(field.name, got, wanted)
            try:
                value = operator.index(got)
            except TypeError:
                raise _field_error(field.name, got, wanted) from None
            if not low <= value <= INT32_MAX:
                raise _field_error(field.name, got, wanted)
            object.__setattr__(self, field.name, value)
        if self.rank >= self.world:
            raise _field_error("rank", self.rank, f"less than world, which is {self.world}")
        if self.experts > INT32_MAX:
            wanted = f"world * local_experts of at most {INT32_MAX} (world is {self.world})"
            raise _field_error("local_experts", self.local_experts, wanted)

    @property
    def experts(self) -> int:
        """E, experts of the whole group."""
        return self.world * self.local_experts

    @property
    def own_experts(self) -> slice:
        """Experts of this rank among the E of the group."""
        first = self.rank * self.local_experts
        return slice(first, first + self.local_experts)


@dataclass(frozen=True)
class PlanSizes:
    """Lengths of the arrays of one plan."""

    rows: int
    """Rows of the layout, padding included: a multiple of tile_m, the rows that GEMMs compute."""
    valid_rows: int
    """Rows that carry a token."""
    bands: int
    remote_bands: int
    """Bands with at least one row of another owner."""
    segments: int
    chunks: int

    @property
    def padding_rows(self) -> int:
        """Rows that the GEMM computes for nothing."""
        return self.rows - self.valid_rows


@dataclass(frozen=True)
class CombinePlan:
    """Arrays that say which rows go where and when; mirrors ``PlanView`` of csrc/plan_abi.h.

    Attributes:
        params: what the plan was built for, besides the counts.
        sizes: lengths of the arrays.
        expert_row: int64 [E_local + 1], first layout row of each local expert, then all rows.
        run_row: int64 [E_local, W], first layout row of the run (local expert, owner).
        bands: BAND_DTYPE [B], in schedule order.
        segments: SEGMENT_DTYPE [S], in the order in which they become ready.
        chunks: CHUNK_DTYPE [C], in segment order; ``row`` counts from the segment's first row.
        arrival_target: int64 [W], rows that this rank is owed by each rank; 0 for itself.
        dispatch_row: int64 [E], first row of this rank's run in the layout of the expert's rank.
        recv_row: int64 [E + 1], first row of each expert in this rank's receive buffer, then all.
    """

    params: PlanParams
    sizes: PlanSizes
    expert_row: Int64Array
    run_row: Int64Array
    bands: StructArray
    segments: StructArray
    chunks: StructArray
    arrival_target: Int64Array
    dispatch_row: Int64Array
    recv_row: Int64Array


def as_counts(params: PlanParams, counts: npt.ArrayLike) -> Int64Array:
    """Checks C and widens it.

    Args:
        params: gives W and E.
        counts: C[source rank, expert], kept rows, any integer type, [W, E].

    Returns:
        C as int64 [W, E].

    Raises:
        PlanError: wrong shape or type, a negative count, or one beyond 32 bits.
    """
    array = np.asarray(counts)
    wanted = (params.world, params.experts)
    if array.shape != wanted:
        raise PlanError(f"counts: got shape {array.shape}, wanted [W, E] = {wanted}")
    if array.dtype.kind not in "iu":
        raise PlanError(f"counts: got type {array.dtype}, wanted an integer type")
    for bad in (array.min(), array.max()):
        if not 0 <= bad <= INT32_MAX:
            where = tuple(int(i) for i in np.argwhere(array == bad)[0])
            raise PlanError(f"counts{list(where)}: got {bad}, wanted 0 to {INT32_MAX}")
    return array.astype(np.int64)
