"""The heap of the CUDA backend: how it is made and kept, its records, and graphs that hold it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_layer_case import Layer, fake, rows
from cuda_library_fake import NoWaits, capture, memory
from moe_models import raised, same_everywhere

from ds_tilemoe.backends import cuda_heap
from ds_tilemoe.errors import CapacityError, TileMoEError
from ds_tilemoe.testing import RankContext, case, rank_tests


@case
def heap_is_kept_while_it_is_large_enough(ctx: RankContext) -> None:
    with fake():
        layer = Layer().open(64)
        first = layer.backend._heap
        layer.open(32)
        assert layer.backend._heap is first
        layer.check(rows(64))
        layer.open(100)
        assert layer.backend._heap is not first
        layer.check(rows(100))
        assert (
            raised(layer.backend.ensure, [layer.shape], 128, False)
            .args[0]
            .startswith("layer moe: the heap would have to grow, but memory is made by all ranks")
        )
        layer.check(rows(100))
        error = raised(layer.backend.ensure, [layer.shape], 2**30)
        assert isinstance(error, CapacityError)
        assert "max_tokens_per_rank" in same_everywhere(str(error))
        layer.check(rows(100))


@case
def memory_that_one_rank_does_not_get(ctx: RankContext) -> None:
    """Wherever it fails, all ranks raise the same: none waits for one that has raised alone."""

    def lack(error: Exception) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        return fail

    locked = lack(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"))
    full = lack(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."))
    odd = lack(OSError("no driver"))
    with fake() as (_, link):
        layer = Layer().open()
        want = layer.check(rows(20))
        for place, name, broken, kind, words in (
            (cuda_heap, "page_locked", locked, CapacityError, "do not fit (RuntimeError: CUDA err"),
            (cuda_heap.CudaHeap, "_room", full, CapacityError, "do not fit (OutOfMemoryError: CUD"),
            (cuda_heap.CudaHeap, "connect", full, CapacityError, "set a smaller max_tokens_per_ra"),
            (
                cuda_heap.CudaHeap,
                "__init__",
                odd,
                TileMoEError,
                "cannot be made: OSError: no driver",
            ),
            (
                link,
                "peer_pointer",
                lambda *_: None,
                TileMoEError,
                "the memory of ranks [0, 1] is not",
            ),
            (torch.cuda, "synchronize", odd, TileMoEError, "cannot be made: OSError: no driver"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                if ctx.rank == 1:
                    patch.setattr(place, name, broken)
                error = raised(layer.open, 128)
            assert type(error) is kind, name
            text = same_everywhere(str(error))
            assert text.startswith("rank 1: "), text
            assert words in text, text
            assert torch.equal(layer.open()(rows(20)), want)


@case(kind=["mlp", "plain"])
def a_first_call_in_inference_mode(ctx: RankContext, kind: str) -> None:
    """Later ones, outside of it, write into the same memory; "plain" gets its rows by NCCL."""
    with fake():
        layer = Layer(kind)
        with torch.inference_mode():
            want = layer.open()(rows(20)).tolist()
        assert layer(rows(20)).tolist() == want
        for cut in layer.experts:
            for parameter in cut.expert.parameters():
                parameter.data = parameter.data.clone()
        assert layer(rows(20)).tolist() == want
        with torch.inference_mode():
            assert layer(rows(20)).tolist() == want


@case
def records_of_calls(ctx: RankContext) -> None:
    with fake() as (library, _):
        layer = Layer(stats=True).open()
        counts = (20, 3, 64)
        for count in counts:
            layer(rows(count))
        assert layer.backend.last_stats is None, "nobody waits for the stats of a steady call"
        records = layer.backend.poll_records()
        assert layer.backend.poll_records() == [], "the next call brings the last one's"
        layer.backend.check()
        records += layer.backend.poll_records()
        assert layer.backend.poll_records() == []
        assert [record.epoch for record in records] == [1, 2, 3]
        assert [record.tokens for record in records] == list(counts)
        assert {layer.backend.layer_name(record) for record in records} == {"moe"}
        for record in records:
            assert record.iteration.epoch == record.epoch
            assert record.times.router_start == -1
            assert record.times.scale_end == 70
            assert 0 < record.remote_rows < record.rows
            assert record.consumer_ctas == 8
        layer(rows(20))
        layer.backend.mover = "sequential"
        layer(rows(20))
        assert library.log[-1] == "SEQUENTIAL"
        assert layer.backend.last_stats is not None
        assert layer.backend.last_stats is None, "a record is handed out once"
        assert [record.epoch for record in layer.backend.poll_records()] == [4]
        with pytest.MonkeyPatch.context() as patch, capture(patch), NoWaits(library):
            layer(rows(20))
            assert layer.backend.last_stats is None, "a captured call has not run"
        assert library.log[-1] == "SEQUENTIAL"


@case
def records_that_nobody_asked_for(ctx: RankContext) -> None:
    with fake(None):
        layer = Layer(ep_size=1).open()
        for _ in range(300):
            layer(rows(1))
        layer.backend.check()
        epochs = [record.epoch for record in layer.backend.poll_records()]
        assert epochs == list(range(45, 301)), "the ring holds 256"


@case
def captured(ctx: RankContext) -> None:
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer().open()
        with capture(patch):
            assert "run one forward before the capture" in str(raised(layer, rows(4)))
        want = layer(rows(4))
        assert not library.exchange.wanted_ctas
        assert not library.combine.device_split
        with capture(patch), NoWaits(library):
            assert torch.equal(layer(rows(4)), want)
        words = library.exchange.wanted_ctas
        assert memory(words, np.int32, 1)[0] == 8
        assert library.combine.device_split == 1
        assert library.combine.num_consumer_ctas == 32
        with capture(patch):
            layer(rows(40))
            assert library.exchange.wanted_ctas == words + 4 * 4, "a word a size bucket"
            log = list(library.log)
            assert isinstance(raised(layer, rows(65)), CapacityError)
            assert isinstance(layer.fails(rows(3), KeyError("x")), KeyError)
            assert library.log[len(log) :] == ["router"], "nothing runs, so nobody is told"
            layer.experts[0].expert[0].weight.data = layer.experts[0].expert[0].weight.data.clone()
            assert "not where they were" in str(raised(layer, rows(4)))
        assert torch.equal(layer(rows(4)), want)
        error = raised(layer.open, 128)
        assert isinstance(error, CapacityError)
        assert "a CUDA graph has been captured with it" in same_everywhere(str(error))
        assert "128 tokens a rank" in str(error)
        assert "max_tokens_per_rank" in str(error)
        assert torch.equal(layer(rows(4)), want)
        library.fail_combine = True
        layer(rows(4))
        library.fail_combine = False
        layer.open(128)  # a heap that has failed is of no use to the graph either
        assert torch.equal(layer(rows(4)), want)
    with fake() as (library, _), pytest.MonkeyPatch.context() as patch:
        layer = Layer(num_consumer_ctas="auto", mover="sm").open()
        layer(rows(4))
        most = layer.backend._splits._most_captured()
        patch.setattr(layer.backend._splits, "_num_consumers", lambda: 8)
        patch.setattr(layer.backend._splits, "_most_captured", lambda: 5)
        with capture(patch):
            layer(rows(4))
        assert most > 5
        assert memory(library.exchange.wanted_ctas, np.int32, 1)[0] == 5, "no more than there are"
    with fake(), pytest.MonkeyPatch.context() as patch:
        layer = Layer(by="nccl").open()
        layer(rows(4))
        with capture(patch):
            assert "cannot be captured" in str(raised(layer, rows(4)))


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
