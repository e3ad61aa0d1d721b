"""The CPU backend on few and on many processes: the same calls, whatever the number of ranks."""

from __future__ import annotations

import random

import torch
from protocol_runs import (
    backend_of,
    draw_ids,
    expected,
    experts_of,
    ready,
    routing_of,
    rows_of,
    shape_of,
)

from ds_tilemoe.testing import case, rank_tests

CALLS = 4000  # over the number of ranks, which share the cores


@case
def calls_with_random_delays(ctx):
    backend = backend_of()
    shapes = [shape_of(ctx.world, 32), shape_of(ctx.world, 24, topk=3, name="other")]
    backend.ensure(shapes, 16)
    backend.set_random_delays(300, seed=7 + ctx.rank)
    for i in range(CALLS // ctx.world):
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
    for layout in ("compact", "aligned"):
        for bands_per_segment in (1, 3):
            run = ready(ctx, 200, room=200, layout=layout, bands_per_segment=bands_per_segment)
            y = run.forward()
            assert run.is_right(y), (layout, bands_per_segment)
            stats = run.backend.last_stats
            assert stats.segments >= 3
            assert 0 < stats.first_segment_ready <= stats.producer_end
            assert stats.last_put > 0
            assert stats.epoch == 1


test_two_ranks = rank_tests(__file__, world=2, timeout_s=300)
test_four_ranks = rank_tests(__file__, world=4, timeout_s=300)
test_eight_ranks = rank_tests(__file__, world=8, timeout_s=300)
