"""A layer on the CPU backend without DeepSpeed, every value of whose result is known."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.routing import Routing
from ds_tilemoe.testing import RankContext, init_cpu_group, tagged_rows

LOCAL_EXPERTS = 2


@dataclass
class Scaled:
    """An expert that multiplies a row by a whole number: exact, so equality is bit for bit."""

    factor: int
    hidden: int
    delay_s: float = 0.0
    fault: Exception | None = None

    def front(self, x: Tensor) -> Tensor:
        time.sleep(self.delay_s)
        if self.fault is not None:
            raise self.fault
        return x

    @property
    def down_weight(self) -> Tensor:
        return torch.eye(self.hidden) * self.factor

    down_bias = None


@dataclass
class Run:
    """A backend, a layer that it is ready for, and this rank's tokens for one call of it."""

    rank: int
    backend: CpuBackend
    shape: LayerShape
    iteration: int
    ids: Tensor
    x: Tensor

    def forward(self, routing: Routing | Exception | None = None, **expert: object) -> Tensor:
        """The layer's result; ``expert`` are options of this rank's :class:`Scaled`."""
        routing = routing_of(self.ids) if routing is None else routing
        experts = experts_of(self.rank, self.shape.hidden, **expert)
        return self.backend.forward(self.shape, experts, self.x, routing)

    def is_right(self, y: Tensor) -> bool:
        wanted = expected(self.iteration, self.rank, self.ids, self.shape.hidden)
        return torch.equal(y, wanted)


def ready(
    ctx: RankContext,
    tokens: int = 5,
    *,
    iteration: int = 0,
    room: int = 16,
    shape: LayerShape | None = None,
    ids: Tensor | None = None,
    **block: object,
) -> Run:
    """A :class:`Run` of all ranks with random routes, on a heap for ``room`` tokens a rank."""
    backend, shape = backend_of(**block), shape or shape_of(ctx.world)
    backend.ensure([shape], room)
    if ids is None:
        ids = draw_ids(random.Random(ctx.rank), tokens, shape.topk, shape.num_experts)
    x = rows_of(iteration, ctx.rank, len(ids), shape.hidden)
    return Run(ctx.rank, backend, shape, iteration, ids, x)


def backend_of(**block: object) -> CpuBackend:
    init_cpu_group()
    return CpuBackend(dist.group.WORLD, TileOverlapConfig(**block))


def shape_of(world: int, hidden: int = 32, topk: int = 2, name: str = "layer") -> LayerShape:
    return LayerShape(name, world * LOCAL_EXPERTS, topk, hidden, hidden, hidden, torch.float32)


def experts_of(rank: int, hidden: int, **options: object) -> list[Scaled]:
    first = rank * LOCAL_EXPERTS
    return [Scaled(first + e + 1, hidden, **options) for e in range(LOCAL_EXPERTS)]


def routing_of(ids: Tensor) -> Routing:
    weights = torch.ones(ids.shape)
    weights[:, 1:] = 2.0
    # Loss and counts of the gate are for DeepSpeed: no backend reads them.
    return Routing(ids.to(torch.int32), weights, torch.zeros(()), torch.zeros(0).long())


def draw_ids(rng: random.Random, tokens: int, topk: int, experts: int) -> Tensor:
    hot = rng.randrange(experts) if rng.random() < 0.3 else None
    rows = []
    for _ in range(tokens):
        chosen = rng.sample(range(experts), topk)
        if hot is not None and hot not in chosen:
            chosen[0] = hot
        rows.append([-1 if rng.random() < 0.1 else e for e in chosen])
    return torch.tensor(rows, dtype=torch.int32).reshape(tokens, topk)


def expected(iteration: int, rank: int, ids: Tensor, hidden: int) -> Tensor:
    """Sum over k of weight * factor * row; every term a multiple of 2**-10, below 2**7."""
    tokens, topk = ids.shape
    total = torch.zeros(tokens, hidden)
    x = rows_of(iteration, rank, tokens, hidden)
    for k in range(topk):
        factor = torch.where(ids[:, k] >= 0, ids[:, k] + 1, 0)
        total += (1.0 if k == 0 else 2.0) * factor[:, None] * x
    return total


def rows_of(iteration: int, rank: int, tokens: int, hidden: int) -> Tensor:
    token = torch.arange(tokens)
    # 2**-10 steps keep the sums exact in fp32.
    tags = tagged_rows(iteration, rank, token, torch.zeros_like(token), hidden)
    return torch.floor(tags * 1024) / 1024
