"""The whole loop on four CPU ranks: what a call reports moves the split of the next one."""

from __future__ import annotations

import os
import random

import pytest
import torch.distributed as dist
from protocol_runs import Run, draw_ids, ready, rows_of, shape_of

from ds_tilemoe.backends import cpu
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.controller import Controller
from ds_tilemoe.testing import case, rank_tests

CALLS = 40
MOST = 3


def calls(ctx, run, count, delay_us=0):
    """Checks each result bit for bit; the split of each call."""
    splits = []
    for iteration in range(count):
        run.backend.set_random_delays(delay_us, seed=100 * iteration + ctx.rank)
        ids = draw_ids(random.Random(1000 * ctx.rank + iteration), 120, 2, run.shape.num_experts)
        x = rows_of(iteration, ctx.rank, len(ids), run.shape.hidden)
        now = Run(ctx.rank, run.backend, run.shape, iteration, ids, x)
        assert now.is_right(now.forward()), (iteration, splits)
        splits.append(run.backend.last_choice.num_consumer_ctas)
    return splits


@case
def backlog_moves_the_split_and_no_value(ctx):
    log = []
    with pytest.MonkeyPatch.context() as patch:
        # A consumer sleeps before each chunk, the producer before each tile: ten times as often,
        # so that it is behind also where other processes have the producer wait for a core.
        patch.setattr(cpu, "_CHUNK_BYTES", 1)
        run = ready(ctx, 120, room=120, shape=shape_of(ctx.world, 64), max_consumer_ctas=MOST)
        controller = run.backend.controller(run.shape)
        observe = controller.observe
        patch.setattr(controller, "observe", lambda seen: (log.append(seen), observe(seen)))
        splits = calls(ctx, run, CALLS, delay_us=400)
    assert splits[0] == 1
    assert set(splits) <= set(range(1, MOST + 1)), splits
    moved = [None] * ctx.world
    dist.all_gather_object(moved, max(splits) > 1)
    assert any(moved), (splits, log[:5])
    # Deterministic: the same log again gives the same splits.
    again = Controller(controller.machine, controller.work, controller.topk, controller.limits)
    replayed = []
    for seen in log:
        replayed.append(again.choose(again.bucket_of(seen.tokens)).num_consumer_ctas)
        again.observe(seen)
    assert replayed == splits
    assert len(log) == CALLS
    assert log[0].rows > log[0].remote_rows > 0
    if max(splits) > 1:
        assert run.backend.last_reason != ""


@case
def an_explicit_split_is_kept(ctx):
    run = ready(ctx, 120, room=120, num_consumer_ctas=2)
    assert run.backend.controller(run.shape) is None
    assert calls(ctx, run, 5, delay_us=200) == [2] * 5


@case
def switched_off_it_keeps_the_first_split(ctx):
    run = ready(ctx, 120, room=120, max_consumer_ctas=MOST, adaptive={"enabled": False})
    assert run.backend.controller(run.shape) is None
    assert calls(ctx, run, 5, delay_us=200) == [1] * 5


@case
def without_a_core_to_spare_nothing_changes(ctx):
    backend = CpuBackend(dist.group.WORLD, TileOverlapConfig())
    cores = len(os.sched_getaffinity(0)) // ctx.world
    assert backend._bounds() == (1, max(1, min(8, cores - 1)))


@case
def ranks_without_tokens_decide_nothing(ctx):
    run = ready(ctx, 120, room=120, max_consumer_ctas=MOST)
    for iteration in range(3):
        tokens = 0 if ctx.rank == 2 else 50
        ids = draw_ids(random.Random(ctx.rank), tokens, 2, run.shape.num_experts)
        x = rows_of(iteration, ctx.rank, tokens, run.shape.hidden)
        now = Run(ctx.rank, run.backend, run.shape, iteration, ids, x)
        assert now.is_right(now.forward())
    assert 1 <= run.backend.last_choice.num_consumer_ctas <= MOST


test_ranks = rank_tests(__file__, world=4, timeout_s=240)


@pytest.mark.parametrize(
    ("block", "bounds"),
    [
        ({"min_consumer_ctas": 2, "max_consumer_ctas": 5}, (2, 5)),
        ({"max_consumer_ctas": 1}, (1, 1)),
        ({"num_consumer_ctas": 4}, (4, 4)),
    ],
)
def test_bounds_are_those_of_the_settings(block, bounds):
    backend = CpuBackend(None, TileOverlapConfig(**block))
    assert backend._bounds() == bounds
    assert backend._fixed_consumers() == bounds[0]


def test_a_rank_alone_has_nothing_to_ship():
    backend = CpuBackend(None, TileOverlapConfig(max_consumer_ctas=2))
    shape = shape_of(1)
    backend.ensure([shape], 8)
    ids = draw_ids(random.Random(0), 8, 2, shape.num_experts)
    run = Run(0, backend, shape, 0, ids, rows_of(0, 0, 8, shape.hidden))
    for _ in range(3):
        assert run.is_right(run.forward())
    assert backend.last_choice.num_consumer_ctas == 1
