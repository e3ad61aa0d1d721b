"""Swapped layers on GPUs beside DeepSpeed's own: router, dispatch, waits, streams and failures."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import (
    EXPERTS,
    FFN,
    HIDDEN,
    IS_SHARED,
    WORLD,
    agree,
    assert_equal,
    assert_rank_1_failed,
    assert_right,
    built,
    difference,
    gpu_rank_tests,
    make,
    rows,
    swap,
    together,
)
from moe_models import raised, run, same_everywhere
from torch import Tensor

import ds_tilemoe
from ds_tilemoe.errors import CapacityError, ConfigError, DeadlineError, RankFailure
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]
# Two bf16 paths with roundings of their own: DeepSpeed rounds each row and the weighted sum.
LIKE_DEEPSPEED = 1.6e-2


def seed_of(*parts: int) -> int:
    return sum(part * 1009**i for i, part in enumerate(parts)) % 2**31


@case(k=[1, 2, 8], drop=[False, True])
def like_deepspeed(ctx: RankContext, k: int, drop: bool) -> None:
    """Output, l_aux and exp_counts of the unswapped layer, by the fused router and by its gate."""
    for kind in ("mlp", "swiglu"):
        moe = make(kind, k=k, drop_tokens=drop, eval_capacity_factor=0.8, min_capacity=2)
        x = rows(2, 96, HIDDEN, seed=seed_of(k, drop))
        want = run(moe, x)
        for router in ("fused", "deepspeed"):
            swap(moe, router=router)
            got = run(moe, x)
            problem = difference(got[0], want[0], x.dtype, LIKE_DEEPSPEED)
            if got[2].tolist() != want[2].tolist():
                problem += f"; exp_counts {got[2].tolist()}, wanted {want[2].tolist()}"
            if not torch.allclose(got[1].float(), want[1].float(), rtol=1e-5):
                problem += f"; l_aux {got[1].item()}, wanted {want[1].item()}"
            agree(problem and f"{kind}, router {router}: {problem}")
            ds_tilemoe.check(moe)
            assert_equal(run(moe, x)[0], got[0], f"{kind}, router {router}, run to run")


@case
def unequal_and_empty_ranks(ctx: RankContext) -> None:
    for k in (1, 2, 8):
        moe = swap(make("swiglu", k=k))
        for seed, counts in enumerate(((5, 900), (0, 17), (17, 0), (0, 0), (1, 1), (1024, 128))):
            assert_right(moe, rows(counts[ctx.rank % 2], HIDDEN, seed=seed))
        ds_tilemoe.check(moe)


@case
def a_steady_forward_does_not_synchronise(ctx: RankContext) -> None:
    for kind, k, block in (("mlp", 2, {}), ("swiglu", 8, {}), ("mlp", 1, {"stats": True})):
        moe = swap(make(kind, k=k), **block)
        inputs = [rows(count, HIDDEN, seed=count) for count in (64, 200, 7, 64)]
        want = [run(moe, x)[0] for x in inputs]
        torch.cuda.synchronize()
        problem, got = "", []
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [run(moe, x)[0] for x in inputs]
        except Exception as error:
            problem = f"{kind}, k {k}: {type(error).__name__}: {error}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        agree(problem)
        for x, y, wanted in zip(inputs, got, want, strict=True):
            assert_equal(y, wanted, f"{kind}, {len(x)} tokens")
        ds_tilemoe.check(moe)


@case
def two_hundred_lengths(ctx: RankContext) -> None:
    """Two rounds of the same inputs: the same bits, the same memory; some against the oracle."""
    first, second = swap(make("swiglu")), swap(make(seed=1, hidden=512, ffn=256))
    generator = torch.Generator().manual_seed(seed_of(ctx.rank))
    counts = torch.randint(0, 1025, (200,), generator=generator).tolist()
    rounds: list[list[Tensor]] = []
    used = []
    for _ in range(2):
        results = []
        for i, count in enumerate(counts):
            moe = (first, second)[i % 2]
            results.append(run(moe, rows(count, (HIDDEN, 512)[i % 2], seed=i))[0])
        torch.cuda.synchronize()
        rounds.append(results)
        used.append(torch.cuda.memory_allocated() - sum(y.nbytes for y in results))
    wrong = [i for i, (a, b) in enumerate(zip(*rounds, strict=True)) if not torch.equal(a, b)]
    agree(f"calls {wrong} differ from round to round" if wrong else "")
    growth = used[1] - used[0] - sum(y.nbytes for y in rounds[0])
    agree("" if growth < 1 << 20 else f"memory grew by {growth} bytes in 200 calls")
    for moe in (first, second):
        ds_tilemoe.check(moe)
    for i in (0, 1, 99):
        assert_right((first, second)[i % 2], rows(counts[i], (HIDDEN, 512)[i % 2], seed=i))


def beside_a_reduction(ctx: RankContext, opposite: bool) -> None:
    """Long kernels that differ from rank to rank, and an all-reduce of another group, in front of
    the calls and behind them; ``opposite``: on one rank in front, on its neighbour behind."""
    moe = swap(make(hidden=1024, ffn=512))
    x = rows(2000, 1024)
    want = assert_right(moe, x)
    group = dist.new_group(backend="gloo" if IS_SHARED else "nccl")
    numbers = torch.ones(1 << 22, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    dist.all_reduce(numbers, group=group)

    def reduce() -> None:
        with torch.cuda.stream(side):
            dist.all_reduce(numbers, group=group)

    for turn in range(8):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000 * (1 + (ctx.rank + turn) % 2))
            for _ in range(4):
                a @ a
        first = (turn + (ctx.rank if opposite else 0)) % 2 == 1
        if first:
            reduce()
        results = [run(moe, x)[0] for _ in range(3)]
        if not first:
            reduce()
        for y in results:
            assert_equal(y, want, f"turn {turn}")
    torch.cuda.synchronize()
    ds_tilemoe.check(moe)
    dist.destroy_process_group(group)


@case
def beside_a_reduction_in_one_order(ctx: RankContext) -> None:
    beside_a_reduction(ctx, opposite=False)


@case
def on_a_stream_of_its_own(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(200, HIDDEN)
    want = assert_right(moe, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(moe, x)[0]
    again = run(moe, x)[0]  # behind it, although its stream is another
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(got, want, "on the other stream")
    assert_equal(again, want, "behind it")


@case
def every_way_gives_the_same_bits(ctx: RankContext) -> None:
    moe, x = make("swiglu", hidden=512), rows(700, 512)
    want = assert_right(swap(moe), x)
    for block in (
        {"dispatch": "nccl"},
        {"dispatch": "fused", "num_dispatch_ctas": 1},
        {"num_dispatch_ctas": 40, "num_consumer_ctas": 3},
        {"transport": "mapped"},
        {"transport": "nvshmem"},
        {"transport": "nvshmem", "mover": "none"},
        {"transport": "nvshmem", "num_consumer_ctas": 24},
        {"adaptive": {"enabled": False}},
    ):
        swap(moe, **block)
        for _ in range(3):
            assert_equal(run(moe, x)[0], want, block)
        ds_tilemoe.check(moe)


@case
def settings_that_cannot_be_met(ctx: RankContext) -> None:
    odd = torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, FFN), torch.nn.Tanh(), torch.nn.Linear(FFN, HIDDEN)
    )
    error = raised(ds_tilemoe.apply, make(odd), {"dispatch": "fused"})
    assert isinstance(error, ConfigError), repr(error)
    assert "not one GEMM" in same_everywhere(str(error))
    moe = make(k=1, use_rts=True, drop_tokens=True)
    swap(moe, router="fused")
    error = raised(run, moe, rows(30, HIDDEN))
    assert isinstance(error, ConfigError), repr(error)
    assert "use_rts" in same_everywhere(str(error))
    swap(moe)
    run(moe, rows(30, HIDDEN))
    ds_tilemoe.check(moe)


@case
def records_without_waiting(ctx: RankContext) -> None:
    moe = swap(make("swiglu", hidden=1024, ffn=512), stats=True)
    for count in (300, 1000, 5):
        run(moe, rows(count, 1024))
    ds_tilemoe.check(moe)
    stats = moe.deepspeed_moe._tile.stats
    agree("" if stats.calls == 3 else f"{stats.calls} calls counted, wanted 3")
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    found: list[Any] = []
    poll = runtime.backend.poll_records
    runtime.backend.poll_records = lambda: found.extend(poll()) or []  # a forward polls, too
    run(moe, rows(1000, 1024))
    runtime.backend.check()
    runtime.backend.poll_records()
    agree("" if len(found) == 1 else f"records {found}, wanted one")
    record = found[0]
    times, problem = record.times, ""
    order = (
        times.router_start,
        0,
        times.exchange_end,
        times.front_end,
        times.down_end,
        times.last_arrival,
        times.scale_end,
    )
    if not all(a <= b for a, b in itertools.pairwise(order)) or times.router_start >= 0:
        problem = f"times out of order: {times}"
    if not (0 < record.remote_rows < record.rows and record.tokens == 1000):
        problem += f" {record}"
    agree(problem)


@case
def one_rank_fails_in_its_gate(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(50, HIDDEN)
    want = assert_right(moe, x)

    def fail() -> None:
        if ctx.rank == 1:
            error = raised(run, moe, x[:, :-8])
            assert "wanted its hidden size" in str(error), repr(error)
        else:
            y = run(moe, x)[0]
            error = raised(ds_tilemoe.check, moe)
            assert isinstance(error, RankFailure), repr(error)
            assert "rank 1 of the group failed in its routing" in str(error)
            assert y.isnan().all()
        ds_tilemoe.check(moe)

    together(fail)
    assert_equal(run(moe, x)[0], want, "the call behind it")


@case(look=["copy", "check"])
def one_rank_fails_and_the_others_had_run_ahead(ctx: RankContext, look: str) -> None:
    """They have queued calls to which the failed rank does not come, and their hosts are in a copy
    behind these, or wait: their devices end the calls, long before the group's timeout."""
    moe, x = swap(make()), rows(50, HIDDEN)
    want = assert_right(moe, x)

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            assert "wanted its hidden size" in str(raised(run, moe, x[:, :-8]))
            return
        torch.cuda._sleep(200_000_000)  # so that nothing can be heard while the host runs ahead
        results = [run(moe, x)[0] for _ in range(3)]
        if look == "copy":
            assert results[-1].cpu().isnan().all()
        error = raised(ds_tilemoe.check, moe)
        seconds = time.monotonic() - began
        assert_rank_1_failed(error, behind=True)
        assert seconds < 8, f"it took {seconds:.0f} s"

    together(fail)

    def hear() -> None:
        for error in (raised(ds_tilemoe.check, moe), raised(run, moe, x)):
            assert isinstance(error, DeadlineError), repr(error)
            is_late = "had failed because of rank 1" in str(error)
            is_first = "rank 1 of the group failed in its routing" in str(error)
            # Where ranks take turns, another than rank 1 may hear of it through a peer.
            assert is_late if ctx.rank == 1 else is_first or (IS_SHARED and is_late), str(error)

    together(hear)
    swap(moe)
    assert_equal(run(moe, x)[0], want, "on the new heap")
    ds_tilemoe.check(moe)


@case(launch=["tilemoe_exchange_launch", "tilemoe_producer_launch", "tilemoe_combine_launch"])
def one_rank_fails_between_launches(ctx: RankContext, launch: str) -> None:
    """Its peers end at once, long before any deadline; a new heap is right again."""
    moe, x = swap(make(), wait_timeout_s=15), rows(50, HIDDEN)
    want = assert_right(moe, x)
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    library = runtime.backend._library

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            real = getattr(library, launch)
            setattr(library, launch, lambda *arguments: 1 // 0)
            error: Any = raised(run, moe, x)
            setattr(library, launch, real)
            assert isinstance(error, ZeroDivisionError), repr(error)
        else:
            assert run(moe, x)[0].isnan().all()
        error = raised(ds_tilemoe.check, moe)
        seconds = time.monotonic() - began
        assert isinstance(error, DeadlineError), repr(error)
        wanted = "ZeroDivisionError" if ctx.rank == 1 else "rank 1 of the group raised an exception"
        assert wanted in str(error), str(error)
        assert seconds < 10, f"it took {seconds:.0f} s: {error}"
        assert isinstance(raised(run, moe, x), DeadlineError)

    together(fail)
    swap(moe, wait_timeout_s=15)
    assert_equal(run(moe, x)[0], want, "on the new heap")
    ds_tilemoe.check(moe)


@case
def too_many_tokens_on_one_rank(ctx: RankContext) -> None:
    moe = swap(make(), max_tokens_per_rank=128)
    assert_right(moe, rows(128, HIDDEN))

    def fail() -> None:
        if ctx.rank == 1:
            error = raised(run, moe, rows(256, HIDDEN))
        else:
            assert run(moe, rows(3, HIDDEN))[0].isnan().all()
            error = raised(ds_tilemoe.check, moe)
        assert isinstance(error, CapacityError), repr(error)
        for part in ("needed 256", "available 128", "max_tokens_per_rank"):
            assert part in str(error)

    together(fail)
    assert_right(moe, rows(4, HIDDEN))


@case
def a_change_on_all_ranks_and_on_one(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(40, HIDDEN)
    want = assert_right(moe, x)
    moe.half()
    half = run(moe, x.half())[0]
    agree(difference(half, want, torch.float16, 1.2e-2))
    moe.bfloat16()
    assert_equal(run(moe, x)[0], want, "bf16 again")
    linear = moe.deepspeed_moe.experts.deepspeed_experts[0][0]

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            hook = linear.register_forward_hook(lambda module, args, output: 2 * output)
            error = raised(run, moe, x)
            hook.remove()
            assert "not on ranks" in str(error), repr(error)
        else:
            assert run(moe, x)[0].isnan().all()
            error = raised(ds_tilemoe.check, moe)
            assert "called it in another way" in str(error), repr(error)
        assert isinstance(error, RankFailure), repr(error)
        seconds = time.monotonic() - began
        assert seconds < 10, f"it took {seconds:.0f} s"

    together(fail)
    swap(moe)
    assert_equal(run(moe, x)[0], want, "applied again")


if WORLD >= 4:

    @case
    def groups_smaller_than_the_job(ctx: RankContext) -> None:
        for kind in ("mlp", "swiglu"):
            moe = swap(make(kind, ep_size=WORLD // 2))
            counts = (5, 700, 0, 33)
            for seed in range(3):
                assert_right(moe, rows(counts[(ctx.rank + seed) % 4], HIDDEN, seed=seed))
            ds_tilemoe.check(moe)
        in_first = ctx.rank < WORLD // 2
        x = rows(60, HIDDEN)

        def fail() -> None:
            if ctx.rank == 0:
                assert "hidden size" in str(raised(run, moe, x[:, :-8]))
            elif in_first:
                assert run(moe, x)[0].isnan().all()
                assert isinstance(raised(ds_tilemoe.check, moe), RankFailure)
            else:
                run(moe, x)
            ds_tilemoe.check(moe)

        together(fail)
        assert_right(moe, x)

else:

    def test_groups_smaller_than_the_job() -> None:
        pytest.skip(f"needs 4 CUDA GPUs, and torch sees {torch.cuda.device_count()}")


@case
def beside_a_reduction_in_opposite_orders(ctx: RankContext) -> None:
    """The last case: were it to hang, the others have run."""
    beside_a_reduction(ctx, opposite=True)


assert EXPERTS % WORLD == 0
test_ranks = gpu_rank_tests(__file__)
