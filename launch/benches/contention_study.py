"""What ``bench.py contention`` does: the same calls by static splits and by the controller.

A trial is one run of the controller beside all static splits, call by call, with the same routing
for all of them. On GPUs an :class:`Operator` makes the calls (contention_operator.py); in the
simulator they are computed many at a time (contention_simulate.py).

Shape letters: S calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benches.contention_calls import Calls, Counts
from demo.options import wrong
from ds_tilemoe.controller import Controller, Limits, Observation
from ds_tilemoe.cost_model import Choice, Machine, Work
from ds_tilemoe.simulator import Floats

STATIC_TAIL_WAVES = 2  # of static splits
CLOSE = 0.02  # a call is as good as the best static split's within this share
CLOSE_US = 3.0  # or within this time
SMOOTH = 5  # calls over which that is judged


class Operator(Protocol):
    """GEMM 2 beside the combine, call by call, on the ranks of this process.

    Attributes:
        ranks: those whose splits this process chooses: all in the simulator, one on a GPU.
        work: of the layer.
    """

    ranks: Sequence[int]
    work: Work

    @property
    def machine(self) -> Machine:
        """As calibrated."""
        ...

    def run(self, choices: Sequence[Choice], counts: Counts) -> tuple[float, list[Observation]]:
        """One call: us until the slowest rank of the group has ended, and what the call left behind
        on each of ``ranks``. ``choices``: of each of them. Every process calls it alike."""
        ...

    def sequential(self, counts: Counts) -> float:
        """us of GEMM 2 on all SMs, then the copies, then scale, on the slowest rank."""
        ...


@dataclass
class Trial:
    """Latencies in us of the same S calls.

    Attributes:
        static: by split, [S] each.
        controller, sequential: [S].
        rule: [S], by the largest split that adds no wave and fits the link.
        open_loop: [S], by the cost model as calibrated, without feedback; NaN where it was not run.
        splits: the controller's, of each driven rank, [S, ranks].
        controllers: of each driven rank, as they are after the trial.
    """

    static: dict[int, Floats]
    controller: Floats
    sequential: Floats
    rule: Floats
    open_loop: Floats
    splits: npt.NDArray[np.int64]
    controllers: list[Controller] = field(default_factory=list)

    def best_split(self, calls: slice) -> int:
        """The static split with the least mean over these calls."""
        return min(self.static, key=lambda c: (self.static[c][calls].mean(), c))

    def part(self, calls: slice) -> Trial:
        """These calls alone, with all controllers and their changes."""
        found = (self.controller, self.sequential, self.rule, self.open_loop, self.splits)
        return Trial(
            {c: us[calls] for c, us in self.static.items()},
            *(values[calls] for values in found),
            self.controllers,
        )

    def excess(self, calls: slice) -> tuple[float, float]:
        """The controller's mean over the best static split's, minus 1, and the difference in us.
        The best is chosen on every second of the calls and timed on the others."""
        start = calls.start or 0
        best = self.best_split(slice(start, calls.stop, 2))
        timed = slice(start + 1, calls.stop, 2)
        got, want = self.controller[timed].mean(), self.static[best][timed].mean()
        return float(got / want - 1), float(got - want)

    def settled_at(self, calls: slice) -> int | None:
        """The first call from which on the controller is close to the best static split of these
        calls, but for trials: in nine of ten windows of ``SMOOTH`` calls. None if there is none."""
        best = self.static[self.best_split(calls)]
        over = np.where(self.controller - best > CLOSE_US, self.controller / best - 1, 0.0)
        windows = np.lib.stride_tricks.sliding_window_view(over, SMOOTH)
        close = np.median(windows, axis=1) <= CLOSE
        share = np.cumsum(close[::-1])[::-1] / np.arange(len(close), 0, -1)
        settled = np.flatnonzero(close & (share >= 0.9))
        return int(settled[0]) if settled.size else None

    def changes_after(self, observations: int) -> float:
        """Changes of a rank after so many observations, the mean over ranks."""
        late = [c for ctl in self.controllers for c in ctl.changes if c.observations > observations]
        return len(late) / max(1, len(self.controllers))


def is_close(excess: tuple[float, float]) -> bool:
    """Within 2 % or 3 us."""
    return excess[0] <= CLOSE or excess[1] <= CLOSE_US


def static_choice(split: int) -> Choice:
    """The same for all ranks."""
    return Choice(split, STATIC_TAIL_WAVES, 1, "sm" if split else "none")


def need_splits(splits: Sequence[int], most: int) -> None:
    """The GPU holds a producer beside the consumers.

    Args:
        most: its SMs but one.

    Raises:
        InputError: a split is larger.
    """
    if (largest := max(splits, default=0)) > most:
        raise wrong("--split", largest, f"1 to {most} SMs of this GPU", "leave it out")


def drive(
    operator: Operator,
    topk: int,
    calls: Calls,
    splits: Sequence[int],
    *,
    seed: int,
    start: int | None = None,
    with_models: bool = True,
) -> Trial:
    """One trial with a real operator: in each round all variants, in an order that all ranks share.

    Args:
        operator: makes the calls.
        topk: of its layer.
        calls: tokens of a rank and C of each round.
        splits: the static ones.
        seed: of the order.
        start: the controllers' first split; None = the cost model's.
        with_models: beside them the rule and the cost model without feedback; else they are NaN.

    Returns:
        The trial, of ``operator.ranks``; the latencies are the group's.
    """
    machine, work = operator.machine, operator.work
    controllers = [Controller(machine, work, topk, Limits(start=start)) for _ in operator.ranks]
    blind = Controller(machine, work, topk)
    model = blind.model
    models = ("rule", "open_loop") if with_models else ()
    order: list[int | str] = [*splits, "controller", "sequential", *models]
    found = {name: np.full(len(calls), np.nan) for name in (*order, "rule", "open_loop")}
    chosen_splits = np.empty((len(calls), len(controllers)), np.int64)
    shuffle = random.Random(seed).shuffle
    late: list[Observation] = []
    for i, (tokens, counts) in enumerate(calls):
        bucket = Controller.bucket_of(tokens)
        shuffle(order)
        for variant in order:
            if variant == "sequential":
                found[variant][i] = operator.sequential(counts)
                continue
            if variant == "controller":
                choices = [c.choose(bucket) for c in controllers]
                chosen_splits[i] = [c.num_consumer_ctas for c in choices]
            elif variant == "rule":
                choices = [
                    static_choice(model.rule(tiles, 1, machine.sms - 1, model.rates))
                    for tiles in _tiles(operator, counts)
                ]
            elif variant == "open_loop":
                choices = [blind.choose(bucket)] * len(controllers)
            else:
                choices = [static_choice(int(variant))] * len(controllers)
            found[variant][i], seen = operator.run(choices, counts)
            if variant == "controller":
                for controller, report in zip(controllers, late, strict=bool(late)):
                    controller.observe(report)
                late = seen
    return Trial(
        {c: found[c] for c in splits},
        *(found[name] for name in ("controller", "sequential", "rule", "open_loop")),
        chosen_splits,
        controllers,
    )


def _tiles(operator: Operator, counts: Counts) -> list[int]:
    """Of GEMM 2 on each rank of ``operator.ranks``."""
    work = operator.work
    rows = counts.sum(axis=0).reshape(len(counts), -1)  # [W, E_l]
    bands = -(-rows // work.tile_m)
    return [int(bands[rank].sum()) * work.n_tiles for rank in operator.ranks]
