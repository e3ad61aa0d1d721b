"""The CPU twin as a backend: the tile protocol with one process a rank and shared memory.

Source: csrc/cpu/rank.h, which holds the protocol; this file makes buffers and calls it.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_tilemoe.backends.base import (
    AUTO_TILE_M,
    Expert,
    LayerShape,
    bands_per_segment,
    local_problem,
)
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import MAX_CPU_CONSUMERS, without_unused
from ds_tilemoe.controller import Controller, Limits, observation
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice, Machine, Work
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.op_builder import CPUTileMoEBuilder
from ds_tilemoe.routing import Routing
from ds_tilemoe.stats import IterationStats
from ds_tilemoe.symmetric_heap import (
    HeapShape,
    SymmetricHeap,
    gather,
    group_timeout_s,
    in_step,
    open_heap,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_CHUNK_BYTES = 128 * 1024
_LAYOUTS = {"auto": 0, "compact": 0, "aligned": 1}
_MOVERS = {"auto": 0, "sm": 0, "none": 1, "sequential": 2}
# Where the controller starts from: one thread copies 4 GB/s, and a second one adds as much. Its own
# calls correct that, so nothing is measured beforehand. A consumer thread takes no core from the
# producer as long as there are cores.
_MACHINE = Machine(
    sms=1,
    rate_per_cta=4.0,
    drain_rate=4.0,
    link=8.0,
    tile_base_ns=2000.0,
    tile_ns_per_k=400.0,
    lone_share=1.0,
    start_share=0.0,
    consumer_takes_sm=False,
    launch_ns=0.0,
    drain_start_ns=0.0,
)


class CpuBackend:
    """``Backend`` of one expert-parallel group on the CPU.

    Args:
        group: the group; None for a group of one rank.
        config: the ``tile_overlap`` block.

    Attributes:
        mover: "sm", "none" or "sequential" (consumers start after the last tile, no drain: what
            the combine takes when nothing hides it). May be set between calls, on each rank alone.
        last_stats: IterationStats of the last forward.
        last_choice, last_reason: the split of the last forward, and why it is what it is.
        last_plan_sizes: (rows, valid_rows, bands, remote_bands, segments, chunks) of it.
    """

    name = "cpu"

    def __init__(self, group: dist.ProcessGroup | None, config: TileOverlapConfig) -> None:
        self.group = group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.config = config
        self.tile_m = AUTO_TILE_M["cpu"] if config.tile_m == "auto" else config.tile_m
        self.mover: str = config.mover
        self.last_stats: IterationStats | None = None
        self.last_choice: Choice | None = None
        self.last_reason = ""
        self.last_plan_sizes: tuple[int, ...] = (0,) * 6
        self._controllers: dict[LayerShape, Controller] = {}
        self._op: Any = CPUTileMoEBuilder().load()
        self._heap: SymmetricHeap | None = None
        self._rank: Any = None
        self._pid = os.getpid()
        self._in_call = threading.Lock()

    # -- heap -------------------------------------------------------------------------------

    @property
    def has_heap(self) -> bool:
        """See ``Backend.has_heap``."""
        return self._heap is not None

    def ensure(self, shapes: Sequence[LayerShape], max_tokens: int, together: bool = True) -> None:
        """See ``Backend.ensure``; here a group needs nobody for its memory."""
        self._demand_own_process("ensure()")
        wanted = self._heap_shape(shapes, max_tokens)
        heap = None if self._heap is None or self.failure() else self._heap
        # What one rank still holds need not be what another holds: all take the union.
        offers = gather(
            (wanted, self._heap and self._heap.shape, heap and heap.identity), self.group
        )
        for offer in (shape for offered in offers for shape in offered[:2] if shape is not None):
            wanted = wanted.union(offer)
        identities = {identity for _, _, identity in offers}
        if heap is not None and len(identities) == 1 and heap.shape == wanted:
            return
        self._heap = self._rank = heap = None  # the old region goes before the new one comes
        bounds = (wanted.world, wanted.max_experts, wanted.dispatch_bytes, wanted.recv_bytes)
        opened = open_heap(wanted, self._op.block_bytes(*bounds), self.group)

        def make() -> Any:
            return self._op.Rank(
                region=opened.region,
                rank=self.rank,
                world=wanted.world,
                max_experts=wanted.max_experts,
                dispatch_bytes=wanted.dispatch_bytes,
                recv_bytes=wanted.recv_bytes,
                max_tokens=wanted.max_tokens,
                wait_timeout_s=float(self.config.wait_timeout_s),
                group_timeout_s=group_timeout_s(self.group, "cpu"),
                pids=opened.pids,
            )

        self._rank = in_step(make, self.group, "the parts of a rank")
        self._heap = opened

    def _heap_shape(self, shapes: Sequence[LayerShape], max_tokens: int) -> HeapShape:
        dispatch = recv = 0
        for shape in shapes:
            local_experts = shape.num_experts // self.world
            size = shape.dtype.itemsize
            rows_in = self.world * max_tokens * min(shape.topk, local_experts)
            try:
                rows = self._op.plan_bounds(self._params(shape), rows_in)[0]
            except ValueError as error:
                raise CapacityError(
                    f"layer {shape.name} at max_tokens_per_rank {max_tokens}: {error}; set a "
                    "smaller max_tokens_per_rank"
                ) from None
            dispatch = max(dispatch, rows * shape.hidden * size)
            recv = max(recv, max_tokens * shape.topk * shape.out * size)
        experts = max(shape.num_experts for shape in shapes)
        return HeapShape(self.world, experts, dispatch, recv, max_tokens)

    @property
    def chosen(self) -> dict[str, object]:
        """The settings, with what "auto" stands for in every layer; tile_n depends on the layer's
        width."""
        config = self.config
        waves = config.local_tail_waves
        settled = {
            **config.model_dump(),
            "backend": self.name,
            "layout": "aligned" if _LAYOUTS[config.layout] else "compact",
            "tile_m": self.tile_m,
            "num_consumer_ctas": self._fixed_consumers(),
            "bands_per_segment": bands_per_segment(config),
            "local_tail_waves": "all" if waves == "auto" else waves,
            "mover": "sm" if config.mover == "auto" else config.mover,
        }
        return without_unused(settled)

    def failure(self) -> str:
        """The first cause that made the heap unusable, or ""."""
        return self._rank.failure() if self._rank is not None else ""

    # -- one layer --------------------------------------------------------------------------

    def forward(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: torch.Tensor,
        routing: Routing | Exception,
    ) -> torch.Tensor:
        """See ``Backend.forward``."""
        if self._rank is None:
            raise TileMoEError(f"layer {shape.name}: the backend has no heap; call ensure() first")
        self._demand_own_process(f"layer {shape.name}")
        if not self._in_call.acquire(blocking=False):
            raise TileMoEError(
                f"layer {shape.name}: another thread is inside a layer of the same group; the "
                "layers of a group must run one after another"
            )
        try:
            return self._forward(shape, experts, x, routing)
        finally:
            self._in_call.release()

    def _demand_own_process(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise TileMoEError(
                f"{what} runs in a forked process (pid {os.getpid()}, backend made by "
                f"{self._pid}); start worker processes with the 'spawn' method"
            )

    def _forward(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: torch.Tensor,
        routing: Routing | Exception,
    ) -> torch.Tensor:
        rank = self._rank
        problem = local_problem(shape, x, routing, "cpu")
        choice = self._choose(shape, len(x))
        try:
            self._begin(shape, routing, problem)
            assert isinstance(routing, Routing)
            y = self._move(shape, experts, x, routing, choice.num_consumer_ctas)
        except RankFailure as failure:  # all ranks raise it, and the heap stays usable
            raise failure from problem
        except CapacityError:
            raise
        except DeadlineError as error:
            raise DeadlineError(
                f"layer {shape.name}: the expert-parallel group has failed: {error}. "
                "ds_tilemoe.apply() on all ranks makes a new heap."
            ) from None
        except BaseException as error:
            # Peers wait for this rank's counts or rows; they raise with this cause.
            cause = f"{type(error).__name__}: {error}"
            rank.fail(
                _plain(f"rank {self.rank} of the group failed in layer {shape.name}: {cause}")
            )
            raise
        self.last_stats = IterationStats(*rank.stats())
        self.last_choice = choice
        self.last_plan_sizes = rank.plan_sizes()
        self._observe(shape, routing, choice)
        return y

    def _begin(
        self, shape: LayerShape, routing: Routing | Exception, problem: Exception | None
    ) -> None:
        """Count exchange and plan."""
        if problem is None:
            assert isinstance(routing, Routing)
            ids = routing.expert_ids.to(torch.int32).contiguous()
        else:
            ids = torch.empty(0, shape.topk, dtype=torch.int32, device="cpu")
        size = shape.dtype.itemsize
        self._rank.begin(
            name=shape.name,
            fingerprint=self._fingerprint(shape),
            params=self._params(shape),
            in_row_bytes=shape.hidden * size,
            out_row_bytes=shape.out * size,
            expert_ids=ids,
            routing_error=problem and _plain(f"{type(problem).__name__}: {problem}"),
        )

    def _move(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: torch.Tensor,
        routing: Routing,
        consumers: int,
    ) -> torch.Tensor:
        """Dispatch, expert GEMMs beside the combine, scale."""
        rank = self._rank
        rank.dispatch(x.contiguous())
        hidden = self._fronts(shape, experts, x)
        out = torch.empty(hidden.shape[0], shape.out, dtype=shape.dtype, device="cpu")
        rank.combine(
            hidden=hidden,
            out=out,
            weights=[expert.down_weight.detach().contiguous() for expert in experts],
            biases=[
                None if expert.down_bias is None else expert.down_bias.detach().contiguous()
                for expert in experts
            ],
            tile_n=self._tile_n(shape.out),
            group_bands=1,  # one producer thread: a band is done before the next begins
            num_consumers=max(1, consumers),
            mover=_MOVERS[self.mover],
        )
        y = torch.empty(x.shape[0], shape.out, dtype=shape.dtype, device="cpu")
        rank.scale(routing.weights.float().contiguous(), y)
        return y

    def _fronts(
        self, shape: LayerShape, experts: Sequence[Expert], x: torch.Tensor
    ) -> torch.Tensor:
        """Everything before the down projection, expert by expert as their rows come in."""
        rank = self._rank
        first = rank.expert_rows()
        rows = rank.dispatched(x)
        hidden = torch.empty(first[-1], shape.ffn, dtype=shape.dtype, device="cpu")
        # Pad rows of the compact layout stand behind an expert's last row and stay out of front();
        # those of the aligned layout stand between runs and go with it: nobody reads the result.
        aligned = self.config.layout == "aligned"
        for e, valid in enumerate(rank.expert_valid()):
            rank.wait_expert(e)
            if valid == 0:
                continue
            last = first[e + 1] if aligned else first[e] + valid
            hidden[first[e] : last].copy_(experts[e].front(rows[first[e] : last]))
        return hidden

    def _params(self, shape: LayerShape) -> Any:
        config, row_bytes = self.config, shape.out * shape.dtype.itemsize
        waves = config.local_tail_waves
        return self._op.PlanParams(
            world=self.world,
            rank=self.rank,
            local_experts=shape.num_experts // self.world,
            tile_m=self.tile_m,
            layout=_LAYOUTS[config.layout],
            bands_per_segment=bands_per_segment(config),
            local_tail_bands=waves if isinstance(waves, int) else -1,  # one band is a wave here
            chunk_rows=_chunk_rows(row_bytes),
        )

    def _tile_n(self, n: int) -> int:
        if self.config.tile_n != "auto":
            return self.config.tile_n
        # At least two tiles a band where N allows it, and no more columns than stay in cache.
        return max(1, min(256, math.ceil(n / 2 / 16) * 16 if n > 16 else n))

    # -- split ------------------------------------------------------------------------------

    def controller(self, shape: LayerShape) -> Controller | None:
        """What moves the layer's split on this rank; None where nothing is left to choose."""
        found = self._controllers.get(shape)
        low, high = self._bounds()
        if found is not None or low == high or not self.config.adaptive.enabled:
            return found
        config, waves = self.config, self.config.local_tail_waves
        tile_n, row_bytes = self._tile_n(shape.out), shape.out * shape.dtype.itemsize
        work = Work(
            tile_m=self.tile_m,
            tile_n=tile_n,
            n_tiles=math.ceil(shape.out / tile_n),
            k=shape.ffn,
            row_bytes=row_bytes,
            chunk_bytes=_chunk_rows(row_bytes) * row_bytes,
            local_experts=shape.num_experts // self.world,
            world=self.world,
        )
        limits = Limits(
            min_consumer_ctas=low,
            max_consumer_ctas=high,
            # Reading weights twice costs nothing here: the paper's rule, unless told otherwise.
            local_tail_waves=waves if isinstance(waves, int) else ALL_TAIL_WAVES,
            bands_per_segment=bands_per_segment(config),
            mover="sm",  # a thread that waits yields, so there is no reason to do without
            hysteresis=config.adaptive.hysteresis,
            interval=config.adaptive.interval,
            start=self._fixed_consumers(),
        )
        found = self._controllers[shape] = Controller(_MACHINE, work, shape.topk, limits)
        return found

    def _choose(self, shape: LayerShape, tokens: int) -> Choice:
        controller = self.controller(shape) if self.mover in ("auto", "sm") else None
        if controller is not None:
            bucket = controller.bucket_of(tokens)
            choice = controller.choose(bucket)
            self.last_reason = controller.why(bucket)
            return choice
        self.last_reason = ""
        waves = self.config.local_tail_waves
        tail = waves if isinstance(waves, int) else ALL_TAIL_WAVES
        consumers = 0 if self.mover == "none" else self._fixed_consumers()
        mover = "none" if self.mover == "none" else "sm"
        return Choice(consumers, tail, bands_per_segment(self.config), mover)

    def _observe(self, shape: LayerShape, routing: Routing, choice: Choice) -> None:
        controller = self._controllers.get(shape)
        if controller is None or self.mover not in ("auto", "sm"):
            return
        assert self.last_stats is not None
        local_experts = shape.num_experts // self.world
        own = routing.expert_ids.div(local_experts, rounding_mode="floor") == self.rank
        _, rows, bands, *_ = self.last_plan_sizes
        seen = observation(
            self.last_stats,
            tokens=len(routing.expert_ids),
            rows=rows,
            remote_rows=rows - int(own.sum()),
            num_consumer_ctas=choice.num_consumer_ctas,
            bands=bands,
        )
        controller.observe(seen)

    def _bounds(self) -> tuple[int, int]:
        """The fewest and the most consumer threads that may be chosen."""
        config = self.config
        if config.num_consumer_ctas != "auto":
            return config.num_consumer_ctas, config.num_consumer_ctas
        most = config.max_consumer_ctas
        if most == "auto":
            # Threads without a core of their own only take the producers' time.
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            most = min(MAX_CPU_CONSUMERS, len(os.sched_getaffinity(0)) // ranks - 1)
        return config.min_consumer_ctas, max(config.min_consumer_ctas, most)

    def _fixed_consumers(self) -> int:
        """The split without a controller, and its first one."""
        return self._bounds()[0]

    def _fingerprint(self, shape: LayerShape) -> int:
        text = f"{shape}{_LAYOUTS[self.config.layout]}{self.tile_m}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def set_random_delays(self, max_us: int, seed: int) -> None:
        """Sleep up to ``max_us`` at the protocol's meeting points; 0 = off. For tests."""
        self._rank.set_random_delays(max_us, seed)

    def poison(self) -> None:
        """Fill this rank's rooms with NaN; between calls, when no peer writes. For tests."""
        self._rank.poison()


def _plain(text: str) -> str:
    """``text`` as UTF-8 can hold it: it crosses into C++ and to other ranks."""
    return text.replace("\0", "?").encode("utf-8", "replace").decode()


def _chunk_rows(row_bytes: int) -> int:
    return max(1, _CHUNK_BYTES // row_bytes)
