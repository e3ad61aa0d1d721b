"""Which split each call of a layer gets, and the words by which a captured graph is told.

The controller of each layer chooses, from the records of past calls; without it (``adaptive`` off,
a group of one) the settings do.

Shape letters: T tokens of this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import bands_per_segment
from ds_tilemoe.backends.cuda_calibration import measured_machine
from ds_tilemoe.backends.cuda_heap import CudaHeap, page_locked
from ds_tilemoe.backends.cuda_layer import CudaLayer, Split
from ds_tilemoe.backends.cuda_plan import tail_waves
from ds_tilemoe.backends.cuda_records import Record
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.controller import Controller, Limits, observation
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice, Machine

# About as many SMs fill an NVLink (18 links of an H200); more only slow the GEMM.
AUTO_CONSUMER_CTAS = 8
# Of a captured graph, whose split the device looks up: those that are too many end at once.
MOST_CAPTURED_CTAS = 32
BUCKETS = 33  # powers of two of tokens
# A lesson takes the host as long as some launches. A controller learns from each call but for
# short ones, where the split matters little, and ones like those that lately changed nothing.
SHORT_NS = 200_000  # of a call, without its wait for the peers' counts
SHORT_CALLS_A_LESSON = 8
CALM_LESSONS = 32  # in a row without a change
CALM_NS = 2_000_000  # of calls between two lessons then, but no more than of short ones
OTHER_LOAD = 0.08  # of the last lesson's: a call that differs by more ends the calm
MOVERS = {
    "sm": abi.Mover.SM,
    "none": abi.Mover.NONE,
    "sequential": abi.Mover.SEQUENTIAL,
    "copy_engine": abi.Mover.COPY_ENGINE,
}


@dataclass
class _Lessons:
    """What a controller has learnt from calls of one size bucket, and when.

    Attributes:
        calls: since the last lesson.
        calm: lessons since the last that changed something, or that had another load.
        bands, remote_rows: of the last lesson's call.
    """

    calls: int = SHORT_CALLS_A_LESSON
    calm: int = 0
    bands: int = 0
    remote_rows: int = 0

    def is_due(self, record: Record) -> bool:
        """Whether to learn from a call, the next of its kind."""
        self.calls += 1
        ns = record.times.scale_end - record.times.exchange_end
        period = SHORT_CALLS_A_LESSON
        if ns >= SHORT_NS:
            if (
                abs(record.bands - self.bands) > OTHER_LOAD * self.bands
                or abs(record.remote_rows - self.remote_rows) > OTHER_LOAD * self.remote_rows
            ):
                self.calm = 0  # one lesson of a load is seldom enough
            period = min(period, CALM_NS // ns) if self.calm >= CALM_LESSONS else 1
        if self.calls < period:
            return False
        self.calls, self.bands, self.remote_rows = 0, record.bands, record.remote_rows
        return True


class Splits:
    """The splits of one rank, for all layers of a group.

    Args:
        config: the ``tile_overlap`` block.
        sms: of the GPU.
        world: W.

    Attributes:
        controllers: by a layer's fingerprint; none where the settings choose.
    """

    def __init__(self, config: TileOverlapConfig, sms: int, world: int) -> None:
        self._config, self._sms, self._world = config, sms, world
        waves = tail_waves(config)
        self._fixed = Choice(  # without a controller, but for the number that a record has
            0,
            ALL_TAIL_WAVES if waves == "all" else int(waves),
            bands_per_segment(config),
            config.mover,
        )
        self._machine: Machine | None = None
        self._words: dict[int, npt.NDArray[np.int32]] = {}  # fingerprint -> [BUCKETS], page-locked
        self._lessons: dict[tuple[int, int], _Lessons] = {}  # by fingerprint and bucket
        # By fingerprint, bucket and consumer CTAs of a call: the choice, and what explain() says.
        self._told: dict[tuple[int, int, int], tuple[Choice, tuple[Choice, str]]] = {}
        # By fingerprint, bucket and mover of an eager call: the choice, and the split it gives.
        self._chosen: dict[tuple[int, int, str], tuple[Choice | None, Split]] = {}
        self.controllers: dict[int, Controller] = {}

    @property
    def chosen(self) -> dict[str, object]:
        """What "auto" stands for at the start; see also :meth:`explain`."""
        return {
            "num_consumer_ctas": self._num_consumers(),
            "bands_per_segment": bands_per_segment(self._config),
            "local_tail_waves": tail_waves(self._config),
            "mover": "sm" if self._config.mover == "auto" else self._config.mover,
        }

    def calibrate(self, heap: CudaHeap) -> None:
        """Find out what the machine does, once, if a controller is to use it. Between calls: see
        ``cuda_calibration.measured_machine``."""
        adaptive = self._config.adaptive
        if adaptive.enabled and self._world > 1 and self._machine is None:
            self._machine = measured_machine(heap, self._sms, adaptive.cache_dir)

    def prepare(self, layer: CudaLayer) -> None:
        """Makes what a layer needs here; in a capture no page-locked memory can be made."""
        if layer.fingerprint not in self._words:
            self._words[layer.fingerprint] = page_locked(4 * BUCKETS).numpy().view(np.int32)
        if self._config.mover == "copy_engine":
            return  # nothing of the split is left to choose
        if self._machine is not None and layer.fingerprint not in self.controllers:
            limits = limits_of(self._config)
            self.controllers[layer.fingerprint] = Controller(
                self._machine, layer.work, layer.shape.topk, limits
            )

    def choose(self, layer: CudaLayer, tokens: int, mover: str, capturing: bool) -> Split:
        """For the next call.

        Args:
            layer: whose call it is.
            tokens: T.
            mover: of the backend.
            capturing: if the mover is SM, the split's number is the most, and :meth:`wanted_word`
                holds the wanted one.
        """
        bucket, fingerprint = Controller.bucket_of(tokens), layer.fingerprint
        controller = self.controllers.get(fingerprint)
        choice = None if controller is None else controller.choose(bucket)
        if capturing:
            return self._split(layer, tokens, mover, choice, True)
        key = (fingerprint, bucket, mover)
        known = self._chosen.get(key)
        if known is None or known[0] is not choice:
            split = self._split(layer, tokens, mover, choice, False)
            known = self._chosen[key] = (choice, split)
        return known[1]

    def _split(
        self,
        layer: CudaLayer,
        tokens: int,
        mover: str,
        choice: Choice | None,
        capturing: bool,
    ) -> Split:
        """What ``choice`` and the settings give; without a choice, the settings."""
        config = self._config
        split = Split(
            self._num_consumers(),
            tail_waves(config),
            bands_per_segment(config),
            abi.Mover.SM if mover == "auto" else MOVERS[mover],
        )
        if split.mover is abi.Mover.SEQUENTIAL:
            return split
        none = split._replace(num_consumer_ctas=0, mover=abi.Mover.NONE)
        if split.mover is abi.Mover.NONE or self._world == 1:  # then there is nothing to ship
            return none
        if split.mover is abi.Mover.COPY_ENGINE:
            return split._replace(num_consumer_ctas=0)
        is_open = mover == config.num_consumer_ctas == "auto" and config.min_consumer_ctas <= 1
        if choice is not None:
            waves = choice.local_tail_waves
            split = Split(
                choice.num_consumer_ctas,
                "all" if waves >= ALL_TAIL_WAVES else waves,
                choice.bands_per_segment,
                MOVERS[choice.mover],
            )
        elif is_open and layer.is_small(tokens):
            return none  # each SM has a tile at most, and ships when it has made it
        if capturing:
            if is_open and split.num_consumer_ctas == 0 and layer.is_small(tokens):
                return split  # without a consumer that is never wanted
            most = self._most_captured()
            wanted = min(split.num_consumer_ctas, most)
            self._words[layer.fingerprint][Controller.bucket_of(tokens)] = wanted
            split = split._replace(num_consumer_ctas=most, mover=abi.Mover.SM)
        return split

    def wanted_word(self, layer: CudaLayer, tokens: int) -> int:
        """Address of the page-locked word from which a captured call of this size reads the number
        of its consumer CTAs."""
        return self._words[layer.fingerprint].ctypes.data + 4 * Controller.bucket_of(tokens)

    def observe(self, records: Sequence[Record]) -> None:
        """Learn from calls that have ended."""
        for record in records:
            controller = self.controllers.get(record.layer)
            if controller is None:
                continue
            bucket = Controller.bucket_of(record.tokens)
            lessons = self._lessons.get((record.layer, bucket))
            if lessons is None:
                lessons = self._lessons[record.layer, bucket] = _Lessons()
            if not lessons.is_due(record):
                continue
            before = controller.choose(bucket)
            controller.observe(
                observation(
                    record.iteration,
                    tokens=record.tokens,
                    rows=record.rows,
                    remote_rows=record.remote_rows,
                    num_consumer_ctas=record.consumer_ctas,
                    bands=record.bands,
                )
            )
            after = controller.choose(bucket)
            lessons.calm += 1
            if after is not before:
                lessons.calm = 0
                wanted = min(after.num_consumer_ctas, self._most_captured())
                self._words[record.layer][bucket] = wanted

    def explain(self, record: Record) -> tuple[Choice | None, str]:
        """The split of a call, and why; None where there was nothing to ship."""
        if self._world == 1:
            return None, ""
        controller = self.controllers.get(record.layer)
        key = (record.layer, Controller.bucket_of(record.tokens), record.consumer_ctas)
        choice = self._fixed if controller is None else controller.choose(key[1])
        told = self._told.get(key)
        if told is not None and told[0] is choice:
            return told[1]
        reason = "" if controller is None else controller.why(key[1])
        without = "copy_engine" if self._config.mover == "copy_engine" else "none"
        mover = "sm" if record.consumer_ctas else without
        found = choice._replace(num_consumer_ctas=record.consumer_ctas, mover=mover), reason
        self._told[key] = (choice, found)
        return found

    def _num_consumers(self) -> int:
        config = self._config
        wanted = config.num_consumer_ctas
        wanted = AUTO_CONSUMER_CTAS if wanted == "auto" else wanted
        return max(config.min_consumer_ctas, min(wanted, self._most()))

    def _most(self) -> int:
        most = self._config.max_consumer_ctas
        return self._sms - 1 if most == "auto" else most

    def _most_captured(self) -> int:
        return max(self._num_consumers(), min(MOST_CAPTURED_CTAS, self._most()))


def limits_of(config: TileOverlapConfig) -> Limits:
    """What the settings leave open to a controller."""

    def given(name: str) -> int | None:
        value = getattr(config, name)
        return None if value == "auto" else value

    waves = config.local_tail_waves
    return Limits(
        min_consumer_ctas=config.min_consumer_ctas,
        max_consumer_ctas=given("max_consumer_ctas"),
        num_consumer_ctas=given("num_consumer_ctas"),
        local_tail_waves=ALL_TAIL_WAVES if waves == "all" else given("local_tail_waves"),
        bands_per_segment=given("bands_per_segment"),
        mover=None if config.mover == "auto" else config.mover,
        hysteresis=config.adaptive.hysteresis,
        interval=config.adaptive.interval,
    )
