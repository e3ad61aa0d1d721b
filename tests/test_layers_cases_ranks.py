"""cases.md 1, 2, 3, 5, 6, 8, 9 and 12 on DeepSpeed layers, and failures of one of four ranks."""

from __future__ import annotations

import copy
import random
import time

import deepspeed
import torch
from deepspeed.moe.sharded_moe import MOELayer
from moe_models import (
    EXPERTS,
    HIDDEN,
    assert_close,
    dense_experts,
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
from ds_tilemoe.errors import CapacityError, RankFailure, TileMoEError, UnsupportedLayerError
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
        experts = moe.deepspeed_moe.experts.deepspeed_experts
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
        assert len(experts) == 2


@case
def case_02_ranks_without_tokens(ctx):
    moe = swapped()
    for on_rank_2, elsewhere in ((0, 17), (1, 17), (0, 0), (5, 17)):
        x = tokens(on_rank_2 if ctx.rank == 2 else elsewhere, HIDDEN, seed=elsewhere)
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


@case(hidden=[200, 72, 130, 1])
def case_03_odd_sizes(ctx, hidden):
    for ffn in (200, 33):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            moe = make_moe(4, hidden=hidden, ffn=ffn, drop_tokens=False).to(dtype)
            odd_size(moe, hidden, dtype, tolerance)


@case(hidden=[1536, 2880], ffn=[33, 2880])
def case_03_wide_odd_sizes(ctx, hidden, ffn):
    moe = make_moe(4, hidden=hidden, ffn=ffn, experts=4, drop_tokens=False)
    odd_size(moe, hidden, torch.float32, 1e-5)


def odd_size(moe, hidden, dtype, tolerance):
    x = tokens(13, hidden, dtype=dtype)
    want = run(moe, x)[0]
    ds_tilemoe.apply(moe, {"strict": True})
    got = run(moe, x)[0]
    for part in (slice(None), (slice(None), slice(-16, None)), slice(-1, None)):
        assert_close(got[part], want[part], tolerance)


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


@case
def case_12_casts_after_the_swap(ctx):
    moe, x = swapped(), tokens(7, HIDDEN)
    want = run(moe, x)[0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        moe.to(dtype)
        got = run(moe, x.to(dtype))[0]
        assert got.dtype == dtype
        assert_close(got, want, 2e-2)
    gate_in_fp32 = swapped()
    gate_in_fp32.deepspeed_moe.experts.bfloat16()
    assert_close(run(gate_in_fp32, x.bfloat16())[0], want, 2e-2)


@case
def case_12_mismatch_on_one_rank(ctx):
    moe, x = swapped(), tokens(7, HIDDEN)
    want = run(moe, x)[0]
    error = raised(run, moe, x.bfloat16() if ctx.rank == 3 else x)
    assert isinstance(error, RankFailure)
    assert "rank 3" in same_everywhere(str(error))
    assert_close(run(moe, x)[0], want)
    if ctx.rank == 1:
        moe.bfloat16()
    for _ in range(2):
        error = raised(run, moe, x.bfloat16() if ctx.rank == 1 else x)
        assert isinstance(error, TileMoEError)
        assert "different dtypes or modes" in same_everywhere(str(error))
    with torch.no_grad():
        moe.float()
    y = run(moe, x)[0]
    assert_close(y, want, 2e-2)


@case
def one_gate_fails_and_all_raise(ctx):
    moe, x = swapped(k=1, min_capacity=4), tokens(9, HIDDEN)
    moe.deepspeed_moe.wall_clock_breakdown = True
    moe.deepspeed_moe.gate.wall_clock_breakdown = True
    want = run(moe, x)[0]
    # DeepSpeed's own assertion: fewer tokens than min_capacity.
    error = raised(run, moe, x[:2] if ctx.rank == 2 else x)
    assert isinstance(error, RankFailure)
    text = same_everywhere(str(error))
    assert "rank 2" in text
    assert "min_capacity" in text
    assert isinstance(error.__cause__, AssertionError) == (ctx.rank == 2)
    assert moe.deepspeed_moe.gate.ep_group is moe.deepspeed_moe.ep_group
    assert torch.equal(run(moe, x)[0], want)
    error = raised(run, moe, x[:, :-1] if ctx.rank == 0 else x)
    assert "width 63; wanted its hidden size 64" in same_everywhere(str(error))
    assert torch.equal(run(moe, x)[0], want)


@case
def dropout_in_training_mode_is_deepspeeds_path(ctx):
    expert = nn.Sequential(nn.Linear(HIDDEN, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, HIDDEN))
    moe, x = swapped(kind=expert), tokens(8, HIDDEN)
    want = oracle(moe.eval(), x, experts=[expert.eval() for expert in dense_experts(moe)])
    for _ in range(2):
        assert_close(run(moe.eval(), x)[0], want)
        random_output = run(moe.train(), x)[0]
        assert not torch.allclose(random_output, want)
        assert type(moe.deepspeed_moe) is TileMOELayer


@case
def replaced_submodules_are_noticed(ctx):
    moe, x = swapped(), tokens(8, HIDDEN)
    run(moe, x)
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[2] = nn.Linear(96, HIDDEN, bias=False)
        nn.init.ones_(expert[2].weight)
    got = run(moe, x)[0]
    assert type(moe.deepspeed_moe) is TileMOELayer
    assert_close(got, run_unswapped(moe, x))
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[1] = nn.Sequential(nn.ReLU(), nn.Dropout(0.9))
    assert_close(run(moe.eval(), x)[0], run_unswapped(moe, x))
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[1][1] = nn.Dropout(0.8)
    first, second = (run(moe.train(), x)[0] for _ in range(2))
    assert not torch.equal(first, second), "dropout was lost"
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[0].register_forward_hook(lambda module, args, output: 0 * output)
    assert (run(moe.eval(), x)[0] == 0).all(), "a hook was lost"
    assert type(moe.deepspeed_moe) is MOELayer


def run_unswapped(moe, x):
    twin = copy.deepcopy(moe)
    ds_tilemoe.restore(twin)
    return run(twin, x)[0]


@case
def failed_heap_and_apply_again(ctx):
    moe, x = swapped(block={"wait_timeout_s": 2.0}), tokens(8, HIDDEN)
    want = run(moe, x)[0]
    front = moe.deepspeed_moe._tile.experts[0].front

    def broken(rows):
        raise MemoryError("no room for the front")

    if ctx.rank == 1:
        moe.deepspeed_moe._tile.experts[0].front = broken
    assert "no room for the front" in str(raised(run, moe, x))
    moe.deepspeed_moe._tile.experts[0].front = front
    for action in (lambda: run(moe, x), lambda: ds_tilemoe.check(moe)):
        error = raised(action)
        assert "no room for the front" in str(error)
        assert "apply" in str(error)
    assert ds_tilemoe.apply(moe, {"wait_timeout_s": 2.0}).swapped
    assert torch.equal(run(moe, x)[0], want)
    ds_tilemoe.check(moe)


test_ranks = rank_tests(__file__, world=4, timeout_s=150)
