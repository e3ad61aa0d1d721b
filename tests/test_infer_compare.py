"""The rule of ``launch/infer.py --compare``: what it lets pass, and that it can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from typing import Any

import pytest
import torch
from infer_runs import ROOT

import ds_tilemoe
from ds_tilemoe.testing import RankContext, case, init_deepspeed, rank_tests

sys.path.insert(0, str(ROOT / "launch"))

from demo import checkpoint, comparison, results
from demo.generation import Reading, read_and_write
from demo.model import ByteMoE
from demo.model_config import ModelConfig

DEMO = ROOT / "launch" / "demo"
SIZES = ModelConfig.load(DEMO / "config.json")
HELDOUT = (DEMO / "heldout.txt").read_bytes()
NEW = 4


def run_both(ctx: RankContext, dtype: torch.dtype, change=lambda model: None, layers: int = 2):
    """What infer.py --compare does, with ``change(model)`` between the two kinds of layers."""
    import deepspeed

    init_deepspeed()
    model = ByteMoE(SIZES, ctx.world).to(dtype)
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    checkpoint.load(model, DEMO / "model.safetensors")
    engine.eval()
    piece = HELDOUT[ctx.rank * 400 : (ctx.rank + 1) * 400]
    calls = comparison.LayerCalls(engine)
    with calls.record():
        plain = read_and_write(engine, SIZES, piece, NEW)
    assert len(ds_tilemoe.apply(engine).swapped) == layers
    change(model)
    again = read_and_write(engine, SIZES, piece, NEW)
    replayed = None
    if dtype != torch.float32:
        with calls.replay():
            replayed = read_and_write(engine, SIZES, piece, NEW, given=plain.written)
    reading = read_and_write(engine, SIZES, piece, NEW)
    mine = comparison.of_rank(plain, reading, again, replayed, calls)
    return mine, (plain, reading, replayed)


def experts(model: ByteMoE, layer: int) -> torch.nn.ModuleList:
    return model.blocks[layer].moe.deepspeed_moe.experts.deepspeed_experts


@case(dtype=["float32", "float16", "bfloat16"])
def right_layers_pass(ctx: RankContext, dtype: str) -> None:
    mine, (plain, reading, replayed) = run_both(ctx, getattr(torch, dtype))
    assert mine["fault"] is None, mine
    if replayed is not None:
        assert mine["routed"] == 2 * (400 + NEW - 1)
        assert mine["max_abs_diff"] <= mine["limit"] / 2
        assert 0 <= mine["layer_diff"] <= 1e-2
        assert mine["rerouted"] <= 0.05 * mine["routed"]
        assert replayed.written == plain.written
        # The whole model differs by more than its layers do wherever a token went another way.
        whole = (reading.logits[:400] - plain.logits[:400]).abs().max().item()
        assert whole <= mine["limit"] or dtype == "bfloat16"


@case(layer=[0, 1], dtype=["float32", "bfloat16"])
def one_wrong_expert_of_one_rank_fails(ctx: RankContext, layer: int, dtype: str) -> None:
    def change(model: ByteMoE) -> None:
        if ctx.rank == 1:
            with torch.no_grad():
                experts(model, layer)[2][2].weight[:, 7] *= 3.0

    mine, _ = run_both(ctx, getattr(torch, dtype), change)
    # Tokens of every rank went there.
    if dtype == "float32":
        assert "max_abs_diff" in (mine["fault"] or ""), mine
    else:
        assert f"given the same input, module.blocks.{layer}.moe differs" in (mine["fault"] or "")


@case
def swapped_experts_fail(ctx: RankContext) -> None:
    def change(model: ByteMoE) -> None:
        first, second = experts(model, 1)[0], experts(model, 1)[1]
        for name, weight in first.named_parameters():
            other = second.get_parameter(name)
            weight.data, other.data = other.data, weight.data

    mine, _ = run_both(ctx, torch.bfloat16, change)
    assert "blocks.1.moe differs" in (mine["fault"] or ""), mine


@case
def a_wrong_gate_fails(ctx: RankContext) -> None:
    # Given the same input, a layer has to choose the same experts.
    def change(model: ByteMoE) -> None:
        gate = model.blocks[0].moe.deepspeed_moe.gate.wg
        gate.weight.data = gate.weight.data.roll(1, dims=0)

    mine, _ = run_both(ctx, torch.bfloat16, change)
    assert "blocks.0.moe differs" in (mine["fault"] or ""), mine


test_ranks = rank_tests(__file__, world=2, timeout_s=300)


def reading(value: float, text: bytes = b"ab") -> Reading:
    return Reading(torch.full((4, 256), value), 3.0, 2, text, 1.0, 1.0, 1)


class Calls:
    """Of layers that differ by ``ratio``."""

    rerouted, routed = 1, 10

    def __init__(self, ratio: float = 0.0) -> None:
        self.ratio = ratio

    def worst_layer(self) -> tuple[str, float]:
        return "blocks.1", self.ratio


RIGHT = {"max_abs_diff": 0.1, "limit": 0.2, "layer_diff": 0.0, "rerouted": 2, "routed": 10}
RIGHT |= {"fault": None}


@pytest.mark.parametrize(
    ("plain", "got", "again", "replayed", "fault"),
    [
        (reading(0.0), reading(0.0), reading(0.0), None, None),
        (reading(0.0), reading(2e-5), reading(2e-5), None, "max_abs_diff is 2e-05; the limit is"),
        (reading(0.0), reading(math.nan), reading(math.nan), None, "max_abs_diff is nan"),
        (reading(0.0), reading(0.0, b"ax"), reading(0.0, b"ax"), None, "another text"),
        (reading(0.0), reading(0.0), reading(1e-7), None, "have to repeat bit for bit"),
        # In half precision the whole model's text and logits may differ; a layer's may not.
        (reading(1.0), reading(9.0, b"xy"), reading(9.0), reading(1.02), None),
        (reading(1.0), reading(1.0), reading(1.0), reading(1.03), "max_abs_diff is 0.03"),
        (reading(1.0), reading(1.0), reading(1.0), reading(math.nan), "max_abs_diff is nan"),
        (reading(1.0), reading(1.0), reading(1.1), reading(1.0), "have to repeat bit for bit"),
    ],
)
def test_what_a_rank_finds(plain, got, again, replayed, fault):
    mine = comparison.of_rank(plain, got, again, replayed, Calls())
    assert bool(mine["fault"]) == bool(fault), mine
    assert (fault or "") in (mine["fault"] or "")
    record = comparison.of_world([mine, mine])
    json.dumps(record, allow_nan=False)
    assert record["fault"] == (f"rank 0: {mine['fault']}" if fault else None)


@pytest.mark.parametrize(("ratio", "fails"), [(0.02, False), (0.021, True), (math.nan, True)])
def test_a_layer_that_differs_fails(ratio, fails):
    right = reading(1.0)
    mine = comparison.of_rank(right, right, right, right, Calls(ratio))
    assert ("given the same input, blocks.1 differs" in (mine["fault"] or "")) == fails
    record = comparison.of_world([mine | {"layer_diff": 0.0}, mine])
    assert record["layer_diff"] == (None if math.isnan(ratio) else ratio)


@pytest.mark.parametrize(("rerouted", "fails"), [(2, False), (3, True)])
def test_too_many_rerouted_tokens_fail(rerouted, fails):
    record = comparison.of_world([RIGHT, RIGHT | {"rerouted": rerouted}])
    assert record["rerouted_share"] == (0.25 if fails else 0.2)
    assert ("of 20 tokens of a layer would have gone" in (record["fault"] or "")) == fails


def record_of(mine: Reading, plain: Reading | None, backend: str) -> dict[str, Any]:
    """As infer.py makes it, of one rank without layers."""
    everyone = [results.of_rank(mine, plain) | {"layers": []}]
    if plain is not None:
        everyone[0] |= comparison.of_rank(plain, mine, mine, None, Calls())
    record = results.of_world(everyone) | comparison.of_world(everyone if plain else [])
    return record | {"text_before": "", "backend": backend, "dtype": "fp32"}


@pytest.mark.parametrize("nll", [math.nan, math.inf, 1e6])
def test_a_perplexity_that_is_no_number_is_null(nll):
    odd = dataclasses.replace(reading(math.nan), nll=nll)
    for plain in (None, odd):
        record = record_of(odd, plain, "cpu")
        json.dumps(record, allow_nan=False)
        assert record["perplexity"] is record["perplexity_unswapped"] is None
        shown = results.show(record)
        assert "perplexity            not a finite number a byte" in shown
        assert ("perplexity unswapped  not a finite number" in shown) == (plain is not None)


def test_a_comparison_of_nothing_says_so():
    words = "no layer was swapped: both runs are of DeepSpeed's own layers"
    right = reading(0.0)
    assert words in results.show(record_of(right, right, "deepspeed"))
    assert words not in results.show(record_of(right, right, "cpu"))
    assert words not in results.show(record_of(right, None, "deepspeed"))


def test_the_worst_rank_is_the_one_nearest_to_its_limit():
    found = [(0.1, 0.3), (0.25, 0.26), (0.2, 0.4)]
    record = comparison.of_world([RIGHT | {"max_abs_diff": d, "limit": m} for d, m in found])
    assert (record["max_abs_diff"], record["max_abs_diff_limit"]) == (0.25, 0.26)
    assert set(comparison.of_world([]).values()) == {None}


def test_hooks_are_gone_after_a_failure():
    from deepspeed.moe.layer import MoE

    layer = MoE(8, torch.nn.Linear(8, 8), num_experts=2)
    calls = comparison.LayerCalls(torch.nn.Sequential(layer))
    for run in (calls.record, calls.replay):
        with contextlib.suppress(KeyError), run():
            assert layer._forward_pre_hooks and layer._forward_hooks
            raise KeyError
        assert not layer._forward_pre_hooks and not layer._forward_hooks
