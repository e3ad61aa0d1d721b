"""Which split a call gets and from which calls a controller learns; no GPU needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds_tilemoe.backends import cuda_split
from ds_tilemoe.backends.cuda_abi import Mover
from ds_tilemoe.backends.cuda_records import Record
from ds_tilemoe.backends.cuda_split import BUCKETS, CALM_LESSONS, SHORT_NS, Splits
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.cost_model import Choice
from ds_tilemoe.stats import IterationStats, LayerTimes

LAYER, TOKENS, WAIT = 7, 64, 10_000_000  # fingerprint, of a call, ns for the peers' counts
LONG = 2 * SHORT_NS


class Teacher:
    """A controller that only counts its lessons; its choice is what the test makes it."""

    def __init__(self) -> None:
        self.choice = Choice(8, 2, 1, "sm")
        self.lessons = 0

    def choose(self, bucket: int) -> Choice:
        return self.choice

    def observe(self, seen: Any) -> None:
        self.lessons += 1


@pytest.fixture
def teacher() -> Teacher:
    return Teacher()


@pytest.fixture
def splits(teacher: Teacher) -> Splits:
    made = Splits(TileOverlapConfig(), sms=132, world=2)
    made.controllers[LAYER] = teacher  # type: ignore[assignment]
    made._words[LAYER] = np.zeros(BUCKETS, np.int32)
    return made


def call(ns: int, remote_rows: int = 1000, bands: int = 100, tokens: int = TOKENS) -> Record:
    iteration = IterationStats(*[1] * len(IterationStats._fields))
    times = LayerTimes(0, WAIT, 0, 0, 0, 0, 0, WAIT + ns)
    return Record(1, LAYER, iteration, times, tokens, 2000, remote_rows, 8, bands)


def lessons(splits: Splits, teacher: Teacher, record: Record, calls: int) -> int:
    before = teacher.lessons
    for _ in range(calls):
        splits.observe([record])
    return teacher.lessons - before


def test_short_calls_teach_seldom_however_long_they_wait(splits: Splits, teacher: Teacher) -> None:
    assert lessons(splits, teacher, call(SHORT_NS - 1), 24) == 3


@pytest.mark.parametrize(("ns", "period"), [(SHORT_NS, 8), (400_000, 5), (1_500_000, 1)])
def test_calls_that_change_nothing_teach_seldom(
    splits: Splits, teacher: Teacher, ns: int, period: int
) -> None:
    assert lessons(splits, teacher, call(ns), CALM_LESSONS) == CALM_LESSONS
    assert lessons(splits, teacher, call(ns), 40) == 40 // period


@pytest.mark.parametrize("other", [{"remote_rows": 1100}, {"bands": 90}, {"tokens": 2 * TOKENS}])
def test_another_load_teaches_at_once(
    splits: Splits, teacher: Teacher, other: dict[str, int]
) -> None:
    lessons(splits, teacher, call(LONG), CALM_LESSONS)
    assert lessons(splits, teacher, call(LONG), 1) == 0
    assert lessons(splits, teacher, call(LONG, **other), 1) == 1


@pytest.mark.parametrize("name", ["remote_rows", "bands"])
def test_a_new_load_teaches_by_one_call_after_another(
    splits: Splits, teacher: Teacher, name: str
) -> None:
    calm = {"remote_rows": 1000, "bands": 100}
    lessons(splits, teacher, call(LONG, **calm), CALM_LESSONS + 8)
    lighter = call(LONG, **{**calm, name: calm[name] * 62 // 100})
    assert [lessons(splits, teacher, lighter, 1) for _ in range(CALM_LESSONS)] == [1] * CALM_LESSONS
    assert lessons(splits, teacher, lighter, 8) == 1, "until they are calm again"


def test_after_a_change_each_call_teaches(splits: Splits, teacher: Teacher) -> None:
    lessons(splits, teacher, call(LONG), CALM_LESSONS)
    changed = Choice(3, 2, 1, "sm")
    teacher.observe = lambda seen: setattr(teacher, "choice", changed)  # type: ignore[method-assign]
    lessons(splits, teacher, call(LONG, bands=50), 1)
    assert splits._words[LAYER].max() == 3, "graphs hear of it"
    del teacher.observe  # type: ignore[method-assign]
    assert lessons(splits, teacher, call(LONG, bands=50), CALM_LESSONS) == CALM_LESSONS


def test_a_split_is_made_once_a_choice(
    splits: Splits, teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer: Any = SimpleNamespace(fingerprint=LAYER, is_small=lambda tokens: False)
    first = splits.choose(layer, TOKENS, "auto", False)
    assert (first.num_consumer_ctas, first.mover) == (8, Mover.SM)
    assert splits.choose(layer, TOKENS - 1, "auto", False) is first, "of one size bucket"
    assert splits.choose(layer, TOKENS, "none", False).mover is Mover.NONE
    teacher.choice = Choice(3, 2, 1, "sm")
    assert splits.choose(layer, TOKENS, "auto", False).num_consumer_ctas == 3
    assert splits.choose(layer, TOKENS, "auto", True).num_consumer_ctas == max(
        cuda_split.MOST_CAPTURED_CTAS, cuda_split.AUTO_CONSUMER_CTAS
    )
    assert splits.choose(layer, TOKENS, "auto", False).num_consumer_ctas == 3
