"""What signals and controller cost: calls in a row with them and without, eager and as graphs.

On: the backend chooses the split, each call leaves a record, and the controller learns from it; of
a graph, whose split its device looks up, behind each replay. Off: none of that, and the split at
which the controller has arrived. On one rank there is nothing to choose: what is left are records.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benches.clock import Timer
from benches.contention_calls import Counts
from benches.contention_operator import ORDER_SEED, GpuOperator
from benches.operator_check import bits
from benches.ranks import World, shuffled
from benches.records import microseconds, number, ratio

LEARNING = 40  # calls before a controller's choice is taken for its last
PREFIXES = ("", "graph_")  # of fields: eager calls, and graphs


def overhead(
    world: World, operator: GpuOperator, counts: Sequence[Counts], rounds: int
) -> dict[str, object]:
    """us of a call among others, on and off in turn. A collective.

    Args:
        counts: of the eager calls in turn; graphs have the first.
        rounds: pairs of loops.

    Returns:
        Fields of a record.

    Raises:
        BenchError: a replay's result differs from that of the call before it.
        DeadlineError: a kernel has waited in vain.
    """
    turns = {name: itertools.cycle(map(operator.number_of, counts)) for name in ("on", "off")}
    signals_ns: list[int] = []

    def on() -> None:
        index = next(turns["on"])
        began = time.perf_counter_ns()
        operator.learn()
        split, _ = operator.choose(index)
        signals_ns.append(time.perf_counter_ns() - began)
        operator.launch(index, split, True)

    operator.settle()
    for _ in range(LEARNING):
        on()
        world.synchronize()
    first = operator.number_of(counts[0])
    fixed, _ = operator.choose(first)
    split, word = operator.choose(first, capturing=True)
    replay_on = _replayed(world, operator, operator.launch(first, split, True, word))
    replay_off = _replayed(world, operator, operator.launch(first, fixed, False))

    def graph_on() -> None:
        operator.learn()
        replay_on()

    timers = {
        "on": Timer(world, on),
        "off": Timer(world, lambda: operator.launch(next(turns["off"]), fixed, False)),
        "graph_on": Timer(world, graph_on),
        "graph_off": Timer(world, replay_off),
    }
    signals_ns.clear()
    names = list(timers)
    samples = np.full((len(names), rounds), np.nan)
    for index, order in shuffled(len(names), rounds, ORDER_SEED):
        for i in order:
            us = timers[names[i]].steady()
            if index >= 0:
                samples[i, index] = us
    operator.settle()
    found: dict[str, object] = {
        "rounds": rounds,
        "num_consumer_ctas": world.gather(fixed.num_consumer_ctas),
    }
    # Of the host: what a record, the choice and now and then a lesson cost it, in an eager call.
    median, mean = world.reduce(np.array([np.median(signals_ns), np.mean(signals_ns)]) / 1e3)
    found |= {"signals_host_us": number(median), "signals_host_mean_us": number(mean)}
    us_of = dict(zip(names, world.reduce(samples), strict=True))
    for prefix in PREFIXES:
        on_us, off_us = us_of[f"{prefix}on"], us_of[f"{prefix}off"]
        found |= {
            f"{prefix}calls": timers[f"{prefix}on"].calls,
            **microseconds(f"{prefix}on", on_us),
            **microseconds(f"{prefix}off", off_us),
            **ratio(f"{prefix}on_over_off", on_us, off_us),
            **microseconds(f"{prefix}added", on_us - off_us),
            # Until the host has enqueued a call.
            f"{prefix}on_host_us": number(timers[f"{prefix}on"].host_us),
            f"{prefix}off_host_us": number(timers[f"{prefix}off"].host_us),
        }
    return found


def _replayed(
    world: World, operator: GpuOperator, launch: Callable[[], None]
) -> Callable[[], None]:
    """What ``launch`` does as a graph, whose result has been compared. A collective.

    Args:
        launch: of the operator's latest call.

    Raises:
        BenchError: a replay gives another result.
    """
    world.synchronize()
    wanted, y = operator.y.clone(), operator.y
    replay = captured(launch)
    y.fill_(float("nan"))
    replay()
    world.synchronize()
    different = int((bits(y) != bits(wanted)).sum())
    text = f"a replayed call: {different} of {y.numel()} elements differ from the eager one's"
    world.agree(f"{text}: not timed" if different else "")
    return replay


def captured(launch: Callable[[], None]) -> Callable[[], None]:
    """``launch``, whose tensors live as long, as a graph."""
    graph = torch.cuda.CUDAGraph()
    # What NCCL's watchdog does meanwhile on its thread is no part of it.
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        launch()

    def replay(_held: Callable[[], None] = launch) -> None:
        graph.replay()

    return replay
