"""``contention_study.Operator`` by the CUDA kernels, and what its signals and controller cost.

A process drives the rank that it is; its controller learns from this rank's records of calls alone.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from benches.calls import (
    OperatorShape,
    Routed,
    Settings,
    Variant,
    positions_of,
    random_rows,
)
from benches.clock import Timer
from benches.contention_calls import Case, Counts
from benches.gpus import need_alone
from benches.operator_check import check_result, check_variants
from benches.operator_cuda import CudaOperator
from benches.ranks import World, command, join, shuffled
from benches.records import BenchError, median, microseconds, number, ratio
from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Experts
from ds_tilemoe.backends.cuda_layer import Split
from ds_tilemoe.backends.cuda_records import Record
from ds_tilemoe.backends.cuda_split import MOVERS
from ds_tilemoe.controller import Observation, observation
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice
from ds_tilemoe.routings import routing_ids

DTYPE = torch.bfloat16
WEIGHT_SEED = 1000
TRIES = 5  # of a call for whose time a host was too late
COPY_SPLITS = (8, 10, 12, 16, 24, 32, 48)  # one of them fills the link
COPY_ROUNDS = 5
LEARNING = 40  # calls before a controller's choice is taken for its last
ORDER_SEED = 77


def open_world() -> World:
    """The ranks, on GPUs of their own. A collective.

    Raises:
        BenchError: there are no two GPUs, or another process computes on one.
    """
    world = join()
    if not world.on_gpu or world.ranks < 2:
        raise BenchError(
            f"got {world.ranks} rank(s) on {world.device.type}, wanted 2 or more on GPUs:"
            f" {command('contention', 4)}; or no GPU: add --simulate"
        )
    need_alone(world)
    return world


@contextlib.contextmanager
def open_operator(
    world: World, case: Case, counts: Sequence[Counts], splits: Sequence[int]
) -> Iterator[GpuOperator]:
    """The operator of one layer, whose results have been checked. A collective.

    Args:
        counts: all C [W, E] that calls will have: these very arrays, as each has routes of its own,
            which are made here.
        splits: of the consumer, checked.

    Raises:
        BenchError: a result is wrong.
    """
    operator = GpuOperator(world, case, counts)
    operator.prove(splits)
    yield operator
    operator.finish()


class GpuOperator(CudaOperator):
    """See ``contention_study.Operator``; and :meth:`overhead`.

    Args:
        world: the ranks.
        case: the layer.
        counts: as of :func:`open_operator`.

    Attributes:
        ranks: this process's.
        machine, work: as the backend has calibrated it; of the layer.
        records: of the calls before the last ``finish``.
        max_rel_err: of the checked calls.
    """

    def __init__(self, world: World, case: Case, counts: Sequence[Counts]) -> None:
        shape = OperatorShape(case.m, case.n, case.k, case.local_experts, case.topk)
        self._routed = [routed(c, world.rank, case.topk, seed) for seed, c in enumerate(counts)]
        weights = random_rows(
            (case.local_experts, case.n, case.k),
            case.k**-0.5,
            DTYPE,
            WEIGHT_SEED + world.rank,
            world.device,
        )
        settings = Settings("compact", case.tile_n, 1, "auto")
        super().__init__(world, shape, DTYPE, settings, self._routed, weights)
        machine = self._backend._splits._machine
        if machine is None:
            raise BenchError("the backend has calibrated no machine; wanted adaptive.enabled")
        self.ranks, self.machine, self.work = (world.rank,), machine, self._layer.work
        self.records: list[Record] = []
        self._static = self._split
        self._counts = list(counts)  # they live, so that their ids stay theirs
        self._number = {id(c): index for index, c in enumerate(counts)}
        # As GEMM 1 would leave the L2: the rows of this call, not those of the longest.
        own = slice(world.rank * case.local_experts, (world.rank + 1) * case.local_experts)
        bands = [int((-(-c.sum(axis=0)[own] // self.work.tile_m)).sum()) for c in counts]
        self._all_rows, self._used = self._source, [b * self.work.tile_m for b in bands]
        self._copy_ctas = COPY_SPLITS[0]

    def prove(self, splits: Sequence[int]) -> None:
        """Checks each split and the mover "none", then finds the fastest copy for "sequential".

        Raises:
            BenchError: a result is wrong.
        """
        self.enqueue(Variant("sequential", 1), 0)
        self.finish()
        self.max_rel_err = check_result(self._world, self, self._routed[0], DTYPE)
        extremes = (1, self.machine.sms - 1)
        variants = [Variant("sm", c) for c in sorted({*splits, *extremes})]
        check_variants(self._world, self, [*variants, Variant("none", 0)], self.y.clone())
        samples = np.full((COPY_ROUNDS, len(COPY_SPLITS)), np.nan)
        for index, order in shuffled(len(COPY_SPLITS), COPY_ROUNDS, ORDER_SEED):
            for i in order:
                read = self.enqueue(Variant("split", COPY_SPLITS[i]), 0)
                self.finish()
                if index >= 0:
                    samples[index, i] = read().copy
        slowest = self._world.reduce(samples)
        us = [np.nan_to_num(median(slowest[:, i]), nan=np.inf) for i in range(len(COPY_SPLITS))]
        self._copy_ctas = COPY_SPLITS[int(np.argmin(us))]

    # -- calls ------------------------------------------------------------------------------

    def run(self, choices: Sequence[Choice], counts: Counts) -> tuple[float, list[Observation]]:
        """See ``contention_study.Operator``.

        Raises:
            BenchError: a host was too late again and again.
            DeadlineError: a kernel has waited in vain.
        """
        (choice,) = choices
        self._split = split_of(choice)
        us = self._timed(Variant(choice.mover, choice.num_consumer_ctas), counts)
        record = self.records[-1]
        return us, [
            observation(
                record.iteration,
                tokens=record.tokens,
                rows=record.rows,
                remote_rows=record.remote_rows,
                num_consumer_ctas=record.consumer_ctas,
                bands=record.bands,
            )
        ]

    def sequential(self, counts: Counts) -> float:
        """See ``contention_study.Operator``, and :meth:`run`."""
        self._split = self._static
        return self._timed(Variant("sequential", self._copy_ctas), counts)

    def finish(self) -> None:
        """See ``calls.Operator``; the records are kept."""
        self._world.synchronize()
        self._heap.failures.raise_heard("bench.py contention")
        self.records = self._heap.ring.poll()
        if len(self.records) != len(self._unfinished):
            raise BenchError(f"{len(self._unfinished)} calls have left {len(self.records)} records")
        for told, record in zip(self._unfinished, self.records, strict=True):
            told.append(record.iteration)
        self._unfinished.clear()

    def _timed(self, variant: Variant, counts: Counts) -> float:
        """us of the slowest rank; all ranks repeat the call for which one of them has no time."""
        index = self._number[id(counts)]
        self._source = self._all_rows[: self._used[index]]
        for _ in range(TRIES):
            read = self.enqueue(variant, index)
            self.finish()
            (us,) = self._world.reduce(np.array([read().total]))
            if np.isfinite(us):
                return float(us)
        raise BenchError(
            f"{TRIES} times in a row a host had not launched a call before its GPU came to it;"
            " wanted a host that nobody else keeps busy"
        )

    # -- signals and controller, on and off ---------------------------------------------------

    def overhead(self, counts: Sequence[Counts], rounds: int) -> dict[str, object]:
        """us of a call among others, as a model makes them, paired: on, the backend chooses the
        split, scale leaves a record and the controller learns from it; off, none of that, and the
        split at which the controller has arrived. A collective.

        Args:
            counts: of the calls in turn.
            rounds: pairs of loops.

        Returns:
            Fields of a record.
        """
        world, layer, splits = self._world, self._layer, self._backend._splits
        numbers = [self._number[id(c)] for c in counts]
        tokens = len(self._routings[numbers[0]].ids)
        experts = Experts(self._experts)
        experts.stamp = object()  # they stay where they are
        ring = self._heap.ring
        records = self._heap.records_address
        signals_ns: list[int] = []

        def call(indices: Iterator[int], split: Split, address: int | None) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            routes = self._routings[next(indices)]
            made = layer.prepare(routes.x, experts, *routes[1:])
            self._call = made  # its tensors live until the next one
            layer._combine.scale.records = address
            self._exchange(tokens, made.places, split, stream)
            side, events = self._beside
            layer.launch_combine(split, False, side, events, stream)

        def on(indices: Iterator[int]) -> None:
            began = time.perf_counter_ns()
            splits.observe(ring.poll())
            split = splits.choose(layer, tokens, "auto", False)
            signals_ns.append(time.perf_counter_ns() - began)
            call(indices, split, records)

        def in_turn(one: Callable[[Iterator[int]], None]) -> Callable[[], None]:
            indices = itertools.cycle(numbers)
            return lambda: one(indices)

        ring.poll()
        learn = in_turn(on)
        for _ in range(LEARNING):
            learn()
            world.synchronize()
        fixed = splits.choose(layer, tokens, "auto", False)
        loops = {
            "on": Timer(world, in_turn(on)),
            "off": Timer(world, in_turn(lambda indices: call(indices, fixed, None))),
        }
        names = list(loops)
        samples = np.full((2, rounds), np.nan)
        signals_ns.clear()
        for index, order in shuffled(len(names), rounds, ORDER_SEED):
            for i in order:
                us = loops[names[i]].steady()
                if index >= 0:
                    samples[i, index] = us
        layer._combine.scale.records = records
        world.synchronize()
        self._heap.failures.raise_heard("bench.py contention")
        ring.poll()
        on_us, off_us = world.reduce(samples)
        (signals,) = world.reduce(np.array([np.median(signals_ns) / 1e3]))
        return {
            "rounds": rounds,
            "calls": loops["on"].calls,
            "num_consumer_ctas": world.gather(fixed.num_consumer_ctas),
            **microseconds("on", on_us),
            **microseconds("off", off_us),
            **ratio("on_over_off", on_us, off_us),
            **microseconds("added", on_us - off_us),
            # Of the host: what a record and the choice cost it, in a call, and a call's launches.
            "signals_host_us": number(float(signals)),
            "on_host_us": number(loops["on"].host_us),
            "off_host_us": number(loops["off"].host_us),
        }


def split_of(choice: Choice) -> Split:
    """A choice as the backend's launches have it."""
    waves = choice.local_tail_waves
    return Split(
        choice.num_consumer_ctas,
        "all" if waves >= ALL_TAIL_WAVES else waves,
        choice.bands_per_segment,
        abi.Mover(MOVERS[choice.mover]),
    )


def routed(counts: Counts, rank: int, topk: int, seed: int) -> Routed:
    """Routes of ``rank`` that give these counts.

    Raises:
        ValueError: none do.
    """
    own_seed = seed * len(counts) + rank
    ids = routing_ids(counts[rank], topk=topk, seed=own_seed)
    weights = np.random.default_rng(own_seed).random(ids.shape, dtype=np.float32)
    return Routed(counts, ids, positions_of(ids), weights)
