"""The CUDA backend's own work on two ranks without a GPU: see cuda_library_fake.py."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_library_fake import FakeLibrary, FakeLink, install, memory
from moe_models import dense_experts, fill, make_moe, own_routing, raised, same_everywhere, tokens
from torch import Tensor, nn

from ds_tilemoe import reference
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.layers.experts import AutocastExpert, LocalExpert
from ds_tilemoe.layers.recognise import find_recipe
from ds_tilemoe.testing import RankContext, case, rank_tests

HIDDEN, FFN, EXPERTS = 64, 96, 8


@contextmanager
def fake() -> Iterator[tuple[FakeLibrary, FakeLink]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield install(monkeypatch)


class Layer:
    """A MoE's experts on a backend of their own."""

    def __init__(self, kind: Any = "mlp", dtype: torch.dtype = torch.bfloat16, **block: Any):
        topk, ep_size = block.pop("k", 2), block.pop("ep_size", 2)
        self.moe = make_moe(ep_size, kind, k=topk, drop_tokens=False).to(dtype)
        modules = list(self.moe.deepspeed_moe.experts.deepspeed_experts)
        recipe = find_recipe(modules[0], HIDDEN)
        self.experts: list[Any] = [LocalExpert(module, recipe) for module in modules]
        self.shape = LayerShape("moe", EXPERTS, topk, HIDDEN, FFN, HIDDEN, dtype, "cuda")
        if kind == "plain":
            self.shape = LayerShape("moe", EXPERTS, topk, HIDDEN, HIDDEN, HIDDEN, dtype, "cuda")
        group = None if ep_size == 1 else dist.group.WORLD
        self.backend = CudaBackend(group, TileOverlapConfig(**block))

    def open(self, max_tokens: int = 64) -> Layer:
        self.backend.ensure([self.shape], max_tokens)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.backend.forward(self.shape, self.experts, x, own_routing(self.moe, x))

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


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return tokens(count, HIDDEN, seed=seed, dtype=dtype)


@case(kind=["mlp", "swiglu", "megatron", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    for dtype, k in ((torch.bfloat16, 2), (torch.float16, 1)):
        with fake() as (library, _):
            layer = Layer(kind, dtype, k=k, layout=layout).open()
            layer.check(rows(40, dtype=dtype))
            layer.check(rows((0, 7)[ctx.rank], seed=1, dtype=dtype))
            front = [] if kind == "plain" else ["front"]
            assert library.log == 2 * ["exchange", *front, "SM"]


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
            assert ("front" in library.log) is by_kernel


@case
def under_autocast(ctx: RankContext) -> None:
    """fp32 weights are cast in each call, so their addresses differ from call to call."""
    with fake() as (library, _):
        layer = Layer(dtype=torch.float32)
        layer.shape = dataclasses.replace(layer.shape, dtype=torch.bfloat16)
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


@case
def failures_known_at_the_exchange(ctx: RankContext) -> None:
    with fake():
        layer = Layer()
        assert "no heap" in str(raised(layer, rows(3)))
        layer.open()
        want = layer.check(rows(20))
        error = raised(layer, rows(65 if ctx.rank else 3))
        assert isinstance(error, CapacityError)
        assert "rank 1 of the group" in same_everywhere(str(error))
        assert "needed 65, available 64" in str(error)
        problem = ValueError("no gate") if ctx.rank == 0 else own_routing(layer.moe, rows(20))
        error = raised(layer.backend.forward, layer.shape, layer.experts, rows(20), problem)
        assert isinstance(error, RankFailure)
        wanted = "rank 0 of the group failed in its routing: ValueError: no gate"
        assert wanted in same_everywhere(str(error))
        assert (error.__cause__ is problem) is (ctx.rank == 0)
        other = layer.shape
        if ctx.rank:
            layer.shape = LayerShape("other", EXPERTS, 2, HIDDEN, FFN, HIDDEN, other.dtype, "cuda")
        error = raised(layer, rows(20))
        assert isinstance(error, RankFailure)
        assert "rank 0 moe, rank 1 other" in same_everywhere(str(error))
        layer.shape = other
        assert torch.equal(layer(rows(20)), want)


@case
def failures_behind_it(ctx: RankContext) -> None:
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
        layer.open()
        assert layer.backend.failure() == ""
        assert torch.equal(layer(rows(20)), want)
        gc.collect()
        layer.open(128)
        assert link.freed >= 1, "blocks of heaps that are gone are given back"


@case
def a_gate_that_names_an_expert_twice(ctx: RankContext) -> None:
    with fake():
        layer = Layer(k=8)  # more than the four experts of a rank
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
        error = raised(layer.backend.ensure, [layer.shape], 2**30)
        assert isinstance(error, CapacityError)
        assert "max_tokens_per_rank" in same_everywhere(str(error))
        layer.check(rows(100))


@case
def stats_when_asked_for(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer().open()
        layer(rows(20))
        assert layer.backend.last_stats is None
        layer.backend.mover = "sequential"
        layer(rows(20))
        assert library.log[-1] == "SEQUENTIAL"
        assert layer.backend.last_stats is not None
        assert layer.backend.last_stats.epoch == 2
        assert Layer(stats=True).open()(rows(3)) is not None


@case
def choices(ctx: RankContext) -> None:
    with fake() as (library, _):
        alone = Layer(ep_size=1).open()
        alone(rows(20))
        assert library.log[-1] == "NONE", "a group of one has nothing to ship"
        for block, consumers in (
            ({}, 8),
            ({"num_consumer_ctas": 131}, 131),
            ({"max_consumer_ctas": 4}, 4),
            ({"min_consumer_ctas": 12}, 12),
            ({"mover": "none"}, 8),
        ):
            layer = Layer(**block).open()
            layer(rows(20))
            assert layer.backend.chosen["num_consumer_ctas"] == consumers
            assert TileOverlapConfig(**layer.backend.chosen)
        assert library.log[-1] == "NONE"
        layer = Layer(local_tail_waves=2, tile_n=256).open()
        layer.check(rows(64))
        assert library.params is not None
        assert library.params.local_tail_bands == 2 * 132
        problem = raised(
            layer.backend.forward, layer.shape, [], rows(3).float(), own_routing(layer.moe, rows(3))
        )
        assert isinstance(problem, TileMoEError)


test_ranks = rank_tests(__file__, world=2, timeout_s=150)
