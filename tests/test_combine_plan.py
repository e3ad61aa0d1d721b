"""Combine plans: hand-computed, proved, simulated; check() refuses every altered plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import figure_counts, mutants, params_of, plan_inputs, plans_of

from ds_tilemoe import plan_check
from ds_tilemoe.combine_plan import Layout, PlanSizes, build_plan, check, check_all, plan_bounds
from ds_tilemoe.errors import PlanError


def test_aligned_figure_by_hand():
    params = params_of(4, 2, rank=1, layout=Layout.ALIGNED, bands_per_segment=2)
    counts = figure_counts()
    plan = build_plan(params, counts)
    check(plan, counts)
    assert plan.sizes == PlanSizes(44, 38, 11, 8, 7, 13)
    assert plan.sizes.padding_rows == 6
    # src_row, dst_row, rows, owner, first band, bands. Every owner has 3 rows for experts 0 and 1
    # in front of those of expert 2.
    assert plan.segments.tolist() == [
        (20, 7, 4, 2, 0, 1),  # first band alone
        (24, 11, 1, 2, 1, 1),
        (28, 5, 4, 3, 2, 1),
        (32, 7, 8, 0, 3, 2),  # joined
        (0, 3, 4, 2, 5, 1),
        (4, 3, 2, 3, 6, 1),
        (8, 3, 4, 0, 7, 1),  # last remote band alone
    ]
    assert plan.chunks.tolist()[:8] == [
        *[(0, 0, 2), (0, 2, 2), (1, 0, 1), (2, 0, 2), (2, 2, 2)],
        *[(3, 0, 3), (3, 3, 3), (3, 6, 2)],
    ]
    assert plan.bands.tolist()[:3] == [(20, 1, 4), (24, 1, 1), (28, 1, 4)]
    assert plan.recv_row.tolist() == [0, 1, 3, 11, 14, 14, 14, 14, 14]
    assert plan.arrival_target.tolist() == [3, 0, 0, 0]
    # On rank 0, rank 1's rows come first (owner 0 + 1); on rank 1 they are local and last.
    assert plan.dispatch_row.tolist() == [0, 16, 12, 40, 0, 0, 0, 0]


def test_compact_figure_by_hand():
    params = params_of(4, 2, rank=1, bands_per_segment=2)
    counts = figure_counts()
    plan = build_plan(params, counts)
    check(plan, counts)
    assert plan.sizes == PlanSizes(40, 38, 10, 8, 9, 14)
    assert plan.segments.tolist() == [
        (20, 7, 4, 2, 0, 1),
        (24, 11, 1, 2, 1, 1),
        (25, 5, 4, 3, 1, 2),  # a band feeds several owners
        (29, 7, 7, 0, 2, 2),
        (36, 14, 1, 0, 4, 1),
        (0, 3, 4, 2, 5, 1),
        (4, 3, 2, 3, 6, 1),
        (6, 3, 2, 0, 6, 1),
        (8, 5, 2, 0, 7, 1),
    ]
    assert plan.dispatch_row.tolist() == [0, 4, 10, 37, 0, 0, 0, 0]


def special_counts(name: str) -> np.ndarray:
    """Counts of a group with two experts a rank."""
    counts = np.zeros((4, 8), np.int32)
    match name:
        case "one hot expert":
            counts[:, 2] = 37
        case "one rank":
            return np.array([[5, 0]], np.int32)
        case "one row":
            counts[3, 0] = 1
        case "odd counts":
            counts[:] = np.arange(1, 65, 2).reshape(4, 8)
        case "rank without tokens, expert without rows":
            counts[:] = 9
            counts[1], counts[:, 5] = 0, 0
        case "rank that receives nothing":
            counts[:] = 6
            counts[:, 4:6] = 0
    return counts


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    "name",
    [
        "all dropped",
        "one hot expert",
        "one rank",
        "one row",
        "odd counts",
        "rank without tokens, expert without rows",
        "rank that receives nothing",
    ],
)
def test_special_counts(layout, name):
    counts = special_counts(name)
    for tail in (-1, 0, 1):
        params = params_of(
            len(counts), 2, layout=layout, bands_per_segment=2, local_tail_bands=tail
        )
        plans = plans_of(params, counts)
        check_all(plans, counts)
        simulate(plans, counts)
        if name in ("all dropped", "one rank"):
            assert all(plan.sizes.segments == 0 for plan in plans)
            assert all(plan.arrival_target.sum() == 0 for plan in plans)


@given(plan_inputs())
@settings(max_examples=100, deadline=None)
def test_any_plan_is_proved(case):
    params, counts = case
    plans = plans_of(params, counts)
    check_all(plans, counts)
    for plan in plans:
        rows_in = int(counts[:, plan.params.own_experts].sum())
        for joined in (1, params.bands_per_segment):
            bounds = plan_bounds(dataclasses.replace(params, bands_per_segment=joined), rows_in)
            for field in dataclasses.fields(bounds):
                assert getattr(plan.sizes, field.name) <= getattr(bounds, field.name), field.name


@given(plan_inputs())
@settings(max_examples=40, deadline=None)
def test_any_plan_delivers_every_row(case):
    params, counts = case
    simulate(plans_of(params, counts), counts)


def simulate(plans, counts) -> None:
    """Runs the plans of a group row by row: dispatch, bands in order, chunks, arrivals."""
    world, experts = counts.shape

    def tags(owner: int, expert: int) -> np.ndarray:
        return (owner * experts + expert) * 100_000 + np.arange(counts[owner, expert])

    inputs = [np.full(plan.sizes.rows, -1) for plan in plans]
    for source, plan in enumerate(plans):
        for expert in range(experts):
            there = inputs[expert // plan.params.local_experts]
            begin = plan.dispatch_row[expert]
            place = there[begin : begin + counts[source, expert]]
            assert (place == -1).all()
            place[:] = tags(source, expert)
    received = [np.full(plan.recv_row[-1], -1) for plan in plans]
    arrived = np.zeros((world, world), np.int64)
    for rank, plan in enumerate(plans):
        output = np.full(plan.sizes.rows, -1)
        segment = chunk = 0
        for number, band in enumerate(plan.bands):
            rows = slice(band["row"], band["row"] + band["rows"])
            output[rows] = inputs[rank][rows]
            while segment < plan.sizes.segments:
                part = plan.segments[segment]
                if part["band_begin"] + part["band_count"] - 1 > number:
                    break
                owner = part["owner"]
                while chunk < plan.sizes.chunks and plan.chunks[chunk]["segment"] == segment:
                    first, length = plan.chunks[chunk]["row"], plan.chunks[chunk]["rows"]
                    source = output[part["src_row"] + first :][:length]
                    target = received[owner][part["dst_row"] + first :][:length]
                    assert (source >= 0).all()
                    assert (target == -1).all()
                    target[:] = source
                    arrived[owner, rank] += length
                    chunk += 1
                segment += 1
        assert (segment, chunk) == (plan.sizes.segments, plan.sizes.chunks)
    for owner, plan in enumerate(plans):
        assert (arrived[owner] == plan.arrival_target).all()
        for expert in range(experts):
            got = received[owner][plan.recv_row[expert] : plan.recv_row[expert + 1]]
            local = expert // plan.params.local_experts == owner
            assert (got == (-1 if local else tags(owner, expert))).all()


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("joined", "tail"), [(1, -1), (2, 1)])
def test_check_refuses_every_altered_plan(layout, joined, tail):
    counts = figure_counts() + np.arange(32, dtype=np.int32).reshape(4, 8) % 3
    counts[2, 3] += 9
    params = params_of(4, 2, rank=1, layout=layout, bands_per_segment=joined, local_tail_bands=tail)
    plan = build_plan(params, counts)
    check(plan, counts)
    refused = 0
    for label, mutant in mutants(plan):
        try:
            check(mutant, counts)
        except PlanError:
            refused += 1
        else:
            pytest.fail(f"check accepts a plan with {label}")
    assert refused > 200


@pytest.mark.parametrize("fault", ["not joined", "joined too far", "uneven chunks", "more chunks"])
def test_check_refuses_a_consistent_plan_of_another_rule(fault):
    counts = figure_counts()
    params = params_of(4, 2, rank=1, layout=Layout.ALIGNED, bands_per_segment=2)
    other = {
        "not joined": {"bands_per_segment": 1},
        "joined too far": {"bands_per_segment": 2},
        "uneven chunks": {},
        "more chunks": {"chunk_rows": 2},
    }[fault]
    plan = build_plan(dataclasses.replace(params, **other), counts)
    if fault == "uneven chunks":
        chunks = plan.chunks.copy()
        chunks[5:8] = [(3, 0, 3), (3, 3, 2), (3, 5, 3)]
        plan = dataclasses.replace(plan, chunks=chunks)
    if fault == "joined too far":
        params = dataclasses.replace(params, bands_per_segment=1)
    with pytest.raises(PlanError, match="wanted"):
        check(dataclasses.replace(plan, params=params), counts)


def test_check_all_looks_across_ranks(monkeypatch):
    counts = figure_counts()
    plans = plans_of(params_of(4, 2), counts)
    check_all(plans, counts)
    with pytest.raises(PlanError, match=r"got ranks \[1, 0, 2, 3\], wanted 0 to 3"):
        check_all([plans[1], plans[0], *plans[2:]], counts)
    with pytest.raises(PlanError, match="got none"):
        check_all([], counts)
    other = build_plan(params_of(4, 2, tile_m=8, rank=3), counts)
    with pytest.raises(PlanError, match="tile_m of rank 3: got 8, wanted 4"):
        check_all([*plans[:3], other], counts)

    # Each plan taken for right, what is left must still find plans that do not fit together.
    monkeypatch.setattr(plan_check._Proof, "prove", lambda self: None)
    for name, part, at, message in [
        ("segments", "dst_row", 0, "first receive rows"),
        ("segments", "owner", 0, "first receive rows"),
        ("segments", "rows", -1, "rows that reach rank|first receive rows"),
        ("dispatch_row", None, 1, "dispatch_row of rank 1"),
        ("run_row", None, 1, "dispatch_row of rank"),
        ("arrival_target", None, 0, "rows shipped to rank 1"),
    ]:
        array = getattr(plans[1], name).copy()
        values = array.reshape(-1) if part is None else array[part]
        values[at] += 1
        with pytest.raises(PlanError, match=message):
            check_all(
                [plans[0], dataclasses.replace(plans[1], **{name: array}), *plans[2:]], counts
            )


def test_case_04_offsets_have_64_bits():
    # 4 ranks, hidden 7168: 320,000 rows of one expert, first from all ranks, then from rank 1.
    hidden, rows = 7168, 320_000
    params = params_of(4, 2, tile_m=128, chunk_rows=9)
    counts = np.zeros((4, 8), np.int32)
    counts[:, 0] = rows // 4
    plans = plans_of(params, counts)
    check_all(plans, counts)
    last = plans[0].run_row[0, 0] + counts[0, 0] - 1
    assert last * hidden == 319_999 * 7168 == 2_293_752_832
    assert last * hidden * 2 == 4_587_505_664
    assert plans[0].bands["row"].max() * hidden == 319_872 * 7168

    counts = np.zeros((4, 8), np.int32)
    counts[1, 0] = rows
    plans = plans_of(params, counts)
    check_all(plans, counts)
    chunk, plan = plans[0].chunks[-1], plans[0]
    segment = plan.segments[chunk["segment"]]
    last = segment["dst_row"] + chunk["row"] + chunk["rows"] - 1
    assert last * hidden == 2_293_752_832
    assert segment["src_row"].dtype == segment["dst_row"].dtype == plan.recv_row.dtype == np.int64


def test_rows_beyond_32_bits():
    huge = 2**31 - 1
    params = params_of(4, 2, tile_m=2**22, chunk_rows=2**24, rank=2, bands_per_segment=7)
    counts = np.full((4, 8), huge, np.int32)
    plans = plans_of(params, counts)
    check_all(plans, counts)
    assert plans[2].recv_row[-1] == 8 * huge
    assert plans[2].segments["dst_row"].max() > 2**33
    assert plans[2].sizes.rows >= 8 * huge


def test_lengths_beyond_32_bits_are_refused():
    counts = np.full((2, 2), 2**31 - 1, np.int32)
    with pytest.raises(PlanError, match="bands: got 4294967294, wanted at most 2147483647; use"):
        build_plan(params_of(2, 1, tile_m=1), counts)
    with pytest.raises(PlanError, match=r"chunks: got 2147483648, .* use a larger chunk_rows"):
        plan_bounds(params_of(2, 1, tile_m=2**20, chunk_rows=1), 2**31)
    with pytest.raises(PlanError, match="max_rows_in: got -1, wanted 0 or more"):
        plan_bounds(params_of(2, 1), -1)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("world", "local_experts"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_bounds_are_reached(layout, world, local_experts):
    """Over all counts of a small group, rows and remote bands reach their bounds exactly."""
    params = params_of(world, local_experts, tile_m=2, layout=layout, chunk_rows=2)
    shape = (world, local_experts)
    for total in range(5):
        best = np.zeros(6, np.int64)
        for cells in np.ndindex(*[total + 1] * (world * local_experts)):
            if sum(cells) <= total:
                counts = np.zeros((world, params.experts), np.int32)
                counts[:, :local_experts] = np.reshape(cells, shape)
                best = np.maximum(best, dataclasses.astuple(build_plan(params, counts).sizes))
        bounds = np.array(dataclasses.astuple(plan_bounds(params, total)))
        assert (best <= bounds).all()
        assert best[:4].tolist() == bounds[:4].tolist()


def test_compact_never_has_more_bands_than_aligned():
    rng = np.random.default_rng(3)
    for _ in range(50):
        counts = rng.integers(0, 40, (4, 12), dtype=np.int32)
        sizes = [
            build_plan(params_of(4, 3, layout=layout, tile_m=16), counts).sizes for layout in Layout
        ]
        assert sizes[0].bands <= sizes[1].bands
        assert sizes[1].padding_rows <= 3 * 4 * 15
