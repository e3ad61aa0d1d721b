"""``bench.py contention`` on GPUs: its studies, one layer after the other.

Shape letters: W ranks, S calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benches.contention_calls import (
    MIXED_SPLITS,
    Calls,
    Case,
    Counts,
    back_and_forth,
    hot_ratio,
    in_turn,
    pool,
    traces,
)
from benches.contention_operator import GpuOperator, open_operator, open_world
from benches.contention_overhead import overhead
from benches.contention_records import (
    OVERHEAD,
    PARTS,
    SETTLE,
    runs_told,
    shape_fields,
    steady_record,
    switch_record,
    trace_record,
)
from benches.contention_study import Trial, drive, need_splits
from benches.ranks import World

PAIRS = (("balanced", "stress_skew"), ("uniform", "moderate_skew"))  # switched back and forth
SWITCHES = 20  # each way
OVERHEAD_PAIRS = 100


class Effort(NamedTuple):
    """What is run, and what bounds the time on the device.

    Attributes:
        parts: of PARTS.
        rounds: S of a steady trial; of a trace twice as many.
        starts: first splits, one a trial; None = the cost model's.
        segment: calls behind each switch.
        pairs: of routings that are switched.
        leading: static splits of each steady routing that are tried again behind switches; without
            the steady part, all of them.
        traces: trials of the mixed trace.
    """

    parts: Sequence[str]
    rounds: int
    starts: Sequence[int | None]
    segment: int
    pairs: Sequence[tuple[str, str]]
    leading: int
    traces: int


Found = tuple[dict[str, Any], Trial | None]  # a record, and the trial that a picture shows


def on_gpus(
    cases: Sequence[Case],
    routings: Sequence[str],
    splits: Sequence[int],
    effort: Effort,
) -> Iterator[Found]:
    """The studies of every case; every rank makes all records.

    Raises:
        InputError: no GPUs, or too few for a part, or too few SMs for a split.
        BenchError: another process computes there, or a result is wrong.
    """
    world = open_world(effort.parts)
    need_splits(splits, world.most_consumers)
    starts = len(effort.starts)
    runs_of = (starts * len(routings), starts * len(effort.pairs), effort.traces, 1)
    runs = sum(n for part, n in zip(PARTS, runs_of, strict=True) if part in effort.parts)
    with world.progress(len(cases) * runs, "contention") as bar:
        for case in cases:
            bar.set_postfix_str(f"{case.m},{case.n},{case.k}")
            yield from _Study(world, case, effort, bar).all(routings, splits)


class _Study:
    """All studies of one layer."""

    def __init__(self, world: World, case: Case, effort: Effort, bar: Any) -> None:
        self._world, self._case, self._effort, self._bar = world, case, effort, bar

    def all(self, routings: Sequence[str], splits: Sequence[int]) -> Iterator[Found]:
        world, case, effort = self._world, self._case, self._effort
        parts = effort.parts
        names = dict.fromkeys(
            (
                "balanced",  # of the overhead, and of the checks
                *(routings if "steady" in parts else ()),
                *(n for pair in effort.pairs for n in pair if "switch" in parts),
            )
        )
        pools = {
            (name, hot): pool(case, name, world.ranks, hot)
            for name in names
            for hot in ((0, 1) if "switch" in parts else (0,))
        }
        mixed: Calls = []
        if "mixed" in parts:
            mixed = traces(case, world.ranks, 2 * effort.rounds)["mixed"]
        every = [c for some in pools.values() for c in some] + [c for _, c in mixed]
        counts = list({id(c): c for c in every}.values())
        checked = () if set(parts) == {OVERHEAD} else (*splits, *MIXED_SPLITS)
        with open_operator(world, case, counts, checked) as operator:
            calibrated = dataclasses.asdict(operator.machine) if world.ranks > 1 else {}
            same = {
                **world.fields(),
                "simulated": False,
                "max_rel_err": operator.max_rel_err,
                "bit_equal": True,  # or nothing would have been timed
                "calibrated": {name: round(value, 4) for name, value in calibrated.items()},
            }
            for record, trial in self._records(operator, routings, splits, pools, mixed):
                yield record | same, trial

    def _records(
        self,
        operator: GpuOperator,
        routings: Sequence[str],
        splits: Sequence[int],
        pools: dict[tuple[str, int], list[Counts]],
        mixed: Calls,
    ) -> Iterator[Found]:
        case, effort, ranks = self._case, self._effort, self._world.ranks
        hot = {name: round(hot_ratio(some[0]), 3) for (name, _), some in pools.items()}
        parts = effort.parts
        leading: set[int] = set()
        for routing in routings if "steady" in parts else ():
            calls = in_turn(case, pools[routing, 0], effort.rounds)
            trials = [
                self._drive(operator, calls, splits, seed, start)
                for seed, start in enumerate(effort.starts)
            ]
            leading |= set(_least(trials)[: effort.leading])
            record = steady_record(case, routing, ranks, trials, False)
            told = {"hot_ratio": hot[routing], "trials": runs_told(trials)}
            yield record | told, trials[0]
        again = sorted(leading or splits)
        for pair in effort.pairs if "switch" in parts else ():
            for (before, after), pieces in self._switches(operator, pair, again, pools):
                record = switch_record(case, (before, after), ranks, effort.segment, pieces, False)
                yield record | {"hot_ratio": [hot[before], hot[after]]}, pieces[0]
        if "mixed" in parts:
            trials = [
                self._drive(operator, mixed, MIXED_SPLITS, seed, None, with_models=False)
                for seed in range(effort.traces)
            ]
            yield trace_record(case, "mixed", ranks, trials, MIXED_SPLITS, False), trials[0]
        if OVERHEAD in parts:
            self._bar.update()
            found = overhead(self._world, operator, pools["balanced", 0], OVERHEAD_PAIRS)
            record = shape_fields(case, "balanced", ranks) | {"study": OVERHEAD, **found}
            yield record | {"hot_ratio": hot["balanced"]}, None

    def _switches(
        self,
        operator: GpuOperator,
        pair: tuple[str, str],
        splits: Sequence[int],
        pools: dict[tuple[str, int], list[Counts]],
    ) -> Iterator[tuple[tuple[str, str], list[Trial]]]:
        """Both ways between two routings, whose hot ranks differ; a piece of a trial a switch."""
        effort = self._effort
        visits = -(-SWITCHES // len(effort.starts))
        calls, switches = back_and_forth(
            self._case,
            (pools[pair[0], 0], pools[pair[1], 1]),
            visits,
            max(SETTLE, effort.segment),
            effort.segment,
        )
        trials = [
            self._drive(operator, calls, splits, seed, start, with_models=False)
            for seed, start in enumerate(effort.starts)
        ]
        around = [slice(at - effort.segment, at + effort.segment) for at in switches]
        for way, name in enumerate((pair, pair[::-1])):
            yield name, [trial.part(calls) for trial in trials for calls in around[way::2]]

    def _drive(
        self,
        operator: GpuOperator,
        calls: Calls,
        splits: Sequence[int],
        seed: int,
        start: int | None,
        with_models: bool = True,
    ) -> Trial:
        """One trial of all ranks: each has driven its own controller."""
        trial = drive(
            operator,
            self._case.topk,
            calls,
            splits,
            seed=seed,
            start=start,
            with_models=with_models,
        )
        self._bar.update()
        everyone = self._world.gather((trial.splits, trial.controllers))
        return dataclasses.replace(
            trial,
            splits=np.concatenate([theirs for theirs, _ in everyone], axis=1),
            controllers=[one for _, theirs in everyone for one in theirs],
        )


def _least(trials: Sequence[Trial]) -> list[int]:
    """The static splits, the one with the least mean first."""
    means = {c: float(np.mean([t.static[c].mean() for t in trials])) for c in trials[0].static}
    return sorted(means, key=means.__getitem__)
