"""Trials of ``bench.py contention`` in the simulator, many at a time, with the same noise for all.

Shape letters: W ranks, S calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from benches.contention_calls import Counts
from benches.contention_study import Trial, static_choice
from ds_tilemoe.calibration import typical
from ds_tilemoe.controller import Controller, Limits, Observation
from ds_tilemoe.cost_model import Choice, CostModel, Machine
from ds_tilemoe.simulator import Floats, Simulator, noise_of

SPREAD = 0.03  # of the noise
WRONG = (0.7, 1.0, 1.3)  # factors on each calibrated rate


def wrong_machine(sms: int, seed: int) -> Machine:
    """An H200 whose calibration is wrong by up to 30 % in each rate."""
    factors = random.Random(seed).choices(WRONG, k=4)
    true = typical(sms)
    return Machine(
        sms=sms,
        rate_per_cta=true.rate_per_cta * factors[0],
        drain_rate=true.drain_rate * factors[1],
        link=true.link * factors[2],
        tile_base_ns=true.tile_base_ns,
        tile_ns_per_k=true.tile_ns_per_k * factors[3],
    )


def simulate(
    simulators: Mapping[int, Simulator],
    calls: Sequence[tuple[int, Counts]],
    splits: Sequence[int],
    seeds: Sequence[int],
    starts: Sequence[int | None] = (None,),
) -> list[Trial]:
    """Trials in the simulator, one a seed; a rank's report is read one call late.

    Args:
        simulators: by the tokens of a rank.
        calls: (tokens, C) of each call.
        splits: the static ones.
        seeds: of the noise, and of how the controllers' calibration is wrong.
        starts: first splits, in turn; None = the cost model's.
    """
    sim = next(iter(simulators.values()))
    world, topk = sim.problem.world, sim.problem.topk
    shape = (len(calls), world)
    noise = np.stack([noise_of(np.random.default_rng(s), *shape, SPREAD) for s in seeds])
    right = CostModel(typical(sim.gpu.sms), sim.work)

    def by_rule(one: Simulator, counts: Counts) -> list[Choice]:
        tiles = [call.tiles for call in one.calls(counts, [static_choice(1)] * world)]
        return [static_choice(right.rule(t, 1, one.gpu.sms - 1, right.rates)) for t in tiles]

    variants: dict[int | str, Callable[[Simulator, Counts], list[Choice]]] = {
        c: lambda *_, c=c: [static_choice(c)] * world for c in splits
    }
    variants["rule"] = by_rule
    found = {name: np.empty(noise.shape[:2]) for name in (*variants, "sequential")}
    same: dict[tuple[int, bytes], list[int]] = {}  # calls of one C are computed together
    for i, (tokens, counts) in enumerate(calls):
        same.setdefault((tokens, counts.tobytes()), []).append(i)
    for (tokens, _), indices in same.items():
        one, counts = simulators[tokens], calls[indices[0]][1]
        factors = noise[:, indices].reshape(-1, world, 2)
        for name, choose in variants.items():
            chosen = choose(one, counts)
            ctas = [c.num_consumer_ctas for c in chosen]
            latency, _ = one.run(one.calls(counts, chosen), ctas, factors)
            found[name][:, indices] = latency.reshape(len(seeds), -1)
        sequential = one.sequential(counts, factors)
        found["sequential"][:, indices] = sequential.reshape(len(seeds), -1)

    trials = []
    for number, seed in enumerate(seeds):
        machine = wrong_machine(sim.gpu.sms, seed)
        limits = Limits(start=starts[number % len(starts)])
        controllers = [Controller(machine, sim.work, topk, limits) for _ in range(world)]
        latency, chosen_splits = _controlled(simulators, calls, controllers, noise[number])
        model = Controller(machine, sim.work, topk)
        blind = np.empty(len(calls))
        for (tokens, _), indices in same.items():
            one, counts = simulators[tokens], calls[indices[0]][1]
            chosen = [model.choose(Controller.bucket_of(tokens))] * world
            ctas = [c.num_consumer_ctas for c in chosen]
            blind[indices] = one.run(one.calls(counts, chosen), ctas, noise[number, indices])[0]
        trials.append(
            Trial(
                {c: found[c][number] for c in splits},
                latency,
                found["sequential"][number],
                found["rule"][number],
                blind,
                chosen_splits,
                controllers,
            )
        )
    return trials


def _controlled(
    simulators: Mapping[int, Simulator],
    calls: Sequence[tuple[int, Counts]],
    controllers: Sequence[Controller],
    noise: Floats,
) -> tuple[Floats, npt.NDArray[np.int64]]:
    latencies = np.empty(len(calls))
    splits = np.empty((len(calls), len(controllers)), np.int64)
    late: list[Observation] = []
    for i, (tokens, counts) in enumerate(calls):
        one, bucket = simulators[tokens], Controller.bucket_of(tokens)
        choices = [c.choose(bucket) for c in controllers]
        splits[i] = [c.num_consumer_ctas for c in choices]
        ranks = one.calls(counts, choices)
        latency, times = one.run(ranks, splits[i].tolist(), noise[i : i + 1])
        latencies[i] = latency[0]
        for controller, seen in zip(controllers, late, strict=bool(late)):
            controller.observe(seen)
        late = [
            call.observation(tokens, choice.num_consumer_ctas, time)
            for call, choice, time in zip(ranks, choices, times, strict=True)
        ]
    return latencies, splits


class SimulatedOperator:
    """A :class:`Simulator` as an :class:`Operator`, with noise of its own in every call.

    Args:
        simulator: the problem.
        machine: what controllers take for calibrated.
        seed: of the noise.
    """

    def __init__(self, simulator: Simulator, machine: Machine, seed: int) -> None:
        self.machine, self.work = machine, simulator.work
        self.ranks = range(simulator.problem.world)
        self._simulator, self._rng = simulator, np.random.default_rng(seed)

    def run(self, choices: Sequence[Choice], counts: Counts) -> tuple[float, list[Observation]]:
        """See :class:`Operator`."""
        calls = self._simulator.calls(counts, choices)
        ctas = [c.num_consumer_ctas for c in choices]
        latency, times = self._simulator.run(calls, ctas, self._noise())
        tokens = self._simulator.problem.tokens
        return float(latency[0]), [
            call.observation(tokens, split, found)
            for call, split, found in zip(calls, ctas, times, strict=True)
        ]

    def sequential(self, counts: Counts) -> float:
        """See :class:`Operator`."""
        return float(self._simulator.sequential(counts, self._noise())[0])

    def _noise(self) -> Floats:
        return noise_of(self._rng, 1, len(self.ranks), SPREAD)
