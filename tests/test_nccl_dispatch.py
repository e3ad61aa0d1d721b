"""Rows and layout rows of the dispatch by all_to_all, against the plan and the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_tilemoe import reference
from ds_tilemoe.backends.nccl_dispatch import (
    Counts,
    await_counts,
    dispatch,
    layout_rows,
    run_fronts,
)
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.plan_abi import Layout, PlanParams
from ds_tilemoe.testing import RankContext, case, rank_tests, tagged_rows


def random_ids(tokens: int, topk: int, experts: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk, dim=1)[1].int()
    ids[torch.rand(tokens, topk, generator=generator) < 0.2] = -1
    return ids.contiguous()


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
    order = torch.where(ids < 0, experts, ids).flatten().sort(stable=True).indices
    on_device = torch.from_numpy(counts).int()
    exchanged = await_counts(
        on_device, torch.empty_like(on_device), torch.from_numpy(plan.expert_row)
    )
    assert (exchanged.on_host == counts).all()
    assert exchanged.first_rows == plan.expert_row.tolist()
    sources = (order // topk).int()
    rooms = torch.empty(ids.numel(), hidden), torch.empty(rows.shape)
    dispatch(
        x,
        sources,
        exchanged,
        torch.from_numpy(plan.run_row),
        ctx.rank,
        torch.distributed.group.WORLD,
        rows,
        rooms,
    )
    kept = int((ids >= 0).sum())
    assert torch.equal(rooms[0][:kept], x[sources[:kept]]), "no memory is taken in front of NCCL"
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


@pytest.mark.parametrize("layout", Layout)
def test_fronts_read_their_own_rows(layout: Layout) -> None:
    """Pad rows behind an expert are left out; an expert without rows does not run."""
    counts = np.array([[3, 0, 5], [0, 0, 2]])
    params = PlanParams(2, 0, 3, 16, layout, 1, -1, 4)
    plan = build_plan(params, np.concatenate([counts, 0 * counts], axis=1))
    rows = torch.arange(float(plan.sizes.rows))[:, None].clone()
    hidden = torch.full((plan.sizes.rows, 1), -1.0)

    class Scaled:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def front(self, x: torch.Tensor) -> torch.Tensor:
            assert x.numel()
            assert self.factor != 2
            return self.factor * x

    exchanged = Counts(
        np.concatenate([counts, 0 * counts], axis=1),
        torch.empty(0),
        plan.expert_row.tolist(),
    )
    experts: list[Any] = [Scaled(1), Scaled(2), Scaled(3)]
    run_fronts(experts, exchanged, 0, layout, rows, hidden)
    for e, factor in ((0, 1), (2, 3)):
        for owner in range(2):
            for i in range(counts[owner, e]):
                row = int(plan.run_row[e, owner]) + i
                assert hidden[row] == factor * row


test_ranks = rank_tests(__file__, world=3, timeout_s=300)
