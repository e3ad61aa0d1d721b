"""What ranks of the CUDA backend hear of a failure that leaves the heap usable, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda_layer_case import Layer, fake, rows
from moe_models import own_routing, raised

from ds_tilemoe.backends import cuda_abi
from ds_tilemoe.backends.base import LayerChange
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.testing import RankContext, case, rank_tests


@case(by=["fused", "nccl"])
def failures_that_leave_the_heap_usable(ctx: RankContext, by: str) -> None:
    """The rank at fault raises at once; its peers at once where they wait anyway, else later."""
    with fake() as (library, _):
        layer = Layer(by=by)
        assert "no heap" in str(raised(layer, rows(3)))
        layer.open()
        want = layer.check(rows(20))

        def outcome(call: Any) -> Exception:
            """What a rank that is not at fault gets of a call."""
            if by == "nccl":
                return raised(call)
            assert call().isnan().all()
            return raised(layer.backend.check)

        call: Any = lambda: layer(rows(65 if ctx.rank else 3))  # noqa: E731
        error = raised(call) if ctx.rank == 1 else outcome(call)
        assert isinstance(error, CapacityError)
        assert "rank 1 of the group has too many tokens: needed 65, available 64" in str(error)
        layer.backend.check()
        assert torch.equal(layer(rows(20)), want)

        problem = ValueError("no gate")
        if ctx.rank == 0:
            assert layer.fails(rows(20), problem) is problem
        else:
            error = outcome(lambda: layer(rows(20)))
            assert isinstance(error, RankFailure)
            assert "rank 0 of the group failed in its routing" in str(error)
            assert by == "nccl" or "layer moe (call 4)" in str(error)
        layer.backend.check()
        assert torch.equal(layer(rows(20)), want), "the heap stays usable"

        other = layer.shape
        if ctx.rank:
            layer.shape = dataclasses.replace(other, name="other")
        error = outcome(lambda: layer(rows(20)))
        assert isinstance(error, RankFailure)
        assert "rank 0 moe" in str(error) if ctx.rank == 0 else "rank 1 other" in str(error)
        layer.shape = other
        assert torch.equal(layer(rows(20)), want)
        assert "fail" not in library.log


@case
def heard_by_the_next_forward(ctx: RankContext) -> None:
    with fake():
        layer = Layer().open()
        want = layer.check(rows(20))
        if ctx.rank == 0:
            assert isinstance(layer.fails(rows(20), KeyError("x")), KeyError)
        else:
            assert layer(rows(20)).isnan().all()
            error = raised(layer, rows(20))
            assert isinstance(error, RankFailure)
            assert "rank 0 of the group failed" in str(error)
            assert "ds_tilemoe.check(engine) after each step" in str(error)
        if ctx.rank == 0:
            assert layer(rows(20)).isnan().all(), "its peer has raised instead of a call"
        assert isinstance(raised(layer, rows(20)), DeadlineError), "no rank goes on out of step"
        layer.open()
        assert torch.equal(layer(rows(20)), want)


@case
def heard_with_calls_behind(ctx: RankContext) -> None:
    """The host of a peer had run ahead and looks at nothing: its device ends the group."""
    for by_check in (False, True):
        with fake() as (library, _):
            layer = Layer().open()
            want = layer.check(rows(20))
            if ctx.rank == 0:
                assert isinstance(layer.fails(rows(20), KeyError("x")), KeyError)
                assert layer(rows(20)).isnan().all()
                error = raised(*((layer.backend.check,) if by_check else (layer, rows(20))))
                assert isinstance(error, DeadlineError)
                late = "rank 1 of the group heard too late that call 2 had failed because of rank 0"
                assert late in str(error)
            else:
                failures = layer.backend._heap.failures
                layer(rows(20))
                hear, failures.hear = failures.hear, lambda: None  # it does not look
                assert layer(rows(20)).isnan().all()
                failures.hear = hear
                error = raised(*((layer.backend.check,) if by_check else (layer, rows(20))))
                assert isinstance(error, RankFailure)
                assert "call 2" in str(error)
                assert "group has failed" in str(error)
            assert library.log.count("fail") == (ctx.rank == 1 and not by_check)
            assert isinstance(raised(layer, rows(20)), DeadlineError)
            layer.open()
            assert torch.equal(layer(rows(20)), want)


@case
def heard_while_another_device_is_current(ctx: RankContext) -> None:
    """A default stream's handle 0 is that of the current device, which must be the backend's."""
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer().open()
        want = layer.check(rows(20))
        if ctx.rank == 0:
            assert layer(rows(3)).isnan().all()
        else:
            assert isinstance(raised(layer, rows(65)), CapacityError)
        heap: Any = layer.backend._heap
        own, seen = layer.backend._index, []
        now: list[Any] = ["another"]

        @contextmanager
        def device(wanted: torch.device) -> Iterator[None]:
            before, now[0] = now[0], wanted.index
            try:
                yield
            finally:
                now[0] = before

        def noting(function: Any) -> Any:
            def note(*arguments: Any) -> Any:
                seen.append((function.__name__, now[0]))
                return function(*arguments)

            return note

        patch.setattr(torch.cuda, "current_device", lambda: now[0])
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(library, "tilemoe_say_heard", noting(library.tilemoe_say_heard))
        patch.setattr(heap, "group_failure", noting(heap.group_failure))
        assert layer.backend.failure() == ""
        assert seen == [("group_failure", own)]
        if ctx.rank == 0:
            assert isinstance(raised(layer.backend.check), CapacityError)
        else:
            layer.backend.check()
        assert seen[1:] == [("group_failure", own), ("tilemoe_say_heard", own)][: 2 - ctx.rank]
        assert now == ["another"]
        patch.undo()
        assert torch.equal(layer(rows(20)), want)


@case
def every_rank_fails_in_the_same_call(ctx: RankContext) -> None:
    """Each has raised its own exception, and has nothing to hear: the heap stays usable."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(20))
        for problem in (KeyError("x"), TileMoEError("y")):
            assert layer.fails(rows(20), problem) is problem
            layer.backend.check()
            assert torch.equal(layer(rows(20)), want)
        error = raised(layer, rows(65))
        assert isinstance(error, CapacityError)
        assert f"rank {ctx.rank} of the group" in str(error)
        layer.backend.check()
        assert torch.equal(layer(rows(20)), want)
        assert "fail" not in library.log


@case
def a_worse_failure_beside_an_unread_one(ctx: RankContext) -> None:
    """The host's word is taken; the block has it."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(20))
        heap = layer.backend._heap
        if ctx.rank == 0:
            assert isinstance(layer.fails(rows(20), KeyError("x")), KeyError)
        else:
            layer(rows(20))
        library.failed = (cuda_abi.Outcome.DEADLINE, 0, 3, 7, cuda_abi.Wait.ARRIVALS)
        library._tell(heap.view, *library.failed)
        assert "waited too long for rows" in layer.backend.failure()
        assert isinstance(raised(layer.backend.check), DeadlineError)
        layer.open()
        assert layer.backend._heap is not heap
        assert torch.equal(layer(rows(20)), want)


@case
def a_capacity_error_of_few_tokens(ctx: RankContext) -> None:
    """The tokens do not say it to the peers, so the status word has to."""
    with fake():
        layer = Layer().open()
        want = layer.check(rows(20))
        if ctx.rank == 0:
            assert isinstance(layer.fails(rows(20), CapacityError("x")), CapacityError)
        else:
            assert layer(rows(20)).isnan().all()
            assert isinstance(raised(layer.backend.check), RankFailure)
        assert torch.equal(layer(rows(20)), want)


@case
def a_layer_that_changes(ctx: RankContext) -> None:
    """On all ranks in one call: they may meet. On one: it raises, and so do its peers."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(20))
        change = LayerChange("now in float32")
        assert layer.fails(rows(20), change) is change
        assert torch.equal(layer(rows(20)), want)
        if ctx.rank == 1:
            error = layer.fails(rows(20), change)
            assert "not on ranks [0]" in str(error)
            assert error.__cause__ is change
        else:
            assert layer(rows(20)).isnan().all()
            error = raised(layer.backend.check)
            assert "rank 1 of the group called it in another way" in str(error)
            assert "1 of 2 ranks did not" in str(error)
        assert isinstance(error, RankFailure)
        assert not isinstance(error, LayerChange)
        assert torch.equal(layer(rows(20)), want)
        assert "fail" not in library.log


@case
def a_call_that_cannot_be_prepared(ctx: RankContext) -> None:
    """Nothing has been sent yet, so the heap stays usable."""
    with fake() as (library, _):
        layer = Layer().open()
        want = layer.check(rows(20))
        if ctx.rank == 1:
            library.raises = "tilemoe_places_launch"
            bare = own_routing(layer.moe, rows(20))
            assert "was told to" in str(layer.fails(rows(20), bare))
        else:
            assert layer(rows(20)).isnan().all()
            assert isinstance(raised(layer.backend.check), RankFailure)
        assert torch.equal(layer(rows(20)), want)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
