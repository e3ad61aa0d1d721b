"""cases.md 1, 2, 3, 5 and 12 on GPUs, by swapped DeepSpeed layers: what a call may be given.

Case 4: test_gpu_large_ranks.py; cases 7 to 10: test_gpu_reuse_ranks.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import (
    SMALL,
    WORLD,
    agree,
    assert_equal,
    assert_right,
    built,
    dense,
    difference,
    forced,
    gpu_rank_tests,
    last_consumers,
    make,
    oracle,
    rows,
    steer,
    swap,
    together,
)
from moe_models import own_routing, raised, run, same_everywhere
from torch import nn

import ds_tilemoe
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import RankFailure, TileMoEError, UnsupportedLayerError
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]
HIDDEN, EXPERTS = SMALL["hidden"], SMALL["experts"]
ODD = WORLD // 2  # the rank that is unlike the others
ALONE = set(range(ODD * EXPERTS // WORLD, (ODD + 1) * EXPERTS // WORLD))  # its experts
DTYPE = torch.bfloat16
# Two paths with roundings of their own: DeepSpeed rounds each row and the weighted sum.
LIKE_DEEPSPEED = 1.6e-2


def poison(moe: Any) -> None:
    """NaN in all memory that a call writes, and where the allocator will give memory next."""
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    heap = runtime.backend._heap
    torch.cuda.synchronize()
    agree("")  # peers write into these
    first = heap.offsets.recv
    received = heap._block[first : first + heap.needs.recv_bytes]
    for memory in (heap.rows, heap.hidden, heap.out, received):
        memory.fill_(255)
    for shape in ((32, HIDDEN), (128, 128), (128, HIDDEN), (4096,)):
        torch.full(shape, float("nan"), dtype=DTYPE, device="cuda")
    torch.cuda.synchronize()
    agree("")


@case
def case_01_experts_and_ranks_without_rows(ctx: RankContext) -> None:
    everyone = set(range(EXPERTS))
    for k, wanted in ((2, everyone - {3, 6}), (2, everyone - ALONE), (1, {0})):
        moe = swap(make(k=k, **SMALL))
        run(moe, rows(32, HIDDEN))
        steer(moe, wanted)
        x = forced(32, HIDDEN, seed=1)
        assert set(own_routing(moe, x).expert_ids.unique().tolist()) <= wanted
        first = None
        for _ in range(10):
            poison(moe)
            y = assert_right(moe, x)
            first = y if first is None else first
            assert_equal(y, first, f"top-{k}, rows for {sorted(wanted)}")
        ds_tilemoe.check(moe)


@case
def case_02_ranks_without_tokens(ctx: RankContext) -> None:
    many, one = (17,), (1, 17)
    sizes = [((0,), many), ((1, 0), one), ((0,), (0,)), ((1, 0), (1, 0)), ((5,), many)]
    for order in (sizes, sizes[2:]):  # the second layer's first call has no token at all
        moe = swap(make(**SMALL))
        for seed, (odd, elsewhere) in enumerate(order):
            x = rows(*(odd if ctx.rank == ODD else elsewhere), HIDDEN, seed=seed)
            y = assert_right(moe, x)
            _, l_aux, exp_counts = run(moe, x)
            right = (y.device, l_aux.dtype, exp_counts.shape) == (x.device, torch.float32, (8,))
            agree("" if right else f"{y.device}, l_aux {l_aux.dtype}, {exp_counts.shape}")
    steer(moe, {0, 1})  # all of rank 0: the others have tokens and receive none
    assert_right(moe, forced(9, HIDDEN))
    ds_tilemoe.check(moe)


@case
def case_03_sizes_that_fill_no_tile(ctx: RankContext) -> None:
    for hidden, ffn in itertools.product((2880, 1536, 200, 72), (2880, 200)):
        moe = make(hidden=hidden, ffn=ffn, experts=EXPERTS)
        swap(moe, strict=True, max_tokens_per_rank=64)
        x = rows(13, hidden)
        experts = dense(moe, DTYPE)
        y, want = assert_right(moe, x, experts), oracle(moe, x, experts)
        # The last columns and the last row are judged by their own size, not by the whole's.
        for what, part in (("columns", (slice(None), slice(-16, None))), ("row", slice(-1, None))):
            problem = difference(y[part], want[part], DTYPE)
            agree(problem and f"{hidden} x {ffn}, last {what}: {problem}")


@case
def case_03_sizes_that_do_not_suit(ctx: RankContext) -> None:
    """DeepSpeed's own path, and why; an error where that is not wanted."""
    sizes = [*itertools.product((130, 1), (2880, 200, 33)), (2880, 33), (1536, 33), (200, 33)]
    for hidden, ffn, dtype in [*((*size, DTYPE) for size in sizes), (72, 200, torch.float32)]:
        moe = make(dtype=dtype, hidden=hidden, ffn=ffn, experts=EXPERTS)
        x = rows(13, hidden, dtype=dtype)
        want = run(moe, x)[0]
        report = ds_tilemoe.apply(moe)
        assert not report.swapped
        odd = hidden if hidden % 8 else ffn
        words = f"width is {odd}; on CUDA it has to be a multiple of 8"
        if odd % 8 == 0:
            words = "only bfloat16 and float16"
        reason = same_everywhere(report.layers[0].reason)
        assert words in reason, reason
        assert_equal(run(moe, x)[0], want, (hidden, ffn, dtype))
        error = raised(ds_tilemoe.apply, moe, {"strict": True})
        assert isinstance(error, UnsupportedLayerError), repr(error)
        assert reason in same_everywhere(str(error))


@case
def case_03_bare_backend(ctx: RankContext) -> None:
    """Before it makes any memory."""
    backend = CudaBackend(dist.group.WORLD, TileOverlapConfig())
    suitable = LayerShape("moe", EXPERTS, 2, 72, 200, 72, DTYPE, "cuda")
    for change, words in (
        ({"hidden": 130, "out": 130}, ("130", "multiple of 8")),
        ({"hidden": 1, "out": 1}, ("is 1", "multiple of 8")),
        ({"ffn": 33}, ("33", "multiple of 8")),
        ({"dtype": torch.float32}, ("float32", "bfloat16 and float16")),
    ):
        error = raised(backend.ensure, [dataclasses.replace(suitable, **change)], 64)
        assert isinstance(error, ValueError), repr(error)
        text = same_everywhere(str(error))
        assert all(word in text for word in words), text


@case
def case_05_token_counts_differ(ctx: RankContext) -> None:
    moe = swap(make(k=2, **SMALL))
    assert_right(moe, rows(*[(1, 7), (2, 31), (4, 64), (1, 1)][ctx.rank % 4], HIDDEN))
    rng = random.Random(ctx.rank)
    for seed in range(20):
        assert_right(moe, rows(rng.randint(1, 3), rng.randint(1, 20), HIDDEN, seed=seed))
    ds_tilemoe.check(moe)


@case
def case_05_about_the_limit_of_small_calls(ctx: RankContext) -> None:
    """Up to it a rank has no consumer; each goes by its own tokens, and all stay in step."""
    moe = make(k=2, hidden=1024, ffn=128, experts=EXPERTS)
    swap(moe, adaptive={"enabled": False}, max_tokens_per_rank=4096)
    run(moe, rows(4, 1024))
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    (layer,) = runtime.backend._layers.values()
    limit = next(1 << b for b in range(12) if not layer.is_small((1 << b) + 1))
    for turn in range(4):
        count = limit + (0, 1, 2, -1)[(ctx.rank + turn) % 4]
        assert_right(moe, rows(count, 1024, seed=turn))
        ctas = last_consumers(moe)
        agree("" if (ctas == 0) is (count <= limit) else f"{ctas} CTAs for {count} tokens")
        same_everywhere(str(moe.deepspeed_moe._tile.shapes))


@case(weights=["bfloat16", "float16", "float32"])
def case_12_autocast(ctx: RankContext, weights: str) -> None:
    """LayerNorm gives fp32 there; without autocast the mismatch is the same error on all ranks."""
    moe = make("swiglu", getattr(torch, weights), **SMALL)
    block = nn.Sequential(nn.LayerNorm(HIDDEN).cuda(), moe)
    x = rows(2, 9, HIDDEN, dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        want = run(block, x)[0]
        report = ds_tilemoe.apply(block, {"wait_timeout_s": 10})
        got = run(block, x)[0]
        if weights == "float32":
            assert "only bfloat16 and float16" in same_everywhere(report.layers[0].reason)
            assert_equal(got, want, "DeepSpeed's own path")
            return
        assert report.swapped, str(report)
        agree(difference(got, want, want.dtype, LIKE_DEEPSPEED))
        assert_equal(run(block, x)[0], got, "run to run")

    def fail() -> None:
        error = raised(run, block, x)
        assert isinstance(error, TileMoEError), repr(error)
        assert f"got float32 input, its experts have {weights} weights" in str(error)

    def go_on() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(run(block, x)[0], got)
        ds_tilemoe.check(block)

    together(fail)
    together(go_on)


@case
def case_12_one_rank_in_another_dtype(ctx: RankContext) -> None:
    moe, x = swap(make(**SMALL)), rows(50, HIDDEN)
    want = assert_right(moe, x)

    def fail() -> None:
        if ctx.rank == 1:
            assert "got float32 input" in str(raised(run, moe, x.float()))
        else:
            assert run(moe, x)[0].isnan().all()
            error = raised(ds_tilemoe.check, moe)
            assert isinstance(error, RankFailure), repr(error)
            assert "rank 1 of the group failed in its routing" in str(error)
        ds_tilemoe.check(moe)

    together(fail)
    assert_equal(run(moe, x)[0], want, "the call behind it")


@case
def case_12_gate_in_fp32(ctx: RankContext) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        moe = make("swiglu", dtype, **SMALL)
        moe.deepspeed_moe.gate.float()
        swap(moe)
        assert_right(moe, rows(70, HIDDEN, dtype=dtype))
        ds_tilemoe.check(moe)


@case
def case_12_casts_after_the_swap(ctx: RankContext) -> None:
    """Beside a layer that was not swapped; in fp32 both are DeepSpeed's own."""
    moe, plain = swap(make("swiglu", **SMALL)), make("swiglu", **SMALL)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        x = rows(40, HIDDEN).to(dtype)
        want = run(plain.to(dtype), x)[0]
        got = run(moe.to(dtype), x)[0]
        is_ours = moe.deepspeed_moe._tile.kept is None
        agree("" if is_ours is (dtype != torch.float32) else f"{dtype}: ours {is_ours}")
        agree(difference(got, want, dtype, LIKE_DEEPSPEED if is_ours else 0.0))
    ds_tilemoe.check(moe)


test_ranks = gpu_rank_tests(__file__, timeout_s=120, case_timeout_s=60)
