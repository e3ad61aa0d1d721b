"""One MoE layer's experts on a CUDA backend of their own: see cuda_library_fake.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_library_fake import FakeLibrary, FakeLink, install
from moe_models import fill, make_moe, own_routing, raised, tokens
from torch import Tensor

from ds_tilemoe import reference
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.backends.cuda_limits import fused_obstacle
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.layers.experts import LocalExpert
from ds_tilemoe.layers.recognise import find_recipe

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
            block = {"adaptive": {"enabled": False}, **block}
            if block.get("mover", "sm") == "sm":
                block = {"num_consumer_ctas": 8, **block}
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


def raised_by(function: Any, *arguments: Any) -> BaseException:
    try:
        function(*arguments)
    except BaseException as error:
        return error
    raise AssertionError("wanted an exception")
