"""cases.md 1, 2, 3, 5 to 10 and 12 on DeepSpeed layers, four ranks."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref

import deepspeed
import torch
from moe_models import (
    EXPERTS,
    HIDDEN,
    assert_close,
    make_moe,
    oracle,
    own_routing,
    raised,
    run,
    same_everywhere,
    tokens,
)
from torch import nn

import ds_tilemoe
from ds_tilemoe.errors import CapacityError, RankFailure, UnsupportedLayerError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import case, rank_tests

FORCE = 50.0


def swapped(ep_size=4, block=None, **options):
    moe = make_moe(ep_size, **{"drop_tokens": False, **options})
    report = ds_tilemoe.apply(moe, block or {})
    assert report.swapped, str(report)
    return moe


def steer(moe, wanted):
    """Only experts in ``wanted`` get tokens whose first number is FORCE."""
    with torch.no_grad():
        column = torch.tensor([0.0 if e in wanted else -1.0 for e in range(moe.num_experts)])
        moe.deepspeed_moe.gate.wg.weight[:, 0] = column


def poison(*shapes):
    """Leave NaN where the allocator will give memory next."""
    for shape in shapes:
        torch.full(shape, float("nan"))


@case
def case_01_experts_and_ranks_without_rows(ctx):
    everyone = set(range(EXPERTS))
    for k, wanted in ((2, everyone - {3, 6}), (2, everyone - {4, 5}), (1, {0})):
        moe = swapped(k=k)
        run(moe, tokens(32, HIDDEN))
        steer(moe, wanted)
        x = tokens(32, HIDDEN, seed=1)
        x[:, 0] = FORCE
        routing = own_routing(moe, x)
        assert set(routing.expert_ids.unique().tolist()) <= wanted
        want = oracle(moe, x, routing)
        first = None
        for _ in range(10):
            poison((32, HIDDEN), (128, 96), (128, HIDDEN), (4096,))
            y = run(moe, x)[0]
            assert_close(y, want)
            first = y if first is None else first
            assert torch.equal(y, first)


@case
def case_02_ranks_without_tokens(ctx):
    moe = swapped()
    one_row, none = [(1, 17), (1, 0)]
    sizes = [((0,), (17,)), (none, one_row), ((1,), (17,)), ((0,), (0,)), (none, none)]
    for on_rank_2, elsewhere in [*sizes, ((5,), (17,))]:
        x = tokens(*(on_rank_2 if ctx.rank == 2 else elsewhere), HIDDEN, seed=elsewhere[-1])
        y, l_aux, exp_counts = run(moe, x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert_close(y, oracle(moe, x))
        assert l_aux.dtype == torch.float32
        assert exp_counts.shape == (EXPERTS,)
    steer(moe, {0, 1})  # ranks 1 to 3 have tokens and receive none
    x = tokens(9, HIDDEN)
    x[:, 0] = FORCE
    assert_close(run(moe, x)[0], oracle(moe, x))


@case(hidden=[2880, 1536, 200, 72, 130, 1], ffn=[2880, 200, 33])
def case_03_odd_sizes(ctx, hidden, ffn):
    moe, x = make_moe(4, hidden=hidden, ffn=ffn, drop_tokens=False), tokens(13, hidden)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        ds_tilemoe.restore(moe.to(dtype))
        want = run(moe, x.to(dtype))[0]
        ds_tilemoe.apply(moe, {"strict": True})
        got = run(moe, x.to(dtype))[0]
        # The last columns and the last row are judged by their own size, not by the whole's.
        for part in (slice(None), (slice(None), slice(-16, None)), slice(-1, None)):
            scale = want[part].float().abs().max()
            assert_close(got[part].float() / scale, want[part].float() / scale, tolerance)


@case
def case_05_token_counts_differ(ctx):
    moe = swapped()
    shape = [(1, 7), (2, 31), (4, 64), (1, 1)][ctx.rank]
    x = tokens(*shape, HIDDEN)
    assert_close(run(moe, x)[0], oracle(moe, x))
    rng = random.Random(ctx.rank)
    for i in range(20):
        x = tokens(rng.randint(1, 3), rng.randint(1, 20), HIDDEN, seed=i)
        assert_close(run(moe, x)[0], oracle(moe, x))


@case
def case_06_experts_and_group_sizes(ctx):
    for experts, k in ((16, 2), (4, 2), (60, 4), (512, 10)):
        moe = swapped(hidden=16, ffn=8, experts=experts, k=k)
        x = tokens(3, 5, 16)
        y = run(moe, x)[0]
        assert y.shape == x.shape
        assert_close(y, oracle(moe, x))


@case
def case_06_impossible_group_sizes(ctx):
    began = time.perf_counter()
    # (c) E=6 on 4 ranks: DeepSpeed's own assertion, at construction; no such layer reaches apply().
    assert "divisible" in str(raised(lambda: make_moe(4, experts=6)))
    moe = make_moe(8, experts=8, parallel=False)
    error = raised(ds_tilemoe.apply, moe)
    assert isinstance(error, UnsupportedLayerError)
    assert "ep_size is 8, the world has 4 ranks" in str(error)
    assert not isinstance(moe.deepspeed_moe, TileMOELayer)
    config = {"train_micro_batch_size_per_gpu": 1}
    error = raised(lambda: deepspeed.initialize(model=moe, config=config))
    assert "not divisible" in same_everywhere(str(error))
    assert time.perf_counter() - began < 10


def remote_identity(ctx):
    """Top-1, weight 1: every token goes to the next rank and comes back as it is."""
    moe = make_moe(4, "plain", k=1, drop_tokens=False, experts=4, min_capacity=0)
    with torch.no_grad():
        for expert in moe.deepspeed_moe.experts.deepspeed_experts:
            expert.weight.copy_(torch.eye(HIDDEN))
            expert.bias.zero_()
        moe.deepspeed_moe.gate.wg.weight.zero_()
        moe.deepspeed_moe.gate.wg.weight[(ctx.rank + 1) % 4, 0] = 100.0
    assert ds_tilemoe.apply(moe).swapped
    return moe


@case
def case_07_flags_of_earlier_calls(ctx):
    """300 calls of a layer, of a new one in the same process, and of two in turn."""
    rng = random.Random(7)
    for layers in (1, 1, 2):
        made = [remote_identity(ctx) for _ in range(layers)]
        for i in range(1, 301):
            sleeper, pause = rng.randrange(8), rng.uniform(0, 0.02)
            if sleeper == ctx.rank:
                time.sleep(pause)
            y = run(made[i % layers], torch.full((8, HIDDEN), float(i)))[0]
            assert (y == i).all(), f"call {i}: {y.unique().tolist()}"
        states = [weakref.ref(moe.deepspeed_moe._tile) for moe in made]
        del made
        gc.collect()
        assert not any(state() for state in states), "the layers live on"


@case(block=[{}, {"max_tokens_per_rank": 256}])
def case_08_batch_sizes_change(ctx, block):
    moe = swapped(block=block)
    for count in (1, 256, 2, 128, 1, 4, 256):
        x = tokens(count, HIDDEN, seed=count)
        y = run(moe, x)[0]
        assert_close(y, oracle(moe, x))
        if count in (4, 256):
            assert torch.equal(y, run(swapped(block=block), x)[0])


@case
def case_08_too_many_tokens(ctx):
    moe = swapped(block={"max_tokens_per_rank": 128})
    run(moe, tokens(128, HIDDEN))
    x = tokens(256 if ctx.rank == 1 else 3, HIDDEN)
    error = raised(run, moe, x)
    assert isinstance(error, CapacityError)
    for part in ("256", "128", "max_tokens_per_rank"):
        assert part in same_everywhere(str(error))
    x4 = tokens(4, HIDDEN)
    assert_close(run(moe, x4)[0], oracle(moe, x4))
    assert ds_tilemoe.apply(moe, {"max_tokens_per_rank": 256}).swapped
    assert_close(run(moe, x)[0], oracle(moe, x))


@case
def auto_capacity_grows_with_apply(ctx):
    moe = swapped(hidden=8, ffn=8)
    run(moe, tokens(3, 8))
    x = tokens(1025 if ctx.rank == 3 else 2, 8)
    assert isinstance(raised(run, moe, x), CapacityError)
    assert ds_tilemoe.apply(moe, {}).swapped
    assert_close(run(moe, x)[0], oracle(moe, x))


@case
def case_09_exact_capacities(ctx):
    for capacity in (1, 2, 31, 32, 33, 64):
        moe = swapped(block={"max_tokens_per_rank": capacity})
        x = tokens(capacity, HIDDEN)
        assert_close(run(moe, x)[0], oracle(moe, x))
        over = raised(run, moe, tokens(capacity + 1, HIDDEN))
        assert isinstance(over, CapacityError)
        assert f"needed {capacity + 1}, available {capacity}" in str(over)
    moe = swapped(block={"max_tokens_per_rank": 32})
    steer(moe, {0, 1})
    x = tokens(32, HIDDEN)
    x[:, 0] = FORCE
    assert set(own_routing(moe, x).expert_ids.unique().tolist()) == {0, 1}
    assert_close(run(moe, x)[0], oracle(moe, x))


@case
def case_10_four_ranks_on_one_core(ctx):
    run(swapped(), tokens(3, HIDDEN))  # the op is built
    began, cores = time.perf_counter(), os.sched_getaffinity(0)
    try:
        pin({min(cores)})
        moe = swapped(block={"num_consumer_ctas": 4})
        for i in range(10):
            x = tokens(16, HIDDEN, seed=i)
            assert_close(run(moe, x)[0], oracle(moe, x))
    finally:
        pin(cores)
    assert time.perf_counter() - began < 60


def pin(cores):
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


@case(weights=["float32", "bfloat16", "float16"])
def case_12_autocast(ctx, weights):
    moe = make_moe(4, "swiglu", drop_tokens=False).to(getattr(torch, weights))
    block = nn.Sequential(nn.LayerNorm(HIDDEN), moe)
    x = tokens(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        want = run(block, x)[0]
        assert ds_tilemoe.apply(block).swapped
        for _ in range(2):
            got = run(block, x)[0]
            assert got.dtype == want.dtype
            assert_close(got, want, 2e-2)
    if weights == "float32":
        assert_close(run(block, x)[0], oracle(moe, block[0](x)))
    else:
        error = raised(run, block, x)
        assert isinstance(error, RankFailure)
        assert f"float32 input, its experts have {weights}" in same_everywhere(str(error))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(block, x)[0], got)


test_ranks = rank_tests(__file__, world=4, timeout_s=300)
