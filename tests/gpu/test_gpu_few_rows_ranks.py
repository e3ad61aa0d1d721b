"""Layers whose experts get few rows, as in decode, on one GPU: bands that load and store few rows,
and a GEMM 2 that asks for weights before GEMM 1 has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_models import built, difference, rows, swap
from moe_models import make_moe, run

import ds_tilemoe
from ds_tilemoe.backends.cuda_layer import CudaLayer
from ds_tilemoe.testing import RankContext, case, rank_tests

__all__ = ["built"]
LIKE_DEEPSPEED = 1.6e-2  # DeepSpeed rounds each row and the weighted sum
TOKENS = (1, 2, 5, 16, 17, 64, 65, 300)  # up to bands of 128 rows
ROUNDS = 60


def make(kind: str, hidden: int, ffn: int, experts: int, k: int) -> Any:
    options = {"hidden": hidden, "ffn": ffn, "experts": experts, "k": k}
    moe = make_moe(1, kind, drop_tokens=False, min_capacity=0, **options)
    return moe.to("cuda", torch.bfloat16)


@case(kind=["mlp", "swiglu"])
def like_deepspeed(ctx: RankContext, kind: str) -> None:
    for hidden, ffn, experts, k in ((1024, 384, 32, 8), (520, 136, 8, 2), (64, 72, 3, 3)):
        moe = make(kind, hidden, ffn, experts, k)
        inputs = [rows(count, hidden, seed=count) for count in TOKENS]
        wanted = [run(moe, x)[0] for x in inputs]
        swap(moe)
        for x, want in zip(inputs, wanted, strict=True):
            problem = difference(run(moe, x)[0], want, x.dtype, LIKE_DEEPSPEED)
            assert not problem, (len(x), hidden, problem)
        ds_tilemoe.check(moe)
        ds_tilemoe.restore(moe)


@case(kind=["mlp", "swiglu"])
def early_weights_change_no_bit(ctx: RankContext, kind: str) -> None:
    """Calls in a row, each on rows of its own, as eager calls and as replays of a graph."""
    moe = swap(make(kind, 1024, 384, 32, 8))
    inputs = [rows(count, 1024, seed=seed) for seed, count in enumerate(TOKENS * 3)]

    def launch_front(layer: Any, stream: int) -> None:
        launch(layer, stream)
        layer._is_behind_front = False

    launch = CudaLayer.launch_front
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaLayer, "launch_front", launch_front)
        wanted = [run(moe, x)[0] for x in inputs]
    for number in range(ROUNDS):
        got = [run(moe, x)[0] for x in inputs]  # nothing waits in between
        for x, y, want in zip(inputs, got, wanted, strict=True):
            assert torch.equal(y, want), (number, len(x), int((y != want).sum()))
    x = torch.empty_like(inputs[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(moe, x)[0]
    for number in range(ROUNDS):
        at = [i for i, one in enumerate(inputs) if len(one) == len(x)][number % 3]
        x.copy_(inputs[at])
        graph.replay()
        assert torch.equal(y, wanted[at]), number
    ds_tilemoe.check(moe)


@case
def measured_and_captured(ctx: RankContext) -> None:
    """Calls that wait for their combine, of which a captured one cannot hand out a record."""
    moe, x = swap(make("mlp", 1024, 384, 32, 8)), rows(64, 1024)
    want = run(moe, x)[0]
    with ds_tilemoe.measure_combine_alone(moe):
        assert torch.equal(run(moe, x)[0], want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(moe, x)[0]
        graph.replay()
        assert torch.equal(y, want)
        assert torch.equal(run(moe, x)[0], want)
    ds_tilemoe.check(moe)


test_ranks = rank_tests(
    __file__, world=1, timeout_s=120, case_timeout_s=60, env={"DS_ACCELERATOR": "cuda"}
)
test_ranks = pytest.mark.gpu(
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")(test_ranks)
)
