"""What changes after the swap, on all of four ranks or on one: all do the same, none hangs."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import time

import torch
import torch.distributed as dist
from deepspeed.profiling.flops_profiler import FlopsProfiler
from moe_models import (
    HIDDEN,
    assert_close,
    dense_experts,
    make_moe,
    oracle,
    raised,
    run,
    same_everywhere,
    tokens,
)
from torch import nn

import ds_tilemoe
from ds_tilemoe.errors import DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import case, rank_tests


def swapped(ep_size=4, block=None, **options):
    moe = make_moe(ep_size, **{"drop_tokens": False, **options})
    report = ds_tilemoe.apply(moe, block or {})
    assert report.swapped, str(report)
    return moe


def run_unswapped(moe, x):
    twin = copy.deepcopy(moe)
    ds_tilemoe.restore(twin)
    return run(twin, x)[0]


def calls(moe):
    """How often the layer has run on the backend."""
    return moe.deepspeed_moe._tile.stats.calls


@contextlib.contextmanager
def warnings():
    """What this rank logs inside."""
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("ds_tilemoe").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("ds_tilemoe").removeHandler(handler)


def everyones(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_linear(moe):
    return moe.deepspeed_moe.experts.deepspeed_experts[0][0]


def doubling(module, args, output):
    return 2 * output


@case(strict=[False, True], ranks=[[1], [0, 1, 2, 3]])
def hooks_that_come_and_go(ctx, strict, ranks):
    moe, x = swapped(block={"strict": strict}), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    with warnings() as texts:
        for again in range(2):
            if ctx.rank in ranks:
                hook = first_linear(moe).register_forward_hook(doubling)
            for _ in range(2):
                assert_close(run(moe, x)[0], run_unswapped(moe, x))
            assert calls(moe) == 1 + again
            if ctx.rank in ranks:
                hook.remove()
            assert torch.equal(run(moe, x)[0], want)
            assert calls(moe) == 2 + again
    (text,) = [text for said in everyones(texts) for text in said]
    assert "expert submodule 0 (Linear) has forward hooks (doubling)" in text
    assert ("rank 1: " in text) == (ranks == [1])


@case
def adapters_on_one_rank(ctx):
    class LoraLinear(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, nn.Linear(HIDDEN, 96)

        def forward(self, x):
            return self.base(x) + self.down(x)

    moe, x = swapped(), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    expert, base = moe.deepspeed_moe.experts.deepspeed_experts[0], first_linear(moe)
    if ctx.rank == 2:
        expert[0] = LoraLinear(base)
    for _ in range(2):
        got = run(moe, x)[0]
        assert_close(got, run_unswapped(moe, x))
        assert not torch.allclose(got, want)
    expert[0] = base
    assert torch.equal(run(moe, x)[0], want)
    assert calls(moe) == 2
    if ctx.rank == 2:
        expert[0] = LoraLinear(base)
    assert ds_tilemoe.apply(moe).layers[0].reason.startswith("rank 2: expert submodule 0 (Lora")


@case
def a_profiler_on_one_rank(ctx):
    """DeepSpeed's engine starts its profiler on rank 0 alone."""
    moe, x = swapped(block={"strict": True}), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    if ctx.rank == 0:
        profiler = FlopsProfiler(moe)
        profiler.start_profile()
    assert_close(run(moe, x)[0], want)
    if ctx.rank == 0:
        profiler.end_profile()
    assert torch.equal(run(moe, x)[0], want)
    assert calls(moe) == 2


@case
def the_first_rank_of_each_group_speaks(ctx):
    moe, x = swapped(2), tokens(9, HIDDEN)
    with warnings() as texts:
        if ctx.rank == 3:
            first_linear(moe).register_forward_hook(doubling)
        assert_close(run(moe, x)[0], run_unswapped(moe, x))
    assert calls(moe) == (1 if ctx.rank < 2 else 0)
    spoken = everyones(texts)
    assert [len(said) for said in spoken] == [0, 0, 1, 0]
    assert "rank 3: expert submodule 0" in spoken[2][0]
    with warnings() as texts:
        reason = ds_tilemoe.apply(moe).layers[0].reason
    assert reason.startswith("rank 3: ") == (ctx.rank > 1)
    assert [len(said) for said in everyones(texts)] == [0, 0, 1, 0]
    for ep_size in (1, 2, 4):
        odd = make_moe(ep_size, nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Softsign()))
        with warnings() as texts:
            ds_tilemoe.apply(odd)
        assert sum(map(len, everyones(texts))) == 1, "groups that agree speak once"


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
def dropout_on_one_rank(ctx):
    expert = nn.Sequential(nn.Linear(HIDDEN, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, HIDDEN))
    moe, x = swapped(kind=expert, block={"strict": True}), tokens(8, HIDDEN)
    want = run(moe, x)[0]
    for again in range(2):
        run(moe.train(ctx.rank == 3), x)
        assert calls(moe) == 1 + again
        assert_close(run(moe.eval(), x)[0], want)
        assert calls(moe) == 2 + again


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
        assert "different dtypes: " in same_everywhere(str(error))
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
def no_input_on_one_rank(ctx):
    moe, x = swapped(), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    wg = moe.deepspeed_moe.gate.wg
    for fault in ("input", "gate"):
        if ctx.rank == 1 and fault == "gate":
            del moe.deepspeed_moe.gate.wg
        error = raised(run, moe, None if ctx.rank == 1 and fault == "input" else x)
        moe.deepspeed_moe.gate.wg = wg
        assert isinstance(error, RankFailure)
        assert "rank 1" in same_everywhere(str(error))
        cause = {"input": "got a NoneType as input", "gate": "AttributeError"}[fault]
        assert cause in str(error)
        assert torch.equal(run(moe, x)[0], want)


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
    ds_tilemoe.check(moe)
    assert torch.equal(run(moe, x)[0], want)
    ds_tilemoe.check(moe)


@case
def grad_enabled_is_deepspeeds_own_path(ctx):
    moe, x = make_moe(4, drop_tokens=False), tokens(6, HIDDEN)
    weight = moe.deepspeed_moe.experts.deepspeed_experts[0][2].weight
    moe(x)[0].sum().backward()
    want, weight.grad = weight.grad, None
    ds_tilemoe.apply(moe)
    y = moe(x)[0]
    y.sum().backward()
    assert torch.equal(weight.grad, want)
    assert_close(run(moe, x)[0], y.detach())
    moe(x)[0].sum().backward()
    with torch.inference_mode():
        assert_close(moe(x)[0], y.detach())


@case
def grad_modes_must_agree(ctx):
    moe, x = make_moe(4, drop_tokens=False), tokens(6, HIDDEN)
    want = run(moe, x)[0]
    ds_tilemoe.apply(moe)
    with torch.set_grad_enabled(ctx.rank == 2):
        error = raised(moe, x)
    assert "different grad modes" in same_everywhere(str(error))
    assert "rank 2" in str(error)
    assert_close(run(moe, x)[0], want)


@case
def grad_modes_that_part_later(ctx):
    """Peers wait in the count exchange, the grad-enabled rank in DeepSpeed's all-to-all."""
    moe, x = make_moe(4, drop_tokens=False), tokens(6, HIDDEN)
    for holder in (moe.deepspeed_moe, moe.deepspeed_moe.gate):
        holder.ep_group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    moe.deepspeed_moe.gate.ep_group = moe.deepspeed_moe.ep_group
    ds_tilemoe.apply(moe, {"wait_timeout_s": 3})
    run(moe, x)
    began = time.perf_counter()
    with torch.set_grad_enabled(ctx.rank == 2):
        error = raised(moe, x)
    assert isinstance(error, DeadlineError)
    assert "grad mode" in str(error)
    if ctx.rank == 2:
        assert "layer deepspeed_moe: a collective of DeepSpeed's own path did not end" in str(error)
        assert "in the same grad mode (here: enabled)" in str(error)
    assert time.perf_counter() - began < 20


test_ranks = rank_tests(__file__, world=4, timeout_s=300)
