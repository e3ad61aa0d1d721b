"""Mover copy_engine on GPUs: values, mixed movers, captures, and peers that do not come."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu_models import (
    EXPERTS,
    FORCE,
    HIDDEN,
    IS_SHARED,
    WORLD,
    assert_equal,
    assert_right,
    built,
    forced,
    gpu_rank_tests,
    make,
    rows,
    steer,
    swap,
    together,
)
from moe_models import raised, run

import ds_tilemoe
from ds_tilemoe.errors import ConfigError, DeadlineError
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]

ENGINE: dict[str, Any] = {"mover": "copy_engine"}


def backend_of(moe: Any) -> Any:
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    return runtime.backend


@case(kind=["mlp", "swiglu", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    """Against the oracle, and the same bits as by SMs; "plain" gets its rows by NCCL."""
    for dtype, k in ((torch.bfloat16, 1), (torch.float16, 2)):
        moe = make(kind, dtype, k=k)
        inputs = [rows(n, HIDDEN, seed=n, dtype=dtype) for n in (67, 700, 1 + 500 * (ctx.rank % 2))]
        inputs.append(rows((0, 16)[ctx.rank % 2], HIDDEN, dtype=dtype))  # ranks without tokens
        inputs.append(rows((300, 0)[ctx.rank % 2], HIDDEN, dtype=dtype))
        swap(moe, mover="sm", layout=layout, max_tokens_per_rank=1024)
        wanted = [run(moe, x)[0] for x in inputs]
        swap(moe, layout=layout, max_tokens_per_rank=1024, **ENGINE)
        for turn in range(3):
            for x, want in zip(inputs, wanted, strict=True):
                assert_equal(assert_right(moe, x), want, f"turn {turn}, {len(x)} tokens")
        ds_tilemoe.check(moe)


def long_calls(ctx: RankContext) -> None:
    """Copies of 8 MiB and more a peer: range by range, and in boxes, as runs are equal."""
    experts = 8 * WORLD
    for is_even in (False, True):
        moe = make("mlp", hidden=4096, ffn=512, experts=experts, k=1)
        x = rows(512 * experts, 4096)
        if is_even:
            with torch.no_grad():
                moe.deepspeed_moe.gate.wg.weight.zero_()[:, :experts].fill_diagonal_(1.0)
            token = torch.arange(len(x), device="cuda")
            x[:, :experts] = 0
            x[token, token % experts] = FORCE
        swap(moe, mover="sm")
        want = assert_right(moe, x)
        for options in ({}, {"bands_per_segment": 4, "local_tail_waves": 0}):
            swap(moe, **ENGINE, **options)
            for turn in range(10):
                assert_equal(run(moe, x)[0], want, f"even {is_even}, {options}, turn {turn}")
            ds_tilemoe.check(moe)


if IS_SHARED:

    def test_long_calls() -> None:
        pytest.skip("copies inside a GPU need SMs, and scale, which waits for them, has them all")

else:
    long_calls = case(long_calls)


@case
def experts_without_rows(ctx: RankContext) -> None:
    for wanted in ({0}, {EXPERTS - 1}, set(range(EXPERTS // 2, EXPERTS))):
        moe = swap(make(k=1), **ENGINE)
        steer(moe, wanted)
        assert_right(moe, forced(333, HIDDEN))


@case
def each_rank_its_own_mover(ctx: RankContext) -> None:
    moe = swap(make(hidden=1024, ffn=512), num_consumer_ctas=8)
    x = rows(2000, 1024)
    want = assert_right(moe, x)
    backend = backend_of(moe)
    movers = ("copy_engine", "sm", "none", "copy_engine")
    real = backend.forward

    def forward(*arguments: Any) -> Any:  # the layer sets the mover in each call
        backend.mover = movers[(turn + ctx.rank) % len(movers)]
        return real(*arguments)

    backend.forward = forward
    for turn in range(40):
        assert_equal(run(moe, x)[0], want, f"turn {turn}")
    ds_tilemoe.check(moe)


@case
def one_rank_by_its_settings(ctx: RankContext) -> None:
    moe, x = make(), rows(500, HIDDEN)
    swap(moe, mover="sm")
    want = assert_right(moe, x)
    swap(moe, mover="copy_engine" if ctx.rank == 0 else "sm")
    for turn in range(20):
        assert_equal(run(moe, x)[0], want, f"turn {turn}")
    ds_tilemoe.check(moe)


@case
def records_name_the_mover(ctx: RankContext) -> None:
    moe = swap(make(), **ENGINE)
    began = time.monotonic()
    for _ in range(5):
        run(moe, rows(500, HIDDEN))
    ds_tilemoe.check(moe)
    assert time.monotonic() - began < 5, "a record has waited for chunks that nobody counts"
    stats = moe.deepspeed_moe._tile.stats
    assert (stats.choice.mover, stats.choice.num_consumer_ctas) == ("copy_engine", 0)


@case
def refused_in_a_capture(ctx: RankContext) -> None:
    moe, x = swap(make(), **ENGINE), rows(50, HIDDEN)
    want = assert_right(moe, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(moe, x)

    error = raised(capture)
    assert isinstance(error, ConfigError), repr(error)
    assert 'tile_overlap.mover: got "copy_engine"' in str(error)
    assert_equal(run(moe, x)[0], want, "afterwards")


@case(stage=["front", "down"])
def a_peer_that_does_not_come(ctx: RankContext, stage: str) -> None:
    """Its rows in front of GEMM 1, or those of its GEMM 2: all ranks hear of it in time, no stream
    stays in its wait, and a new heap is right."""
    moe, x = swap(make(), wait_timeout_s=2, **ENGINE), rows(50, HIDDEN)
    want = assert_right(moe, x)
    library = backend_of(moe)._library
    name = {"front": "tilemoe_producer_launch", "down": "tilemoe_combine_launch"}[stage]
    real = getattr(library, name)

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:  # it has sent its counts
            setattr(library, name, lambda *arguments: 0)
        y = run(moe, x)[0]
        setattr(library, name, real)
        torch.cuda.synchronize()
        if ctx.rank == 1 and stage == "down":
            time.sleep(4)  # it waits for nobody; the others do until their deadline
        error = raised(ds_tilemoe.check, moe)
        seconds = time.monotonic() - began
        assert isinstance(error, DeadlineError), repr(error)
        assert "waited too long for" in str(error)
        assert y.isnan().all() or (ctx.rank == 1 and stage == "down")
        assert seconds < 8, f"it took {seconds:.0f} s"
        assert isinstance(raised(run, moe, x), DeadlineError)

    together(fail)
    swap(moe, wait_timeout_s=2, **ENGINE)
    assert_equal(run(moe, x)[0], want, "on the new heap")
    ds_tilemoe.check(moe)


@case
def a_rank_whose_copies_cannot_be_queued(ctx: RankContext) -> None:
    """Its peers hear of it at once, long before the deadline."""
    moe, x = swap(make(), wait_timeout_s=20, **ENGINE), rows(50, HIDDEN)
    want = assert_right(moe, x)
    library = backend_of(moe)._library
    real = library.tilemoe_copy_engine_fetch

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            library.tilemoe_copy_engine_fetch = lambda *arguments: 1
            assert "the copy of the counts" in str(raised(run, moe, x))
            library.tilemoe_copy_engine_fetch = real
        else:
            assert run(moe, x)[0].isnan().all()
        error = raised(ds_tilemoe.check, moe)
        assert isinstance(error, DeadlineError), repr(error)
        seconds = time.monotonic() - began
        assert seconds < 10, f"it took {seconds:.0f} s"

    together(fail)
    swap(moe, **ENGINE)
    assert_equal(run(moe, x)[0], want, "on the new heap")


@case
def nvshmem_ends(ctx: RankContext) -> None:
    """Last: see test_gpu_backend_ranks.py."""
    from ds_tilemoe import transport
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    transport.start(CUDATileMoEBuilder().load()).close()


test_ranks = gpu_rank_tests(__file__, timeout_s=200, case_timeout_s=60)
