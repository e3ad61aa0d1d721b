"""One of two ranks differs in apply() or fails there, after all went well before: no rank waits."""

from __future__ import annotations

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from moe_models import (
    HIDDEN,
    assert_close,
    make_moe,
    oracle,
    raised,
    run,
    same_everywhere,
    tokens,
)
from torch import nn

import ds_tilemoe
from ds_tilemoe.errors import (
    BuildError,
    ConfigError,
    DeadlineError,
    TileMoEError,
    UnsupportedLayerError,
)
from ds_tilemoe.layers import runtime
from ds_tilemoe.layers.native import MISMATCH, TileMOELayer
from ds_tilemoe.testing import case, rank_tests

BLOCK = {"max_tokens_per_rank": 64}


def swapped(block=BLOCK):
    moe = make_moe(2, drop_tokens=False)
    assert ds_tilemoe.apply(moe, block).swapped
    return moe


@case
def another_wish_after_a_heap_was_made(ctx):
    """Peers know from before how large it has to be, and must not make it alone."""
    moe, x = swapped(), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    for block, reason in (
        ({**BLOCK, "enabled": False}, "rank 1: tile_overlap.enabled is false"),
        ({**BLOCK, "layers": "none"}, "rank 1: its name does not match tile_overlap.layers"),
        ({**BLOCK, "layout": "aligned"}, "layout differs: 'auto' on rank 0, 'aligned' on rank 1"),
    ):
        report = ds_tilemoe.apply(moe, block if ctx.rank else BLOCK)
        assert same_everywhere(report.layers[0].reason) == reason
        assert_close(run(moe, x)[0], want)
        assert ds_tilemoe.apply(moe, BLOCK).swapped
        assert torch.equal(run(moe, x)[0], want)
    if ctx.rank:
        assert isinstance(raised(ds_tilemoe.apply, moe, {**BLOCK, "stricct": True}), ConfigError)
    else:
        assert "stricct" in ds_tilemoe.apply(moe, BLOCK).layers[0].reason
    assert_close(run(moe, x)[0], want)


@case
def the_same_wish_in_other_words(ctx):
    moe, x = make_moe(2, drop_tokens=False), tokens(9, HIDDEN)
    want = oracle(moe, x)
    block = {**BLOCK, "layout": "compact", "dispatch": "auto"} if ctx.rank else BLOCK
    assert ds_tilemoe.apply(moe, block).swapped
    assert_close(run(moe, x)[0], want)


@case
def layers_that_differ_behind_a_meeting(ctx):
    """Ranks whose meeting finds nothing say so, and do not meet for ever."""
    moe, x = swapped(), tokens(9, HIDDEN)
    (found,) = moe.deepspeed_moe._tile.session.runtimes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.backend, "_fingerprint", lambda shape: ctx.rank)
        assert MISMATCH in same_everywhere(str(raised(run, moe, x)))
    assert_close(run(moe, x)[0], oracle(moe, x))


@case
def a_group_that_one_rank_alone_has(ctx):
    """Its end of apply() is no word to the others."""
    moe, alone, x = make_moe(2, drop_tokens=False), make_moe(1), tokens(9, HIDDEN)
    for block in (BLOCK, {}):
        model = nn.ModuleList([moe] if ctx.rank else [moe, alone])
        assert len(ds_tilemoe.apply(model, block).swapped) == len(model)
        assert_close(run(moe, x)[0], oracle(moe, x))
        ds_tilemoe.restore(model)


@case
def settings_that_one_rank_changes_later(ctx):
    """Those that may differ, while a copy goes on with what it has."""
    moe, x = swapped(), tokens(9, HIDDEN)
    run(moe, x)
    twin = copy.deepcopy(moe)
    want = run(twin, x)[0]
    assert ds_tilemoe.apply(moe, {**BLOCK, "stats": ctx.rank == 0}).swapped
    for layer in (twin, moe, twin):
        assert torch.equal(run(layer, x)[0], want)


@case
def different_calls(ctx):
    """apply() on one rank, and another layer on DeepSpeed's path, are no answers to each other."""
    first, x = swapped(), tokens(9, HIDDEN)
    second = make_moe(2, drop_tokens=False, seed=1)
    model = nn.ModuleList([first, second])
    ds_tilemoe.apply(model, BLOCK)
    handles = [
        moe.deepspeed_moe.experts.deepspeed_experts[0].register_forward_hook(lambda *_: None)
        for moe in model
    ]
    for moe in model:
        run(moe, x)
        assert moe.deepspeed_moe._tile.kept is not None
    wanted = "layer 0.deepspeed_moe on DeepSpeed's path on rank 0, layer 1.deepspeed_moe on"
    assert wanted in same_everywhere(without_label(raised(run, model[ctx.rank], x)))
    error = raised(ds_tilemoe.apply, model, BLOCK) if ctx.rank else raised(run, first, x)
    wanted = "layer 0.deepspeed_moe on DeepSpeed's path on rank 0, the pre-flight on rank 1"
    assert wanted in same_everywhere(without_label(error))
    for handle in handles:
        handle.remove()
    assert len(ds_tilemoe.apply(model, BLOCK).swapped) == 2
    assert_close(run(first, x)[0], oracle(first, x))


def without_label(error):
    """A TileMoEError's text behind the layer of this rank."""
    assert isinstance(error, TileMoEError), error
    return str(error).partition(": ")[2]


@case
def a_backend_that_one_rank_cannot_make(ctx):
    def fail(*_):
        raise OSError("no such device")

    moe, x = make_moe(2, drop_tokens=False), tokens(9, HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank:
            patch.setattr(runtime, "make_backend", fail)
        for block in (BLOCK, {}):
            error = raised(ds_tilemoe.apply, moe, block)
            assert isinstance(error, BuildError)
            wanted = "rank 1: the CPU backend cannot be made: OSError: no such device"
            assert same_everywhere(str(error)) == wanted
    assert type(moe.deepspeed_moe) is MOELayer
    ds_tilemoe.apply(moe, BLOCK)
    assert_close(run(moe, x)[0], oracle(moe, x))


class ForeignMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), nn.Linear(4, 4)


@case(strict=[0, 1])
def one_strict_rank_is_enough_for_layers_that_nobody_knows(ctx, strict):
    model = nn.ModuleDict({"a": make_moe(2, drop_tokens=False), "b": ForeignMoE()})
    x = tokens(9, HIDDEN)
    want = run(model["a"], x)[0]
    error = raised(ds_tilemoe.apply, model, {"strict": ctx.rank == strict})
    assert isinstance(error, UnsupportedLayerError)
    assert "leave as it is: b: " in same_everywhere(str(error))
    assert "ForeignMoE is a MoE block that is not known" in str(error)
    assert torch.equal(run(model["a"], x)[0], want)
    if ctx.rank:
        del model["b"]
    error = raised(ds_tilemoe.apply, model, {"strict": ctx.rank == 1})
    assert "leave as it is: rank 0: b: " in same_everywhere(str(error))
    assert ds_tilemoe.apply(model).swapped == ("a.deepspeed_moe",)


@case(strict=[False, True])
def a_failure_in_a_later_group_is_heard_in_the_earlier(ctx, strict):
    """Which this rank leaves as well: its layers are DeepSpeed's again."""
    model, x = nn.ModuleList([make_moe(2), make_moe(1), make_moe(1)]), tokens(8, HIDDEN)
    if ctx.rank:
        model[2].deepspeed_moe.experts.register_forward_hook(lambda *_: None)
    if ctx.rank or strict:
        error = raised(ds_tilemoe.apply, model, {"strict": True})
        assert isinstance(error, UnsupportedLayerError)
        assert "its Experts module has forward hooks" in str(error)
        assert not any(isinstance(module, TileMOELayer) for module in model.modules())
    else:
        first, *others = ds_tilemoe.apply(model).layers
        assert first.status == "kept"
        assert first.reason.startswith("apply() has failed on another rank: strict is true and")
        assert [entry.status for entry in others] == ["swapped", "swapped"]
    for moe in model:
        assert run(moe, x)[0].isfinite().all()


@case(first=[True, False])
def grad_modes_that_part_after_the_first_call(ctx, first):
    """With grad there is nothing to agree on any more; without it the ranks meet."""
    moe, x = make_moe(2, drop_tokens=False), tokens(6, HIDDEN)
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    moe.deepspeed_moe.ep_group = moe.deepspeed_moe.gate.ep_group = group
    ds_tilemoe.apply(moe)
    with torch.set_grad_enabled(first):
        moe(x)
    with torch.set_grad_enabled(ctx.rank == 1):
        error = raised(moe, x) if first else None
    if error is None:  # the ranks go on to DeepSpeed's path, where they ask in every call
        moe.deepspeed_moe.experts.register_forward_hook(lambda *_: None)
        run(moe, x)
        with torch.set_grad_enabled(ctx.rank == 1):
            error = raised(moe, x)
    assert isinstance(error, DeadlineError)
    mode, what = ("enabled", "DeepSpeed's own path") if ctx.rank else ("disabled", "the ")
    assert f"layer deepspeed_moe: a collective of {what}" in str(error)
    assert f"in the same grad mode (here: {mode})" in str(error)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
