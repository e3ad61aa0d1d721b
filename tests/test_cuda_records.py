"""The ring of call records, as a device writes it while the host reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from ds_tilemoe.backends.cuda_records import (
    _EPOCH_WORD,
    _RECORD_WORDS,
    RING_BYTES,
    RecordRing,
)
from ds_tilemoe.plan_abi import CALL_RECORD_DTYPE, CALL_RECORDS


def make() -> tuple[RecordRing, Any]:
    memory = np.zeros(RING_BYTES, np.uint8)
    return RecordRing(memory), memory.view(CALL_RECORD_DTYPE)


def write(slots: Any, epoch: int, layer: int = 5) -> None:
    slot = slots[epoch % CALL_RECORDS]
    slot["iteration"]["producer_end"] = 10 * epoch
    slot["times"]["scale_end"] = 100 * epoch
    slot["layer"], slot["tokens"], slot["epoch"] = layer, epoch, epoch


def test_each_call_once_and_in_order() -> None:
    ring, slots = make()
    assert ring.poll() == []
    for epoch in (1, 2, 4):  # call 3 ended without a record
        write(slots, epoch)
    found = ring.poll()
    assert [record.epoch for record in found] == [1, 2, 4]
    assert [record.iteration.producer_end for record in found] == [10, 20, 40]
    assert [record.times.scale_end for record in found] == [100, 200, 400]
    assert ring.poll() == []
    write(slots, 5)
    assert [record.epoch for record in ring.poll()] == [5]


def test_quickly_what_follows_a_gap_may_come_later() -> None:
    ring, slots = make()
    for epoch in (1, 2, 4, 6):
        write(slots, epoch)
    assert [record.epoch for record in ring.poll_quickly()] == [1, 2]
    assert [record.epoch for record in ring.poll_quickly()] == [4, 6]
    assert ring.poll_quickly() == []
    for epoch in range(7, 8 + CALL_RECORDS):  # slot of 7 is that of the last one
        write(slots, epoch)
    assert [record.epoch for record in ring.poll_quickly()] == list(range(8, 8 + CALL_RECORDS))


def test_order_where_the_ring_wraps() -> None:
    ring, slots = make()
    for epoch in range(1, 301):
        write(slots, epoch)
        if epoch == 250:
            assert len(ring.poll()) == 250
    assert [record.epoch for record in ring.poll()] == list(range(251, 301))
    for epoch in range(301, 1000):
        write(slots, epoch)
    assert [record.epoch for record in ring.poll()] == list(range(1000 - CALL_RECORDS, 1000))


def test_a_slot_that_is_being_written_is_left_alone() -> None:
    """The device takes the epoch back before it writes over a record."""
    ring, slots = make()
    write(slots, 1)
    write(slots, 2)
    slots[1]["epoch"] = 0
    assert [record.epoch for record in ring.poll()] == [2]

    class Racing:
        """The epoch of slot 3 is taken back while its record is read."""

        def __init__(self, words: Any) -> None:
            self._words, self._looks = words, 0
            self._at = 3 * _RECORD_WORDS + _EPOCH_WORD

        def __getitem__(self, at: int) -> int:
            self._looks += at == self._at
            return 0 if at == self._at and self._looks > 2 else self._words[at]

    write(slots, 3)
    write(slots, 4)
    ring._words = Racing(ring._words)  # type: ignore[assignment]
    assert [record.epoch for record in ring.poll()] == [4]
    assert ring._words._looks > 2  # type: ignore[attr-defined]
