"""Layouts: hand-computed examples, then the definition for any counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import figure_counts, params_of, plan_inputs

from ds_tilemoe.errors import PlanError
from ds_tilemoe.layout import build_layouts, owners_in_layout, valid_rows_of_bands
from ds_tilemoe.plan_abi import INT32_MAX, Layout, as_counts


def test_aligned_pads_every_run_as_in_the_papers_figure():
    params = params_of(4, 2, rank=1, layout=Layout.ALIGNED)
    counts = as_counts(params, figure_counts())
    layouts = build_layouts(params, counts)
    assert list(owners_in_layout(params)) == [2, 3, 0, 1]
    # Expert 2: R2 0-4, R3 4-6 (+2), R0 8-12, local 12-20. Expert 3: R2 20-25 (+3), R3 28-32,
    # R0 32-40, local 40-43 (+1).
    assert layouts.expert_row[1].tolist() == [0, 20, 44]
    assert layouts.run_row[2].tolist() == [8, 12, 0, 4]
    assert layouts.run_row[3].tolist() == [32, 40, 20, 28]
    assert layouts.remote_rows[2:4].tolist() == [12, 20]
    valid = valid_rows_of_bands(params, counts, 11)
    assert valid.tolist() == [4, 2, 4, 4, 4, 4, 1, 4, 4, 4, 3]


def test_compact_pads_the_expert_only():
    params = params_of(4, 2, rank=1)
    counts = as_counts(params, figure_counts())
    layouts = build_layouts(params, counts)
    # Expert 2: R2 0-4, R3 4-6, R0 6-10, local 10-18 (+2). Expert 3: R2 20-25, R3 25-29, R0 29-37,
    # local 37-40.
    assert layouts.expert_row[1].tolist() == [0, 20, 40]
    assert layouts.run_row[2].tolist() == [6, 10, 0, 4]
    assert layouts.run_row[3].tolist() == [29, 37, 20, 25]
    assert layouts.remote_rows[2:4].tolist() == [10, 17]
    valid = valid_rows_of_bands(params, counts, 10)
    assert valid.tolist() == [4, 4, 4, 4, 2, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("layout", Layout)
def test_empty_experts_take_no_rows(layout):
    params = params_of(2, 3, layout=layout)
    counts = np.zeros((2, 6), np.int64)
    counts[1, 1] = 5
    layouts = build_layouts(params, counts)
    assert layouts.expert_row.tolist() == [[0, 0, 8, 8], [0, 0, 0, 0]]
    start_of_local_run = 8 if layout is Layout.ALIGNED else 5
    assert layouts.run_row[:3].tolist() == [[0, 0], [start_of_local_run, 0], [8, 8]]


@given(plan_inputs())
@settings(max_examples=50, deadline=None)
def test_any_layout_follows_the_definition(case):
    params, counts = case
    layouts = build_layouts(params, as_counts(params, counts))
    for rank in range(params.world):
        row = 0
        for local in range(params.local_experts):
            expert = rank * params.local_experts + local
            assert row % params.tile_m == 0
            assert layouts.expert_row[rank, local] == row
            for owner in owners_in_layout(dataclasses.replace(params, rank=rank)):
                assert layouts.run_row[expert, owner] == row
                row += int(counts[owner, expert])
                while params.layout is Layout.ALIGNED and row % params.tile_m:
                    row += 1
            while row % params.tile_m:
                row += 1
        assert layouts.expert_row[rank, -1] == row


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((2, 3), int), r"shape \(2, 3\), wanted \[W, E\] = \(2, 4\)"),
        (np.zeros((2, 4)), "type float64, wanted an integer type"),
        (np.array([[0, 0, 0, 0], [0, -7, 0, 0]]), r"counts\[1, 1\]: got -7, wanted 0 to"),
        (np.full((2, 4), INT32_MAX + 1), r"counts\[0, 0\]: got 2147483648"),
    ],
)
def test_bad_counts_are_named(counts, message):
    with pytest.raises(PlanError, match=message):
        as_counts(params_of(2, 2), counts)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("world", 0, "world: got 0, wanted an integer from 1"),
        ("rank", 2, "rank: got 2, wanted less than world, which is 2"),
        ("rank", -1, "rank: got -1, wanted an integer from 0"),
        ("local_experts", 2**31 - 1, "local_experts: got 2147483647, wanted world"),
        ("tile_m", 1.5, "tile_m: got 1.5, wanted an integer"),
        ("layout", 0, "layout: got 0, wanted Layout.COMPACT or Layout.ALIGNED"),
        ("bands_per_segment", True, "bands_per_segment: got True"),
        ("local_tail_bands", -2, "local_tail_bands: got -2, wanted an integer from -1"),
        ("chunk_rows", 2**31, "chunk_rows: got 2147483648"),
    ],
)
def test_bad_params_are_named(field, value, message):
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(params_of(2, 2), **{field: value})
