"""Which split the next call gets: the cost model, with rates corrected by what past calls report.

One Controller a layer, one state a size bucket. ``observe`` takes what a call left behind, late or
not at all; ``choose`` says what the next call shall do. Neither waits, and nothing but their
arguments decides, so a replayed log gives the same choices. Ranks decide alone: all that a rank can
shorten is its own last tile and its own last row, and that is what is predicted here.

What is corrected, and from what:
- the time of tiles, from the producer's end;
- bytes a consumer CTA moves, from what was left at the producer's end; where nothing was left, only
  that fewer CTAs might do: the rate is taken for higher, call by call, until a smaller split is
  tried, and from then on it is known;
- the link, from how long the drain took for what was left.
A split that in fact took longer than the one before it is taken back, and not tried again under
the same load. In the simulator this keeps within 2 % (or 3 us) of the best static split; the cost
model alone, with a calibration that is wrong by 30 %, and the rule alone do not: ``bench.py
contention --simulate`` records them side by side.

Pure: no clock, no torch. Times are ns, rates bytes a ns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple, Protocol

from .cost_model import Choice, CostModel, Load, Machine, Rates, Work

MEMORY = 8  # calls over which rates and loads are averaged
SAME = 0.02  # as long as nothing changes by more, another look finds the same
COLD = 0.9  # of the rows of balanced routing: a rank with fewer is not the slowest
NEW_LOAD = 0.08  # a load that differs by more is another one
CALM_CALLS = 3  # lighter calls in a row that make a lighter load
TRIAL_CALLS = 4  # of a new split before it is compared with the one before it
MOST_TRIAL_CALLS = 24  # after which it stays
NOISE = 0.03  # of a call's time, about
FEWEST_WAVES = 4  # in shorter calls consumers mostly wait for tiles
TRUST = 1 / 3  # weight of a measured rate beside those before it
DOUBT = 1.05  # over a measured rate
HOPE = 1.05  # by which a rate that left nothing over is taken for higher
SLOW_HOPE = 1.01  # the same for one that was measured
MOST_HOPE = 1.6  # over the calibrated rate
LEFT_SHARE = 0.02  # of the remote bytes, from which on the producer's end left something
FULL_LINK, HALF_LINK = 0.9, 0.6  # of the link's rate: how much less it is not the link's fault
LEAST_OF_CALIBRATED = 0.6  # of a consumer's rate alone is left of it beside a GEMM
RATE_RANGE = 1000.0  # times the calibrated value, either way: beyond it a report is not believed
CHANGES_KEPT = 64


class Observation(NamedTuple):
    """What one call of this rank left behind; times in ns since its first tile.

    Attributes:
        tokens: of this rank, which name the size bucket.
        num_consumer_ctas: of that call, 0 if no consumer ran.
        rows: valid rows of the rank's layout.
        remote_rows: of them, owed to other ranks.
        bands: of the plan; 0 = not known.
        first_segment_ready, producer_end, last_put, backlog_at_producer_end, chunks_drained: see
            IterationStats.
    """

    tokens: int
    num_consumer_ctas: int
    rows: int
    remote_rows: int
    bands: int
    first_segment_ready: int
    producer_end: int
    last_put: int
    backlog_at_producer_end: int
    chunks_drained: int


class Iteration(Protocol):
    """The fields of IterationStats that are needed here."""

    first_segment_ready: int
    producer_end: int
    last_put: int
    backlog_at_producer_end: int
    chunks_drained: int


def observation(
    iteration: Iteration,
    *,
    tokens: int,
    rows: int,
    remote_rows: int,
    num_consumer_ctas: int,
    bands: int = 0,
) -> Observation:
    """An Observation from IterationStats and the other words of a CallRecord."""
    return Observation(
        tokens,
        num_consumer_ctas,
        rows,
        remote_rows,
        bands,
        iteration.first_segment_ready,
        iteration.producer_end,
        iteration.last_put,
        iteration.backlog_at_producer_end,
        iteration.chunks_drained,
    )


@dataclass(frozen=True)
class Limits:
    """What the settings leave open. A value that is given is never overridden.

    Args:
        min_consumer_ctas, max_consumer_ctas: bounds of the split; None = all that the machine has.
        num_consumer_ctas, local_tail_waves, bands_per_segment, mover: explicit values, or None for
            "auto".
        hysteresis: a change has to promise at least this share of a call.
        interval: observations of a bucket between two looks.
        start: a split to begin with, instead of the cost model's; for tests and benchmarks.
    """

    min_consumer_ctas: int = 1
    max_consumer_ctas: int | None = None
    num_consumer_ctas: int | None = None
    local_tail_waves: int | None = None
    bands_per_segment: int | None = None
    mover: str | None = None
    hysteresis: float = 0.02
    interval: int = 1
    start: int | None = None


class Change(NamedTuple):
    """One change of a bucket's choice, after so many observations of it."""

    bucket: int
    observations: int
    before: Choice | None
    after: Choice
    reason: str


@dataclass
class _Bucket:
    """What is known of calls of about one size."""

    choice: Choice
    load: Load
    tile: float  # of Rates, and start_ns
    start_ns: float
    spread: float = 0.0  # variance of tiles
    seen: int = 0  # observations, and of the present load
    of_load: int = 0
    lighter: int = 0  # calls in a row
    # Load and rates at the last look, by the waves of the split: at an edge they come and go.
    looked_at: dict[int, tuple[float, ...]] = field(default_factory=dict)
    # The present split's own times, and those of the split before it.
    count: int = 0
    mean: float = 0.0
    before: Choice | None = None
    count_before: int = 0
    mean_before: float = 0.0
    used: set[int] = field(default_factory=set)  # splits, under the present load
    barred: set[int] = field(default_factory=set)


class Controller:
    """The state machine of one layer on one rank.

    Args:
        machine: as calibrated.
        work: the layer's GEMM 2.
        topk: rows a token, for calls that nothing is known of.
        limits: bounds and explicit values.

    Attributes:
        low, high: the splits that may be chosen.
        changes: the latest changes, oldest first.
    """

    def __init__(
        self, machine: Machine, work: Work, topk: int, limits: Limits | None = None
    ) -> None:
        self.model = model = CostModel(machine, work)
        self.machine, self.work, self.topk = machine, work, topk
        self.limits = limits = limits or Limits()
        most = max(1, machine.sms - 1) if machine.consumer_takes_sm else 2**30
        high = most if limits.max_consumer_ctas is None else min(limits.max_consumer_ctas, most)
        self.high = max(1, high)
        self.low = max(1, min(limits.min_consumer_ctas, self.high))
        if limits.num_consumer_ctas is not None:
            self.low = self.high = max(1, min(limits.num_consumer_ctas, most))
        self.changes: deque[Change] = deque(maxlen=CHANGES_KEPT)
        self._per_cta, self._link = model.rates.per_cta, model.rates.link
        self._per_cta_known = self._link_known = False  # or only calibrated, or hoped for
        self._most_per_cta = machine.rate_per_cta * MOST_HOPE
        self._buckets: dict[int, _Bucket] = {}

    # -- what the backend calls ---------------------------------------------------------------

    @staticmethod
    def bucket_of(tokens: int) -> int:
        """Number of the size bucket: calls within a power of two are alike."""
        return max(0, tokens - 1).bit_length()

    def choose(self, bucket: int) -> Choice:
        """What the next call of the bucket shall do."""
        state = self._buckets.get(bucket)
        return state.choice if state is not None else self._open(bucket).choice

    def why(self, bucket: int) -> str:
        """The reason of the bucket's latest change; "" if none is kept."""
        return next((c.reason for c in reversed(self.changes) if c.bucket == bucket), "")

    def observe(self, seen: Observation) -> None:
        """Learn from one call. Any call may be missing, and any may come late."""
        if seen.rows <= 0 or seen.producer_end <= 0:
            return  # this rank had nothing to do
        bucket = self.bucket_of(seen.tokens)
        state = self._buckets.get(bucket) or self._open(bucket)
        load = self.model.load(seen.rows, seen.remote_rows, seen.bands)
        state.seen += 1
        self._learn_rates(state, load, seen)
        if seen.rows < COLD * seen.tokens * self.topk:
            # The group waits for others. What it decides is for when that changes.
            load = self.model.expected_load(seen.tokens, self.topk)
        self._learn_load(state, load)
        if seen.num_consumer_ctas == state.choice.num_consumer_ctas:
            state.count += 1
            # Weighted by size, so that calls of one load compare.
            own = max(seen.producer_end, seen.last_put) * state.load.tiles / load.tiles
            state.mean += (own - state.mean) / min(state.count, MOST_TRIAL_CALLS)
        if state.seen % self.limits.interval == 0:
            self._look(bucket, state)

    def export(self) -> dict[str, int | str]:
        """The choice of the bucket with most calls, as settings of the block."""
        if not self._buckets:
            return {}
        bucket = max(self._buckets, key=lambda b: (self._buckets[b].seen, b))
        return self._buckets[bucket].choice.settings()

    # -- learning -----------------------------------------------------------------------------

    def _open(self, bucket: int) -> _Bucket:
        tokens = max(1, 2**bucket * 3 // 4)
        load = self.model.expected_load(tokens, self.topk)
        known = max(self._buckets.values(), key=lambda b: b.seen, default=None)
        tile, start_ns, _, _ = self._rates_of(known) if known else self.model.rates
        state = _Bucket(Choice(0, 1, 1, "none"), load, tile, start_ns)
        self._buckets[bucket] = state
        start = self.limits.start
        if start is None:
            consumers, total = self._best(state)
            reason = f"start: {total / 1e3:.0f} us by the cost model"
        else:
            consumers, reason = max(self.low, min(self.high, start)), "start: as told"
        self._change(bucket, state, consumers, reason)
        return state

    def _learn_load(self, state: _Bucket, load: Load) -> None:
        """Follow the load that decides: the heaviest of the last calls."""
        ratio = load.tiles / max(state.load.tiles, 1.0)
        light = ratio < 1 - NEW_LOAD
        state.lighter = state.lighter + 1 if light else 0
        if state.of_load == 0 or ratio > 1 + NEW_LOAD or state.lighter >= CALM_CALLS:
            state.load, state.spread, state.of_load, state.lighter = load, 0.0, 1, 0
            state.count, state.before = 0, None
            state.used, state.barred = {state.choice.num_consumer_ctas}, set()
            return
        if light:
            return
        state.of_load += 1
        weight = 1.0 / min(state.of_load, MEMORY)
        off = load.tiles - state.load.tiles
        state.spread += (off * off - state.spread) / MEMORY
        state.load = Load(
            *(old + (new - old) * weight for old, new in zip(state.load, load, strict=True))
        )

    def _learn_rates(self, state: _Bucket, load: Load, seen: Observation) -> None:
        machine, consumers, end = self.machine, seen.num_consumer_ctas, seen.producer_end
        first, _, _, gemm = self.model.gemm(load.tiles, consumers)
        ready = seen.first_segment_ready
        tile = end / gemm
        if gemm > first and 0 < ready < end:  # two points of a line
            tile = min(tile, (end - ready) / (gemm - first))
        tile = self._believed(tile, 1.0)
        weight = 1.0 / min(state.seen, MEMORY)
        state.tile += (tile - state.tile) * weight
        state.start_ns += (max(0.0, end - tile * gemm) - state.start_ns) * weight
        if load.remote_bytes <= 0:
            return
        chunk, beside_ns = self.work.chunk_bytes, end - (ready or first * end / gemm)
        left = min(load.remote_bytes, float(seen.backlog_at_producer_end * chunk))
        choice = state.choice._replace(num_consumer_ctas=consumers)
        unavoidable = self.model.last_wave_left(load, choice, self._rates_of(state))
        if left > unavoidable + LEFT_SHARE * load.remote_bytes:
            drains = machine.producers(consumers) * machine.drain_rate
            mine = consumers * self._per_cta
            if mine + drains >= self._link:
                self._learn_link(left, seen.last_put - end)
            count = self.model.waves(load.tiles, consumers)
            if consumers and beside_ns > 0 and count >= FEWEST_WAVES:
                # The consumers were never idle. More drained than left: CTAs without a tile helped.
                helped = max(0.0, seen.chunks_drained * chunk - left)
                moved = load.remote_bytes - left - helped
                self._learn_per_cta(moved / beside_ns, consumers)
        elif consumers:
            # Enough for this load. Fewer might be: taken for faster until a trial has shown.
            hope = SLOW_HOPE if self._per_cta_known else HOPE
            self._per_cta = max(self._per_cta, min(self._per_cta * hope, self._most_per_cta))
            if not self._link_known:
                self._link = min(self._link * HOPE, machine.link * MOST_HOPE)

    def _learn_link(self, left: float, drain_ns: float) -> None:
        drain_ns -= self.machine.drain_start_ns
        if drain_ns <= self.machine.drain_start_ns:
            return  # too short to tell
        link = self._believed(left / drain_ns, self.machine.link)
        self._link += (link - self._link) * (TRUST if self._link_known else 1.0)
        self._link_known = True

    def _learn_per_cta(self, moved_per_ns: float, consumers: int) -> None:
        calibrated = self.machine.rate_per_cta
        rate = self._believed(moved_per_ns / consumers, calibrated)
        # Was it the link? Not if these few could not fill it even as calibrated, or by far did not.
        few = consumers * calibrated * LEAST_OF_CALIBRATED < self._link
        if consumers * rate < (FULL_LINK if few else HALF_LINK) * self._link:
            self._per_cta += (rate - self._per_cta) * (TRUST if self._per_cta_known else 1.0)
            self._per_cta_known = True
            self._most_per_cta = self._per_cta * DOUBT

    @staticmethod
    def _believed(value: float, calibrated: float) -> float:
        return min(max(value, calibrated / RATE_RANGE), calibrated * RATE_RANGE)

    # -- deciding -----------------------------------------------------------------------------

    def _look(self, bucket: int, state: _Bucket) -> None:
        """Change the choice if that pays."""
        if self._take_back(bucket, state):
            return
        tiles = state.load.tiles + sqrt(state.spread)
        now = state.choice
        count = self.model.waves(tiles, now.num_consumer_ctas)
        basis = (tiles, state.load.remote_bytes, state.tile, self._per_cta, self._link)
        then = state.looked_at.get(count)
        if then is not None and all(map(_near, basis, then)):
            return
        state.looked_at[count] = basis
        current = self._total(state, now.num_consumer_ctas)
        best, total = self._best(state)
        saved = current - total
        if best != now.num_consumer_ctas and saved > self.limits.hysteresis * current:
            if state.before is None or state.count >= TRIAL_CALLS:  # else it is not proved itself
                state.before, state.count_before, state.mean_before = now, state.count, state.mean
            if best in state.used:  # whoever returns does not come again: this ends every circle
                state.barred.add(now.num_consumer_ctas)
            what = "fewer waves" if best < now.num_consumer_ctas else "less left to the drain"
            self._change(bucket, state, best, f"{what}: {saved / 1e3:.0f} us less predicted")
            return
        longer = self._with(state, now.num_consumer_ctas).local_tail_waves
        if longer > now.local_tail_waves:
            self._change(bucket, state, now.num_consumer_ctas, "a longer tail of local tiles")

    def _take_back(self, bucket: int, state: _Bucket) -> bool:
        """Return to the split before, if this one took longer."""
        before = state.before
        if before is None or state.count < TRIAL_CALLS or not state.count_before:
            return False
        margin = 2 * NOISE * sqrt(1 / state.count + 1 / min(state.count_before, MOST_TRIAL_CALLS))
        worse = state.mean / state.mean_before - 1
        if worse > max(margin, self.limits.hysteresis):
            state.barred.add(state.choice.num_consumer_ctas)
            state.before = None
            text = f"taken back: {state.mean / 1e3:.0f} us, was {state.mean_before / 1e3:.0f}"
            self._change(bucket, state, before.num_consumer_ctas, text)
            state.count, state.mean = state.count_before, state.mean_before
            return True
        if state.count >= MOST_TRIAL_CALLS:
            state.before = None
        return False

    def _best(self, state: _Bucket) -> tuple[int, float]:
        """The consumer count with the least predicted time, and that time."""
        limits, rates = self.limits, self._rates_of(state)
        options: list[int] = []
        if limits.mover != "none":
            tiles = state.load.tiles + sqrt(state.spread)
            options = self.model.splits_that_differ(tiles, self.low, self.high, rates)
        if limits.mover == "none" or (limits.mover is None and limits.num_consumer_ctas is None):
            options = [0, *options]
        options = [c for c in options if c not in state.barred] or [state.choice.num_consumer_ctas]
        totals = [self._total(state, c) for c in options]
        total = min(totals)
        return options[totals.index(total)], total

    def _rates_of(self, state: _Bucket) -> Rates:
        return Rates(state.tile, state.start_ns, self._per_cta, self._link)

    def _total(self, state: _Bucket, consumers: int) -> float:
        load = state.load._replace(tiles=state.load.tiles + sqrt(state.spread))
        choice = self._with(state, consumers)
        return self.model.predict(load, choice, self._rates_of(state)).total

    def _with(self, state: _Bucket, consumers: int) -> Choice:
        """The choice that goes with a consumer count."""
        limits = self.limits
        tail, joined = limits.local_tail_waves, limits.bands_per_segment
        if tail is None:
            rates = self._rates_of(state)
            tail = self.model.tail_waves(state.load, consumers, rates)
        if joined is None:
            joined = self.model.joined_bands
        return Choice(consumers, tail, joined, "sm" if consumers else "none")

    def _change(self, bucket: int, state: _Bucket, consumers: int, reason: str) -> None:
        before, after = state.choice, self._with(state, consumers)
        if after.num_consumer_ctas != before.num_consumer_ctas:
            state.count, state.mean = 0, 0.0
            state.looked_at.clear()
        state.choice = after
        state.used.add(consumers)
        first = state.seen == 0
        self.changes.append(Change(bucket, state.seen, None if first else before, after, reason))


def _near(now: float, then: float) -> bool:
    return abs(now - then) <= SAME * then
