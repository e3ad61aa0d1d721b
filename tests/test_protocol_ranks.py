"""The CPU backend itself on four processes: no DeepSpeed, every value predicted."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from protocol_runs import (
    LOCAL_EXPERTS,
    Run,
    backend_of,
    draw_ids,
    expected,
    experts_of,
    ready,
    routing_of,
    rows_of,
    shape_of,
)

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.testing import case, init_cpu_group, rank_tests


@case
def rows_are_shipped_while_tiles_are_made(ctx):
    for mover in ("sm", "none", "sequential"):
        block = {"mover": "auto" if mover == "sequential" else mover}
        run = ready(ctx, 400, room=400, shape=shape_of(ctx.world, 64), **block)
        run.backend.mover = mover
        # Delays, not arithmetic, make the producer slow: the ranks share two cores.
        most_beside = 0
        for attempt in range(3 if mover == "sm" else 1):  # other jobs may hold both cores
            run.backend.set_random_delays(2000, seed=ctx.rank + 10 * attempt)
            assert run.is_right(run.forward()), mover
            stats, chunks = run.backend.last_stats, run.backend.last_plan_sizes[5]
            shipped_beside = chunks - stats.backlog_at_producer_end
            most_beside = max(most_beside, shipped_beside)
        if mover == "sm":
            assert most_beside > chunks // 4, (most_beside, chunks)
        else:
            assert shipped_beside == 0, mover
            assert stats.chunks_drained == (chunks if mover == "none" else 0)
            assert stats.last_put > stats.producer_end


@case
def a_rank_that_cannot_be_made(ctx):
    """Its peers do not wait for it in their first call."""

    class Lacking:
        def __getattr__(self, name):
            return getattr(op, name)

        def Rank(self, **_):
            raise MemoryError("no memory")

    backend, shape = backend_of(), shape_of(ctx.world)
    op = backend._op
    if ctx.rank == 1:
        backend._op = Lacking()
    with pytest.raises(CapacityError, match=r"^rank 1: the parts of a rank do not fit \(MemoryErr"):
        backend.ensure([shape], 16)
    backend._op = op
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 9, 2, shape.num_experts)
    run = Run(ctx.rank, backend, shape, 0, ids, rows_of(0, ctx.rank, 9, shape.hidden))
    assert run.is_right(run.forward())


@case
def ranks_that_kept_different_heaps_agree_on_a_new_one(ctx):
    backend = backend_of()
    shapes = [shape_of(ctx.world), shape_of(ctx.world, 64, name="wide")]
    if ctx.rank == 1:  # as if the others had lost theirs
        group = [dist.new_group([rank]) for rank in range(ctx.world)][1]
        own = LayerShape("alone", LOCAL_EXPERTS, 2, 256, 256, 256, torch.float32)
        backend.group, backend.world, backend.rank = group, 1, 0
        backend.ensure([own], 64)
        held = backend._heap.shape
        backend.group, backend.world, backend.rank = dist.group.WORLD, ctx.world, 1
        backend._heap.shape = dataclasses.replace(held, world=ctx.world)
    else:
        for rank in range(ctx.world):
            dist.new_group([rank])
    for shape in (*shapes, *shapes):
        backend.ensure([shape], 16)
        identities = [None] * ctx.world
        dist.all_gather_object(identities, (backend._heap.identity, backend._heap.shape))
        assert len(set(identities)) == 1, identities
        ids = draw_ids(random.Random(ctx.rank), 9, 2, shape.num_experts)
        run = Run(ctx.rank, backend, shape, 0, ids, rows_of(0, ctx.rank, 9, shape.hidden))
        assert run.is_right(run.forward())


@case
def a_message_that_utf8_cannot_hold_still_reaches_all(ctx):
    run = ready(ctx)
    try:
        run.forward(ValueError("bad byte \udcff") if ctx.rank == 1 else None)
        raise AssertionError("nothing raised")
    except RankFailure as error:
        assert "bad byte" in str(error)


@case
def a_failure_before_the_count_exchange_reaches_all(ctx):
    run = ready(ctx)
    if ctx.rank == 3:
        run.backend._params = None  # calling it raises TypeError, on this rank alone
    started = time.monotonic()
    try:
        run.forward()
        raise AssertionError("nothing raised")
    except (TypeError, DeadlineError) as error:
        assert isinstance(error, TypeError) == (ctx.rank == 3)
        assert "TypeError" in str(error) or ctx.rank == 3
    assert time.monotonic() - started < 10


@case
def a_forked_child_ends_and_is_refused(ctx):
    run = ready(ctx)
    run.forward()  # consumers exist
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run.forward()
        except TileMoEError as error:
            code = 0 if "spawn" in str(error) else 2
        del run  # its backend must neither wait for threads that are not here nor abort
        gc.collect()
        os._exit(code)
    limit = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < limit:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0), ended
    assert run.is_right(run.forward())


@case
def too_many_tokens_on_one_rank_then_right_again(ctx):
    run = ready(ctx, room=16)
    for tokens in (4, 17, 16):
        mine = tokens if ctx.rank == 1 else 3
        run.ids = draw_ids(random.Random(ctx.rank), mine, 2, run.shape.num_experts)
        run.x = rows_of(0, ctx.rank, mine, 32)
        try:
            y = run.forward()
        except CapacityError as error:
            assert tokens == 17
            for word in ("rank 1", "needed 17", "available 16", "max_tokens_per_rank"):
                assert word in str(error), error
        else:
            assert tokens != 17
            assert run.is_right(y)


@case
def failed_routing_is_the_same_exception_on_all_ranks(ctx):
    run = ready(ctx)
    x = run.x
    faults = [
        ValueError("no gate today"),  # what the gate raised
        routing_of(torch.tensor([[0, 9]] * 5)),  # an expert that is not there
        routing_of(torch.tensor([[3, 3]] * 5)),  # one expert twice
        x.double(),
        x[:, 1:],
    ]
    words = ["no gate today", "expert id 9", "twice to expert 3", "float64", "[5, 31]"]
    for fault, word in zip(faults, words, strict=True):
        is_input = isinstance(fault, torch.Tensor)
        if ctx.rank == 2 and is_input:
            run.x = fault
        try:
            run.forward(fault if ctx.rank == 2 and not is_input else None)
            raise AssertionError(f"{word}: nothing raised")
        except RankFailure as error:
            assert "rank 2 of the group" in str(error) and word in str(error), error
        run.x = x
        assert run.is_right(run.forward())


@case
def ranks_in_different_layers_are_told(ctx):
    run = ready(ctx)
    other = dataclasses.replace(run.shape, name="second")
    run.backend.ensure([other], 16)
    if ctx.rank == 3:
        run.shape = other
    try:
        run.forward()
        raise AssertionError("nothing raised")
    except RankFailure as error:
        assert "rank 0 layer" in str(error) and "rank 3 second" in str(error), error


@case
def a_rank_that_fails_in_an_expert_stops_all(ctx):
    run = ready(ctx, 12, wait_timeout_s=20.0)
    fault = MemoryError("no room for the activation") if ctx.rank == 1 else None
    started = time.monotonic()
    try:
        run.forward(fault=fault)
        raise AssertionError("nothing raised")
    except MemoryError:
        assert ctx.rank == 1
    except DeadlineError as error:
        assert ctx.rank != 1
        assert "no room for the activation" in str(error), error
    assert time.monotonic() - started < 10, "peers waited for a deadline instead of the failure"
    for _ in range(2):  # later calls raise at once with the first cause
        try:
            run.forward()
            raise AssertionError("a failed heap was used")
        except DeadlineError as error:
            assert "no room for the activation" in str(error), error
    run.backend.ensure([run.shape], 16)  # a collective makes a new heap
    assert run.is_right(run.forward())


@case
def a_deadline_names_rank_peer_seen_and_wanted(ctx):
    first = LOCAL_EXPERTS * ((ctx.rank + 1) % ctx.world)  # all to the next rank
    ids = torch.tensor([[first, first + 1]] * 6, dtype=torch.int32)
    run = ready(ctx, ids=ids, wait_timeout_s=1.0)
    slow = 4.0 if ctx.rank == 1 else 0.0  # rank 0 waits for rows that rank 1 makes too late
    started = time.monotonic()
    try:
        run.forward(delay_s=slow)
        outcome = "passed"
    except DeadlineError as error:
        outcome = str(error)
        if ctx.rank == 0:
            for word in ("rank 0", "rank 1", "seen 0", "wanted 12", "1000 ms"):
                assert word in outcome, outcome
    took = time.monotonic() - started
    # Ranks 2 and 3 may have been done before; nobody waits longer than the slow expert takes.
    assert took < 12, took
    if ctx.rank < 2:
        assert outcome != "passed"
    dist.barrier()
    assert run.backend.failure(), "the failure did not reach this rank's block"


@case
def slow_is_not_dead(ctx):
    run = ready(ctx, wait_timeout_s=0.3)
    if ctx.rank == 2:
        time.sleep(1.0)  # before its first word in the call: the process group's timeout counts
    assert run.is_right(run.forward())


@case
def sub_groups_have_heaps_of_their_own(ctx):
    init_cpu_group()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    backend = CpuBackend(groups[ctx.rank // 2], TileOverlapConfig())
    shape = shape_of(2, name="pair")
    backend.ensure([shape], 16)
    mine = ctx.rank % 2
    for i in range(20):
        ids = draw_ids(random.Random(ctx.rank * 100 + i), 7, 2, shape.num_experts)
        x = rows_of(i, ctx.rank, 7, 32)
        y = backend.forward(shape, experts_of(mine, 32), x, routing_of(ids))
        assert torch.equal(y, expected(i, ctx.rank, ids, 32))


@case
def a_second_thread_is_refused(ctx):
    run = ready(ctx)
    caught = []

    def intrude():
        time.sleep(0.3)
        try:
            run.forward()
        except TileMoEError as error:
            caught.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    y = run.forward(delay_s=0.6)
    thread.join()
    assert run.is_right(y)
    assert caught and "another thread" in caught[0], caught


@case
def nothing_of_ours_has_a_name_in_shared_memory(ctx):
    run = ready(ctx)
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ds_tilemoe")]
    # Mapped all the same: an unlinked file of /dev/shm.
    assert run.backend.failure() == ""
    with open("/proc/self/maps") as maps:
        assert any("/dev/shm/" in line and "deleted" in line for line in maps)


test_ranks = rank_tests(__file__, world=4, timeout_s=300)
