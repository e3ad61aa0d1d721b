"""Counts, positions and layout rows of the dispatch, against the plan and the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_tilemoe import reference
from ds_tilemoe.backends.nccl_dispatch import Places, dispatch, find_places, layout_rows
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.plan_abi import Layout, PlanParams
from ds_tilemoe.testing import RankContext, case, rank_tests, tagged_rows


def random_ids(tokens: int, topk: int, experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1)[1].int()
    ids[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    return ids.contiguous()


@pytest.mark.parametrize(
    ("tokens", "topk", "experts"), [(37, 2, 8), (5, 4, 4), (0, 2, 3), (9, 1, 60)]
)
def test_places(tokens: int, topk: int, experts: int) -> None:
    ids = random_ids(tokens, topk, experts, seed=tokens)
    places = find_places(ids, experts)
    assert places.counts.dtype == places.positions.dtype == torch.int32
    assert torch.equal(places.counts.long(), reference.counts(ids, experts))
    kept = ids >= 0
    assert torch.equal(places.positions[kept].long(), reference.places_in_runs(ids)[kept])
    flat = ids.flatten()[places.order]
    count = int(kept.sum())
    assert (flat[count:] == -1).all()
    routes = list(zip(flat[:count].tolist(), places.order[:count].tolist(), strict=True))
    assert routes == sorted(routes)


def params_of(rank: int, world: int, local: int, layout: Layout) -> PlanParams:
    return PlanParams(world, rank, local, 16, layout, 1, -1, 4)


@pytest.mark.parametrize("layout", Layout)
def test_layout_rows_are_those_of_the_plan(layout: Layout) -> None:
    rng = np.random.default_rng(0)
    world, local = 3, 4
    counts = rng.integers(0, 21, (world, world * local)) * rng.integers(0, 2, (1, world * local))
    for rank in range(world):
        plan = build_plan(params_of(rank, world, local, layout), counts)
        runs = counts[:, rank * local : (rank + 1) * local]
        want = [
            plan.run_row[e, source] + i
            for source in range(world)
            for e in range(local)
            for i in range(runs[source, e])
        ]
        got = layout_rows(torch.from_numpy(runs), torch.from_numpy(plan.run_row), int(runs.sum()))
        assert got.tolist() == want


@case(topk=[1, 2], layout=["compact", "aligned"])
def rows_lie_where_the_plan_says(ctx: RankContext, topk: int, layout: str) -> None:
    local, hidden = 3, 8
    experts = ctx.world * local
    everyone = [
        random_ids(0 if r == 1 else 11 + r, topk, experts, seed=r) for r in range(ctx.world)
    ]
    ids = everyone[ctx.rank]
    x = tagged_rows(0, ctx.rank, torch.arange(len(ids)), torch.zeros(len(ids)), hidden)
    counts = np.stack([reference.counts(e, experts).numpy() for e in everyone])
    plan = build_plan(params_of(ctx.rank, ctx.world, local, Layout[layout.upper()]), counts)
    rows = torch.full((plan.sizes.rows, hidden), float("nan"))
    places: Places = find_places(ids, experts)
    dispatch(
        x,
        places,
        topk,
        counts,
        torch.from_numpy(counts).int(),
        torch.from_numpy(plan.run_row),
        ctx.rank,
        torch.distributed.group.WORLD,
        rows,
    )
    want = torch.full_like(rows, float("nan"))
    for source, theirs in enumerate(everyone):
        found = reference.places_in_runs(theirs)
        for token, k in (theirs >= 0).nonzero().tolist():
            expert = int(theirs[token, k]) - ctx.rank * local
            if 0 <= expert < local:
                row = plan.run_row[expert, source] + int(found[token, k])
                one = tagged_rows(0, source, torch.tensor(token), torch.tensor(0), hidden)
                want[row] = one
    assert torch.equal(rows.nan_to_num(-1.0), want.nan_to_num(-1.0))


test_ranks = rank_tests(__file__, world=3, timeout_s=60)
