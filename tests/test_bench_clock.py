"""When the benches' clock begins, and who may compute beside them. What a GPU does is recorded."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from benches import clock, gpus, ranks
from benches.records import BenchError

ALONE = ranks.World(0, 1, torch.device("cpu"), None)


class Device:
    """A world on a GPU that only writes down what it is asked to do, in the host's order."""

    on_gpu, device = True, None

    def __init__(self):
        self.log, self.slept, self.is_late, self.us = [], [], False, 700.0

    def together(self):
        self.log.append("together")

    def meet(self):
        self.log.append("meet")

    def synchronize(self):
        pass

    def sleep(self, us):
        self.log.append("sleep")
        self.slept.append(us)

    def reduce(self, values):
        return values

    def events(self, number):
        assert number == 2
        return [Event(self, "start"), Event(self, "end")]


class Event:
    def __init__(self, device, name):
        self._device, self._name = device, name

    def record(self):
        self._device.log.append(self._name)

    def query(self):
        self._device.log.append(f"{self._name} over?")
        return self._device.is_late

    def synchronize(self):
        self._device.log.append(f"wait {self._name}")

    def elapsed_time(self, end):
        log = self._device.log
        began = len(log) - 1 - log[::-1].index("start")
        return self._device.us * 1e-3 * log[began:].count("call")


def timer(device, host_s=0.0):
    def call():
        device.log.append("call")
        time.sleep(host_s)

    made = clock.Timer(device, call)
    device.log.clear()
    return made


def test_a_call_alone_begins_behind_a_sleep_and_a_barrier_on_the_device():
    device = Device()
    assert timer(device).alone() == pytest.approx(700.0)
    wanted = ["together", "sleep", "meet", "start", "call", "end", "start over?", "wait end"]
    assert device.log == wanted


def test_a_call_whose_host_was_late_has_no_time_and_the_next_sleep_is_longer():
    device = Device()
    made = timer(device, host_s=2e-3)
    assert made.host_us > 2000
    device.is_late = True
    assert np.isnan(made.alone())
    device.is_late = False
    assert made.alone() == pytest.approx(700.0)
    assert min(device.slept) >= 2 * 2000


def test_a_sleep_is_twice_the_slowest_of_the_last_calls_within_bounds():
    lead = clock.Lead()
    assert lead.us == clock.FIRST_US
    now = time.perf_counter_ns
    lead.took(now())
    assert lead.us == clock.LEAST_US
    lead.took(now() - 3_000_000)
    assert lead.us == pytest.approx(6000, rel=0.1)
    for _ in range(20):
        lead.took(now())
    assert lead.us == clock.LEAST_US
    lead.took(now() - 1_000_000_000)
    assert lead.us == clock.MOST_US


@pytest.mark.parametrize(("us", "calls"), [(10.0, 20), (700.0, 7), (9000.0, 4)])
def test_a_row_of_calls_starts_behind_one_that_fills_the_pipeline(us, calls):
    device = Device()
    device.us = us
    made = timer(device)
    assert made.steady() == pytest.approx(us)
    assert made.calls == calls
    device.log.clear()
    assert made.steady() == pytest.approx(us)
    assert device.log == ["together", "call", "start", *["call"] * calls, "end", "wait end"]


def test_on_a_cpu_a_call_ends_before_it_returns():
    made = clock.Timer(ALONE, lambda: time.sleep(2e-3))
    assert 2000 <= made.steady() < 50_000
    assert 2000 <= made.alone() < 50_000
    assert made.calls == 1
    assert clock.slowest_us(ALONE, lambda: time.sleep(1e-3), 3) >= 1000


LISTED = """GPU-a, 10, python3
GPU-a, 77, /usr/bin/python3 -m x, y
GPU-b, 11, python3
GPU-b, 10, python3
[N/A], [Not Found], x
"""


def test_a_stranger_is_a_process_on_this_gpu_that_is_no_rank():
    assert gpus.strangers(LISTED, "GPU-a", [10, 11]) == [(77, "/usr/bin/python3 -m x, y")]
    assert gpus.strangers(LISTED, "GPU-b", [10, 11]) == []
    assert gpus.strangers(LISTED, "GPU-a", [5]) == []  # numbers of another container
    assert gpus.strangers("", "GPU-a", [10]) == []


def test_nothing_is_timed_beside_a_stranger(monkeypatch):
    class Properties:
        uuid = "a"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(gpus.os, "getpid", lambda: 10)
    answer = gpus.subprocess.CompletedProcess([], 0, LISTED)
    monkeypatch.setattr(gpus.subprocess, "run", lambda *args, **kwargs: answer)
    gpus.need_alone(ALONE)  # no GPU
    world = ranks.World(0, 1, torch.device("cuda", 0), None)
    with pytest.raises(BenchError, match=r"got 77 \(/usr/bin.*GPU-a beside this run.*kill 77"):
        gpus.need_alone(world)
