"""Which split and which tiles the CUDA backend takes for a call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cuda_layer_case import Layer, fake, rows
from cuda_library_fake import capture, memory
from moe_models import own_routing

from ds_tilemoe.backends import cuda_abi, cuda_split
from ds_tilemoe.calibration import typical
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.testing import RankContext, case, rank_tests


@case
def choices(ctx: RankContext) -> None:
    with fake(None) as (library, _):
        alone = Layer(ep_size=1).open()
        alone.check(rows(20))
        assert library.log[-1] == "NONE", "a group of one has nothing to ship"
    with fake() as (library, _):
        auto = {"num_consumer_ctas": "auto"}
        for block, consumers, used in (
            (auto, 8, 0),  # as there are few tiles
            ({"mover": "sm", **auto}, 8, 8),
            ({"num_consumer_ctas": 131}, 131, 131),
            ({"mover": "sm", "max_consumer_ctas": 4, **auto}, 4, 4),
            ({"min_consumer_ctas": 12, **auto}, 12, 12),
            ({"mover": "none"}, None, 0),
        ):
            layer = Layer(**block).open()
            layer(rows(20))
            assert layer.backend.chosen.get("num_consumer_ctas") == consumers
            assert library.exchange.consumer_ctas == library.combine.num_consumer_ctas == used
            assert TileOverlapConfig(**layer.backend.chosen)
        assert library.log[-1] == "NONE"
        layer = Layer(local_tail_waves=2, tile_n=256, transport="nvshmem").open()
        layer.check(rows(64))
        assert library.params is not None
        assert library.params.local_tail_bands == 2 * 132
        assert library.combine.transport == cuda_abi.Transport.PUT
        assert memory(library.combine.pes, np.int32, 2).tolist() == [0, 1]
        problem = layer.fails(rows(3).float(), own_routing(layer.moe, rows(3)))
        assert isinstance(problem, TypeError)


@case
def the_controller_chooses(ctx: RankContext) -> None:
    """By the machine at first, then by what calls leave behind; within explicit settings."""
    on = {"adaptive": {"enabled": True}}
    with fake() as (library, _):
        layer = Layer(**on).open()
        layer.check(rows(64))
        assert library.log[-1] == "NONE", "so few rows are shipped faster without a kernel"
        assert library.exchange.consumer_ctas == 0
        layer = Layer(num_consumer_ctas=3, mover="sm", local_tail_waves="all", **on).open()
        layer.check(rows(64))
        assert library.log[-1] == "SM"
        assert library.exchange.consumer_ctas == 3
        assert library.params is not None
        assert library.params.local_tail_bands == -1
        assert layer.backend.chosen["local_tail_waves"] == "all"
        assert TileOverlapConfig(**layer.backend.chosen)
    # So slow that even these rows want consumers at first; what calls report says otherwise.
    slow = dataclasses.replace(
        typical(4), tile_base_ns=2e4, rate_per_cta=0.2, drain_rate=0.07, link=0.6
    )
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_split, "measured_machine", lambda *_: slow)
        layer = Layer(**on).open()
        library.iteration = (1, 100_000, 3, 4, 5, 0, 7, 8)
        library.scale_end = 2 * cuda_split.SHORT_NS  # from each such call something is learnt
        backend = layer.backend
        layer(rows(64))
        first = library.exchange.consumer_ctas
        assert first > 1
        assert library.combine.num_consumer_ctas == first
        with capture(patch):
            layer(rows(64))
        word = memory(library.exchange.wanted_ctas, np.int32, 1)
        assert word[0] == first
        (controller,) = backend._splits.controllers.values()
        for _ in range(40):
            layer(rows(64))
            (record, *_) = backend.poll_records()
            chosen = controller.choose(controller.bucket_of(64))
            if chosen.num_consumer_ctas != first:
                break
        assert chosen.num_consumer_ctas != first
        assert word[0] == chosen.num_consumer_ctas, "the next replay has it"
        assert backend.explain(record) == (
            chosen._replace(num_consumer_ctas=first, mover="sm"),
            controller.why(controller.bucket_of(64)),
        )
        layer(rows(64))
        assert library.exchange.consumer_ctas == chosen.num_consumer_ctas


@case
def short_calls_teach_seldom(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(adaptive={"enabled": True}).open()
        splits, seen = layer.backend._splits, 0
        for scale_end, count, learnt in ((1000, 16, 2), (2 * cuda_split.SHORT_NS, 3, 3)):
            library.scale_end = scale_end
            for _ in range(count):
                layer(rows(20))
            layer.backend.check()
            layer.backend.poll_records()
            (controller,) = splits.controllers.values()
            now = controller._buckets[controller.bucket_of(20)].seen
            assert now - seen == learnt
            seen = now


@case
def calls_of_a_few_tokens(ctx: RankContext) -> None:
    """Narrow tiles where so weights are read more evenly by 132 SMs, which then have four experts'
    bands; no consumer where no SM has two tiles, in a graph either."""
    wide = 8192
    # Calls count as the next power of two. (tokens, columns of a tile of GEMM 2, of 1, mover)
    one = (1, 128, 128, "NONE")  # 64 tiles of 128 or 32 of 256 are a wave: the shorter one
    four = (4, 256, 128, "NONE")  # 256 of 128 are two waves, 128 of 256 one that is as long
    many = (600, 256, 256, "SM")  # 8 bands of 4 experts: no longer a matter of weights
    for kind in ("mlp", "swiglu"):
        with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
            layer = Layer(kind, k=1, hidden=wide, num_consumer_ctas="auto").open(1024)
            for count, down, front, mover in (one, four, many, one):
                layer.check(rows(count, hidden=wide))
                assert library.combine.kind.tile_n == down
                assert library.combine.producer.ship.n_tiles == wide // down
                # Of FFN columns, one tile a band either way; a gated GEMM has one width.
                assert library.front_tile_n == (256 if kind == "swiglu" else front)
                assert library.log[-1] == mover
            with capture(patch):
                layer(rows(1, hidden=wide))
                assert library.log[-1] == "NONE"
                assert not library.exchange.wanted_ctas
                layer(rows(600, hidden=wide))
                assert library.log[-1] == "SM"
                assert library.exchange.wanted_ctas
    with fake() as (library, _):
        uneven = 70 * 128
        layer = Layer(k=1, hidden=uneven, num_consumer_ctas="auto").open()
        layer.check(rows(4, hidden=uneven))
        # 4 bands: 280 tiles of 128 in three waves, or 140 of 256 in two that are twice as long.
        assert library.combine.kind.tile_n == 128
        assert library.log[-1] == "SM"
    with fake() as (library, _):
        Layer(hidden=wide, tile_n=256).open().check(rows(1, hidden=wide))
        assert library.combine.kind.tile_n == library.front_tile_n == 256, "as told"


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
