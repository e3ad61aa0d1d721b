"""cases.md 7 to 10 on GPUs, by swapped DeepSpeed layers: a heap's reuse, its room, and the SMs.

Case 8's graphs are ``several_on_one_heap`` of test_gpu_graphs.py; case 9's small symmetric memory
is test_gpu_small_heaps_ranks.py.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from typing import Any

import torch
from gpu_models import (
    SMALL,
    WORLD,
    agree,
    assert_equal,
    assert_right,
    built,
    forced,
    gpu_rank_tests,
    last_consumers,
    make,
    rows,
    steer,
    swap,
    together,
)
from moe_models import own_routing, raised, run, same_everywhere
from torch import Tensor, nn

import ds_tilemoe
from ds_tilemoe.errors import CapacityError, ConfigError
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]
HIDDEN = SMALL["hidden"]


def remote_identity(ctx: RankContext) -> Any:
    """Top-1, weight 1: every token goes to the next rank and comes back as it is.

    In fp16, which holds the integers up to 2048.
    """
    expert = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
    moe = make(expert, torch.float16, k=1, hidden=HIDDEN, ffn=HIDDEN, experts=WORLD)
    with torch.no_grad():
        for own in moe.deepspeed_moe.experts.deepspeed_experts:
            for linear in (own[0], own[2]):
                linear.weight.copy_(torch.eye(HIDDEN))
                linear.bias.zero_()
        weight = moe.deepspeed_moe.gate.wg.weight
        weight.zero_()
        weight[(ctx.rank + 1) % ctx.world, 0] = 100.0
    return moe


def tagged_calls(ctx: RankContext, number: int, one_heap: bool) -> list[weakref.ref[Any]]:
    """300 calls of ``number`` layers in turn; what is left of the layers behind them."""
    layers = [remote_identity(ctx) for _ in range(number)]
    for model in [nn.ModuleList(layers)] if one_heap else layers:
        swap(model)
    rng = random.Random(7)
    outputs: list[Tensor] = []
    for i in range(1, 301):
        sleeper, pause = rng.randrange(2 * ctx.world), rng.uniform(0, 0.02)
        if sleeper == ctx.rank:
            time.sleep(pause)
        x = torch.full((8, HIDDEN), float(i), dtype=torch.float16, device="cuda")
        outputs.append(run(layers[i % number], x)[0])
    wrong = [
        f"{i}: {set(y.flatten().tolist())}" for i, y in enumerate(outputs, 1) if (y != i).any()
    ]
    agree("; ".join(wrong[:5]))
    for moe in layers:
        ds_tilemoe.check(moe)
    return [weakref.ref(moe.deepspeed_moe._tile) for moe in layers]


@case
def case_07_flags_of_earlier_calls(ctx: RankContext) -> None:
    """Of a layer, of a new one in the same process, of two on a heap each, of two on one heap."""
    for number, one_heap in ((1, False), (1, False), (2, False), (2, True)):
        states = tagged_calls(ctx, number, one_heap)
        gc.collect()
        agree("the layers live on" if any(state() for state in states) else "")


@case(block=[{}, {"max_tokens_per_rank": 256}])
def case_08_batch_sizes_change(ctx: RankContext, block: dict[str, Any]) -> None:
    moe = swap(make(**SMALL), **block)
    for count in (1, 256, 2, 128, 1, 4, 256):
        x = rows(count, HIDDEN, seed=count)
        y = assert_right(moe, x)
        assert_equal(run(swap(make(**SMALL), **block), x)[0], y, f"a fresh layer, {count} tokens")
    ds_tilemoe.check(moe)


@case
def case_08_too_many_tokens_on_all_ranks(ctx: RankContext) -> None:
    """On one: ``too_many_tokens_on_one_rank`` of test_gpu_layer_ranks.py."""
    moe = swap(make(**SMALL), max_tokens_per_rank=128)
    assert_right(moe, rows(128, HIDDEN))

    def fail() -> None:
        error = raised(run, moe, rows(256, HIDDEN))
        assert isinstance(error, CapacityError), repr(error)
        for part in ("needed 256", "available 128", "max_tokens_per_rank"):
            assert part in str(error)

    together(fail)
    assert_right(moe, rows(4, HIDDEN))
    ds_tilemoe.check(moe)


@case
def case_09_exact_capacities(ctx: RankContext) -> None:
    for capacity in (1, 2, 31, 32, 33, 64):
        moe = swap(make(**SMALL), max_tokens_per_rank=capacity)
        assert_right(moe, rows(capacity, HIDDEN))

        def fail(moe: Any = moe, capacity: int = capacity) -> None:
            error = raised(run, moe, rows(capacity + 1, HIDDEN))
            assert isinstance(error, CapacityError), repr(error)
            assert f"needed {capacity + 1}, available {capacity}" in str(error)

        together(fail)
    moe = swap(make(**SMALL), max_tokens_per_rank=32)
    steer(moe, {0, 1})
    x = forced(32, HIDDEN)
    assert set(own_routing(moe, x).expert_ids.unique().tolist()) == {0, 1}
    assert_right(moe, x)
    ds_tilemoe.check(moe)


def busy() -> torch.cuda.Stream:
    """A stream that has just got about 100 ms of matrix products, each on all SMs."""
    stream, a = torch.cuda.Stream(), torch.randn(8192, 8192, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.mm(a, a)
    a.record_stream(stream)
    return stream


@case
def case_10_consumers_from_none_to_all_but_one(ctx: RankContext) -> None:
    """Alone, and beside long kernels of another stream."""
    total = torch.cuda.get_device_properties(0).multi_processor_count
    moe, x = make(hidden=1024, ffn=512), rows(2000, 1024)
    want = assert_right(swap(moe), x)
    for ctas in (0, 1, total - 1):
        swap(moe, **({"mover": "sm", "num_consumer_ctas": ctas} if ctas else {"mover": "none"}))
        assert_equal(run(moe, x)[0], want, f"{ctas} consumer CTAs")
        beside = busy()
        got = [run(moe, x)[0] for _ in range(3)]
        agree("the other stream had ended before" if beside.query() else "")
        for y in got:
            assert_equal(y, want, f"{ctas} consumer CTAs beside another kernel")
        found = last_consumers(moe)
        agree("" if found == ctas else f"{found} consumer CTAs, wanted {ctas}")


@case
def case_10_more_consumers_than_there_can_be(ctx: RankContext) -> None:
    total = torch.cuda.get_device_properties(0).multi_processor_count
    moe, x = swap(make(**SMALL)), rows(30, HIDDEN)
    want = assert_right(moe, x)
    names = ("num_consumer_ctas", "min_consumer_ctas", "max_consumer_ctas", "num_dispatch_ctas")
    for name, value in [*itertools.product(names, (total, total + 1)), ("num_consumer_ctas", 0)]:
        error = raised(ds_tilemoe.apply, moe, {name: value})
        assert isinstance(error, ConfigError), repr(error)
        bound = f"at most {total - 1}" if value else "from 1 to"
        for part in (f"tile_overlap.{name}: got {value};", bound):
            assert part in same_everywhere(str(error)), str(error)
    assert_equal(run(swap(moe), x)[0], want, "behind the errors")


test_ranks = gpu_rank_tests(__file__, timeout_s=120, case_timeout_s=60)
