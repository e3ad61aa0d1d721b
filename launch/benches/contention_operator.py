"""``contention_study.Operator`` by the CUDA kernels, and its calls in a row.

A process drives the rank that it is; its controller learns from this rank's records of calls alone.
"""

from __future__ import annotations

import contextlib
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
from benches.contention_calls import Case, Counts
from benches.contention_records import OVERHEAD
from benches.gpus import need_alone
from benches.operator_check import check_result, check_variants
from benches.operator_cuda import CudaOperator
from benches.ranks import World, command, join, shuffled
from benches.records import BenchError, median
from demo.options import wrong
from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Experts
from ds_tilemoe.backends.cuda_layer import Split
from ds_tilemoe.backends.cuda_records import Record
from ds_tilemoe.backends.cuda_split import MOVERS
from ds_tilemoe.controller import Observation, observation
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice, Machine
from ds_tilemoe.routings import routing_ids

DTYPE = torch.bfloat16
WEIGHT_SEED = 1000
TRIES = 5  # of a call for whose time a host was too late
COPY_SPLITS = (8, 10, 12, 16, 24, 32, 48)  # one of them fills the link
COPY_ROUNDS = 5
ORDER_SEED = 77


def open_world(parts: Sequence[str]) -> World:
    """The ranks, on GPUs of their own. A collective.

    Args:
        parts: what is to be run.

    Raises:
        InputError: there are no GPUs, or one, on which only the overhead can be measured.
        BenchError: another process computes on one.
    """
    world = join()
    if not world.on_gpu:
        fix = f"{command('contention', 4)}; or no GPU: add --simulate"
        raise wrong("contention", f"{world.ranks} rank(s) on {world.device.type}", "GPUs", fix)
    if world.ranks < 2 and (moving := [part for part in parts if part != OVERHEAD]):
        got = f"{', '.join(moving)} on one rank, where nothing is remote"
        fix = f"{command('contention', 4)}; or name --part {OVERHEAD} alone"
        raise wrong("--part", got, f"2 or more ranks, or {OVERHEAD}", fix)
    need_alone(world)
    return world


@contextlib.contextmanager
def open_operator(
    world: World, case: Case, counts: Sequence[Counts], splits: Sequence[int]
) -> Iterator[GpuOperator]:
    """The operator of one layer, whose results have been checked. A collective.

    Args:
        counts: all C [W, E] that calls will have, two or more: these very arrays, as each has
            routes of its own, which are made here.
        splits: of the consumer, checked.

    Raises:
        BenchError: a result is wrong.
    """
    operator = GpuOperator(world, case, counts)
    operator.prove(splits)
    yield operator
    operator.finish()


class GpuOperator(CudaOperator):
    """See ``contention_study.Operator``; :meth:`launch` and what stands around it is for calls in a
    row, as a model makes them.

    Args:
        world: the ranks.
        case: the layer.
        counts: as of :func:`open_operator`.

    Attributes:
        ranks: this process's.
        work: of the layer.
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
        self.ranks, self.work = (world.rank,), self._layer.work
        self.records: list[Record] = []
        self._static = self._split
        self._counts = list(counts)  # they live, so that their ids stay theirs
        self._number = {id(c): index for index, c in enumerate(counts)}
        # As GEMM 1 would leave the L2: the rows of this call, not those of the longest.
        own = slice(world.rank * case.local_experts, (world.rank + 1) * case.local_experts)
        bands = [int((-(-c.sum(axis=0)[own] // self.work.tile_m)).sum()) for c in counts]
        self._all_rows, self._used = self._source, [b * self.work.tile_m for b in bands]
        self._copy_ctas = COPY_SPLITS[0]
        self._stamped = Experts(self._experts)
        self._stamped.stamp = object()  # they stay where they are

    @property
    def machine(self) -> Machine:
        """As the backend has calibrated it.

        Raises:
            BenchError: it has not, as on one rank nothing is to be chosen.
        """
        machine = self._backend._splits._machine
        if machine is None:
            raise BenchError("the backend has calibrated no machine; wanted adaptive.enabled")
        return machine

    def prove(self, splits: Sequence[int]) -> None:
        """Checks each split and the mover "none", then, if anything is to be copied, finds the
        fastest copy for "sequential".

        Raises:
            BenchError: a result is wrong.
        """
        self.enqueue(Variant("sequential", 1), 0)
        self.finish()
        self.max_rel_err = check_result(self._world, self, self._routed[0], DTYPE)
        extremes = (1, self._backend.sms - 1)
        variants = [Variant("sm", c) for c in sorted({*splits, *extremes})]
        check_variants(self._world, self, [*variants, Variant("none", 0)], self.y.clone())
        if self._world.ranks == 1:
            return
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
        self._heap.bring_record()
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

    # -- calls in a row -----------------------------------------------------------------------

    def number_of(self, counts: Counts) -> int:
        """Of C among those that the operator was made with."""
        return self._number[id(counts)]

    def choose(self, number: int, capturing: bool = False) -> tuple[Split, int | None]:
        """The backend's choice for the next call of these counts, and the address of the word from
        which a captured call reads its consumer CTAs; None if it reads none."""
        splits, layer = self._backend._splits, self._layer
        tokens = len(self._routings[number].ids)
        split = splits.choose(layer, tokens, "auto", capturing)
        reads = capturing and split.mover is abi.Mover.SM
        return split, splits.wanted_word(layer, tokens) if reads else None

    def learn(self) -> None:
        """The backend's controller, if there is one, sees the calls that have ended."""
        self._backend._splits.observe(self._heap.ring.poll_quickly())

    def launch(
        self, number: int, split: Split, leaves_record: bool, wanted: int | None = None
    ) -> Callable[[], None]:
        """A call among others, of these counts; returns what launches it again with the same
        tensors, as long as no other call has been launched, or in a graph.

        Args:
            leaves_record: whether the call before leaves one.
            wanted: of :meth:`choose`.
        """
        layer, routes = self._layer, self._routings[number]
        made = layer.prepare(routes.x, self._stamped, *routes[1:])
        self._call, self._y = made, made.y  # its tensors live until the next one

        def again(_held: object = made) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            layer._exchange.records = self._heap.records_address if leaves_record else None
            timeout_ns = self._timeout_ns
            layer.launch_exchange(0, len(routes.ids), True, split, wanted, timeout_ns, stream)
            layer.launch_combine(split, wanted is not None, *self._beside, stream)

        again()
        return again

    def settle(self) -> None:
        """Behind calls in a row: the device is idle, records are on again, and what the calls have
        left is dropped.

        Raises:
            DeadlineError: a kernel has waited in vain.
        """
        self._layer._exchange.records = self._heap.records_address
        self._world.synchronize()
        self._heap.bring_record()
        self._heap.failures.raise_heard("bench.py contention")
        self._heap.ring.poll()


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
