"""More than 2^31 elements in the rows of a rank, and in its experts' weights, on one GPU."""

from __future__ import annotations

import pytest
import torch
from deepspeed.moe.layer import MoE
from gpu_models import built, difference, swap
from moe_models import run
from torch import nn

import ds_tilemoe
from ds_tilemoe.testing import RankContext, case, rank_tests

__all__ = ["built"]


def made_on_the_gpu(hidden: int, ffn: int, experts: int, k: int) -> MoE:
    """A MoE of a group of one, dropless, whose weights have never been on the host."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        expert = nn.Sequential(
            nn.Linear(hidden, ffn, bias=False), nn.GELU(), nn.Linear(ffn, hidden, bias=False)
        ).bfloat16()
        moe = MoE(
            hidden,
            expert,
            num_experts=experts,
            k=k,
            drop_tokens=False,
            min_capacity=0,
            top2_2nd_expert_sampling=False,
        )
    moe.set_deepspeed_parallelism()
    for number, own in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
        for parameter in own.parameters():
            parameter.data.mul_(1 + number / experts)  # copies of one expert would hide a mix-up
    return moe.cuda().bfloat16().eval()


@case
def rows_of_2_to_31_elements(ctx: RankContext) -> None:
    tokens, hidden, k = 40_000, 7168, 8
    moe = swap(made_on_the_gpu(hidden, 64, 8, k), max_tokens_per_rank=tokens)
    assert tokens * k * hidden > 2**31
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    y = run(moe, x)[0]
    ds_tilemoe.check(moe)
    sample = torch.linspace(0, tokens - 1, 64, device="cuda").long()
    small = run(moe, x[sample])[0]  # the same layer, where nothing is large
    ds_tilemoe.check(moe)
    problem = difference(y[sample], small, x.dtype)
    assert not problem, problem
    assert y[-1].abs().max() > 0


@case
def weights_of_2_to_31_elements(ctx: RankContext) -> None:
    hidden, ffn, experts = 8192, 4104, 64
    assert hidden * ffn * experts > 2**31
    moe = made_on_the_gpu(hidden, ffn, experts, 2)
    x = torch.randn(512, hidden, device="cuda", dtype=torch.bfloat16)
    want = run(moe, x)[0]
    got = run(swap(moe), x)[0]
    ds_tilemoe.check(moe)
    problem = difference(got, want, x.dtype, 1.6e-2)  # DeepSpeed rounds each row and the sum
    assert not problem, problem


test_ranks = rank_tests(
    __file__, world=1, timeout_s=120, case_timeout_s=60, env={"DS_ACCELERATOR": "cuda"}
)
test_ranks = pytest.mark.gpu(
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")(test_ranks)
)
