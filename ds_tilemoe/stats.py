"""What swapped layers did on this rank: times, exposed combine, overlap ratio, backlog, split.

Every number is of this rank's own clock. ``layers()``, ``reset()`` and ``export_config()`` speak of
all swapped layers of the process that are alive.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_tilemoe.config_block import without_unused
from ds_tilemoe.cost_model import Choice

BLOCK = "tile_overlap"
MOST_CALLS_KEPT = 65536  # a layer; the oldest go first
MOST_CHANGES_KEPT = 32  # of the split, a layer


class IterationStats(NamedTuple):
    """One call of one layer; mirror of ``IterationStats`` in csrc/plan_abi.h.

    Times are ns since this rank's producer started; plan_abi.h says of each what it marks.
    """

    first_segment_ready: int
    producer_end: int
    last_put: int
    last_arrival: int
    segments: int
    backlog_at_producer_end: int
    chunks_drained: int
    idle_spins: int
    epoch: int

    @property
    def exposed_combine(self) -> int:
        """ns from the producer's end to the last arrival of a row that this rank is owed.

        A peer that makes its tiles later than this rank is in it too, beside the copies.
        """
        return max(0, self.last_arrival - self.producer_end)


class LayerTimes(NamedTuple):
    """Where a call's time went; mirror of ``LayerTimes`` in csrc/plan_abi.h.

    ns since this rank's count exchange began; 0 where a kernel did not run.
    """

    router_start: int
    exchange_end: int
    front_start: int
    front_end: int
    down_start: int
    down_end: int
    last_arrival: int
    scale_end: int

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Begin and end of each of ``PARTS``."""
        front = (self.front_start, self.front_end)
        if not self.front_end:  # made by other kernels, between the plan and GEMM 2
            front = (self.exchange_end, self.down_start)
        arrived = max(self.down_end, self.last_arrival)
        found = (
            (self.router_start, 0),
            (0, self.exchange_end),
            front,
            (self.down_start, self.down_end),
            (self.down_end, arrived),
            (arrived, self.scale_end),
        )
        return dict(zip(PARTS, found, strict=True))

    @property
    def whole(self) -> int:
        """ns from the router's start to the end of scale."""
        return self.scale_end - self.router_start


#: Parts of a call, one after another, as keys of a record (with "_us") and in traces.
PARTS = ("router", "counts_and_plan", "gemm1", "gemm2", "exposed_combine", "scale")


class Call(NamedTuple):
    """A call kept for the trace: begin and end on ``time.perf_counter_ns``, or None where nobody
    waited for it on the host; its stats and times."""

    begin: int | None
    end: int | None
    iteration: IterationStats
    times: LayerTimes | None = None


class SplitChange(NamedTuple):
    """The split of a layer's calls from number ``call`` on, and why."""

    call: int
    split: int
    reason: str


_alive: list[weakref.ref[LayerStats]] = []


@dataclass(eq=False)
class LayerStats:
    """Sums over the calls of one layer since the last reset.

    Attributes:
        name: the layer's name in the model.
        keep_history: whether calls are kept for the trace.
        settings: the ``tile_overlap`` block in force, with the values that "auto" stands for.
        combine_alone_ns: mean ns of the combine when nothing hides it, over the calls of a
            measuring run (``ds_tilemoe.measure_combine_alone``); None until there was one.
        calls: number of calls that the other fields sum over.
        choice: the split of the last call that had one; changes: how it came about.
    """

    name: str
    keep_history: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    combine_alone_ns: float | None = None
    calls: int = 0
    time_ns: int = 0
    exposed_ns: int = 0
    segments: int = 0
    backlog: int = 0
    chunks_drained: int = 0
    idle_spins: int = 0
    timed_calls: int = 0  # that the parts are of
    parts_ns: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    choice: Choice | None = None
    changes: deque[SplitChange] = field(default_factory=lambda: deque(maxlen=MOST_CHANGES_KEPT))
    history: deque[Call] = field(default_factory=lambda: deque(maxlen=MOST_CALLS_KEPT))
    _alone_calls: int = 0

    def __post_init__(self) -> None:
        _alive.append(weakref.ref(self, _alive.remove))

    def go_on(self, name: str) -> None:
        """For a layer that has been swapped once more, and is now called so."""
        self.name = name
        _alive.sort(key=lambda ref: ref() is self)  # the last

    def add(
        self,
        iteration: IterationStats,
        begin: int | None,
        end: int | None,
        *,
        times: LayerTimes | None = None,
        choice: Choice | None = None,
        reason: str | None = None,
    ) -> None:
        """Count a call.

        Args:
            iteration: of the call.
            begin, end: ns of ``time.perf_counter_ns``; None where nobody waited for it.
            times: its parts; what gives its length where begin and end do not.
            choice: its split.
            reason: why that is so; kept where the split differs from the call's before.

        Raises:
            ValueError: neither begin and end nor times are given.
        """
        if begin is not None and end is not None:
            self.time_ns += end - begin
        elif times is not None:
            self.time_ns += times.whole
        else:
            raise ValueError("LayerStats.add: got no begin and end and no times; wanted either")
        self.calls += 1
        self.exposed_ns += iteration.exposed_combine
        self.segments += iteration.segments
        self.backlog += iteration.backlog_at_producer_end
        self.chunks_drained += iteration.chunks_drained
        self.idle_spins += iteration.idle_spins
        if times is not None:
            self.timed_calls += 1
            for part, (start, stop) in enumerate(times.spans.values()):
                self.parts_ns[part] += max(0, stop - start)
        if choice is not None and choice != self.choice:
            self.choice = choice
            self.changes.append(SplitChange(self.calls, choice.num_consumer_ctas, reason or ""))
        if self.keep_history:
            self.history.append(Call(begin, end, iteration, times))

    def add_alone(self, iteration: IterationStats) -> None:
        """Count a call of a measuring run, whose combine began when the producer had ended."""
        before = (self.combine_alone_ns or 0.0) * self._alone_calls
        self._alone_calls += 1
        self.combine_alone_ns = (before + iteration.exposed_combine) / self._alone_calls

    @property
    def overlap_ratio(self) -> float | None:
        """1 - exposed combine / combine alone, both means; None where that is not known, or no row
        went to another rank.

        It compares like with like only if the measuring run saw the same calls. Both means hold
        the lateness of peers.
        """
        if not self.segments or not self.combine_alone_ns:
            return None
        return 1.0 - self.exposed_ns / self.calls / self.combine_alone_ns

    def record(self) -> dict[str, Any]:
        """The layer as one JSON-able row: means per call."""
        calls = max(1, self.calls)
        alone = self.combine_alone_ns
        parts: dict[str, float | None] = {f"{name}_us": None for name in PARTS}
        if self.timed_calls:
            means = [ns / self.timed_calls / 1e3 for ns in self.parts_ns]
            parts = dict(zip(parts, means, strict=True))
        return {
            "layer": self.name,
            "calls": self.calls,
            "time_us": self.time_ns / calls / 1e3,
            **parts,
            "exposed_combine_us": self.exposed_ns / calls / 1e3,
            "combine_alone_us": None if alone is None else alone / 1e3,
            "overlap_ratio": self.overlap_ratio,
            "backlog": self.backlog / calls,
            "segments": self.segments / calls,
            "chunks_drained": self.chunks_drained / calls,
            "idle_spins": self.idle_spins / calls,
            "split": None if self.choice is None else self.choice.num_consumer_ctas,
            "changes": [change._asdict() for change in self.changes],
        }

    def clear(self) -> None:
        """Forget the calls; what a measuring run found stays, and the split in force."""
        self.calls = self.time_ns = self.exposed_ns = self.segments = self.backlog = 0
        self.chunks_drained = self.idle_spins = self.timed_calls = 0
        self.parts_ns = [0] * len(PARTS)
        self.changes.clear()
        self.history.clear()


def all_stats() -> list[LayerStats]:
    """Of every swapped layer of this process that is alive, in the order of their making."""
    return [found for ref in list(_alive) if (found := ref()) is not None]


def layers() -> list[dict[str, Any]]:
    """``LayerStats.record()`` of every layer that has been called."""
    return [stats.record() for stats in all_stats() if stats.calls]


def reset() -> None:
    """Forget the calls so far, in every layer.

    On CUDA a call counts when it has ended on the GPU and its record has been read;
    ``ds_tilemoe.check(engine)`` in front of this leaves none behind.
    """
    for stats in all_stats():
        stats.clear()


def table(records: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Records of :func:`layers` as text: a row a layer, means per call, "-" for what is unknown.

    Args:
        records: None for those of now.
    """
    records = layers() if records is None else records
    columns = {
        "layer": lambda r: r["layer"],
        "calls": lambda r: str(r["calls"]),
        "time [us]": lambda r: f"{r['time_us']:.0f}",
        "exposed combine [us]": lambda r: f"{r['exposed_combine_us']:.0f}",
        "overlap ratio": lambda r: (
            "-" if r["overlap_ratio"] is None else f"{r['overlap_ratio']:.2f}"
        ),
        "backlog [chunks]": lambda r: f"{r['backlog']:.1f}",
        "split": lambda r: "-" if r.get("split") is None else str(r["split"]),
    }
    rows = [list(columns), *([show(record) for show in columns.values()] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def to_chrome_trace(rank: int = 0) -> dict[str, Any]:
    """The kept calls in Chrome's trace format (chrome://tracing, Perfetto); needs ``stats: true``.

    Where the device's clock is at hand the parts of a call are exact. Calls that nobody waited for
    have no place on the host's clock: they follow one another without their gaps, by epoch. Where
    it is not, a call's own times are exact, and its parts are placed as if the last of them ended
    with the call.

    Args:
        rank: shown as the process, so that files of several ranks can be joined.
    """
    events: list[dict[str, Any]] = []

    def span(name: str, thread: int, begin: int, end: int, **args: Any) -> None:
        events.append(
            {
                "name": name,
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "ts": begin / 1e3,
                "dur": max(0, end - begin) / 1e3,
                "args": args,
            }
        )

    calls = [(stats.name, call) for stats in all_stats() for call in stats.history]
    calls.sort(key=lambda named: (named[1].begin is not None, named[1].iteration.epoch))
    cursor = 0
    for name, call in calls:
        it, times = call.iteration, call.times
        begin, end = call.begin, call.end
        if begin is None or end is None:
            assert times is not None
            begin, end = cursor, cursor + times.whole
            cursor = end
        span(name, 0, begin, end, **it._asdict())
        start = end - max(it.producer_end, it.last_put, it.last_arrival)
        if times is not None:
            zero = begin - times.router_start  # where the count exchange began
            for part, (first, last) in times.spans.items():
                if last > first:
                    span(part, 3 if part == "exposed_combine" else 1, zero + first, zero + last)
            start = zero + times.down_start
        else:
            span("gemm2", 1, start, start + it.producer_end)
            if it.exposed_combine:
                span("exposed_combine", 3, start + it.producer_end, start + it.last_arrival)
        if it.segments:
            span("consumer", 2, start + it.first_segment_ready, start + it.last_put)
    for thread, name in enumerate(("layer", "parts", "consumer", "exposed combine")):
        args = {"name": name}
        events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def export_config(path: str | Path | None = None) -> dict[str, Any]:
    """The settings in force as a block, with the values that "auto" stands for: of the split, what
    the controller has chosen last.

    Args:
        path: where to write it as JSON as well; ``~`` is the home, missing folders are made.

    Returns:
        ``{"tile_overlap": {...}}``, of the layer that was swapped last.

    Raises:
        ValueError: no layer has run on a backend yet, so nothing has been chosen.
        OSError: the file cannot be written.
    """
    chosen = [stats for stats in all_stats() if stats.settings]
    if not chosen:
        raise ValueError(
            "export_config: no layer has been swapped and called yet; fix: run a forward first"
        )
    settings, choice = chosen[-1].settings, chosen[-1].choice
    split = {} if choice is None else choice.settings()
    block = {BLOCK: without_unused(settings | split)}
    if path is not None:
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(block, indent=2) + "\n")
    return block
