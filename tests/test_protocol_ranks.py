"""The CPU backend itself on four processes: no DeepSpeed, every value predicted."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.routing import Routing
from ds_tilemoe.testing import case, init_cpu_group, rank_tests, tagged_rows

LOCAL_EXPERTS = 2


@dataclass
class Scaled:
    """An expert that multiplies a row by a whole number: exact, so equality is bit for bit."""

    factor: int
    hidden: int
    delay_s: float = 0.0
    fault: Exception | None = None

    def front(self, x):
        time.sleep(self.delay_s)
        if self.fault is not None:
            raise self.fault
        return x

    @property
    def down_weight(self):
        return torch.eye(self.hidden) * self.factor

    down_bias = None


def backend_of(**block):
    init_cpu_group()
    return CpuBackend(dist.group.WORLD, TileOverlapConfig(**block))


def shape_of(hidden=32, topk=2, world=4, name="layer"):
    return LayerShape(name, world * LOCAL_EXPERTS, topk, hidden, hidden, hidden, torch.float32)


def experts_of(rank, hidden, **options):
    first = rank * LOCAL_EXPERTS
    return [Scaled(first + e + 1, hidden, **options) for e in range(LOCAL_EXPERTS)]


def routing_of(ids):
    weights = torch.ones(ids.shape)
    weights[:, 1:] = 2.0
    return Routing(
        ids.to(torch.int32), weights, torch.zeros(()), torch.zeros(4 * LOCAL_EXPERTS).long()
    )


def draw_ids(rng, tokens, topk, experts):
    hot = rng.randrange(experts) if rng.random() < 0.3 else None
    rows = []
    for _ in range(tokens):
        chosen = rng.sample(range(experts), topk)
        if hot is not None and hot not in chosen:
            chosen[0] = hot
        rows.append([-1 if rng.random() < 0.1 else e for e in chosen])
    return torch.tensor(rows, dtype=torch.int32).reshape(tokens, topk)


def expected(iteration, rank, ids, hidden):
    """Sum over k of weight * factor * row; every term a multiple of 2**-20, below 2**4."""
    tokens, topk = ids.shape
    total = torch.zeros(tokens, hidden)
    x = rows_of(iteration, rank, tokens, hidden)
    for k in range(topk):
        factor = torch.where(ids[:, k] >= 0, ids[:, k] + 1, 0)
        total += (1.0 if k == 0 else 2.0) * factor[:, None] * x
    return total


def rows_of(iteration, rank, tokens, hidden):
    token = torch.arange(tokens)
    # 2**-10 steps keep the sums exact in fp32.
    tags = tagged_rows(iteration, rank, token, torch.zeros_like(token), hidden)
    return torch.floor(tags * 1024) / 1024


@case
def thousand_calls_with_random_delays(ctx):
    backend = backend_of()
    shapes = [shape_of(32), shape_of(24, topk=3, name="other")]
    backend.ensure(shapes, 16)
    backend.set_random_delays(300, seed=7 + ctx.rank)
    for i in range(1000):
        shape = shapes[i % 2]
        draws = [random.Random(i * 10 + r) for r in range(ctx.world)]
        sizes = [0 if rng.random() < 0.2 else rng.randrange(17) for rng in draws]
        ids = draw_ids(draws[ctx.rank], sizes[ctx.rank], shape.topk, shape.num_experts)
        backend.mover = ("sm", "none", "sequential")[(i + ctx.rank) % 3]
        x = rows_of(i, ctx.rank, sizes[ctx.rank], shape.hidden)
        backend.poison()
        y = backend.forward(shape, experts_of(ctx.rank, shape.hidden), x, routing_of(ids))
        assert torch.equal(y, expected(i, ctx.rank, ids, shape.hidden)), f"call {i}"
        x.fill_(float("nan"))  # a late reader of the input would show


@case
def both_layouts_ship_first_middle_and_last_segments(ctx):
    results = {}
    for layout in ("compact", "aligned"):
        for bands_per_segment in (1, 3):
            backend = backend_of(layout=layout, bands_per_segment=bands_per_segment)
            shape = shape_of(32)
            backend.ensure([shape], 200)
            ids = draw_ids(random.Random(ctx.rank), 200, 2, shape.num_experts)
            x = rows_of(0, ctx.rank, 200, 32)
            y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
            results[layout, bands_per_segment] = y
            stats = backend.last_stats
            assert stats.segments >= 3
            assert 0 < stats.first_segment_ready <= stats.producer_end
            assert stats.last_put > 0
            assert stats.epoch == 1
    want = expected(0, ctx.rank, ids, 32)
    for key, y in results.items():
        assert torch.equal(y, want), key


@case
def rows_are_shipped_while_tiles_are_made(ctx):
    for mover in ("sm", "none", "sequential"):
        backend = backend_of(mover="auto" if mover == "sequential" else mover)
        backend.mover = mover
        shape = shape_of(64)
        backend.ensure([shape], 400)
        # Delays, not arithmetic, make the producer slow: the ranks share two cores.
        backend.set_random_delays(2000, seed=ctx.rank)
        ids = draw_ids(random.Random(ctx.rank), 400, 2, shape.num_experts)
        x = rows_of(0, ctx.rank, 400, 64)
        y = backend.forward(shape, experts_of(ctx.rank, 64), x, routing_of(ids))
        assert torch.equal(y, expected(0, ctx.rank, ids, 64)), mover
        stats, chunks = backend.last_stats, backend.last_plan_sizes[5]
        shipped_beside = chunks - stats.backlog_at_producer_end
        if mover == "sm":
            assert shipped_beside > chunks // 4, (shipped_beside, chunks)
            assert stats.chunks_drained < chunks
        else:
            assert shipped_beside == 0, mover
            assert stats.chunks_drained == (chunks if mover == "none" else 0)
            assert stats.last_put > stats.producer_end


@case
def ranks_that_kept_different_heaps_agree_on_a_new_one(ctx):
    backend = backend_of()
    shapes = [shape_of(32), shape_of(64, name="wide")]
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
        x = rows_of(0, ctx.rank, 9, shape.hidden)
        y = backend.forward(shape, experts_of(ctx.rank, shape.hidden), x, routing_of(ids))
        assert torch.equal(y, expected(0, ctx.rank, ids, shape.hidden))


@case
def a_message_that_utf8_cannot_hold_still_reaches_all(ctx):
    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(2, ctx.rank, 5, 32)
    routing = ValueError("bad byte \udcff") if ctx.rank == 1 else routing_of(ids)
    try:
        backend.forward(shape, experts_of(ctx.rank, 32), x, routing)
        raise AssertionError("nothing raised")
    except RankFailure as error:
        assert "bad byte" in str(error)


@case
def a_failure_before_the_count_exchange_reaches_all(ctx):
    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(2, ctx.rank, 5, 32)
    if ctx.rank == 3:
        backend._params = None  # calling it raises TypeError, on this rank alone
    started = time.monotonic()
    try:
        backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
        raise AssertionError("nothing raised")
    except (TypeError, DeadlineError) as error:
        assert isinstance(error, TypeError) == (ctx.rank == 3)
        assert "TypeError" in str(error) or ctx.rank == 3
    assert time.monotonic() - started < 10


@case
def a_forked_child_ends_and_is_refused(ctx):
    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(8, ctx.rank, 5, 32)
    backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))  # consumers exist
    child = os.fork()
    if child == 0:
        code = 1
        try:
            backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
        except TileMoEError as error:
            code = 0 if "spawn" in str(error) else 2
        del backend  # must neither wait for threads that are not here nor abort
        gc.collect()
        os._exit(code)
    limit = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < limit:
        time.sleep(0.05)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert ended == (child, 0), ended
    y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
    assert torch.equal(y, expected(8, ctx.rank, ids, 32))


@case
def too_many_tokens_on_one_rank_then_right_again(ctx):
    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    for tokens in (4, 17, 16):
        mine = tokens if ctx.rank == 1 else 3
        ids = draw_ids(random.Random(ctx.rank), mine, 2, shape.num_experts)
        x = rows_of(1, ctx.rank, mine, 32)
        try:
            y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
        except CapacityError as error:
            assert tokens == 17
            for word in ("rank 1", "needed 17", "available 16", "max_tokens_per_rank"):
                assert word in str(error), error
        else:
            assert tokens != 17
            assert torch.equal(y, expected(1, ctx.rank, ids, 32))


@case
def failed_routing_is_the_same_exception_on_all_ranks(ctx):
    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(2, ctx.rank, 5, 32)
    faults = [
        ValueError("no gate today"),  # what the gate raised
        routing_of(torch.tensor([[0, 9]] * 5)),  # an expert that is not there
        routing_of(torch.tensor([[3, 3]] * 5)),  # one expert twice
        "dtype",
        "shape",
    ]
    words = ["no gate today", "expert id 9", "twice to expert 3", "float64", "[5, 31]"]
    for fault, word in zip(faults, words, strict=True):
        routing, rows = routing_of(ids), x
        if ctx.rank == 2:
            if isinstance(fault, str):
                rows = x.double() if fault == "dtype" else x[:, 1:]
            else:
                routing = fault
        try:
            backend.forward(shape, experts_of(ctx.rank, 32), rows, routing)
            raise AssertionError(f"{word}: nothing raised")
        except RankFailure as error:
            assert "rank 2 of the group" in str(error) and word in str(error), error
        y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
        assert torch.equal(y, expected(2, ctx.rank, ids, 32))


@case
def ranks_in_different_layers_are_told(ctx):
    backend = backend_of()
    shapes = [shape_of(name="first"), shape_of(name="second")]
    backend.ensure(shapes, 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, 8)
    x = rows_of(3, ctx.rank, 5, 32)
    mine = shapes[1] if ctx.rank == 3 else shapes[0]
    try:
        backend.forward(mine, experts_of(ctx.rank, 32), x, routing_of(ids))
        raise AssertionError("nothing raised")
    except RankFailure as error:
        assert "first" in str(error) and "second" in str(error), error


@case
def a_rank_that_fails_in_an_expert_stops_all(ctx):
    backend = backend_of(wait_timeout_s=20.0)
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 12, 2, shape.num_experts)
    x = rows_of(4, ctx.rank, 12, 32)
    fault = MemoryError("no room for the activation") if ctx.rank == 1 else None
    started = time.monotonic()
    try:
        backend.forward(shape, experts_of(ctx.rank, 32, fault=fault), x, routing_of(ids))
        raise AssertionError("nothing raised")
    except MemoryError:
        assert ctx.rank == 1
    except DeadlineError as error:
        assert ctx.rank != 1
        assert "no room for the activation" in str(error), error
    assert time.monotonic() - started < 10, "peers waited for a deadline instead of the failure"
    for _ in range(2):  # later calls raise at once with the first cause
        try:
            backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
            raise AssertionError("a failed heap was used")
        except DeadlineError as error:
            assert "no room for the activation" in str(error), error
    backend.ensure([shape], 16)  # a collective makes a new heap
    y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
    assert torch.equal(y, expected(4, ctx.rank, ids, 32))


@case
def a_deadline_names_rank_peer_seen_and_wanted(ctx):
    backend = backend_of(wait_timeout_s=1.0)
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = torch.tensor([[(2 * ctx.rank + 2) % 8, (2 * ctx.rank + 3) % 8]] * 6)  # to the next rank
    x = rows_of(5, ctx.rank, 6, 32)
    slow = 4.0 if ctx.rank == 1 else 0.0  # rank 0 waits for rows that rank 1 makes too late
    started = time.monotonic()
    try:
        backend.forward(shape, experts_of(ctx.rank, 32, delay_s=slow), x, routing_of(ids))
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
    assert backend.failure(), "the failure did not reach this rank's block"


@case
def slow_is_not_dead(ctx):
    backend = backend_of(wait_timeout_s=0.3)
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(6, ctx.rank, 5, 32)
    if ctx.rank == 2:
        time.sleep(1.0)  # before its first word in the call: the process group's timeout counts
    y = backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
    assert torch.equal(y, expected(6, ctx.rank, ids, 32))


@case
def sub_groups_have_heaps_of_their_own(ctx):
    init_cpu_group()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[ctx.rank // 2]
    backend = CpuBackend(group, TileOverlapConfig())
    shape = LayerShape("pair", 4, 2, 32, 32, 32, torch.float32)
    backend.ensure([shape], 16)
    for i in range(20):
        mine = ctx.rank % 2
        ids = draw_ids(random.Random(ctx.rank * 100 + i), 7, 2, 4)
        x = rows_of(i, ctx.rank, 7, 32)
        y = backend.forward(shape, experts_of(mine, 32), x, routing_of(ids))
        assert torch.equal(y, expected(i, ctx.rank, ids, 32))


@case
def a_second_thread_is_refused(ctx):
    import threading

    backend = backend_of()
    shape = shape_of()
    backend.ensure([shape], 16)
    ids = draw_ids(random.Random(ctx.rank), 5, 2, shape.num_experts)
    x = rows_of(7, ctx.rank, 5, 32)
    caught = []

    def intrude():
        time.sleep(0.3)
        try:
            backend.forward(shape, experts_of(ctx.rank, 32), x, routing_of(ids))
        except TileMoEError as error:
            caught.append(str(error))

    thread = threading.Thread(target=intrude)
    thread.start()
    y = backend.forward(shape, experts_of(ctx.rank, 32, delay_s=0.6), x, routing_of(ids))
    thread.join()
    assert torch.equal(y, expected(7, ctx.rank, ids, 32))
    assert caught and "another thread" in caught[0], caught


@case
def nothing_of_ours_has_a_name_in_shared_memory(ctx):
    backend = backend_of()
    backend.ensure([shape_of()], 16)
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ds_tilemoe")]
    # Mapped all the same: an unlinked file of /dev/shm.
    assert backend.failure() == ""
    with open("/proc/self/maps") as maps:
        assert any("/dev/shm/" in line and "deleted" in line for line in maps)


test_ranks = rank_tests(__file__, world=4, timeout_s=150)
