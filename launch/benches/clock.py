"""When the clock of a call begins: all ranks are there, and on a GPU the launches lie ready.

Two times of a call. :meth:`Timer.alone`: of the device, behind a barrier of all ranks in the
stream, with the host's work done before. :meth:`Timer.steady`: as a model has it, calls one behind
the other, whichever of host and device is the slower.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benches.ranks import World
from benches.records import median

FIRST_US, LEAST_US, MOST_US = 2000.0, 100.0, 20_000.0  # of a lead
HOST_CALLS = 5
STEADY_US = 5000.0  # of a loop
FEWEST_CALLS, MOST_CALLS = 4, 20  # in a loop


class Lead:
    """How long a stream sleeps so that the host enqueues all that is timed before it wakes.

    Twice what the slowest of the last calls took. Of this rank alone: what is timed begins behind a
    barrier of the devices, which the longest sleep of all ranks holds up.
    """

    def __init__(self) -> None:
        self._host_us: deque[float] = deque(maxlen=16)

    @property
    def us(self) -> float:
        if not self._host_us:
            return FIRST_US
        return min(MOST_US, max(LEAST_US, 2 * max(self._host_us)))

    def took(self, began_ns: int) -> None:
        """The host has enqueued a call since ``began_ns`` of ``time.perf_counter_ns``."""
        self._host_us.append((time.perf_counter_ns() - began_ns) / 1e3)


class Timer:
    """Times one call again and again. Everything here is a collective.

    Args:
        world: the ranks.
        call: what all of them do.

    Attributes:
        host_us: how long the host takes until it has enqueued a call; of the slowest rank.
        calls: in the loop of :meth:`steady`; 0 before its first one.
    """

    def __init__(self, world: World, call: Callable[[], Any]) -> None:
        self._world, self._call = world, call
        self._lead = Lead()
        self.calls = 0
        call()  # what is made once is made now
        took = []
        for _ in range(HOST_CALLS):
            world.together()
            began = time.perf_counter_ns()
            call()
            took.append((time.perf_counter_ns() - began) / 1e3)
            self._lead.took(began)
        world.synchronize()
        self.host_us = float(world.reduce(np.array([median(took)]))[0])
        self._events = world.events(2) if world.on_gpu else []

    def alone(self) -> float:
        """One call, us of this rank's device, launches not counted; NaN where the host was late."""
        world = self._world
        world.together()
        if not world.on_gpu:
            return self._on_host(1)
        start, end = self._events
        world.sleep(self._lead.us)
        began = time.perf_counter_ns()
        world.meet()
        start.record()
        self._call()
        end.record()
        self._lead.took(began)
        late = start.query()  # the device was already there while the host still launched
        end.synchronize()
        return float("nan") if late else start.elapsed_time(end) * 1e3

    def steady(self) -> float:
        """Of one call among others of its kind, us of this rank; ranks run free. On a CPU, where a
        call ends before it returns, of one call that the ranks begin together."""
        world = self._world
        if not self.calls:
            self.calls = self._enough()
        world.together()
        return self._loop(self.calls) if world.on_gpu else self._on_host(self.calls)

    def _enough(self) -> int:
        if not self._world.on_gpu:
            return 1
        self._world.together()
        once = float(self._world.reduce(np.array([self._loop(2)]))[0])
        return max(FEWEST_CALLS, min(MOST_CALLS, round(STEADY_US / once)))

    def _loop(self, calls: int) -> float:
        """Behind a first call, which fills the pipeline."""
        start, end = self._events
        self._call()
        start.record()
        for _ in range(calls):
            self._call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    def _on_host(self, calls: int) -> float:
        began = time.perf_counter_ns()
        for _ in range(calls):
            self._call()
        return (time.perf_counter_ns() - began) / 1e3 / calls


def slowest_us(world: World, call: Callable[[], Any], rounds: int) -> float:
    """Median over rounds of :meth:`Timer.alone` of the slowest rank."""
    timer = Timer(world, call)
    return median(world.reduce(np.array([timer.alone() for _ in range(rounds)])))
