"""The controller as a state machine: bounds, reasons, determinism, cost; on made-up calls.

What it achieves on simulated GPUs is in test_contention.py.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import pytest

from ds_tilemoe.calibration import typical
from ds_tilemoe.controller import Controller, Limits, Observation, observation
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice, Load, Machine, Work

TOKENS = 8192


def work(n=8192, k=2048, tile_n=256):
    return Work(128, tile_n, -(-n // tile_n), k, 2 * n, 64 * 1024, 16, 4)


class Truth:
    """A GPU that does what the cost model says, with rates of its own."""

    def __init__(self, machine, shape=None, rate=31.0, link=360.0, noise=0.0, seed=0):
        self.work = shape or work()
        self.model = Controller(machine, self.work, 2).model
        self.rates = self.model.rates._replace(per_cta=rate, link=link)
        self.noise, self.random = noise, random.Random(seed)

    def call(self, choice, rows=16384, tokens=TOKENS):
        remote = rows * 3 // 4
        load = self.model.load(rows, remote)
        factor = self.random.lognormvariate(0.0, self.noise) if self.noise else 1.0
        rates = self.rates._replace(tile=factor, start_ns=20_000.0)
        consumers = choice.num_consumer_ctas
        timing = self.model.predict(load, choice, rates)
        first = rates.start_ns + factor * self.model.gemm(load.tiles, consumers).first_ready
        over = timing.total - timing.gemm - (self.model.machine.launch_ns if consumers else 0)
        drains = self.model.machine.producers(consumers) * self.model.machine.drain_rate
        mine = min(consumers * rates.per_cta, rates.link)
        after = min(mine + drains, rates.link)
        left = max(0.0, over - self.model.machine.drain_start_ns) * after
        chunks = int(left / self.work.chunk_bytes)
        return Observation(
            tokens=tokens,
            num_consumer_ctas=consumers,
            rows=rows,
            remote_rows=remote,
            bands=-(-rows // 128),
            first_segment_ready=int(first),
            producer_end=int(timing.gemm),
            last_put=int(timing.gemm + over) if chunks else int(timing.gemm * 0.99),
            backlog_at_producer_end=chunks,
            chunks_drained=int(chunks * drains / (drains + mine)),
        )


def controller(shape=None, machine=None, **limits):
    return Controller(machine or typical(132), shape or work(), 2, Limits(**limits))


def run(ctl, truth, calls, rows=16384, tokens=TOKENS, late=0):
    """Splits of so many calls, each report read ``late`` calls later."""
    bucket, pending, splits = ctl.bucket_of(tokens), [], []
    for _ in range(calls):
        choice = ctl.choose(bucket)
        splits.append(choice.num_consumer_ctas)
        pending.append(truth.call(choice, rows, tokens))
        if len(pending) > late:
            ctl.observe(pending.pop(0))
    return splits


def best_split(truth, rows=16384):
    load = truth.model.load(rows, rows * 3 // 4)
    rates = truth.rates._replace(start_ns=20_000.0)
    totals = {
        c: truth.model.predict(load, Choice(c, 2, 1, "sm"), rates).total for c in range(1, 131)
    }
    return min(totals, key=totals.get), totals


# -- what it chooses --------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("start", [None, 1, 8, 24, 64, 131])
@pytest.mark.parametrize("rate", [22.0, 31.0, 45.0])
def test_it_finds_the_best_split_from_anywhere(start, late, rate):
    truth = Truth(typical(132), rate=rate)
    best, totals = best_split(truth)
    splits = run(controller(start=start), truth, 40, late=late)
    assert splits[0] == start or start is None
    for split in splits[20:]:  # 2 % are the hysteresis
        assert totals[split] <= 1.025 * totals[best], (splits, best)


def test_a_steady_load_brings_no_change():
    truth = Truth(typical(132), noise=0.03)
    ctl = controller()
    run(ctl, truth, 20)
    before = len(ctl.changes)
    run(ctl, truth, 500)
    assert len(ctl.changes) - before <= 3, "fewer than one in 50"


def test_a_new_load_is_followed_within_eight_calls():
    shape = work(1024, 4096)
    truth = Truth(typical(132), shape)
    ctl = controller(shape)
    run(ctl, truth, 25)
    for rows in (42598, 16384, 7000 * 2):
        splits = run(ctl, truth, 12, rows=rows, late=1)
        best, totals = best_split(truth, max(rows, 16384))
        assert totals[splits[8]] <= 1.03 * totals[best], (rows, splits, best)


def test_a_split_that_took_longer_is_taken_back():
    """The truth contradicts the model: beyond 6 consumers everything is slow."""
    truth = Truth(typical(132))
    ctl = controller(start=6)
    bucket, splits = ctl.bucket_of(TOKENS), []
    for _ in range(100):
        choice = ctl.choose(bucket)
        splits.append(choice.num_consumer_ctas)
        seen = truth.call(choice)
        if choice.num_consumer_ctas > 6:
            seen = seen._replace(last_put=2 * seen.producer_end)
        ctl.observe(seen)
    assert max(splits) > 6, "it was tried"
    assert max(splits[60:]) <= 6, splits
    assert any(change.reason.startswith("taken back") for change in ctl.changes)
    assert not [c for c in ctl.changes if c.observations > 60], "and not again and again"


def test_little_to_ship_goes_without_a_consumer():
    tiny = Work(128, 256, 16, 1536, 8192, 64 * 1024, 32, 4)
    ctl = Controller(typical(132), tiny, 8, Limits())
    choice = ctl.choose(ctl.bucket_of(1))
    assert choice == Choice(0, choice.local_tail_waves, 1, "none")
    ctl = Controller(typical(132), tiny, 8, Limits(mover="sm"))
    assert ctl.choose(0).mover == "sm", "unless it is wanted"


def test_buckets_are_apart_and_share_what_they_learn():
    truth = Truth(typical(132), rate=20.0)
    ctl = controller()
    run(ctl, truth, 20)
    short = ctl.choose(ctl.bucket_of(1024))
    assert ctl.bucket_of(1024) != ctl.bucket_of(TOKENS)
    fresh = controller().choose(ctl.bucket_of(1024))
    assert short.local_tail_waves > fresh.local_tail_waves, "the rate is known to be lower"
    assert [c.before is None for c in ctl.changes].count(True) == 2


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (8192, 13), (8193, 14)]
)
def test_size_buckets(tokens, bucket):
    assert Controller.bucket_of(tokens) == bucket


# -- bounds and settings ----------------------------------------------------------------------


@pytest.mark.parametrize("sms", [4, 78, 108, 132])
@pytest.mark.parametrize("wants", ["more", "less"])
def test_it_stays_in_one_to_sms_minus_one(sms, wants):
    """A load that always asks for more, or for less."""
    ctl = controller(machine=typical(sms))
    bucket = ctl.bucket_of(TOKENS)
    for i in range(200):
        choice = ctl.choose(bucket)
        if choice.mover == "sm":
            assert 1 <= choice.num_consumer_ctas <= sms - 1
        else:
            assert choice.num_consumer_ctas == 0
        end = 1_000_000 + i
        ctl.observe(
            Observation(
                TOKENS,
                choice.num_consumer_ctas,
                16384,
                12288,
                128,
                20_000,
                end,
                10 * end if wants == "more" else end // 2,
                3000 if wants == "more" else 0,
                0,
            )
        )
    assert 1 <= ctl.low <= ctl.high <= sms - 1


def test_the_bounds_of_the_settings_hold():
    ctl = controller(min_consumer_ctas=5, max_consumer_ctas=7, mover="sm", start=99)
    splits = run(ctl, Truth(typical(132), rate=5.0), 30)
    assert set(splits) <= {5, 6, 7}
    assert splits[0] == 7


def test_explicit_values_are_never_overridden():
    limits = {
        "num_consumer_ctas": 3,
        "local_tail_waves": ALL_TAIL_WAVES,
        "bands_per_segment": 4,
    }
    ctl = controller(**limits)
    truth = Truth(typical(132), rate=5.0)
    assert set(run(ctl, truth, 40)) == {3}
    assert ctl.choose(ctl.bucket_of(TOKENS)) == Choice(3, ALL_TAIL_WAVES, 4, "sm")
    assert set(run(controller(mover="none"), truth, 40)) == {0}


def test_a_large_hysteresis_keeps_the_first_split():
    assert set(run(controller(start=2, hysteresis=0.9), Truth(typical(132)), 40)) == {2}


def test_the_interval_is_the_calls_between_two_looks():
    splits = run(controller(start=2, interval=10), Truth(typical(132)), 30)
    assert splits[:10] == [2] * 10
    assert splits[10] != 2


def test_on_the_cpu_threads_take_nothing_from_the_producer():
    machine = Machine(
        sms=1, rate_per_cta=4.0, drain_rate=4.0, link=16.0, tile_base_ns=0.0, tile_ns_per_k=0.5,
        consumer_takes_sm=False,
    )  # fmt: skip
    ctl = controller(machine=machine, min_consumer_ctas=1, max_consumer_ctas=3, mover="sm", start=1)
    truth = Truth(machine, rate=2.0, link=16.0)
    splits = run(ctl, truth, 20)
    assert splits[0] == 1
    assert splits[-1] == 3, "all that may be used"


# -- reports ----------------------------------------------------------------------------------


def test_a_replayed_log_gives_the_same_choices():
    truth, rng = Truth(typical(132), noise=0.05), random.Random(3)
    ctl = controller()
    log, chosen = [], []
    for i in range(300):
        tokens = rng.choice([512, 4096, 8192])
        choice = ctl.choose(ctl.bucket_of(tokens))
        seen = truth.call(choice, rows=int(2 * tokens * rng.choice([0.5, 1.0, 1.6])), tokens=tokens)
        chosen.append(choice)
        log.append(seen if i % 3 else None)  # some reports are lost
        if log[-1] is not None:
            ctl.observe(seen)
    again, replayed = controller(), []
    rng = random.Random(3)
    for seen in log:
        tokens = rng.choice([512, 4096, 8192])
        rng.choice([0, 0, 0])
        replayed.append(again.choose(again.bucket_of(tokens)))
        if seen is not None:
            again.observe(seen)
    assert replayed == chosen
    assert list(again.changes) == list(ctl.changes)


def test_reports_of_nothing_are_ignored():
    ctl = controller()
    bucket = ctl.bucket_of(0)
    choice = ctl.choose(bucket)
    for rows, end in ((0, 0), (0, 100), (10, 0)):
        ctl.observe(Observation(0, 1, rows, 0, 0, 0, end, 0, 0, 0))
    assert ctl.choose(bucket) == choice


def test_absurd_reports_do_no_harm():
    ctl = controller()
    rng = random.Random(0)
    for _ in range(2000):
        ctl.choose(ctl.bucket_of(TOKENS))
        ctl.observe(
            Observation(
                rng.choice([1, TOKENS]),
                rng.randrange(132),
                rng.randrange(1, 10**6),
                rng.randrange(10**6),
                rng.choice([0, 1, 10**5]),
                rng.randrange(10**9),
                rng.randrange(1, 10**9),
                rng.randrange(10**10),
                rng.randrange(10**5),
                rng.randrange(10**5),
            )
        )
        choice = ctl.choose(ctl.bucket_of(TOKENS))
        assert 0 <= choice.num_consumer_ctas <= 131
        assert 1 <= choice.local_tail_waves <= 8


class Iteration(NamedTuple):
    first_segment_ready: int = 1
    producer_end: int = 2
    last_put: int = 3
    backlog_at_producer_end: int = 4
    chunks_drained: int = 5
    others: int = 6


def test_an_observation_is_made_of_a_calls_record():
    seen = observation(Iteration(), tokens=7, rows=8, remote_rows=6, num_consumer_ctas=9, bands=10)
    assert seen == Observation(7, 9, 8, 6, 10, 1, 2, 3, 4, 5)


def test_each_change_has_a_reason():
    ctl = controller(start=1)
    run(ctl, Truth(typical(132)), 20)
    bucket = ctl.bucket_of(TOKENS)
    assert ctl.changes[0].reason == "start: as told"
    assert "less left to the drain" in ctl.changes[1].reason
    assert ctl.why(bucket) == ctl.changes[-1].reason
    assert ctl.why(bucket + 1) == ""
    assert ctl.changes[-1].after == ctl.choose(bucket)


def test_the_export_is_the_choice_of_the_most_frequent_size():
    ctl = controller()
    assert ctl.export() == {}
    run(ctl, Truth(typical(132)), 30)
    ctl.choose(ctl.bucket_of(4))
    choice = ctl.choose(ctl.bucket_of(TOKENS))
    assert ctl.export() == choice._asdict()


def test_a_call_costs_little_host_time():
    """7 to 9 us on one core of a server; the bound leaves room for a busy machine."""
    truth = Truth(typical(132), noise=0.03)
    ctl = controller()
    run(ctl, truth, 50)
    bucket = ctl.bucket_of(TOKENS)
    seen = [truth.call(ctl.choose(bucket)) for _ in range(400)]
    times = []
    for one in seen:
        began = time.thread_time_ns()
        ctl.choose(bucket)
        ctl.observe(one)
        times.append(time.thread_time_ns() - began)
    assert sorted(times)[len(times) // 2] < 50_000
    assert sum(times) / len(times) < 100_000


def test_the_cold_rank_decides_for_the_balanced_load():
    shape = work(1024, 4096)
    truth = Truth(typical(132), shape)
    cold, balanced = controller(shape), controller(shape)
    run(cold, truth, 20, rows=6000)
    run(balanced, truth, 20, rows=16384)
    bucket = cold.bucket_of(TOKENS)
    assert cold.choose(bucket)[0] == pytest.approx(balanced.choose(bucket)[0], abs=1)
    assert isinstance(cold._buckets[bucket].load, Load)
