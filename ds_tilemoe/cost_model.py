"""How long GEMM 2 beside the combine takes on one rank, by arithmetic.

Tiles move in waves: with P producer CTAs there are ceil(tiles / P) of them, and a consumer CTA that
takes an SM from the producer costs nothing until it costs a whole wave. c consumer CTAs move
min(c * rate_per_cta, link) bytes a ns; what they have not shipped when the last tile is made, all
CTAs ship together, which fills the link.

Pure: numbers in, numbers out. Times are ns, rates bytes a ns (= GB/s).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ALL_TAIL_WAVES = 2**20  # more than any call has: the paper's rule
MOST_TAIL_WAVES = 8  # that the model asks for
MOST_JOINED_BANDS = 8
MOST_GROUP_BANDS = 8  # of the producer's order of tiles


class Choice(NamedTuple):
    """What a rank may choose in each call, alone.

    Attributes:
        num_consumer_ctas: CTAs of the consumer (threads on the CPU); 0 with the mover "none".
        local_tail_waves: waves of local tiles that go last; ALL_TAIL_WAVES for all of them.
        bands_per_segment: most bands of a middle segment.
        mover: "sm" or "none".
    """

    num_consumer_ctas: int
    local_tail_waves: int
    bands_per_segment: int
    mover: str

    def settings(self) -> dict[str, int | str]:
        """The choice as fields of the ``tile_overlap`` block."""
        fields: dict[str, int | str] = self._asdict()
        if self.num_consumer_ctas == 0:
            del fields["num_consumer_ctas"]  # of a mover that has no consumer
        if self.local_tail_waves >= ALL_TAIL_WAVES:
            fields["local_tail_waves"] = "all"
        return fields


@dataclass(frozen=True)
class Machine:
    """What one GPU and its link do; ``calibration.py`` measures it.

    Attributes:
        sms: SMs that CTAs are spread over; on the CPU 1, the producer's thread.
        rate_per_cta: bytes a ns that one consumer CTA ships.
        drain_rate: the same of a producer CTA that drains.
        link: bytes a ns out of the GPU at most.
        tile_base_ns, tile_ns_per_k: time of one tile of ``tile_n`` columns while all SMs are busy:
            base + K * per_k.
        lone_share: the time of a tile while hardly any other CTA works, over that.
        start_share: what the first wave takes longer, in tiles.
        tile_n: columns of the tiles that were timed.
        consumer_takes_sm: whether a consumer CTA leaves one SM less to the producer.
        launch_ns: what a consumer kernel costs in itself.
        drain_start_ns: from the last tile to the drain's first bytes.
        put_bytes: bytes from which one put reaches the link's rate; 0 = every size does.
    """

    sms: int
    rate_per_cta: float
    drain_rate: float
    link: float
    tile_base_ns: float
    tile_ns_per_k: float
    lone_share: float = 0.85
    start_share: float = 0.5
    tile_n: int = 256
    consumer_takes_sm: bool = True
    launch_ns: float = 1000.0
    drain_start_ns: float = 3000.0
    put_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("sms", "rate_per_cta", "drain_rate", "link", "tile_n"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Machine.{name}: got {value}, wanted a number above 0")
        for name in ("tile_base_ns", "tile_ns_per_k", "launch_ns", "drain_start_ns"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"Machine.{name}: got {value}, wanted a number from 0 on")

    def producers(self, consumers: int) -> int:
        """CTAs that make tiles beside ``consumers`` consumer CTAs."""
        return max(1, self.sms - consumers) if self.consumer_takes_sm else self.sms


class Work(NamedTuple):
    """GEMM 2 of one layer; the same in every call.

    Attributes:
        tile_m, tile_n: rows and columns of a tile.
        n_tiles: tiles of a band.
        k: K.
        row_bytes: bytes of an output row.
        chunk_bytes: bytes of a whole chunk.
        local_experts: experts of this rank.
        world: ranks.
    """

    tile_m: int
    tile_n: int
    n_tiles: int
    k: int
    row_bytes: int
    chunk_bytes: int
    local_experts: int
    world: int


class Load(NamedTuple):
    """What one call brings to this rank; ``local_tiles`` have no row of another owner."""

    tiles: float
    remote_bytes: float
    local_tiles: float


class Rates(NamedTuple):
    """What feedback corrects of a Machine, for one layer.

    Attributes:
        tile: factor on the time of a tile.
        start_ns: what the first wave takes longer, while operands come from memory.
        per_cta, link: bytes a ns, as in Machine.
    """

    tile: float
    start_ns: float
    per_cta: float
    link: float


class GemmTiming(NamedTuple):
    """GEMM 2 of one call, ns since its first tile, as calibrated and without ``start_ns``.

    Attributes:
        first_ready: the first band is stored.
        idle_from: the first CTA finds no tile; ``idle`` CTAs drain from here on.
        idle: their number.
        end: the last tile is stored.
    """

    first_ready: float
    idle_from: float
    idle: float
    end: float


class Timing(NamedTuple):
    """A call of one rank, ns since the first tile: the last tile is stored; all is done."""

    gemm: float
    total: float


class CostModel:
    """The arithmetic for one layer on one machine.

    Args:
        machine: as calibrated.
        work: the layer's GEMM 2.
    """

    def __init__(self, machine: Machine, work: Work) -> None:
        self.machine, self.work = machine, work
        whole = (machine.tile_base_ns + machine.tile_ns_per_k * work.k) * (
            work.tile_n / machine.tile_n
        )
        self._lone = whole * machine.lone_share
        self._shared = (whole - self._lone) / machine.sms  # a busy CTA more
        # Feedback starts from here.
        self.rates = Rates(1.0, whole * machine.start_share, machine.rate_per_cta, machine.link)
        # A draining CTA's first chunk counts when it is done.
        self._first_drain_ns = work.chunk_bytes / machine.drain_rate

    # -- loads ----------------------------------------------------------------------------------

    def expected_load(self, tokens: int, topk: int) -> Load:
        """Of a call that nothing is known of: balanced, and as many tokens on every rank."""
        rows = tokens * topk
        return self.load(rows, rows - rows // self.work.world)

    def load(self, rows: int, remote_rows: int, bands: int = 0) -> Load:
        """Of a call with so many rows here; ``bands`` of the plan, 0 = not known."""
        work = self.work
        tiles = (bands or self.bands_of(rows)) * work.n_tiles
        # An expert's remote rows end inside a band: on average half a band of its local ones.
        local_bands = (rows - remote_rows) / work.tile_m - work.local_experts / 2
        local_tiles = max(0.0, local_bands) * work.n_tiles
        return Load(float(tiles), float(remote_rows * work.row_bytes), local_tiles)

    def bands_of(self, rows: int) -> int:
        """Bands that so many rows fill, where the plan's own number is not at hand."""
        return max(-(-rows // self.work.tile_m), min(self.work.local_experts, rows))

    # -- times ----------------------------------------------------------------------------------

    def waves(self, tiles: float, consumers: int) -> int:
        """ceil(tiles / producer CTAs)."""
        return math.ceil(tiles / self.machine.producers(consumers))

    def gemm(self, tiles: float, consumers: int) -> GemmTiming:
        """GEMM 2 on the SMs that ``consumers`` consumer CTAs leave."""
        if tiles <= 0:
            return GemmTiming(0.0, 0.0, 0.0, 0.0)
        producers, n_tiles = self.machine.producers(consumers), self.work.n_tiles
        full = self._lone + self._shared * producers
        count = math.ceil(tiles / producers)
        last = tiles - (count - 1) * producers
        idle_from = (count - 1) * full
        end = idle_from + self._lone + self._shared * last
        # Tiles go out in groups of about as many bands as a wave has, band by band inside a group.
        group = max(1, min(MOST_GROUP_BANDS, (producers + n_tiles // 2) // n_tiles))
        first = ((n_tiles - 1) * group // producers + 1) * full
        return GemmTiming(min(first, end), idle_from, producers - last, end)

    def predict(self, load: Load, choice: Choice, rates: Rates) -> Timing:
        """The call's times.

        Args:
            load: the call.
            choice: its split; ``bands_per_segment`` does not matter here.
            rates: ``self.rates``, or what feedback has made of them.
        """
        machine, consumers = self.machine, choice.num_consumer_ctas
        first, idle_from, idle, end = self.gemm(load.tiles, consumers)
        first = rates.start_ns + rates.tile * first
        idle_from = rates.start_ns + rates.tile * idle_from
        gemm = rates.start_ns + rates.tile * end
        if load.remote_bytes <= 0:
            return Timing(gemm, gemm)
        beside = min(consumers * rates.per_cta, rates.link)
        joined = min(beside + idle * machine.drain_rate, rates.link)
        drain_from = min(gemm, max(idle_from, first) + self._first_drain_ns)
        left = load.remote_bytes - beside * (drain_from - first) - joined * (gemm - drain_from)
        left = max(left, self.last_wave_left(load, choice, rates))
        total = gemm
        if left > 0:
            after = beside + self.machine.producers(consumers) * machine.drain_rate
            total += machine.drain_start_ns + left / min(after, rates.link)
        if consumers:
            total += machine.launch_ns
        return Timing(gemm, total)

    def last_wave_left(self, load: Load, choice: Choice, rates: Rates) -> float:
        """Bytes of the last remote wave that are left when the last tile is made: they cannot be
        shipped before they are made, whatever the split."""
        consumers = choice.num_consumer_ctas
        producers = self.machine.producers(consumers)
        tail = min(float(choice.local_tail_waves), load.local_tiles / producers)
        wave_ns = rates.tile * (self._lone + self._shared * producers)
        shipped = min(consumers * rates.per_cta, rates.link) * tail * wave_ns
        return max(0.0, self.last_wave_bytes(load) - shipped)

    def last_wave_bytes(self, load: Load) -> float:
        """Most bytes that one wave of tiles makes ready."""
        bands = max(1, self.machine.sms // self.work.n_tiles)
        return min(load.remote_bytes, bands * self.work.tile_m * self.work.row_bytes)

    # -- choices --------------------------------------------------------------------------------

    def tail_waves(self, load: Load, consumers: int, rates: Rates) -> int:
        """The fewest waves of local tiles under which the last remote wave can be shipped."""
        beside = min(consumers * rates.per_cta, rates.link) if consumers else rates.link
        count = max(1, self.waves(load.tiles, consumers))
        wave_ns = rates.tile * self.gemm(load.tiles, consumers).end / count
        if wave_ns <= 0:
            return 1
        needed = self.last_wave_bytes(load) / beside / wave_ns
        return max(1, min(MOST_TAIL_WAVES, math.ceil(needed)))

    @property
    def joined_bands(self) -> int:
        """bands_per_segment: as many bands as make one put long enough."""
        needed = math.ceil(self.machine.put_bytes / (self.work.tile_m * self.work.row_bytes))
        return max(1, min(MOST_JOINED_BANDS, needed))

    def rule(self, tiles: float, low: int, high: int, rates: Rates) -> int:
        """The largest split that adds no wave and does not overfill the link.

        Args:
            tiles: of the call.
            low, high: bounds of the result.
            rates: as for :meth:`predict`.
        """
        fewest = max(1, self.waves(tiles, 0))
        free = self.machine.sms - math.ceil(tiles / fewest)
        if not self.machine.consumer_takes_sm:
            free = high
        return max(low, min(high, free, int(rates.link / rates.per_cta)))

    def splits_that_differ(self, tiles: float, low: int, high: int, rates: Rates) -> list[int]:
        """Consumer counts worth a look: of each number of waves the largest, and the largest that
        does not overfill the link.

        Args: as for :meth:`rule`.

        Returns:
            Ascending, all of [low, high], without repetition.
        """
        enough = max(low, min(high, math.ceil(rates.link / rates.per_cta)))
        if not self.machine.consumer_takes_sm:
            return list(range(low, enough + 1))
        found: set[int] = set()
        smallest, count = low, max(1, self.waves(tiles, low))
        while True:
            largest = max(low, min(high, self.machine.sms - math.ceil(tiles / count)))
            found.add(largest)
            found.add(max(min(smallest, largest), min(largest, enough)))
            if largest >= enough:
                return sorted(found)
            smallest = largest + 1
            count = max(count + 1, self.waves(tiles, smallest))
