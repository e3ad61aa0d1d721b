"""The ring of call records in page-locked memory, read without waiting for the device.

A call's record comes beside the exchange of the next one, or when the heap is asked for it:
csrc/plan_abi.h, csrc/common/record.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tilemoe.plan_abi import CALL_RECORD_DTYPE, CALL_RECORDS
from ds_tilemoe.stats import IterationStats, LayerTimes

RING_BYTES = CALL_RECORDS * CALL_RECORD_DTYPE.itemsize


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
        self._slots = memory.view(CALL_RECORD_DTYPE)
        self._epochs = self._slots["epoch"]  # a view: read anew each time
        self._last = 0

    def poll(self) -> list[Record]:
        """Calls that have ended since the last poll, oldest first.

        A call is missing if more than CALL_RECORDS others have ended before anybody asked.
        """
        slots = (self._epochs > self._last).nonzero()[0].tolist()
        found = [record for slot in slots if (record := self._read(slot)) is not None]
        if len(found) > 1:
            found.sort()  # by epoch
        if found:
            self._last = found[-1].epoch
        return found

    def _read(self, slot: int) -> Record | None:
        """The record that stands there; None if the device is writing, or has begun to."""
        before = int(self._epochs[slot])
        iteration, times, layer, tokens, rows, remote, ctas, bands, epoch = self._slots[slot].item()
        if not before == epoch == int(self._epochs[slot]) or epoch == 0:
            return None
        return Record(
            epoch,
            layer,
            IterationStats._make(iteration),
            LayerTimes._make(times),
            tokens,
            rows,
            remote,
            ctas,
            bands,
        )
