"""A group of GPUs that runs GEMM 2 beside the combine, on paper: what the controller is tried on.

Events of the real plan: tiles are handed out in claim order, a band is ready when its last tile is
stored, consumers serve segments in order, CTAs without a tile drain, owners wait for all senders.
Between two events rates are constant, so the time of each follows from sums of bytes. What comes
in is not limited: no rank receives more than the busiest one sends.

It shares no arithmetic with cost_model.py. All numbers are measurements: docs/gpu-notes.md,
docs/results/operator_x2.jsonl (2 x H200, both busy). tests/test_simulator.py holds it to these.

Shape letters: E experts, W ranks, N output width, K input width of GEMM 2, B bands, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .combine_plan import CombinePlan, Layout, PlanParams, build_plan
from .controller import Observation
from .cost_model import Choice, Work

Floats = npt.NDArray[np.float64]

TILE_M = 128
CHUNK_BYTES = 64 * 1024
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Tile:
    """Times of GEMM 2, us.

    Attributes:
        start: what the first waves take longer, while operands come from memory.
        lone: one tile while few other CTAs work.
        full: one tile while all do; they share L2, memory and power.
        long_full: the same in GEMMs of at least ``LONG_US``, when the GPU has clocked down.
    """

    start: float
    lone: float
    full: float
    long_full: float


SHORT_US, LONG_US = 850.0, 1350.0
#: By (tile_n, N, K), from operator_x2.jsonl: gemm_alone_us at its three lengths, and
#: overlapped_us - scale_us - exposed_us where a split adds a wave. With tiles of 128 columns waves
#: blur: lone is what is left of them.
TILES = {
    (256, 8192, 2048): Tile(20.0, 21.0, 24.3, 26.6),
    (256, 4096, 1536): Tile(12.0, 15.2, 18.1, 18.3),
    (256, 1024, 4096): Tile(23.0, 36.0, 42.6, 42.6),
    (256, 512, 2048): Tile(18.2, 20.0, 22.7, 22.7),
    (128, 1024, 4096): Tile(20.0, 10.0, 25.0, 25.0),
    (128, 512, 2048): Tile(20.6, 9.0, 11.7, 11.7),
}
#: Few bands an expert: its weights are read for little (by bands of an expert).
EXPERT_COST = ((2.0, 4.0, 8.0), (1.11, 1.03, 1.0))
#: All local bands last over two waves of them: weights are read twice (by local bands an expert).
TAIL_COST = ((1.0, 2.0, 4.0, 8.0), (1.27, 1.06, 1.02, 1.0))
SCALE_LAUNCH_US, SCALE_GBPS = 6.0, 3700.0


@dataclass(frozen=True)
class Gpu:
    """Rates beside a busy GEMM; GB/s is bytes a ns.

    Attributes:
        consumer_gbps: one consumer CTA (41 with the GPU to itself).
        drain_gbps: one producer CTA that drains, with a third of a consumer's copy warps.
        link_gbps: out of one GPU while its GEMM runs.
        drained_link_gbps: the same when the GEMM has ended.
        start_us: from the launch to the first tile, and to the first look at a flag.
        exposed_us: from the last tile to scale's first row, if no row is late.
        copy_start_us, copy_gbps: the copies of a rank alone, after its GEMM.
    """

    sms: int = 132
    consumer_gbps: float = 31.3
    drain_gbps: float = 11.0
    link_gbps: float = 358.0
    drained_link_gbps: float = 380.0
    start_us: float = 3.0
    drain_start_us: float = 3.0
    exposed_us: float = 4.0
    copy_start_us: float = 10.0
    copy_gbps: float = 367.0


@dataclass(frozen=True)
class Problem:
    """One MoE layer's GEMM 2 and combine, alike on all ranks."""

    world: int
    local_experts: int
    tokens: int
    topk: int
    n: int
    k: int
    tile_n: int
    layout: Layout = Layout.COMPACT

    def __post_init__(self) -> None:
        shape = (self.tile_n, self.n, self.k)
        if shape not in TILES:
            raise ValueError(
                f"simulator: got (tile_n, N, K) {shape}, wanted a measured one: {list(TILES)}"
            )

    @property
    def n_tiles(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def row_bytes(self) -> int:
        return self.n * ELEMENT_BYTES

    @property
    def chunk_rows(self) -> int:
        return max(1, CHUNK_BYTES // self.row_bytes)

    @property
    def scale_us(self) -> float:
        """The weighted sum: k rows read and one written a token."""
        return SCALE_LAUNCH_US + self.tokens * (self.topk + 1) * self.row_bytes / SCALE_GBPS / 1e3


@dataclass(frozen=True)
class Times:
    """What one rank's kernels did, us since the producer's start, S samples each [S]."""

    first_ready: Floats
    producer_end: Floats
    last_put: Floats
    backlog: Floats  # chunks ready or not, not shipped at producer_end
    drained: Floats  # chunks


@dataclass(frozen=True)
class Events:
    """One split of a rank's call without noise.

    Attributes:
        first_ready: us of the first segment.
        knots: us of the start, the first idle CTA, the last tile, and of long after.
        capacity: bytes that could have been shipped by the knots.
        at_ready: the same when each band is ready, [remote bands].
        until_idle: and from then until the first idle CTA.
        idle_share: of what is shipped after that, by CTAs without a tile; drain_share: of what is
            shipped after the last tile, by the drain.
    """

    first_ready: float
    knots: Floats
    capacity: Floats
    at_ready: Floats
    until_idle: Floats
    idle_share: float
    drain_share: float


class RankCall:
    """GEMM 2 and combine of one rank for one C and one order of bands; splits are arguments."""

    def __init__(self, problem: Problem, gpu: Gpu, plan: CombinePlan) -> None:
        self.problem, self.gpu, self.plan = problem, gpu, plan
        self.tiles = plan.sizes.bands * problem.n_tiles
        segments = plan.segments
        last_band = segments["band_begin"] + segments["band_count"] - 1
        bands, first = np.unique(last_band, return_index=True)  # segments are in this order
        sent = np.cumsum(segments["rows"], dtype=np.float64) * problem.row_bytes
        self.remote_rows = int(segments["rows"].sum())
        self.bytes = float(sent[-1]) if len(sent) else 0.0
        self._events: dict[int, Events] = {}
        self._bands = bands
        self._bytes_before = np.concatenate([[0.0], sent])[first] if len(sent) else sent

    @cached_property
    def _weights_cost(self) -> float:
        params, sizes = self.plan.params, self.plan.sizes
        cost = float(np.interp(sizes.bands / params.local_experts, *EXPERT_COST))
        local = (sizes.bands - sizes.remote_bands) / params.local_experts
        if params.local_tail_bands < 0 and local and sizes.remote_bands:
            cost *= float(np.interp(local, *TAIL_COST))
        return cost

    def observation(self, tokens: int, consumers: int, times: Times) -> Observation:
        """What the first sample of the call left behind, in ns."""
        return Observation(
            tokens=tokens,
            num_consumer_ctas=consumers,
            rows=self.plan.sizes.valid_rows,
            remote_rows=self.remote_rows,
            bands=self.plan.sizes.bands,
            first_segment_ready=int(times.first_ready[0] * 1e3),
            producer_end=int(times.producer_end[0] * 1e3),
            last_put=int(times.last_put[0] * 1e3),
            backlog_at_producer_end=int(times.backlog[0]),
            chunks_drained=int(times.drained[0]),
        )

    def wave_ends(self, ctas: int) -> Floats:
        """us at which each wave of ``ctas`` tiles is stored, the last one perhaps not full."""
        problem, sms = self.problem, self.gpu.sms
        tile = TILES[problem.tile_n, problem.n, problem.k]
        waves = -(-self.tiles // ctas)
        # The clock depends on the length; that of the GEMM on all SMs is near enough.
        length = self.tiles / sms * tile.full
        full = float(np.interp(length, (SHORT_US, LONG_US), (tile.full, tile.long_full)))
        busy = np.full(waves, float(ctas))
        busy[-1:] = self.tiles - (waves - 1) * ctas
        times = tile.lone + (full * self._weights_cost - tile.lone) * busy / sms
        start = self.gpu.start_us + tile.start * min(1.0, self.tiles / sms / 2)
        return start + np.cumsum(times)

    def _ready(self, ctas: int, wave_ends: Floats) -> Floats:
        """us at which the bands that segments wait for are ready, [remote bands]."""
        n_tiles = self.problem.n_tiles
        group = min(8, max(1, (ctas + n_tiles // 2) // n_tiles))
        first = self._bands - self._bands % group
        in_group = np.minimum(group, self.plan.sizes.bands - first)
        last_claim = first * n_tiles + (n_tiles - 1) * in_group + self._bands % group
        ready: Floats = wave_ends[last_claim // ctas]
        return ready

    def times(self, consumers: int, gemm: Floats, copy: Floats) -> Times:
        """The call with ``consumers`` consumer CTAs.

        Args:
            consumers: 0 = no consumer kernel: the drain does it all.
            gemm, copy: factors on the time of tiles and of copies, [S].
        """
        zero = np.zeros_like(gemm)
        if self.tiles == 0:
            return Times(zero, zero, zero, zero, zero)
        events = self._events.get(consumers)
        if events is None:
            events = self._events[consumers] = self._find_events(consumers)
        knots, capacity, at_ready = events.knots, events.capacity, events.at_ready
        end = knots[2] * gemm
        if not self.bytes:
            return Times(zero, end, zero, zero, zero)
        speed = gemm / copy  # of copies, in time that is measured in this sample's tiles
        # The capacity at which all is shipped: none is used while no bytes are ready.
        done_at = self.bytes + np.max(speed[:, None] * at_ready - self._bytes_before, axis=1)
        last_put = np.interp(done_at / speed, capacity, knots) * gemm + self.gpu.drain_start_us
        left = np.clip(done_at - capacity[2] * speed, 0.0, self.bytes)
        # Shipped when the first CTA finds no tile, and what such CTAs ship until the end.
        gone = speed[:, None] * events.until_idle
        before = np.minimum(self.bytes, np.min(self._bytes_before + gone, axis=1))
        by_idle = np.maximum(0.0, self.bytes - left - before) * events.idle_share
        chunk = self.problem.chunk_rows * self.problem.row_bytes
        return Times(
            first_ready=events.first_ready * gemm,
            producer_end=end,
            last_put=np.where(left > 0, last_put, np.minimum(last_put, end)),
            backlog=np.round(left / chunk),
            drained=np.round((by_idle + left * events.drain_share) / chunk),
        )

    def _find_events(self, consumers: int) -> Events:
        gpu = self.gpu
        ctas = gpu.sms - consumers
        ends = self.wave_ends(ctas)
        ready = self._ready(ctas, ends)
        # Until idle_from all CTAs make tiles; then those without one drain, whose first chunk
        # counts when it is done; then all drain.
        idle_from = float(ends[-2]) if len(ends) > 1 else gpu.start_us
        idle_from = min(float(ends[-1]), idle_from + CHUNK_BYTES / gpu.drain_gbps / 1e3)
        idle = ctas * len(ends) - self.tiles
        # Where weights are read for little, memory is what both want.
        consumer = consumers * gpu.consumer_gbps / self._weights_cost**2
        alone = min(gpu.link_gbps, consumer)
        joined = min(gpu.link_gbps, consumer + idle * gpu.drain_gbps)
        slopes = 1e3 * np.array([alone, joined, gpu.drained_link_gbps])  # bytes a us
        knots = np.array([gpu.start_us, idle_from, ends[-1], ends[-1] + 1e7])
        capacity = np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
        at_ready = np.interp(ready, knots, capacity)
        draining = ctas * gpu.drain_gbps
        return Events(
            first_ready=float(ready[0]) if len(ready) else 0.0,
            knots=knots,
            capacity=capacity,
            at_ready=at_ready,
            until_idle=np.maximum(0.0, capacity[1] - at_ready),
            idle_share=max(0.0, 1.0 - consumer / joined) if joined else 0.0,
            drain_share=draining / (draining + consumer),
        )


class Simulator:
    """All ranks of one problem. Plans are kept, so the same C costs little again.

    Args:
        problem: the layer.
        gpu: every rank's.
    """

    def __init__(self, problem: Problem, gpu: Gpu | None = None) -> None:
        self.problem, self.gpu = problem, gpu or Gpu()
        self._calls: dict[tuple[bytes, int, int, int], RankCall] = {}

    @property
    def work(self) -> Work:
        """The layer as the controller knows it."""
        problem = self.problem
        return Work(
            tile_m=TILE_M,
            tile_n=problem.tile_n,
            n_tiles=problem.n_tiles,
            k=problem.k,
            row_bytes=problem.row_bytes,
            chunk_bytes=problem.chunk_rows * problem.row_bytes,
            local_experts=problem.local_experts,
            world=problem.world,
        )

    def call(
        self, counts: npt.NDArray[np.int32], rank: int, tail_bands: int, joined: int = 1
    ) -> RankCall:
        """A rank's call: its plan for C, ``local_tail_bands`` and ``bands_per_segment``."""
        key = (counts.tobytes(), rank, tail_bands, joined)
        if key not in self._calls:
            problem = self.problem
            params = PlanParams(
                world=problem.world,
                rank=rank,
                local_experts=problem.local_experts,
                tile_m=TILE_M,
                layout=problem.layout,
                bands_per_segment=joined,
                local_tail_bands=tail_bands,
                chunk_rows=2**30,  # events depend on segments, not on how they are cut
            )
            self._calls[key] = RankCall(problem, self.gpu, build_plan(params, counts))
        return self._calls[key]

    def calls(self, counts: npt.NDArray[np.int32], choices: Sequence[Choice]) -> list[RankCall]:
        """Of all ranks, each with its choice."""
        wave_bands = -(-self.gpu.sms // self.problem.n_tiles)
        return [
            self.call(counts, rank, c.local_tail_waves * wave_bands, c.bands_per_segment)
            for rank, c in enumerate(choices)
        ]

    def run(
        self, calls: Sequence[RankCall], consumers: Sequence[int], noise: Floats
    ) -> tuple[Floats, list[Times]]:
        """One call of the group, S times.

        Args:
            calls: of each rank.
            consumers: CTAs of each rank, 0 = mover "none".
            noise: factors on the times of GEMM and copies, [S, W, 2]; 1 = none.

        Returns:
            us from the producers' start to the end of the slowest rank's scale, [S]; each rank's
            times.
        """
        times = [
            call.times(c, noise[:, rank, 0], noise[:, rank, 1])
            for rank, (call, c) in enumerate(zip(calls, consumers, strict=True))
        ]
        last = np.max([np.maximum(t.producer_end, t.last_put) for t in times], axis=0)
        return last + self.gpu.exposed_us + self.problem.scale_us, times

    def sequential(
        self, counts: npt.NDArray[np.int32], noise: Floats, tail_bands: int = 0
    ) -> Floats:
        """us of GEMM 2 on all SMs, then the copies, then scale; S calls, [S]."""
        last = np.zeros(len(noise))
        for rank in range(self.problem.world):
            call = self.call(counts, rank, tail_bands)
            waves = call.wave_ends(self.gpu.sms)
            end = noise[:, rank, 0] * (waves[-1] if len(waves) else 0.0)
            if call.bytes:
                copy_us = self.gpu.copy_start_us + call.bytes / self.gpu.copy_gbps / 1e3
                end = end + noise[:, rank, 1] * copy_us
            last = np.maximum(last, end)
        return last + self.problem.scale_us


def noise_of(rng: np.random.Generator, samples: int, world: int, spread: float) -> Floats:
    """Factors for :meth:`Simulator.run`, [samples, world, 2], log-normal."""
    return np.exp(rng.normal(0.0, spread, (samples, world, 2)))
