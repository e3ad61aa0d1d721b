"""Experts whose fronts write, on ranks of which some have no rows: no change on any of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuda_library_fake import install
from moe_models import FFN, HIDDEN, make_moe, run, tokens
from torch import Tensor, nn

import ds_tilemoe
from ds_tilemoe.testing import RankContext, case, rank_tests

WORLD = 4


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.amax()
        return F.gelu(x)


@case
def ranks_without_rows_keep_up(ctx: RankContext) -> None:
    """Fronts run in torch, of those experts only that have rows."""
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), Counting(), nn.Linear(FFN, HIDDEN))
    moe = make_moe(WORLD, expert, drop_tokens=False, min_capacity=0).bfloat16()
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    with pytest.MonkeyPatch.context() as patch:
        install(patch, moe.deepspeed_moe.ep_group)
        assert ds_tilemoe.apply(moe, {"dispatch": "nccl"}).swapped
        state = moe.deepspeed_moe._tile
        calls = []
        for call in range(6):
            rows = 1 if ctx.rank == 0 else 0  # for two experts at the most
            run(moe, tokens(rows, HIDDEN, seed=call, dtype=torch.bfloat16))
            calls.append(sum(e[1].calls for e in experts))
        ds_tilemoe.check(moe)
        assert (state.version, len(state.shapes)) == (0, 1)
        total = torch.tensor(calls[-1] - calls[0])
        torch.distributed.all_reduce(total)
        assert total == 10, "two fronts a call in all the group"
        ds_tilemoe.restore(moe)


test_ranks = rank_tests(__file__, world=WORLD, timeout_s=300)
