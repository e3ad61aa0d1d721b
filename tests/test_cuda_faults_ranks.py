"""Faults in the midst of a call that end the use of the CUDA backend's heap."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
import torch
from cuda_layer_case import EXPERTS, Layer, fake, raised_by, rows
from cuda_library_fake import memory
from moe_models import own_routing, raised, same_everywhere

from ds_tilemoe.backends import cuda_blocks, nccl_dispatch
from ds_tilemoe.errors import DeadlineError
from ds_tilemoe.testing import RankContext, case, rank_tests


@case
def a_layer_that_cannot_be_made(ctx: RankContext) -> None:
    """Its peers are in the count exchange by then."""
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer().open()
        if ctx.rank == 1:
            with patch.context() as broken:
                broken.setattr(layer.backend, "_params", lambda shape: 1 / 0)
                assert isinstance(raised(layer, rows(20)), ZeroDivisionError)
            assert library.log[-1] == "fail"
        else:
            assert layer(rows(20)).isnan().all()
        assert isinstance(raised(layer, rows(20)), DeadlineError)
        layer.open().check(rows(20))


@case
def a_timeout_without_an_end(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_blocks, "group_timeout_s", lambda *_: 1e300)
        assert cuda_blocks.exchange_timeout_ns(None) == 10**18


@case
def failures_behind_the_exchange(ctx: RankContext) -> None:
    with fake() as (library, link):
        layer = Layer().open()
        want = layer.check(rows(20))
        library.fail_combine = True
        assert layer(rows(20)).isnan().all()
        error = raised(layer, rows(20))
        assert isinstance(error, DeadlineError)
        assert "waited too long for rows of rank 0 (call 2: 3 of 7 rows came)" in str(error)
        assert "waited too long" in layer.backend.failure()
        library.fail_combine = False
        assert isinstance(raised(layer, rows(20)), DeadlineError)
        assert isinstance(raised(layer.backend.check), DeadlineError)
        layer.open()
        assert layer.backend.failure() == ""
        assert torch.equal(layer(rows(20)), want)
        gc.collect()
        layer.open(128)
        assert link.freed >= 1, "blocks of heaps that are gone are given back"


@case(launch=["tilemoe_exchange_launch", "tilemoe_producer_launch", "tilemoe_combine_launch"])
def a_host_that_fails_between_launches(ctx: RankContext, launch: str) -> None:
    """Its peers end at once, whatever the deadline is."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(20))
        if ctx.rank == 1:
            library.raises = launch
            assert "was told to" in str(raised(layer, rows(20)))
            assert library.log[-1] == "fail"
        else:
            assert layer(rows(20)).isnan().all()
        for error in (raised(layer, rows(20)), raised(layer.backend.check)):
            assert isinstance(error, DeadlineError)
            assert "rank 1 of the group" in str(error)
            assert ("RuntimeError" if ctx.rank else "raised an exception at about") in str(error)
        layer.open()
        assert torch.equal(layer(rows(20)), want)


@case
def an_interrupt_behind_the_count_exchange(ctx: RankContext) -> None:
    """Where the host waits for the counts."""
    with fake(None) as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer(ep_size=1, by="nccl").open()
        layer.check(rows(20))

        def interrupt(*counts: Any) -> None:
            raise KeyboardInterrupt

        with patch.context() as inner:
            inner.setattr(nccl_dispatch, "await_counts", interrupt)
            assert isinstance(raised_by(layer, rows(20)), KeyboardInterrupt)
        assert library.log[-1] == "fail"
        error = raised(layer, rows(20))
        assert isinstance(error, DeadlineError)
        assert "failed in layer moe: KeyboardInterrupt" in str(error)


@case
def a_gate_that_names_an_expert_twice(ctx: RankContext) -> None:
    with fake():
        layer = Layer(k=8, by="nccl")  # more than the four experts of a rank
        layer.open()
        ids = torch.zeros(64, 8, dtype=torch.int32)
        routing = dataclasses.replace(own_routing(layer.moe, rows(64)), expert_ids=ids)
        layer.backend._library.tilemoe_exchange_launch = lambda p, _: memory(
            p.plan.counts, np.int32, 2, EXPERTS
        ).__setitem__((slice(None), 0), 512)
        error = raised(layer.backend.forward, layer.shape, layer.experts, rows(64), routing)
        assert isinstance(error, DeadlineError)
        assert "rank 0 of the group was to get 1024 rows" in same_everywhere(str(error))


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
