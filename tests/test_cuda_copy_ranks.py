"""The host's side of mover copy_engine on two ranks without a GPU: see cuda_library_fake.py."""

from __future__ import annotations

import gc

import pytest
import torch
from cuda_layer_case import Layer, fake, rows
from cuda_library_fake import NoWaits, capture

from ds_tilemoe.backends import cuda_abi
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, ConfigError, DeadlineError, RankFailure
from ds_tilemoe.testing import RankContext, case, rank_tests

CALL = ["router", "exchange", "fetch", "dispatch and front", "COPY_ENGINE", "host waits"]


def steady(log: list[str]) -> list[str]:
    return [word for word in log if word not in ("waits", "engine made")]


@case
def values_and_order(ctx: RankContext) -> None:
    """The counts are on their way before GEMM 1, and waited for in front of GEMM 2 alone."""
    with fake() as (library, _):
        want = Layer().open().check(rows(40))
    with fake() as (library, _):
        layer = Layer(mover="copy_engine").open()
        assert torch.equal(layer.check(rows(40)), want)
        assert steady(library.log) == CALL
        assert library.log.index("engine made") < library.log.index("exchange")
        library.log.clear()
        with NoWaits(library):
            for count in (40, 3, (0, 5)[ctx.rank]):
                layer(rows(count, seed=count))
        assert library.log == 3 * CALL, "one engine a heap"
        layer.check(rows((0, 7)[ctx.rank], seed=1))
        assert library.exchange.consumer_ctas == 0
        assert layer.backend.chosen["mover"] == "copy_engine"
        assert TileOverlapConfig(**layer.backend.chosen)
        (*_, record) = layer.backend.poll_records()
        choice, _ = layer.backend.explain(record)
        assert choice is not None
        assert (choice.mover, choice.num_consumer_ctas) == ("copy_engine", 0)


@case
def with_rows_by_nccl_and_without_a_controller(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(mover="copy_engine", by="nccl", adaptive={"enabled": True}).open()
        layer.check(rows(40))
        assert steady(library.log) == [*CALL[:3], "front", *CALL[4:]]
        assert not layer.backend._splits.controllers
    with fake(None) as (library, _):
        alone = Layer(mover="copy_engine", ep_size=1).open()
        alone.check(rows(20))
        assert library.log[-1] == "NONE", "a group of one has nothing to copy"
        assert not library.engines


@case
def one_rank_alone_and_in_some_calls(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(40))
        for turn in range(4):
            layer.backend.mover = "copy_engine" if turn % 2 == ctx.rank else "auto"
            assert torch.equal(layer(rows(40)), want)
            assert (library.combine.mover == cuda_abi.Mover.COPY_ENGINE) is (turn % 2 == ctx.rank)
            assert bool(library.combine.copy_engine) is (turn % 2 == ctx.rank)


@case
def refused_in_a_capture(ctx: RankContext) -> None:
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer(mover="copy_engine").open()
        want = layer(rows(4))
        library.log.clear()
        with capture(patch), pytest.raises(ConfigError) as caught:
            layer(rows(4))
        for words in ('tile_overlap.mover: got "copy_engine"', "layer moe", 'wanted "auto", "sm"'):
            assert words in str(caught.value)
        assert steady(library.log) == ["router"], "nothing runs"
        assert torch.equal(layer(rows(4)), want)
        layer.backend.mover = "sm"
        with capture(patch):
            assert torch.equal(layer(rows(4)), want)


@case
def a_new_heap_has_an_engine_of_its_own(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(mover="copy_engine").open()
        want = layer(rows(20))
        (first,) = library.engines
        layer.open(128)
        assert torch.equal(layer(rows(20)), want)
        gc.collect()
        (second,) = library.engines
        assert second != first


@case(failing=["make", "fetch"])
def an_engine_that_fails_fails_the_group(ctx: RankContext, failing: str) -> None:
    """The others hear of it at once, whatever their mover, and not by a deadline."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer(rows(20))
        if ctx.rank == 1:
            layer.backend.mover = "copy_engine"
            setattr(library, f"tilemoe_copy_engine_{failing}", lambda *_: 801)
            with pytest.raises(Exception, match="gave cudaError 801"):
                layer(rows(20))
        else:
            assert layer(rows(20)).isnan().all()
        with pytest.raises(DeadlineError, match="rank 1 of the group"):
            layer.backend.check()
        layer.backend.mover = "auto"
        layer.open()
        assert torch.equal(layer(rows(20)), want)


@case
def failures_of_peers(ctx: RankContext) -> None:
    """An exchange that ends badly leaves nothing to copy, and the heap is as it was."""
    with fake() as (library, _):
        layer = Layer(mover="copy_engine").open()
        want = layer(rows(20))
        if ctx.rank == 1:
            assert isinstance(layer.fails(rows(20), KeyError("x")), KeyError)
        else:
            assert layer(rows(20)).isnan().all()
            with pytest.raises(RankFailure):
                layer.backend.check()
        assert torch.equal(layer(rows(20)), want)
        if ctx.rank == 0:
            with pytest.raises(CapacityError):
                layer(rows(65))
        else:
            assert layer(rows(3)).isnan().all()
            with pytest.raises(CapacityError):
                layer.backend.check()
        assert torch.equal(layer(rows(20)), want)
        library.fail_combine = True
        assert layer(rows(20)).isnan().all()
        library.fail_combine = False
        with pytest.raises(DeadlineError, match="waited too long for rows"):
            layer.backend.check()
        layer.open()
        assert torch.equal(layer(rows(20)), want)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
