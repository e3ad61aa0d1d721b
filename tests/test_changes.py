"""What happens to a swapped layer later: hooks, patches, a profiler, torch.compile. One process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deepspeed.profiling.flops_profiler import FlopsProfiler
from moe_models import HIDDEN, SwiGLU, assert_close, make_moe, run, tokens
from torch import nn

import ds_tilemoe
from ds_tilemoe.layers.native import TileMOELayer


def hook_a_child(moe):
    return (
        moe.deepspeed_moe.experts.deepspeed_experts[1][0]
        .register_forward_hook(lambda module, args, output: output + 1)
        .remove
    )


def pre_hook_an_expert(moe):
    expert = moe.deepspeed_moe.experts.deepspeed_experts[2]
    return expert.register_forward_pre_hook(lambda module, args: (args[0] * 2,)).remove


def hook_all_experts(moe):
    return moe.deepspeed_moe.experts.register_forward_hook(lambda m, args, output: -output).remove


def hook_the_world(moe):
    linear = moe.deepspeed_moe.experts.deepspeed_experts[0][2]
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 3 if module is linear else None
    ).remove


def patch_a_forward(moe):
    act = moe.deepspeed_moe.experts.deepspeed_experts[0][1]
    act.forward = torch.relu
    return lambda: delattr(act, "forward")


def parametrise(moe):
    linear = moe.deepspeed_moe.experts.deepspeed_experts[0][2]
    nn.utils.parametrizations.weight_norm(linear)
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(2)
        undone = linear.parametrizations.weight.original1.clone()

    def undo():
        nn.utils.parametrize.remove_parametrizations(linear, "weight")
        linear.weight.data.copy_(undone)

    return undo


def patch_the_class(moe):
    kind = type(moe.deepspeed_moe.experts.deepspeed_experts[0])
    forward = kind.forward
    kind.forward = lambda self, x: 2 * forward(self, x)
    return lambda: setattr(kind, "forward", forward)


def replace_a_call(moe):
    expert = moe.deepspeed_moe.experts.deepspeed_experts[1]
    linear = next(module for module in expert.modules() if isinstance(module, nn.Linear))
    linear._call_impl = lambda x: F.linear(x, 2 * linear.weight, linear.bias)
    return lambda: delattr(linear, "_call_impl")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        hook_a_child,
        pre_hook_an_expert,
        hook_all_experts,
        hook_the_world,
        patch_a_forward,
        parametrise,
        patch_the_class,
        replace_a_call,
    ],
)
def test_changes_that_come_and_go(change, strict, caplog):
    moe, x = make_moe(drop_tokens=False), tokens(40, HIDDEN)
    ds_tilemoe.apply(moe, {"strict": strict})
    stats, want = moe.deepspeed_moe._tile.stats, run(moe, x)[0]
    for again in range(2):
        undo = change(moe)
        changed = [run(moe, x)[0] for _ in range(2)]
        assert stats.calls == 1 + again, "on the backend, which does not see the change"
        assert not torch.allclose(changed[0], want)
        assert torch.equal(*changed)
        undo()
        assert_close(run(moe, x)[0], want)
        assert stats.calls == 2 + again
    assert caplog.text.count("takes DeepSpeed's path") == 1
    assert "overlaps again when that is gone" in caplog.text


def patch_a_class(moe, monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: -self.w2(self.w1(x)))


def patch_a_call(moe, monkeypatch):
    linear = moe.deepspeed_moe.experts.deepspeed_experts[1].w2
    linear._call_impl = lambda x: 0 * x[..., :1].expand(*x.shape[:-1], HIDDEN)


@pytest.mark.parametrize("change", [patch_a_class, patch_a_call])
def test_what_runs_instead_of_an_expert_is_not_lost(change, monkeypatch):
    moe, x = make_moe(kind="swiglu", drop_tokens=False), tokens(40, HIDDEN)
    assert ds_tilemoe.apply(moe).swapped
    before = run(moe, x)[0]
    change(moe, monkeypatch)
    got = run(moe, x)[0]
    assert not torch.allclose(got, before)
    ds_tilemoe.restore(moe)
    assert_close(got, run(moe, x)[0])


def test_a_profiler_of_deepspeed(caplog):
    moe, x = make_moe(drop_tokens=False), tokens(9, HIDDEN)
    ds_tilemoe.apply(moe)
    want = run(moe, x)[0]
    profiler = FlopsProfiler(moe)
    profiler.start_profile()
    assert_close(run(moe, x)[0], want)
    assert profiler.get_total_flops() > 0
    profiler.end_profile()
    assert torch.equal(run(moe, x)[0], want)
    assert moe.deepspeed_moe._tile.stats.calls == 2
    assert "forward hooks (FlopsProfiler.start_profile" in caplog.text


@pytest.mark.parametrize("when", ["before", "after"])
def test_torch_compile_leaves_the_layer_alone(when):
    """Traced, its polled flags would be constants: the numbers were NaN."""
    model, x = (
        nn.Sequential(nn.LayerNorm(HIDDEN), First(make_moe(drop_tokens=False))),
        tokens(9, 64),
    )
    want = run(model, x)
    compiled = torch.compile(model, backend="eager") if when == "before" else model
    ds_tilemoe.apply(model)
    if when == "after":
        run(model, x)
        compiled = torch.compile(model, backend="eager")
    for count in (9, 9, 4):
        assert_close(run(compiled, x[:count]), want[:count])
    assert type(model[1].moe.deepspeed_moe) is TileMOELayer


class First(nn.Module):
    """The output alone."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe.eval()

    def forward(self, x):
        return self.moe(x)[0]
