"""The CUDA backend's own work on two ranks without a GPU: see cuda_library_fake.py."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_library_fake import FakeLibrary, FakeLink, NoWaits, capture, install, memory
from moe_models import dense_experts, fill, make_moe, own_routing, raised, same_everywhere, tokens
from torch import Tensor, nn

from ds_tilemoe import reference
from ds_tilemoe.backends import cuda_abi, cuda_blocks, cuda_split, nccl_dispatch
from ds_tilemoe.backends.base import LayerChange, LayerShape
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.backends.cuda_limits import fused_obstacle
from ds_tilemoe.calibration import typical
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    RankFailure,
    TileMoEError,
)
from ds_tilemoe.layers.experts import AutocastExpert, LocalExpert
from ds_tilemoe.layers.recognise import find_recipe
from ds_tilemoe.testing import RankContext, case, rank_tests

HIDDEN, FFN, EXPERTS = 64, 96, 8


@contextmanager
def fake(group: Any = "world") -> Iterator[tuple[FakeLibrary, FakeLink]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield install(monkeypatch, dist.group.WORLD if group == "world" else group)


class Layer:
    """A MoE's experts on a backend of their own."""

    def __init__(self, kind: Any = "mlp", dtype: torch.dtype = torch.bfloat16, **block: Any):
        topk, ep_size = block.pop("k", 2), block.pop("ep_size", 2)
        hidden = block.pop("hidden", HIDDEN)
        options = {"hidden": hidden, "drop_tokens": False, "min_capacity": 0}
        self.moe = make_moe(ep_size, kind, k=topk, **options).to(dtype)
        modules = list(self.moe.deepspeed_moe.experts.deepspeed_experts)
        recipe = find_recipe(modules[0], hidden)
        self.experts: list[Any] = [LocalExpert(module, recipe) for module in modules]
        ffn = hidden if kind == "plain" else FFN
        dispatch = "nccl" if fused_obstacle(self.experts, dtype) else "fused"
        self.shape = LayerShape(
            "moe", EXPERTS, topk, hidden, ffn, hidden, dtype, "cuda", block.pop("by", dispatch)
        )
        group = None if ep_size == 1 else self.moe.deepspeed_moe.ep_group
        if "adaptive" not in block:  # and a consumer, although there are few tiles
            block = {"adaptive": {"enabled": False}, "num_consumer_ctas": 8, **block}
        self.backend = CudaBackend(group, TileOverlapConfig(**block))

    def open(self, max_tokens: int = 64) -> Layer:
        self.backend.ensure([self.shape], max_tokens)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            routing = self.backend.route(self.moe.deepspeed_moe.gate, x)
            return self.backend.forward(self.shape, self.experts, x, routing)

    def fails(self, x: Tensor, problem: Any) -> Exception:
        return raised(self.backend.forward, self.shape, self.experts, x, problem)

    def check(self, x: Tensor) -> Tensor:
        everyone = []
        for e in range(EXPERTS):
            twin = copy.deepcopy(self.experts[0].expert).float()
            fill(twin, e)
            everyone.append(twin.to(x.dtype).float())
        with torch.no_grad():
            want = reference.moe(x.float(), own_routing(self.moe, x), everyone)
        y = self(x)
        assert y.shape == want.shape
        assert y.dtype == x.dtype
        assert ((y.float() - want).norm(dim=1) <= 8e-3 * want.norm(dim=1)).all()
        return y


def rows(
    count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, hidden: int = HIDDEN
) -> Tensor:
    return tokens(count, hidden, seed=seed, dtype=dtype)


STEADY = ["router", "exchange", "dispatch and front", "SM"]


@case(kind=["mlp", "swiglu", "megatron", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    """By GEMM 1's kernel, and by NCCL, where the front is torch's or the kernel's own."""
    for dtype, k in ((torch.bfloat16, 2), (torch.float16, 1)):
        results = []
        for by in ("fused", "nccl")[kind == "plain" :]:
            with fake() as (library, _):
                layer = Layer(kind, dtype, k=k, layout=layout, by=by).open()
                results.append(layer.check(rows(40, dtype=dtype)))
                layer.check(rows((0, 7)[ctx.rank], seed=1, dtype=dtype))
                log = [word for word in library.log if word != "waits"]
                front = {"fused": ["dispatch and front"], "nccl": ["front"]}[by]
                assert log == 2 * ["router", "exchange", *(front if kind != "plain" else []), "SM"]
        assert all(torch.equal(result, results[0]) for result in results)


@case
def a_steady_forward_waits_for_nothing(ctx: RankContext) -> None:
    for kind, k in (("mlp", 1), ("swiglu", 2), ("mlp", 8)):
        with fake() as (library, _):
            layer = Layer(kind, k=k).open()
            layer(rows(40))
            library.log.clear()
            with NoWaits(library):
                for count in (40, 40, (0, 3)[ctx.rank]):
                    layer(rows(count))
                    layer.backend.poll_records()
            assert library.log == 3 * STEADY
    with fake() as (library, _):
        layer = Layer(router="deepspeed").open()
        layer.check(rows(40))
        words = [word for word in library.log if word != "waits"]
        assert words == ["places", *STEADY[1:]], "DeepSpeed's gate has no places"
    with fake() as (library, _):
        layer = Layer(by="nccl").open()
        layer(rows(40))
        with NoWaits(library):
            assert "tolist waits" in str(raised_by(layer, rows(40))), "the mode finds what waits"


def raised_by(function: Any, *arguments: Any) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("wanted an exception")


@case
def gated_in_one_matrix_and_other_fronts(ctx: RankContext) -> None:
    class Fused(nn.Module):
        def __init__(self, gate_first: bool) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, 2 * FFN)
            self.down = nn.Linear(FFN, HIDDEN)
            self.gate_first = gate_first

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.up(x).chunk(2, dim=-1)
            pair = (first, second) if self.gate_first else (second, first)
            return self.down(nn.functional.silu(pair[0]) * pair[1])

    tanh = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Tanh(), nn.Linear(FFN, HIDDEN))
    for expert, by_kernel in ((Fused(True), True), (Fused(False), True), (tanh, False)):
        with fake() as (library, _):
            Layer(expert).open().check(rows(30))
            assert ("dispatch and front" in library.log) is by_kernel


@case
def under_autocast(ctx: RankContext) -> None:
    """fp32 weights are cast in each call, so their addresses differ from call to call."""
    with fake() as (library, _):
        layer = Layer(dtype=torch.float32)
        assert "autocast" in str(fused_obstacle(layer.experts, torch.bfloat16))
        layer.shape = dataclasses.replace(layer.shape, dtype=torch.bfloat16, dispatch="nccl")
        layer.experts = [AutocastExpert(cut, torch.bfloat16) for cut in layer.experts]
        layer.open()
        x = rows(30)
        routing = own_routing(layer.moe, x.float())
        want = reference.moe(x.float(), routing, dense_experts(layer.moe))
        for _ in range(2):
            y = layer.backend.forward(layer.shape, layer.experts, x, routing)
            assert ((y.float() - want).norm(dim=1) <= 1.2e-2 * want.norm(dim=1)).all()
        assert "front" not in library.log, "the activation is autocast's"


@case
def weights_that_move(ctx: RankContext) -> None:
    with fake():
        layer = Layer().open()
        want = layer.check(rows(20))
        for cut in layer.experts:
            for linear in (cut.expert[0], cut.expert[2]):
                odd = torch.empty(linear.weight.numel() + 1, dtype=torch.bfloat16)[1:]
                odd.copy_(linear.weight.data.flatten())  # from no multiple of 16 bytes on
                linear.weight.data = odd.view(linear.weight.shape)
        assert torch.equal(layer(rows(20)), want)
        with torch.no_grad():
            for cut in layer.experts:
                cut.expert[2].weight.mul_(2)
                cut.expert[2].bias.mul_(2)
        assert torch.equal(layer(rows(20)), 2 * want)


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
                assert "rank 1 of the group heard too late that call 2 had failed" in str(error)
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
def two_threads_in_a_group(ctx: RankContext) -> None:
    """The second is refused, by the router too: the params of its launch are one for all."""
    with fake(None) as (library, _):
        layer = Layer(ep_size=1).open()
        want = layer.check(rows(20))
        gate, launch = layer.moe.deepspeed_moe.gate, library.tilemoe_router_launch
        routing = layer.backend.route(gate, rows(20))
        refused: list[Exception] = []

        def meanwhile(*arguments: Any) -> int:
            library.tilemoe_router_launch = launch
            with ThreadPoolExecutor(1) as other:
                for function, given in (
                    (layer.backend.route, (gate, rows(20))),
                    (layer.backend.forward, (layer.shape, layer.experts, rows(20), routing)),
                ):
                    refused.append(other.submit(raised, function, *given).result())
            return launch(*arguments)

        library.tilemoe_router_launch = meanwhile
        assert torch.equal(layer(rows(20)), want)
        names = [str(error).partition(": another thread is inside")[0] for error in refused]
        assert names == ["the router", "layer moe"]
        assert all(type(error) is TileMoEError for error in refused)
        assert torch.equal(layer(rows(20)), want), "whoever was refused holds nothing"


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
def a_timeout_without_an_end(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_blocks, "group_timeout_s", lambda *_: 1e300)
        assert cuda_blocks.exchange_timeout_ns(None) == 10**18


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


@case
def a_gate_that_names_an_expert_twice(ctx: RankContext) -> None:
    with fake():
        layer = Layer(k=8, by="nccl")  # more than the four experts of a rank
        layer.open()
        ids = torch.zeros(64, 8, dtype=torch.int32)
        routing = dataclasses.replace(own_routing(layer.moe, rows(64)), expert_ids=ids)
        layer.backend._library.tilemoe_exchange_launch = lambda p, _: memory(
            p.counts, np.int32, 2, EXPERTS
        ).__setitem__((slice(None), 0), 512)
        error = raised(layer.backend.forward, layer.shape, layer.experts, rows(64), routing)
        assert isinstance(error, DeadlineError)
        assert "rank 0 of the group was to get 1024 rows" in same_everywhere(str(error))


@case
def what_the_kernels_cannot_run(ctx: RankContext) -> None:
    """It is refused before any memory is made, and the heap that there is stays."""
    with fake() as (_, link):
        layer = Layer()
        for change, words in (
            ({"hidden": 130, "out": 130}, "hidden width is 130; on CUDA it has to be a multiple"),
            ({"ffn": 33}, "ffn width is 33; on CUDA it has to be a multiple of 8"),
            ({"dtype": torch.float32}, "give float32; on CUDA only bfloat16 and float16"),
            ({"num_experts": 2048}, "2048 experts on 2 ranks; on CUDA at most 1024"),
        ):
            bad = dataclasses.replace(layer.shape, name="odd", **change)
            error = raised(layer.backend.ensure, [layer.shape, bad], 64)
            assert isinstance(error, ValueError)
            text = same_everywhere(str(error))
            assert text.startswith("layer odd: ")
            assert words in text
        assert link.sizes == []
        want = layer.open().check(rows(20))
        assert isinstance(raised(layer.backend.ensure, [bad], 64), ValueError)
        assert torch.equal(layer(rows(20)), want)


@case
def heap_is_kept_while_it_is_large_enough(ctx: RankContext) -> None:
    with fake():
        layer = Layer().open(64)
        first = layer.backend._heap
        layer.open(32)
        assert layer.backend._heap is first
        layer.check(rows(64))
        layer.open(100)
        assert layer.backend._heap is not first
        layer.check(rows(100))
        assert (
            raised(layer.backend.ensure, [layer.shape], 128, False)
            .args[0]
            .startswith("layer moe: the heap would have to grow, but memory is made by all ranks")
        )
        layer.check(rows(100))
        error = raised(layer.backend.ensure, [layer.shape], 2**30)
        assert isinstance(error, CapacityError)
        assert "max_tokens_per_rank" in same_everywhere(str(error))
        layer.check(rows(100))


@case
def records_of_calls(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(stats=True).open()
        counts = (20, 3, 64)
        for count in counts:
            layer(rows(count))
        assert layer.backend.last_stats is None, "nobody waits for the stats of a steady call"
        records = layer.backend.poll_records()
        assert layer.backend.poll_records() == []
        assert [record.epoch for record in records] == [1, 2, 3]
        assert [record.tokens for record in records] == list(counts)
        assert {layer.backend.layer_name(record) for record in records} == {"moe"}
        for record in records:
            assert record.iteration.epoch == record.epoch
            assert record.times.router_start == -1
            assert record.times.scale_end == 70
            assert 0 < record.remote_rows < record.rows
            assert record.consumer_ctas == 8
        layer(rows(20))
        layer.backend.mover = "sequential"
        layer(rows(20))
        assert library.log[-1] == "SEQUENTIAL"
        assert layer.backend.last_stats is not None
        assert layer.backend.last_stats is None, "a record is handed out once"
        assert [record.epoch for record in layer.backend.poll_records()] == [4]


@case
def records_that_nobody_asked_for(ctx: RankContext) -> None:
    with fake(None):
        layer = Layer(ep_size=1).open()
        for _ in range(300):
            layer(rows(1))
        epochs = [record.epoch for record in layer.backend.poll_records()]
        assert epochs == list(range(45, 301)), "the ring holds 256"


@case
def captured(ctx: RankContext) -> None:
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer().open()
        with capture(patch):
            assert "run one forward before the capture" in str(raised(layer, rows(4)))
        want = layer(rows(4))
        assert not library.exchange.wanted_ctas
        assert not library.combine.device_split
        with capture(patch), NoWaits(library):
            assert torch.equal(layer(rows(4)), want)
        words = library.exchange.wanted_ctas
        assert memory(words, np.int32, 1)[0] == 8
        assert library.combine.device_split == 1
        assert library.combine.num_consumer_ctas == 32
        with capture(patch):
            layer(rows(40))
            assert library.exchange.wanted_ctas == words + 4 * 4, "a word a size bucket"
            log = list(library.log)
            assert isinstance(raised(layer, rows(65)), CapacityError)
            assert isinstance(layer.fails(rows(3), KeyError("x")), KeyError)
            assert library.log[len(log) :] == ["router"], "nothing runs, so nobody is told"
            layer.experts[0].expert[0].weight.data = layer.experts[0].expert[0].weight.data.clone()
            assert "not where they were" in str(raised(layer, rows(4)))
        assert torch.equal(layer(rows(4)), want)
        error = raised(layer.open, 128)
        assert isinstance(error, CapacityError)
        assert "a CUDA graph has been captured with it" in same_everywhere(str(error))
        assert "128 tokens a rank" in str(error)
        assert "max_tokens_per_rank" in str(error)
        assert torch.equal(layer(rows(4)), want)
        library.fail_combine = True
        layer(rows(4))
        library.fail_combine = False
        layer.open(128)  # a heap that has failed is of no use to the graph either
        assert torch.equal(layer(rows(4)), want)
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer(num_consumer_ctas="auto", mover="sm").open()
        layer(rows(4))
        most = layer.backend._splits._most_captured()
        patch.setattr(layer.backend._splits, "_num_consumers", lambda: 8)
        patch.setattr(layer.backend._splits, "_most_captured", lambda: 5)
        with capture(patch):
            layer(rows(4))
        assert most > 5
        assert memory(library.exchange.wanted_ctas, np.int32, 1)[0] == 5, "no more than there are"
    with fake(), pytest.MonkeyPatch.context() as patch:
        layer = Layer(by="nccl").open()
        layer(rows(4))
        with capture(patch):
            assert "cannot be captured" in str(raised(layer, rows(4)))


@case
def choices(ctx: RankContext) -> None:
    with fake(None) as (library, _):
        alone = Layer(ep_size=1).open()
        alone.check(rows(20))
        assert library.log[-1] == "NONE", "a group of one has nothing to ship"
    with fake() as (library, _):
        auto = {"num_consumer_ctas": "auto"}
        for block, consumers, used in (
            (auto, 8, 0),  # as there are few tiles
            ({"mover": "sm", **auto}, 8, 8),
            ({"num_consumer_ctas": 131}, 131, 131),
            ({"mover": "sm", "max_consumer_ctas": 4, **auto}, 4, 4),
            ({"min_consumer_ctas": 12, **auto}, 12, 12),
            ({"mover": "none"}, 8, 0),
        ):
            layer = Layer(**block).open()
            layer(rows(20))
            assert layer.backend.chosen["num_consumer_ctas"] == consumers
            assert library.exchange.consumer_ctas == library.combine.num_consumer_ctas == used
            assert TileOverlapConfig(**layer.backend.chosen)
        assert library.log[-1] == "NONE"
        layer = Layer(local_tail_waves=2, tile_n=256, transport="nvshmem").open()
        layer.check(rows(64))
        assert library.params is not None
        assert library.params.local_tail_bands == 2 * 132
        assert library.combine.transport == cuda_abi.Transport.PUT
        assert memory(library.combine.pes, np.int32, 2).tolist() == [0, 1]
        problem = layer.fails(rows(3).float(), own_routing(layer.moe, rows(3)))
        assert isinstance(problem, TypeError)


@case
def the_controller_chooses(ctx: RankContext) -> None:
    """By the machine at first, then by what calls leave behind; within explicit settings."""
    on = {"adaptive": {"enabled": True}}
    with fake() as (library, _):
        layer = Layer(**on).open()
        layer.check(rows(64))
        assert library.log[-1] == "NONE", "so few rows are shipped faster without a kernel"
        assert library.exchange.consumer_ctas == 0
        layer = Layer(num_consumer_ctas=3, mover="sm", local_tail_waves="all", **on).open()
        layer.check(rows(64))
        assert library.log[-1] == "SM"
        assert library.exchange.consumer_ctas == 3
        assert library.params is not None
        assert library.params.local_tail_bands == -1
        assert layer.backend.chosen["local_tail_waves"] == "all"
        assert TileOverlapConfig(**layer.backend.chosen)
    # So slow that even these rows want consumers at first; what calls report says otherwise.
    slow = dataclasses.replace(
        typical(4), tile_base_ns=2e4, rate_per_cta=0.2, drain_rate=0.07, link=0.6
    )
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_split, "measured_machine", lambda *_: slow)
        layer = Layer(**on).open()
        library.iteration = (1, 100_000, 3, 4, 5, 0, 7, 8)
        library.scale_end = 2 * cuda_split.SHORT_NS  # from each such call something is learnt
        backend = layer.backend
        layer(rows(64))
        first = library.exchange.consumer_ctas
        assert first > 1
        assert library.combine.num_consumer_ctas == first
        with capture(patch):
            layer(rows(64))
        word = memory(library.exchange.wanted_ctas, np.int32, 1)
        assert word[0] == first
        (controller,) = backend._splits.controllers.values()
        for _ in range(40):
            layer(rows(64))
            (record, *_) = backend.poll_records()
            chosen = controller.choose(controller.bucket_of(64))
            if chosen.num_consumer_ctas != first:
                break
        assert chosen.num_consumer_ctas != first
        assert word[0] == chosen.num_consumer_ctas, "the next replay has it"
        assert backend.explain(record) == (
            chosen._replace(num_consumer_ctas=first, mover="sm"),
            controller.why(controller.bucket_of(64)),
        )
        layer(rows(64))
        assert library.exchange.consumer_ctas == chosen.num_consumer_ctas


@case
def short_calls_teach_seldom(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(adaptive={"enabled": True}).open()
        splits, seen = layer.backend._splits, 0
        for scale_end, count, learnt in ((1000, 16, 2), (2 * cuda_split.SHORT_NS, 3, 3)):
            library.scale_end = scale_end
            for _ in range(count):
                layer(rows(20))
            layer.backend.poll_records()
            (controller,) = splits.controllers.values()
            now = controller._buckets[controller.bucket_of(20)].seen
            assert now - seen == learnt
            seen = now


@case
def calls_of_a_few_tokens(ctx: RankContext) -> None:
    """Narrow tiles where so weights are read more evenly by 132 SMs, which then have four experts'
    bands; no consumer where no SM has two tiles, in a graph either."""
    wide = 8192
    # Calls count as the next power of two. (tokens, columns of a tile of GEMM 2, of 1, mover)
    one = (1, 128, 128, "NONE")  # 64 tiles of 128 or 32 of 256 are a wave: the shorter one
    four = (4, 256, 128, "NONE")  # 256 of 128 are two waves, 128 of 256 one that is as long
    many = (600, 256, 256, "SM")  # 8 bands of 4 experts: no longer a matter of weights
    for kind in ("mlp", "swiglu"):
        with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
            layer = Layer(kind, k=1, hidden=wide, num_consumer_ctas="auto").open(1024)
            for count, down, front, mover in (one, four, many, one):
                layer.check(rows(count, hidden=wide))
                assert library.combine.kind.tile_n == down
                assert library.combine.producer.ship.n_tiles == wide // down
                # Of FFN columns, one tile a band either way; a gated GEMM has one width.
                assert library.front_tile_n == (256 if kind == "swiglu" else front)
                assert library.log[-1] == mover
            with capture(patch):
                layer(rows(1, hidden=wide))
                assert library.log[-1] == "NONE"
                assert not library.exchange.wanted_ctas
                layer(rows(600, hidden=wide))
                assert library.log[-1] == "SM"
                assert library.exchange.wanted_ctas
    with fake() as (library, _):
        uneven = 70 * 128
        Layer(k=1, hidden=uneven, num_consumer_ctas="auto").open().check(rows(4, hidden=uneven))
        # 4 bands: 280 tiles of 128 in three waves, or 140 of 256 in two that are twice as long.
        assert library.combine.kind.tile_n == 128
        assert library.log[-1] == "SM"
    with fake() as (library, _):
        Layer(hidden=wide, tile_n=256).open().check(rows(1, hidden=wide))
        assert library.combine.kind.tile_n == library.front_tile_n == 256, "as told"


@case
def routers(ctx: RankContext) -> None:
    x = rows(50)
    with fake() as (library, _):
        layer = Layer(router="fused").open()
        own = own_routing(layer.moe, x)
        gate = layer.moe.deepspeed_moe.gate
        routing = layer.backend.route(gate, x)
        assert torch.equal(routing.expert_ids, own.expert_ids)
        assert torch.allclose(routing.weights, own.weights, atol=1e-6)
        assert routing.places is not None
        layer.check(x)
        gate.noisy_gate_policy = "Jitter"
        gate.train()
        error = raised(layer.backend.route, gate, x)
        assert isinstance(error, ConfigError)
        assert "noisy_gate_policy is Jitter" in str(error)
        library.log.clear()
        auto = Layer(router="auto")
        assert auto.backend.route(gate, x).places is None
        assert library.log == []


test_ranks = rank_tests(__file__, world=2, timeout_s=150)
