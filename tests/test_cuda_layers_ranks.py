"""Swapped layers on the CUDA backend, on four ranks without a GPU: see cuda_library_fake.py.

Meetings of ranks, changes, sub-groups, graphs and settings; numbers are in test_cuda_backend_ranks.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_fake_memory import memory
from cuda_library_fake import FakeLibrary, FakeLink, NoWaits, capture, install
from moe_models import HIDDEN, make_moe, oracle, raised, run, same_everywhere, tokens
from torch import Tensor, nn

import ds_tilemoe
from ds_tilemoe.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    RankFailure,
    TileMoEError,
)
from ds_tilemoe.testing import RankContext, case, rank_tests

WORLD = 4
BYTES = 128  # of a tensor map
# A consumer, although there are few tiles.
SETTINGS: dict[str, Any] = {"adaptive": {"enabled": False}, "num_consumer_ctas": 8}


@contextmanager
def swapped(
    ep_size: int = WORLD, kind: Any = "mlp", block: Any = None, **options: Any
) -> Iterator[tuple[Any, FakeLibrary, FakeLink]]:
    """A bf16 MoE on the fake library."""
    options = {"drop_tokens": False, "min_capacity": 0, **options}
    moe = make_moe(ep_size, kind, **options).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        library, link = install(patch, moe.deepspeed_moe.ep_group)
        report = ds_tilemoe.apply(moe, {**SETTINGS, **(block or {})})
        assert report.swapped, str(report)
        yield moe, library, link
        ds_tilemoe.restore(moe)
        gc.collect()


def rows(*shape: int, seed: int = 0) -> Tensor:
    return tokens(*shape, HIDDEN, seed=seed, dtype=torch.bfloat16)


def assert_right(moe: Any, x: Tensor) -> Tensor:
    y, want = run(moe, x)[0], oracle(moe, x)
    assert y.shape == want.shape
    limit = 2e-2 * max([1.0, *want.abs().flatten().tolist()])
    assert ((y.float() - want).abs() <= limit).all()
    return y


def backend_of(moe: Any) -> Any:
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    return runtime.backend


@case
def a_steady_layer_waits_for_nothing(ctx: RankContext) -> None:
    with swapped(kind="swiglu") as (moe, library, _):
        assert_right(moe, rows(2, 9))
        library.log.clear()
        with NoWaits(library):
            for count in (9, 17, (0, 5)[ctx.rank % 2]):
                run(moe, rows(2, count))
        assert library.log == 3 * ["router", "exchange", "dispatch and front", "SM"]
        ds_tilemoe.check(moe)
        stats = moe.deepspeed_moe._tile.stats
        assert stats.calls == 4, "records of all calls, none of them waited for"
        assert stats.choice is not None
        assert stats.choice.num_consumer_ctas == 8
        row = stats.record()
        assert row["router_us"] == pytest.approx(1e-3)
        assert row["scale_us"] == pytest.approx(0.01)


@case
def settings(ctx: RankContext) -> None:
    tanh = nn.Sequential(nn.Linear(HIDDEN, 96), nn.Tanh(), nn.Linear(96, HIDDEN))
    for kind, block, words in (
        ("mlp", {}, "dispatch and front"),
        ("mlp", {"dispatch": "nccl"}, "front"),
        (tanh, {}, None),
        (tanh, {"dispatch": "nccl"}, None),
    ):
        with swapped(kind=kind, block=block) as (moe, library, _):
            assert_right(moe, rows(11))
            fronts = {"dispatch and front", "front"} & set(library.log)
            assert fronts == ({words} - {None}), block
    moe = make_moe(WORLD, tanh).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        install(patch, moe.deepspeed_moe.ep_group)
        error = raised(ds_tilemoe.apply, moe, {"dispatch": "fused"})
        assert isinstance(error, ConfigError)
        assert 'dispatch: got "fused", and its experts\' front is not one' in str(error)
    with swapped(block={"router": "fused"}, k=1, use_rts=True, drop_tokens=True) as (moe, _, _):
        error = raised(run, moe, rows(3))
        assert isinstance(error, ConfigError)
        assert "use_rts drops tokens at random" in same_everywhere(str(error))


@case
def autocast(ctx: RankContext) -> None:
    """bf16 weights under bf16 autocast are as without; a new dtype is agreed on by all."""
    with swapped() as (moe, library, _):
        want = assert_right(moe, rows(9))
        library.log.clear()
        with torch.autocast("cpu", torch.bfloat16):
            got = run(moe, rows(9))[0]
        assert library.log == ["places", "exchange", "dispatch and front", "SM"]
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()
    with swapped() as (moe, library, _):
        x = rows(9)
        want = assert_right(moe, x)
        moe.half()
        half = run(moe, x.half())[0]
        assert half.dtype == torch.float16
        assert (half.float() - want.float()).norm() <= 2e-2 * want.float().norm()
        assert "fail" not in library.log
        exchanges = library.log.count("exchange")
        run(moe, x.half())
        assert library.log.count("exchange") == exchanges + 1, "agreed on once"


@case
def weights_between_two_calls(ctx: RankContext) -> None:
    """Each call reads the numbers of the moment, wherever they have come to lie."""
    with swapped() as (moe, library, _):
        x = rows(9)
        want = assert_right(moe, x)
        linears = [expert[2] for expert in moe.deepspeed_moe.experts.deepspeed_experts]

        def scale(linears: Any, factor: float) -> None:
            with torch.no_grad():
                for linear in linears:
                    linear.weight.mul_(factor)
                    linear.bias.mul_(factor)

        scale(linears, 2)
        assert torch.equal(run(moe, x)[0], 2 * want), "in place"
        for linear in linears:
            linear.weight.data = linear.weight.data / 2
            linear.bias = nn.Parameter(linear.bias / 2)
        assert torch.equal(run(moe, x)[0], want), "elsewhere"
        twin = copy.deepcopy(moe)  # of experts of its own, on the same heap
        scale([expert[2] for expert in twin.deepspeed_moe.experts.deepspeed_experts], 4)
        for _ in range(2):
            assert torch.equal(run(twin, x)[0], 4 * want), "a copy of the layer"
            assert torch.equal(run(moe, x)[0], want), "the layer behind its copy"
        for linear in linears:
            linear.weight.data = linear.weight.data.t().contiguous().t()
        for factor in (1, 2, 2):
            scale(linears, factor)
            want = factor * want
            assert torch.equal(run(moe, x)[0], want), "kernels read a copy, anew in each call"
        moe.load_state_dict({name: value.clone() for name, value in twin.state_dict().items()})
        assert torch.equal(run(moe, x)[0], want), "loaded"
        assert "fail" not in library.log


@case
def a_change_on_one_rank(ctx: RankContext) -> None:
    """It raises there at once and elsewhere when it is heard; nobody waits for anybody."""
    with swapped() as (moe, _, _):
        x = rows(9)
        want = assert_right(moe, x)
        began = time.monotonic()
        linear = moe.deepspeed_moe.experts.deepspeed_experts[0][0]
        if ctx.rank == 2:
            hook = linear.register_forward_hook(lambda module, args, output: 2 * output)
            error = raised(run, moe, x)
            hook.remove()
            assert "not on ranks [0, 1, 3]" in str(error)
        else:
            assert run(moe, x)[0].isnan().all()
            error = raised(ds_tilemoe.check, moe)
            assert "rank 2 of the group called it in another way" in str(error)
            assert "3 of 4 ranks did not" in str(error)
        assert isinstance(error, RankFailure)
        assert time.monotonic() - began < 20
        if ctx.rank == 2:
            # The experts were examined anew: as they are now they are new to this rank alone.
            assert isinstance(raised(run, moe, x), RankFailure)
        else:
            assert run(moe, x)[0].isnan().all()
            assert isinstance(raised(ds_tilemoe.check, moe), RankFailure)
        dist.barrier()
        ds_tilemoe.apply(moe, SETTINGS)
        assert torch.equal(run(moe, x)[0], want)


@case
def dropout_everywhere(ctx: RankContext) -> None:
    expert = nn.Sequential(nn.Linear(HIDDEN, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, HIDDEN))
    with swapped(kind=expert) as (moe, library, _):
        x = rows(9)
        want = assert_right(moe, x)
        moe.deepspeed_moe.experts.train()
        library.log.clear()
        run(moe, x)
        assert library.log.count("exchange") == 1, "all say so, meet, and take DeepSpeed's path"
        moe.deepspeed_moe.experts.eval()
        assert torch.equal(run(moe, x)[0], want)


@case
def one_rank_fails_in_its_gate(ctx: RankContext) -> None:
    with swapped() as (moe, _, _):
        x = rows(9)
        want = assert_right(moe, x)
        if ctx.rank == 1:
            error = raised(run, moe, x[:, :-8])
            assert "wanted its hidden size" in str(error)
            assert type(error) is TileMoEError
        else:
            assert run(moe, x)[0].isnan().all()
            error = raised(run, moe, x)
            assert isinstance(error, RankFailure)
            assert "rank 1 of the group failed in its routing" in str(error)
            assert "ds_tilemoe.apply() on all ranks" in str(error)
        if ctx.rank == 1:
            assert run(moe, x)[0].isnan().all(), "its peers have raised instead of this call"
        assert isinstance(raised(run, moe, x), DeadlineError)
        dist.barrier()
        ds_tilemoe.apply(moe, SETTINGS)
        ds_tilemoe.check(moe)
        assert torch.equal(run(moe, x)[0], want)


@case
def graphs(ctx: RankContext) -> None:
    with swapped() as (moe, library, _), pytest.MonkeyPatch.context() as patch:
        x = rows(8)
        with capture(patch):
            assert "run one forward before the capture" in str(raised(run, moe, x))
        want = run(moe, x)[0]
        with capture(patch), NoWaits(library):
            assert torch.equal(run(moe, x)[0], want)
        moe.half()
        with capture(patch):
            assert "another dtype or mode" in str(raised(run, moe, x.half()))
        moe.bfloat16()
        assert torch.equal(run(moe, x)[0], want)


@case
def apply_again(ctx: RankContext) -> None:
    """With the same settings the heap stays, for a graph that holds it is never freed, and so do
    calls that nobody has counted yet; with others the old memory goes once the device is idle."""
    with swapped() as (moe, library, _), pytest.MonkeyPatch.context() as patch:
        x = rows(8)
        want = run(moe, x)[0]
        with capture(patch):
            run(moe, x)
        heap = backend_of(moe)._heap
        for _ in range(2):
            assert ds_tilemoe.apply(moe, SETTINGS).swapped
            assert torch.equal(run(moe, x)[0], want)
            assert backend_of(moe)._heap is heap
        ds_tilemoe.check(moe)
        assert moe.deepspeed_moe._tile.stats.calls == 4, "the captured one has a record here"
    with swapped() as (moe, library, _):
        run(moe, x)
        old = weakref.ref(backend_of(moe))
        library.log.clear()
        ds_tilemoe.apply(moe, {**SETTINGS, "stats": ctx.rank == 0})
        assert old() is None
        assert library.log == ["waits"]
        assert torch.equal(run(moe, x)[0], want)


@case
def check_counts_every_call(ctx: RankContext) -> None:
    """Those behind a call that has left no record, too."""
    with swapped() as (moe, _, _):
        x = rows(8)
        for _ in range(2):
            run(moe, x)
        moe.half()
        run(moe, x.half())
        ds_tilemoe.check(moe)
        assert moe.deepspeed_moe._tile.stats.calls == 3


@case
def a_graph_reads_what_it_was_captured_with(ctx: RankContext) -> None:
    """Not the experts of a later call, and no memory that has been given back."""
    with swapped(kind="swiglu") as (moe, library, _), pytest.MonkeyPatch.context() as patch:
        x = rows(8)
        want = run(moe, x)[0]
        with capture(patch):
            run(moe, x)
        tables = library.front.b, library.combine.producer.b
        maps = [bytes(memory(table, np.uint8, BYTES)) for table in tables]
        twin = copy.deepcopy(moe)
        for parameter in twin.parameters():
            parameter.data *= 2
        for _ in range(2):  # with addresses that the layer has not seen before, and knows now
            assert not torch.equal(run(twin, x)[0], want)
            assert [bytes(memory(table, np.uint8, BYTES)) for table in tables] == maps
            assert library.front.b != tables[0]
            assert torch.equal(run(moe, x)[0], want)
            assert (library.front.b, library.combine.producer.b) == tables
        (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
        backend = runtime.backend
        owners = [*backend._layers.values(), backend._router, backend._splits, backend._heap]
        held = [weakref.ref(owner) for owner in owners]
        del runtime, backend, owners
        ds_tilemoe.restore(moe)
        ds_tilemoe.restore(twin)
        gc.collect()
        assert all(ref() is not None for ref in held)


@case
def groups_smaller_than_the_job(ctx: RankContext) -> None:
    with swapped(2, block={"stats": True}) as (moe, library, link):
        counts = (5, 40, 0, 17)
        x = rows(counts[ctx.rank])
        assert_right(moe, x)
        assert len(set(link.sizes)) == 1
        assert len(link.sizes) == WORLD
        # 0 and 1 in one group, 2 and 3 in the other: a failure stays in its group.
        if ctx.rank == 0:
            assert "hidden size" in str(raised(run, moe, x[:, :-8]))
        elif ctx.rank == 1:
            assert run(moe, x)[0].isnan().all()
            assert isinstance(raised(ds_tilemoe.check, moe), RankFailure)
        else:
            assert_right(moe, x)
        ds_tilemoe.check(moe)
        assert_right(moe, x)
        # Growth that one group alone wants is refused in it; together it works.
        other = dict(moe.deepspeed_moe._tile.shapes)
        backend, shape = backend_of(moe), next(iter(other.values()))
        if ctx.rank >= 2:
            error = raised(backend.ensure, [shape], 4096, False)
            assert isinstance(error, CapacityError)
            for part in ("4096 tokens a rank", "available", "1024", "max_tokens_per_rank"):
                assert part in str(error)
        assert_right(moe, x)
        backend.ensure([shape], 4096)
        assert_right(moe, rows(2000))
        library.fail_combine = ctx.rank < 2
        y = run(moe, x)[0]
        assert bool(y.isnan().any()) == (ctx.rank < 2 and len(x) > 0)
        library.fail_combine = False
        assert bool(backend.failure()) == (ctx.rank < 2)
        if ctx.rank < 2:
            assert isinstance(raised(run, moe, x), DeadlineError)
        dist.barrier()
        ds_tilemoe.apply(moe, {**SETTINGS, "stats": True})
        assert_right(moe, x)


@case
def a_reason_in_one_group_is_one_for_all(ctx: RankContext) -> None:
    """Memory takes all ranks, so a group that wants none must not leave the others waiting."""
    moe = make_moe(2, drop_tokens=False).bfloat16()
    if ctx.rank == 3:
        moe.deepspeed_moe.experts.deepspeed_experts[0][0].register_forward_hook(lambda *a: None)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, moe.deepspeed_moe.ep_group)
        report = ds_tilemoe.apply(moe, {"max_tokens_per_rank": 64})
        assert not report.swapped
        assert "rank 3: expert submodule 0" in same_everywhere(report.layers[0].reason)


@case
def groups_of_one(ctx: RankContext) -> None:
    """They need nobody, also for their memory."""
    with swapped(1) as (moe, _, link):
        assert_right(moe, rows(ctx.rank * 7))
        if ctx.rank == 1:
            backend = backend_of(moe)
            backend.ensure(list(moe.deepspeed_moe._tile.shapes.values()), 4096)
            assert_right(moe, rows(3000))
        assert link.sizes == []


test_ranks = rank_tests(__file__, world=WORLD, timeout_s=200)
