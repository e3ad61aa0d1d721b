"""The operator on the CPU backend: its own forward, with a clock around combine and scale."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benches.calls import OperatorShape, Routed, Sample, Settings, Variant, random_rows
from benches.ranks import World
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.plan_abi import Layout, PlanParams
from ds_tilemoe.routing import Routing

NAN = float("nan")


class _DownProjection:
    """An expert that is its down projection: the rows dispatched are those that GEMM 2 reads."""

    front_gemm = None
    down_bias = None

    def __init__(self, weight: Tensor) -> None:
        self.down_weight = weight

    def front(self, x: Tensor) -> Tensor:
        return x


class _TimedRank:
    """The native rank with clocks; ranks begin the combine together."""

    def __init__(self, native: Any, group: dist.ProcessGroup | None) -> None:
        self._native, self._group = native, group
        self.ctas = 1
        self.us: dict[str, float] = {}
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def begin(self, **params: Any) -> None:
        self._time("exchange", self._native.begin, **params)

    def combine(self, **params: Any) -> None:
        self.hidden = params["hidden"]
        if self._group is not None:
            dist.barrier(self._group)
        self._time("combine", self._native.combine, **params | {"num_consumers": self.ctas})

    def scale(self, weights: Tensor, y: Tensor) -> None:
        self._time("scale", self._native.scale, weights, y)

    def _time(self, part: str, call: Callable[..., Any], /, *args: Any, **params: Any) -> None:
        began = time.perf_counter_ns()
        call(*args, **params)
        self.us[part] = (time.perf_counter_ns() - began) / 1e3


class CpuOperator(CpuBackend):
    """``calls.Operator`` on the CPU backend. A call also exchanges counts and dispatches, untimed.

    Args:
        world: the ranks.
        shape, dtype, settings: of the operator; tile_n "auto" is the backend's own.
        routings: what calls name by number.
        weights: [E_l, N, K].
    """

    def __init__(
        self,
        world: World,
        shape: OperatorShape,
        dtype: torch.dtype,
        settings: Settings,
        routings: Sequence[Routed],
        weights: Tensor,
    ) -> None:
        super().__init__(world.group, TileOverlapConfig(backend="cpu", **settings._asdict()))
        tokens = shape.m // shape.topk
        experts = world.ranks * shape.local_experts
        self._shape = LayerShape("operator", experts, shape.topk, shape.k, shape.k, shape.n, dtype)
        self.ensure([self._shape], tokens)
        self._rank: Any = _TimedRank(self._rank, world.group)
        self.weights = weights
        self._experts = [_DownProjection(weight) for weight in weights]
        self._x = random_rows((tokens, shape.k), 1.0, dtype, 17 + world.rank, world.device)
        self._routings = [
            Routing(
                torch.from_numpy(routed.ids),
                torch.from_numpy(routed.weights),
                torch.zeros(()),
                torch.zeros(experts, dtype=torch.int64),
            )
            for routed in routings
        ]
        self._y = self._x.new_empty(0)
        waves = settings.local_tail_waves
        self.plan_params = PlanParams(
            world=world.ranks,
            rank=world.rank,
            local_experts=shape.local_experts,
            tile_m=self.tile_m,
            layout=Layout[settings.layout.upper()],
            bands_per_segment=settings.bands_per_segment,
            local_tail_bands=waves if isinstance(waves, int) else -1,
            chunk_rows=1,
        )

    @property
    def rows(self) -> Tensor:
        assert self._rank.hidden is not None, "no call yet"
        return self._rank.hidden

    @property
    def y(self) -> Tensor:
        return self._y

    def enqueue(self, variant: Variant, routing: int) -> Callable[[], Sample]:
        """See ``calls.Operator``; the call has ended when this returns."""
        self.mover = "sequential" if variant.mover == "split" else variant.mover
        self._rank.ctas = max(1, variant.ctas)
        self._y = self.forward(self._shape, self._experts, self._x, self._routings[routing])
        us, stats = self._rank.us, self.last_stats
        assert stats is not None
        end, split = stats.producer_end / 1e3, variant.mover == "split"
        sample = Sample(
            total=us["combine"] + us["scale"],
            exchange=us["exchange"] if split else NAN,
            front=NAN,
            gemm=end if split else NAN,
            copy=us["combine"] - end if split else NAN,
            scale=us["scale"] if split else NAN,
            end=end,
            arrival=stats.last_arrival / 1e3,
            backlog=stats.backlog_at_producer_end,
            drained=stats.chunks_drained,
        )
        return lambda: sample

    def finish(self) -> None:
        """Nothing to wait for."""
