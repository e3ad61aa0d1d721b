"""Proof that a combine plan is right; ``combine_plan.check`` and ``check_all``.

Shares no code with the builders: it walks the definitions with plain integers and then compares
row ranges by sorting and counting, so it also judges plans of more rows than memory could hold.

Shape letters: E experts of the group, W ranks, B bands, S segments, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import PlanError
from .plan_abi import (
    BAND_DTYPE,
    CHUNK_DTYPE,
    SEGMENT_DTYPE,
    CombinePlan,
    Int64Array,
    Layout,
    as_counts,
)


class _Runs(NamedTuple):
    """Nonempty runs of one rank in layout order, each array int64 [runs]."""

    expert: Int64Array
    owner: Int64Array
    row: Int64Array
    rows: Int64Array

    def rows_before(self, row: Int64Array, chosen: npt.NDArray[np.bool_]) -> Int64Array:
        """How many rows of the chosen runs lie before each layout row."""
        starts = np.append(np.int64(-1), self.row)
        rows = np.append(0, np.where(chosen, self.rows, 0))
        at = np.searchsorted(starts, row, side="right") - 1
        inside = np.minimum(row - starts[at], rows[at])
        return np.asarray((np.cumsum(rows) - rows)[at] + inside)


def check(plan: CombinePlan, counts: npt.ArrayLike) -> None:
    """Proves one rank's plan: every remote row ships exactly once, to the right place, in time.

    Args:
        plan: the plan of rank ``plan.params.rank``, from any planner.
        counts: the C it was built from, integers [W, E].

    Raises:
        PlanError: the first thing that is wrong, with the value got and the value wanted.
    """
    _Proof(plan, as_counts(plan.params, counts)).prove()


def check_all(plans: Sequence[CombinePlan], counts: npt.ArrayLike) -> None:
    """Proves the plans of a whole group, each for itself and against each other.

    Args:
        plans: one plan a rank, in rank order.
        counts: the C they were built from, integers [W, E].

    Raises:
        PlanError: a plan is wrong, or two of them do not fit: an owner's receive rows are not
            covered exactly once, or a dispatch row is not where the destination expects the run.
    """
    if not plans:
        raise PlanError("plans: got none, wanted one for each rank")
    first = plans[0].params
    if [plan.params.rank for plan in plans] != list(range(first.world)):
        ranks = [plan.params.rank for plan in plans]
        raise PlanError(f"plans: got ranks {ranks}, wanted 0 to {first.world - 1} in order")
    wide = as_counts(first, counts)
    for plan in plans:
        for name in ("world", "local_experts", "tile_m", "layout"):
            got, wanted = getattr(plan.params, name), getattr(first, name)
            _equal(f"{name} of rank {plan.params.rank}", got, wanted)
        _Proof(plan, wide).prove()
    run_rows = np.concatenate([plan.run_row for plan in plans])
    shipped = np.concatenate([plan.segments for plan in plans])
    senders = np.repeat(np.arange(len(plans)), [len(plan.segments) for plan in plans])
    for owner, plan in enumerate(plans):
        _same(f"dispatch_row of rank {owner}", plan.dispatch_row, run_rows[:, owner])
        mine = shipped["owner"] == owner
        begin, rows = shipped["dst_row"][mine], shipped["rows"][mine].astype(np.int64)
        order = np.argsort(begin)
        begin, end = begin[order], (begin + rows)[order]
        own = plan.params.own_experts
        # Rows of the owner's own experts stay where they are, so nothing may land on their place.
        local_begin, local_end = int(plan.recv_row[own.start]), int(plan.recv_row[own.stop])
        want_begin = np.append(0, end)
        want_begin[want_begin == local_begin] = local_end
        want_begin, wanted_end = want_begin[:-1], want_begin[-1]
        _same(f"first receive rows of the segments to rank {owner}", begin, want_begin)
        _equal(f"rows that reach rank {owner}", wanted_end, int(plan.recv_row[-1]))
        got_rows = np.bincount(senders[mine], rows, len(plans)).astype(np.int64)
        _same(f"rows shipped to rank {owner} by each rank", got_rows, plan.arrival_target)


class _Proof:
    """One plan, its counts and what the definitions say about its rows."""

    def __init__(self, plan: CombinePlan, counts: Int64Array) -> None:
        self.plan = plan
        self.params = plan.params
        self.rank = plan.params.rank
        self.counts = counts
        self.table: list[list[int]] = counts.tolist()

    def prove(self) -> None:
        self._check_shapes()
        self.runs = self._check_layout()
        self._check_bands()
        self._check_schedule()
        self._check_targets()
        self._check_segments()
        self._check_destinations()
        self._check_waits()
        self._check_joins()
        self._check_chunks()

    def _check_shapes(self) -> None:
        world, local_experts = self.params.world, self.params.local_experts
        sizes, experts = self.plan.sizes, self.params.experts
        wanted: dict[str, tuple[tuple[int, ...], Any]] = {
            "expert_row": ((local_experts + 1,), np.int64),
            "run_row": ((local_experts, world), np.int64),
            "bands": ((sizes.bands,), BAND_DTYPE),
            "segments": ((sizes.segments,), SEGMENT_DTYPE),
            "chunks": ((sizes.chunks,), CHUNK_DTYPE),
            "arrival_target": ((world,), np.int64),
            "dispatch_row": ((experts,), np.int64),
            "recv_row": ((experts + 1,), np.int64),
        }
        for name, (shape, dtype) in wanted.items():
            array = getattr(self.plan, name)
            _equal(f"shape of {name}", array.shape, shape)
            _equal(f"type of {name}", array.dtype, np.dtype(dtype))

    def _walk(self, rank: int) -> tuple[list[int], list[list[int]], list[tuple[int, ...]]]:
        """Expert rows, run rows [E_local][W] and nonempty runs of any rank, by the definition."""
        world, tile_m = self.params.world, self.params.tile_m
        row = 0
        expert_row: list[int] = []
        run_row: list[list[int]] = []
        runs: list[tuple[int, ...]] = []
        for local in range(self.params.local_experts):
            expert_row.append(row)
            run_row.append([0] * world)
            for owner in [*range(rank + 1, world), *range(rank + 1)]:
                rows = self.table[owner][rank * self.params.local_experts + local]
                run_row[local][owner] = row
                if rows:
                    runs.append((local, owner, row, rows))
                row += rows
                if self.params.layout is Layout.ALIGNED:
                    row += -row % tile_m
            row += -row % tile_m
        return [*expert_row, row], run_row, runs

    def _check_layout(self) -> _Runs:
        local_experts = self.params.local_experts
        expert_row, run_row, runs = self._walk(self.rank)
        _same("expert_row", self.plan.expert_row, np.array(expert_row))
        _same("run_row", self.plan.run_row, np.array(run_row))
        _equal("sizes.rows", self.plan.sizes.rows, expert_row[-1])
        _equal("sizes.valid_rows", self.plan.sizes.valid_rows, sum(run[3] for run in runs))
        for rank in range(self.params.world):
            there = [rows[self.rank] for rows in self._walk(rank)[1]]
            part = slice(rank * local_experts, (rank + 1) * local_experts)
            _same(f"dispatch_row to rank {rank}", self.plan.dispatch_row[part], np.array(there))
        return _Runs(*np.array(runs, np.int64).reshape(-1, 4).T)

    def _check_bands(self) -> None:
        """Bands are the tile_m-row pieces of the layout, each once, valid rows in front."""
        tile_m, bands, sizes = self.params.tile_m, self.plan.bands, self.plan.sizes
        row = bands["row"]
        _equal("sizes.bands * tile_m", sizes.bands * tile_m, sizes.rows)
        _all("bands", row % tile_m == 0, bands, f"first rows that are multiples of {tile_m}")
        _all("bands", (row >= 0) & (row < sizes.rows), bands, f"rows of 0 to {sizes.rows}")
        known = (bands["expert"] >= 0) & (bands["expert"] < self.params.local_experts)
        _all("bands", known, bands, "local experts")
        expert_row = self.plan.expert_row
        inside = (row >= expert_row[bands["expert"]]) & (row < expert_row[bands["expert"] + 1])
        _all("bands", inside, bands, "rows of the band's own expert")
        _equal("different bands", len(np.unique(row)), sizes.bands)

        every = np.ones(len(self.runs.row), bool)
        before = self.runs.rows_before(row, every)
        valid = self.runs.rows_before(row + tile_m, every) - before
        _all("bands", bands["rows"] == valid, bands, "the valid rows of their row range")
        front = self.runs.rows_before(row + bands["rows"], every) - before
        _all("bands", front == valid, bands, "valid rows in front of pad rows")
        _all("bands", valid > 0, bands, "at least one valid row")
        foreign = self.runs.owner != self.rank
        remote = self.runs.rows_before(row + tile_m, foreign)
        self.remote = remote > self.runs.rows_before(row, foreign)
        _equal("sizes.remote_bands", sizes.remote_bands, int(self.remote.sum()))
        self.band_of_piece = np.empty(sizes.bands, np.int64)
        self.band_of_piece[row // tile_m] = np.arange(sizes.bands)

    def _check_schedule(self) -> None:
        """The order of the bands is what sorting them by the rule's keys gives."""
        bands, remote, tail = self.plan.bands, self.remote, self.params.local_tail_bands
        per_expert = np.bincount(bands["expert"][remote], minlength=self.params.local_experts)
        ranking = sorted(range(len(per_expert)), key=lambda e: (-int(per_expert[e]), e))
        place = np.argsort(ranking)[bands["expert"]]
        walk = np.lexsort((bands["row"], ~remote, place))
        local_walk = walk[~remote[walk]]
        if tail >= 0:
            local_walk = local_walk[max(len(local_walk) - tail, 0) :]
        held = np.zeros(len(bands), bool)
        held[local_walk] = True
        wanted = np.lexsort((bands["row"], ~remote, place, held))
        _same("order of the bands", np.arange(len(bands)), wanted)

    def _check_targets(self) -> None:
        mine, local_experts = self.table[self.rank], self.params.local_experts
        _same("recv_row", self.plan.recv_row, np.array([0, *accumulate(mine)]))
        owed = [
            sum(mine[rank * local_experts : (rank + 1) * local_experts]) if rank != self.rank else 0
            for rank in range(self.params.world)
        ]
        _same("arrival_target", self.plan.arrival_target, np.array(owed))

    def _check_segments(self) -> None:
        """Every remote row is in one segment, and that segment goes to the row's owner."""
        segments, runs = self.plan.segments, self.runs
        src, rows = segments["src_row"], segments["rows"].astype(np.int64)
        _all("segments", rows > 0, segments, "at least one row")
        _all("segments", (src >= 0) & (src < self.plan.sizes.rows), segments, "rows of the layout")
        self.run_of = run = np.searchsorted(runs.row, src, side="right") - 1
        self.offset = offset = src - runs.row[run]
        _all("segments", offset + rows <= runs.rows[run], segments, "rows of one run only")
        _all("segments", segments["owner"] == runs.owner[run], segments, "the run's owner")
        _all("segments", segments["owner"] != self.rank, segments, "an owner other than the rank")
        self.by_row = order = np.argsort(src, kind="stable")
        apart = (src + rows)[order][:-1] <= src[order][1:]
        _all("segments", apart, segments[order[:-1]], "no row shipped twice")
        owed = int(runs.rows[runs.owner != self.rank].sum())
        _equal("remote rows shipped", int(rows.sum()), owed)

    def _check_destinations(self) -> None:
        """An owner receives the rows of its experts in order, without gap, each at its place."""
        segments, expert = self.plan.segments, self.runs.expert[self.run_of]
        for owner in range(self.params.world):
            to_owner = segments["owner"] == owner
            mine = segments[to_owner]
            first = np.array([0, *accumulate(self.table[owner])])[self.params.own_experts]
            right = mine["dst_row"] == (first[expert] + self.offset)[to_owner]
            _all("segments", right, mine, f"the row's place at rank {owner}")
            mine = mine[np.argsort(mine["dst_row"])]
            apart = (mine["dst_row"] + mine["rows"])[:-1] <= mine["dst_row"][1:]
            _all("segments", apart, mine[:-1], f"destinations apart at rank {owner}")

    def _check_waits(self) -> None:
        """A segment waits for the bands that hold its rows and for no other."""
        segments, tile_m = self.plan.segments, self.params.tile_m
        piece = segments["src_row"] // tile_m
        last_piece = (segments["src_row"] + segments["rows"] - 1) // tile_m
        begin, count = segments["band_begin"], segments["band_count"]
        _all("segments", begin == self.band_of_piece[piece], segments, "their first row's band")
        _all("segments", count == last_piece - piece + 1, segments, "all bands of their rows")
        jumps = np.cumsum(np.diff(self.band_of_piece, prepend=0) != 1)
        together = jumps[piece] == jumps[last_piece]
        _all("segments", together, segments, "bands that follow each other in the schedule")

    def _check_joins(self) -> None:
        """First and last remote band alone, full joins between, in order of readiness."""
        segments, joined = self.plan.segments, self.params.bands_per_segment
        last_band = segments["band_begin"] + segments["band_count"] - 1
        remote = np.flatnonzero(self.remote)
        ends = remote[[0, -1]] if len(remote) else remote
        edge = np.isin(segments["band_begin"], ends) | np.isin(last_band, ends)
        most = np.where(edge, 1, joined)
        _all("segments", segments["band_count"] <= most, segments, "no more bands than allowed")
        order = np.lexsort((segments["src_row"], last_band))
        _same("order of the segments", np.arange(len(segments)), order)
        now, then = self.by_row[:-1], self.by_row[1:]
        cut_early = (self.run_of[now] == self.run_of[then]) & ~edge[now] & ~edge[then]
        full = ~cut_early | (segments["band_count"][now] == joined)
        _all("segments", full, segments[now], f"{joined} joined bands before the next cut")

    def _check_chunks(self) -> None:
        """Chunks tile their segments in order, as evenly as it goes, longer ones first."""
        segments, chunks, most = self.plan.segments, self.plan.chunks, self.params.chunk_rows
        wanted = -(-segments["rows"].astype(np.int64) // most)
        _equal("sizes.chunks", len(chunks), int(wanted.sum()))
        _same("chunks' segments", chunks["segment"], np.repeat(np.arange(len(segments)), wanted))
        rows = chunks["rows"].astype(np.int64)
        _all("chunks", (rows > 0) & (rows <= most), chunks, f"1 to {most} rows")
        same = np.diff(chunks["segment"], prepend=-1) == 0
        before = np.append(0, (chunks["row"] + rows)[:-1])[: len(chunks)]
        _all("chunks", chunks["row"] == np.where(same, before, 0), chunks, "no gap, no overlap")
        last = np.cumsum(wanted) - 1
        reached = chunks["row"][last] + rows[last] == segments["rows"]
        _all("chunks", reached, chunks[last], "their segment's last row at the end")
        _all("chunks", ~same | (np.diff(rows, prepend=0) <= 0), chunks, "longer chunks first")
        first_rows = rows[last - wanted + 1]
        _all("chunks", first_rows - rows[last] <= 1, chunks[last], "lengths that differ by 1")


def _equal(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise PlanError(f"{what}: got {got}, wanted {wanted}")


def _same(what: str, got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> None:
    if not np.array_equal(got, wanted):
        if got.shape != wanted.shape:
            raise PlanError(f"{what}: got {len(got)} values, wanted {len(wanted)}")
        at = tuple(int(i) for i in np.argwhere(got != wanted)[0])
        raise PlanError(f"{what} at {list(at)}: got {got[at]}, wanted {wanted[at]}")


def _all(
    what: str, right: npt.NDArray[np.bool_], records: npt.NDArray[np.void], wanted: str
) -> None:
    if not right.all():
        record = records[int(np.argmin(right))]
        names = records.dtype.names or ()
        got = ", ".join(f"{name} {record[name]}" for name in names)
        raise PlanError(f"{what}: got one with {got}; wanted {wanted}")
