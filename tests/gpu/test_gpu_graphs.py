"""Swapped layers in CUDA graphs: several on one heap, new inputs and routing, another split."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import (
    HIDDEN,
    agree,
    assert_equal,
    assert_rank_1_failed,
    assert_right,
    built,
    gpu_rank_tests,
    make,
    rows,
    swap,
    together,
)
from moe_models import raised, run, same_everywhere
from torch import Tensor

import ds_tilemoe
from ds_tilemoe.errors import CapacityError, DeadlineError, TileMoEError
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]


class Graph:
    """A layer, or several in turn, captured at one size.

    Args:
        layers: called one after another, each on the output of the one before.
        count: tokens of this rank.
    """

    def __init__(self, layers: list[Any], count: int, width: int = HIDDEN) -> None:
        self.layers = layers
        self.x = rows(count, width, seed=1)
        self.eager(self.x)  # of this size: nothing is new in the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog looks at events on a thread of its own.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.y = self.eager(self.x)
        self.replay = graph.replay

    def eager(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = run(layer, x)[0]
        return x

    def __call__(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.replay()
        return self.y.clone()

    def assert_right(self, seed: int) -> None:
        x = rows(*self.x.shape, seed=seed)
        got = self(x)
        assert_equal(got, self.eager(x), f"{len(x)} tokens, seed {seed}")


@case(kind=["mlp", "swiglu"])
def several_on_one_heap(ctx: RankContext, kind: str) -> None:
    moe = swap(make(kind, k=2))
    graphs = {count: Graph([moe], count) for count in (1, 2, 4, 8)}
    for seed, count in enumerate((8, 1, 4, 2, 1)):
        graphs[count].assert_right(10 + seed)
        assert_right(moe, rows(33, HIDDEN, seed=seed))  # an eager call between
    ds_tilemoe.check(moe)


@case
def unequal_ranks_and_many_replays(ctx: RankContext) -> None:
    moe = swap(make("swiglu", k=8))
    large, small = Graph([moe], (700, 0)[ctx.rank % 2]), Graph([moe], (3, 64)[ctx.rank % 2])
    for seed in range(20):
        (large, small)[seed % 3 == 1].assert_right(seed)
    x = rows(*large.x.shape, seed=99)
    want = large.eager(x)
    results = [large(x) for _ in range(100)]
    agree("" if all(torch.equal(y, want) for y in results) else "replays differ")
    ds_tilemoe.check(moe)


@case
def layers_of_different_shape(ctx: RankContext) -> None:
    layers = [swap(make(k=2)), swap(make("swiglu", k=1, ffn=512, seed=1))]
    graph = Graph(layers, 40)
    for seed in range(5):
        graph.assert_right(seed)


@case
def the_split_of_a_graph_changes(ctx: RankContext) -> None:
    moe = swap(make(hidden=1024, ffn=512))
    graph = Graph([moe], 1500, 1024)
    x = rows(1500, 1024, seed=5)
    want = graph.eager(x)
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    (words,) = runtime.backend._splits._words.values()
    took = {}
    for ctas in (0, 1, 3, 8, 31, 32):
        words[:] = ctas
        torch.cuda.synchronize()
        for _ in range(3):
            assert_equal(graph(x), want, f"{ctas} consumer CTAs")
        runtime.backend.check()
        record = runtime.backend.poll_records()[-1]
        took[ctas] = record.times.scale_end
        agree("" if record.consumer_ctas == ctas else f"{record}: wanted {ctas} CTAs")
    print(f"rank {ctx.rank}: ns by consumer CTAs {took}")
    ds_tilemoe.check(moe)


@case
def what_cannot_be_captured(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(8, HIDDEN)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            run(moe, x)

    error = raised(capture)
    assert isinstance(error, TileMoEError), repr(error)
    assert "run one forward before the capture" in same_everywhere(str(error))
    want = assert_right(moe, x)
    swap(moe, dispatch="nccl")
    assert_equal(run(moe, x)[0], want, "by NCCL")
    error = raised(capture)
    assert isinstance(error, TileMoEError), repr(error)
    assert "cannot be captured" in same_everywhere(str(error))
    assert_equal(run(moe, x)[0], want, "after a capture that failed")


@case
def a_heap_with_graphs_does_not_grow(ctx: RankContext) -> None:
    moe = swap(make())
    graph = Graph([moe], 16)
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    shape = next(iter(moe.deepspeed_moe._tile.shapes.values()))
    error = raised(runtime.backend.ensure, [shape], 1 << 15)
    assert isinstance(error, CapacityError), repr(error)
    assert "a CUDA graph has been captured with it" in same_everywhere(str(error))
    assert "max_tokens_per_rank" in str(error)
    graph.assert_right(3)


@case
def what_was_captured_is_what_is_read(ctx: RankContext) -> None:
    """Not the experts of a later call, and no memory that is another's by now."""
    moe = swap(make("swiglu", k=2))
    graph, x = Graph([moe], 64), rows(64, HIDDEN, seed=3)
    want = graph(x)
    twin = copy.deepcopy(moe)
    with torch.no_grad():
        for parameter in twin.deepspeed_moe.experts.parameters():
            parameter.mul_(2)
    other = run(twin, x)[0]
    agree("" if not torch.equal(other, want) else "the copy computes the same")
    assert_equal(graph(x), want, "behind a call of a copy")
    ds_tilemoe.restore(twin)
    ds_tilemoe.restore(moe)
    del twin, other
    gc.collect()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    assert_equal(graph(x), want, "behind restore()")
    del taken


@case
def a_rank_fails_while_others_replay(ctx: RankContext) -> None:
    """Heard behind the replay, the heap and its graph stay usable. With replays queued behind the
    failed one, to which the failed rank does not come, the device ends them at once."""
    moe = swap(make())
    graph, x = Graph([moe], 16), rows(16, HIDDEN, seed=2)
    want = graph(x)

    def fail(replays: int) -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            assert "wanted its hidden size" in str(raised(run, moe, x[:, :-8]))
            return
        torch.cuda._sleep(200_000_000)
        results = [graph(x) for _ in range(replays)]
        assert results[-1].cpu().isnan().all()
        error = raised(ds_tilemoe.check, moe)
        seconds = time.monotonic() - began
        assert_rank_1_failed(error, behind=replays > 1)
        assert seconds < 8, f"it took {seconds:.0f} s"

    together(lambda: fail(1))
    assert_equal(graph(x), want, "the replay behind it")
    together(lambda: fail(3))
    together(lambda: _assert_failed(moe, x))
    swap(moe)
    assert_equal(run(moe, x)[0], want, "on the new heap")


def _assert_failed(moe: Any, x: Tensor) -> None:
    for error in (raised(ds_tilemoe.check, moe), raised(run, moe, x)):
        assert isinstance(error, DeadlineError), repr(error)


@case
def decode_takes_microseconds(ctx: RankContext) -> None:
    """Not a benchmark: that a replay is no slower than the eager call, and prints both."""
    moe = swap(make("swiglu", k=8, hidden=2048, ffn=768))
    graph = Graph([moe], 4, 2048)
    times = {}
    for name, call in (
        ("graph", graph.replay),
        ("eager", lambda: graph.eager(graph.x)),
    ):
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        times[name] = (time.perf_counter() - began) / 200 * 1e6
    print(f"rank {ctx.rank}: us a call {times}")
    agree("" if times["graph"] <= 1.2 * times["eager"] else f"us a call: {times}")


test_ranks = gpu_rank_tests(__file__)
