"""The ring of call records in page-locked memory, read without waiting for the device.

A call's record comes beside the exchange of the next one, or when the heap is asked for it:
csrc/plan_abi.h, csrc/common/record.cuh.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tilemoe.plan_abi import CALL_RECORD_DTYPE, CALL_RECORDS
from ds_tilemoe.stats import IterationStats, LayerTimes

RING_BYTES = CALL_RECORDS * CALL_RECORD_DTYPE.itemsize


def _format(dtype: np.dtype[Any]) -> str:
    if dtype.names is None:
        return {"i8": "q", "u8": "Q", "i4": "i"}[dtype.str[1:]]
    return "".join(_format(dtype[name]) for name in dtype.names)


# By struct a record is read in a fraction of the time that numpy takes for it.
_LAYOUT = struct.Struct("=" + _format(CALL_RECORD_DTYPE))
assert _LAYOUT.size == CALL_RECORD_DTYPE.itemsize, "the record has gaps"
_RECORD_WORDS = _LAYOUT.size // 8
_EPOCH_WORD = CALL_RECORD_DTYPE.fields["epoch"][1] // 8  # type: ignore[index]
_ITERATION_END = len(IterationStats._fields)
_TIMES_END = _ITERATION_END + len(LayerTimes._fields)


class Record(NamedTuple):
    """One call of one layer on this rank.

    Attributes:
        epoch: number of the call on its heap; calls that ended without scale leave a gap.
        layer: fingerprint.
        iteration, times: see plan_abi.h.
        tokens: of this rank.
        rows: valid rows of its layout; ``remote_rows`` of them are owed to other ranks.
        consumer_ctas: that were asked for.
        bands: of the plan.
    """

    epoch: int
    layer: int
    iteration: IterationStats
    times: LayerTimes
    tokens: int
    rows: int
    remote_rows: int
    consumer_ctas: int
    bands: int


class RecordRing:
    """Hands out each record once.

    Args:
        memory: [RING_BYTES] uint8, page-locked, zeroed.
    """

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory.data
        self._words = memory.data.cast("Q")
        self._epochs = memory.view(CALL_RECORD_DTYPE)["epoch"]  # a view: read anew each time
        self._last = 0

    def poll(self) -> list[Record]:
        """Calls that have ended since the last poll, oldest first.

        A call is missing if more than CALL_RECORDS others have ended before anybody asked.
        """
        found = self.poll_quickly()
        while more := self.poll_quickly():
            found += more
        return found

    def poll_quickly(self) -> list[Record]:
        """As poll(), but those behind a call that has left no record may come the next time.

        Mostly one call has ended, and it is the next: to look at all slots would take longer.
        """
        found = []
        while self._epoch_at(slot := (self._last + 1) % CALL_RECORDS) == self._last + 1:
            if (record := self._read(slot)) is None:
                break
            found.append(record)
            self._last += 1
        return found or self._search()

    def _search(self) -> list[Record]:
        slots = (self._epochs > self._last).nonzero()[0].tolist()
        found = [record for slot in slots if (record := self._read(slot)) is not None]
        if len(found) > 1:
            found.sort()  # by epoch
        if found:
            self._last = found[-1].epoch
        return found

    def _epoch_at(self, slot: int) -> int:
        return self._words[slot * _RECORD_WORDS + _EPOCH_WORD]

    def _read(self, slot: int) -> Record | None:
        """The record that stands there; None if the device is writing, or has begun to."""
        before = self._epoch_at(slot)
        words = _LAYOUT.unpack_from(self._memory, slot * _LAYOUT.size)
        layer, tokens, rows, remote_rows, consumer_ctas, bands, epoch = words[_TIMES_END:]
        if not before == epoch == self._epoch_at(slot) or epoch == 0:
            return None
        return Record(
            epoch,
            layer,
            IterationStats._make(words[:_ITERATION_END]),
            LayerTimes._make(words[_ITERATION_END:_TIMES_END]),
            tokens,
            rows,
            remote_rows,
            consumer_ctas,
            bands,
        )
