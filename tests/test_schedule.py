"""Schedules: hand-computed examples, then the rules for any counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import figure_counts, params_of, plan_inputs

from ds_tilemoe.layout import build_layouts
from ds_tilemoe.plan_abi import Layout, as_counts
from ds_tilemoe.schedule import Schedule, build_schedule


def schedule_of(params, counts) -> Schedule:
    return build_schedule(params, build_layouts(params, as_counts(params, counts)))


@pytest.mark.parametrize(
    ("layout", "tail", "rows"),
    [
        # Rank 1: expert 3 has five remote bands (rows 20 to 39), expert 2 three (rows 0 to 11).
        (Layout.ALIGNED, -1, [20, 24, 28, 32, 36, 0, 4, 8, 40, 12, 16]),
        (Layout.ALIGNED, 3, [20, 24, 28, 32, 36, 0, 4, 8, 40, 12, 16]),
        (Layout.ALIGNED, 2, [20, 24, 28, 32, 36, 40, 0, 4, 8, 12, 16]),
        (Layout.ALIGNED, 0, [20, 24, 28, 32, 36, 40, 0, 4, 8, 12, 16]),
        (Layout.COMPACT, -1, [20, 24, 28, 32, 36, 0, 4, 8, 12, 16]),
    ],
)
def test_the_papers_figure(layout, tail, rows):
    params = params_of(4, 2, rank=1, layout=layout, local_tail_bands=tail)
    schedule = schedule_of(params, figure_counts())
    assert schedule.experts.tolist() == [1, 0]
    assert schedule.remote_bands.tolist() == [3, 5]
    assert schedule.band_row.tolist() == rows
    first_local_row = 20
    assert schedule.band_expert.tolist() == [int(row >= first_local_row) for row in rows]


def test_tail_is_held_back_from_the_end_of_the_walk():
    # Three experts with 1, 2, 1 remote and 2, 1, 3 local bands of one row each.
    counts = np.zeros((2, 6), np.int32)
    counts[1, :3], counts[0, :3] = (1, 2, 1), (2, 1, 3)

    def walk(tail: int) -> list[int]:
        params = params_of(2, 3, tile_m=1, local_tail_bands=tail)
        return schedule_of(params, counts).band_row.tolist()

    # Expert 1 (rows 3-5) first, then 0 (rows 0-2), then 2 (rows 6-9); a run's local rows are last.
    assert walk(0) == [3, 4, 5, 0, 1, 2, 6, 7, 8, 9]
    assert walk(3) == [3, 4, 5, 0, 1, 2, 6, 7, 8, 9]
    assert walk(4) == [3, 4, 5, 0, 1, 6, 2, 7, 8, 9]
    assert walk(5) == [3, 4, 5, 0, 6, 1, 2, 7, 8, 9]
    assert walk(6) == walk(7) == walk(-1) == [3, 4, 0, 6, 5, 1, 2, 7, 8, 9]


def test_ties_go_to_the_lower_expert():
    counts = np.zeros((2, 8), np.int32)
    counts[1, :4] = (1, 3, 3, 1)
    assert schedule_of(params_of(2, 4, tile_m=1), counts).experts.tolist() == [1, 2, 0, 3]


def test_one_rank_has_local_bands_only():
    schedule = schedule_of(params_of(1, 2), np.array([[5, 9]]))
    assert schedule.band_row.tolist() == [0, 4, 8, 12, 16]
    assert schedule.last_remote_band == -1


@given(plan_inputs())
@settings(max_examples=50, deadline=None)
def test_any_schedule_makes_every_band_once_and_holds_back_the_tail(case):
    params, counts = case
    layouts = build_layouts(params, as_counts(params, counts))
    schedule = build_schedule(params, layouts)
    rows = int(layouts.expert_row[params.rank, -1])
    assert sorted(schedule.band_row) == list(range(0, rows, params.tile_m))

    first = layouts.expert_row[params.rank][schedule.band_expert]
    index = (schedule.band_row - first) // params.tile_m
    remote = index < schedule.remote_bands[schedule.band_expert]
    assert np.flatnonzero(remote)[-1:].tolist() in ([], [schedule.last_remote_band])
    for expert in range(params.local_experts):
        begin, count = schedule.first_band[expert], schedule.remote_bands[expert]
        numbers = np.flatnonzero(remote & (schedule.band_expert == expert))
        assert numbers.tolist() == list(range(begin, begin + count))
    tail, local = params.local_tail_bands, int((~remote).sum())
    held = local if tail < 0 else min(tail, local)
    assert not remote[len(remote) - held :].any()
    if tail < 0:
        assert remote[: len(remote) - local].all()
    kept = [e for e, far in zip(schedule.band_expert, remote, strict=True) if not far]
    places = np.argsort(schedule.experts)[kept]
    assert (np.diff(places[: local - held]) >= 0).all()
    assert (np.diff(places[local - held :]) >= 0).all()
