"""One rank differs at apply(): all ranks of its group hear why, and none waits for it."""

from __future__ import annotations

import torch
from deepspeed.moe.sharded_moe import MOELayer
from moe_models import HIDDEN, assert_close, make_moe, raised, run, same_everywhere, tokens
from torch import nn

import ds_tilemoe
from ds_tilemoe.errors import ConfigError, UnsupportedLayerError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import case, rank_tests


@case
def one_rank_that_cannot_keeps_all_back(ctx):
    moe, x = make_moe(4, drop_tokens=False), tokens(6, HIDDEN)
    want = run(moe, x)[0]
    if ctx.rank == 1:
        expert = moe.deepspeed_moe.experts.deepspeed_experts[0]
        hook = expert[0].register_forward_hook(lambda *_: None)
    report = ds_tilemoe.apply(moe)
    reason = same_everywhere(report.layers[0].reason)
    assert reason.startswith("rank 1: ")
    assert "hooks" in reason
    assert type(moe.deepspeed_moe) is MOELayer
    assert torch.equal(run(moe, x)[0], want)
    error = raised(ds_tilemoe.apply, moe, {"strict": ctx.rank == 3})
    assert isinstance(error, UnsupportedLayerError)
    same_everywhere(str(error))
    assert type(moe.deepspeed_moe) is MOELayer
    if ctx.rank == 1:
        hook.remove()
    assert ds_tilemoe.apply(moe).swapped


@case
def settings_that_ranks_must_share(ctx):
    moe, x = make_moe(4, drop_tokens=False), tokens(6, HIDDEN)
    want = run(moe, x)[0]
    report = ds_tilemoe.apply(moe, {"layout": "aligned" if ctx.rank == 2 else "compact"})
    reason = same_everywhere(report.layers[0].reason)
    assert "layout differs: 'compact' on rank 0, 'aligned' on rank 2" in reason
    assert torch.equal(run(moe, x)[0], want)
    # How a rank shapes its own sending is its own business.
    block = {"num_consumer_ctas": 1 + ctx.rank % 2, "bands_per_segment": 1 + ctx.rank}
    assert ds_tilemoe.apply(moe, block).swapped
    assert_close(run(moe, x)[0], want)


@case
def strict_on_some_ranks(ctx):
    """A rank that is strict about what it hears in one group has a word to say in its others."""
    sizes, x = (2, 4, 1), tokens(6, HIDDEN)
    model = nn.ModuleList(make_moe(size, drop_tokens=False) for size in sizes)
    if ctx.rank == 2:
        model[2].deepspeed_moe.experts.register_forward_hook(lambda *_: None)
    strict = ctx.rank in (0, 2)
    if strict:
        error = raised(ds_tilemoe.apply, model, {"strict": True})
        assert isinstance(error, UnsupportedLayerError)
        assert "forward hooks" in str(error)
    else:
        report = ds_tilemoe.apply(model, {})
        assert [entry.status for entry in report.layers[:2]] == ["kept", "kept"]
    same_everywhere([type(moe.deepspeed_moe) for moe in model[:2]])
    for moe in model:
        run(moe, x)


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)

    def forward(self, x):
        return self.out(torch.cos(self.up(x)))


@case
def any_error_on_one_rank_is_a_reason(ctx):
    def describe(expert):
        if ctx.rank == 1 and broken:
            raise KeyError("no such layer")
        return ds_tilemoe.ExpertParts(lambda x: torch.cos(expert.up(x)), expert.out)

    ds_tilemoe.register_expert(Cosine, describe)
    broken = False
    moe, x = make_moe(4, Cosine(), drop_tokens=False), tokens(6, HIDDEN)
    want = run(moe, x)[0]
    assert ds_tilemoe.apply(moe).swapped
    assert_close(run(moe, x)[0], want)
    broken = True
    reason = same_everywhere(ds_tilemoe.apply(moe).layers[0].reason)
    assert reason.startswith("rank 1: "), reason
    assert torch.equal(run(moe, x)[0], want)
    wg = moe.deepspeed_moe.gate.wg
    if ctx.rank == 1:
        del moe.deepspeed_moe.gate.wg
    reason = same_everywhere(ds_tilemoe.apply(moe).layers[0].reason)
    assert reason.startswith("rank 1: it could not be examined: AttributeError: "), reason
    error = raised(ds_tilemoe.apply, moe, {"strict": True})
    assert isinstance(error, UnsupportedLayerError)
    same_everywhere(str(error))
    moe.deepspeed_moe.gate.wg, broken = wg, False
    assert ds_tilemoe.apply(moe).swapped


@case
def experts_without_parameters_on_one_rank(ctx):
    moe = make_moe(4, drop_tokens=False)
    if ctx.rank == 3:
        moe.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList([nn.ReLU(), nn.ReLU()])
    reason = same_everywhere(ds_tilemoe.apply(moe).layers[0].reason)
    assert reason == "rank 3: an expert (ReLU) has no parameters"


@case
def wishes_of_one_rank(ctx):
    model, x = nn.ModuleList([make_moe(4), make_moe(2)]), tokens(8, HIDDEN)
    want = [run(moe, x)[0] for moe in model]
    for block, reason in (
        ({"enabled": False}, "rank 2: tile_overlap.enabled is false"),
        ({"layers": "nothing"}, "rank 2: its name does not match tile_overlap.layers"),
    ):
        first, second = ds_tilemoe.apply(model, block if ctx.rank == 2 else {}).layers
        assert same_everywhere(first.reason) == reason
        assert second.status == ("swapped" if ctx.rank < 2 else "kept")
        for moe, y in zip(model, want, strict=True):
            assert_close(run(moe, x)[0], y)
    if ctx.rank == 2:
        assert "'layers'" in str(raised(ds_tilemoe.apply, model, {"layer": 1}))
    else:
        first, _ = ds_tilemoe.apply(model).layers
        assert first.reason.startswith("rank 2: its settings are wrong: tile_overlap.layer: got")
    assert isinstance(raised(ds_tilemoe.apply, model, {"mover": 3}), ConfigError)
    assert len(ds_tilemoe.apply(model, {"strict": True}).swapped) == 2


@case
def strict_in_one_group_is_heard_in_the_next(ctx):
    model = nn.ModuleList([make_moe(2), make_moe(4)])
    if ctx.rank == 3:
        model[0].deepspeed_moe.experts.register_forward_hook(lambda *_: None)
    error = raised(ds_tilemoe.apply, model, {"strict": True})
    assert isinstance(error, UnsupportedLayerError)
    assert "its Experts module has forward hooks" in str(error)
    assert ("apply() has failed there" in str(error)) == (ctx.rank < 2)
    assert not any(isinstance(module, TileMOELayer) for module in model.modules())


test_ranks = rank_tests(__file__, world=4, timeout_s=300)
