"""apply and restore in other orders, on shared and copied layers, on two ranks; what changes in a
swapped layer afterwards, its gate first of all."""

from __future__ import annotations

import copy

import deepspeed
import pytest
import torch
from cuda_library_fake import install
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from moe_models import (
    HIDDEN,
    assert_close,
    fill,
    make_moe,
    oracle,
    raised,
    run,
    same_everywhere,
    tokens,
)
from torch import nn

import ds_tilemoe
from ds_tilemoe import swap
from ds_tilemoe.backends import cpu
from ds_tilemoe.errors import BuildError, CapacityError, TileMoEError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import case, rank_tests


class Model(nn.Module):
    """Two MoE layers in turn."""

    def __init__(self, parallel=True):
        super().__init__()
        self.first = make_moe(2, "mlp", parallel=parallel, drop_tokens=False)
        self.second = make_moe(2, "swiglu", parallel=parallel, drop_tokens=False, seed=1)

    def forward(self, x):
        x = x + self.first(x)[0]
        return x + self.second(x)[0]

    @property
    def layers(self):
        return [self.first.deepspeed_moe, self.second.deepspeed_moe]


def swapped(block=None, **options):
    moe = make_moe(2, **{"drop_tokens": False, **options})
    assert ds_tilemoe.apply(moe, block or {}).swapped
    return moe


def assert_as_unswapped(moe, x, tolerance=1e-5):
    twin = copy.deepcopy(moe)
    ds_tilemoe.restore(twin)
    assert_close(run(moe, x)[0], run(twin, x)[0], tolerance)


def calls(moe):
    """How often the layer has run on the backend."""
    return moe.deepspeed_moe._tile.stats.calls


# -- the gate ---------------------------------------------------------------------------------


@case
def k_changes(ctx):
    moe, x = swapped(min_capacity=0), tokens(9, HIDDEN)
    gate, state = moe.deepspeed_moe.gate, moe.deepspeed_moe._tile
    for number, k in enumerate((3, 2, 1, 8, 3, 2)):
        gate.k = k
        rows = x if ctx.rank else x[: number % 3]  # at times none
        assert_close(run(moe, rows)[0], oracle(moe, rows))
        assert calls(moe) == 1 + number
    assert len(state.shapes) == 4, "a number that was agreed on once is known"
    gate.k = 9
    assert "out of range" in str(raised(run, moe, x)), "DeepSpeed's own error"
    gate.k = 4
    assert_as_unswapped(moe, x)
    assert calls(moe) == 7
    assert "K=4" in ds_tilemoe.apply(moe, {}).layers[0].shape


@case(k=[3, 4])
def k_changes_on_one_rank(ctx, k):
    """To one that the ranks have agreed on before, or to another: both are DeepSpeed's path."""
    moe, x = swapped(), tokens(9, HIDDEN)
    gate = moe.deepspeed_moe.gate
    for known in (3, 2):
        gate.k = known
        run(moe, x)
    if ctx.rank == 1:
        gate.k = k
    for _ in range(2):
        assert_as_unswapped(moe, x)
    assert calls(moe) == 2
    gate.k = k
    assert_as_unswapped(moe, x)
    assert calls(moe) == 3


@case
def k_changes_on_cuda(ctx):
    """Without a GPU: see cuda_library_fake.py."""
    moe = make_moe(2, drop_tokens=False, min_capacity=0).bfloat16()
    x = tokens(9, HIDDEN, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        install(patch, moe.deepspeed_moe.ep_group)
        block = {"adaptive": {"enabled": False}, "num_consumer_ctas": 8}
        assert ds_tilemoe.apply(moe, block).swapped
        for k in (2, 3, 1, 2, 8):
            moe.deepspeed_moe.gate.k = k
            assert_close(run(moe, x)[0], oracle(moe, x), 2e-2)
            assert type(moe.deepspeed_moe) is TileMOELayer
            assert moe.deepspeed_moe._tile.kept is None
        ds_tilemoe.check(moe)
        ds_tilemoe.restore(moe)


@case
def settings_of_the_gate_change(ctx):
    moe = swapped(drop_tokens=True, eval_capacity_factor=0.5, min_capacity=1)
    x, gate = tokens(16, HIDDEN), moe.deepspeed_moe.gate
    assert_as_unswapped(moe, x)
    for name, value in (
        ("eval_capacity_factor", 1.5),
        ("min_capacity", 9),
        ("drop_tokens", False),
    ):
        setattr(gate, name, value)
        assert_as_unswapped(moe, x)
    assert calls(moe) == 4


def fill_linear(outputs):
    linear = nn.Linear(HIDDEN, outputs, bias=False)
    fill(linear, 6)
    return linear


class OwnGate(TopKGate):
    """Negative weights."""

    def forward(self, *args):
        aux, capacity, experts, indices, locations, gates, counts = super().forward(*args)
        return aux, capacity, experts, indices, locations, -gates, counts


@case
def the_gate_is_replaced(ctx):
    moe, x = swapped(), tokens(9, HIDDEN)
    layer, old = moe.deepspeed_moe, moe.deepspeed_moe.gate
    want = run(moe, x)[0]
    for kind, on_backend in ((TopKGate, 1), (OwnGate, 0)):
        layer.gate = kind(HIDDEN, 8, k=3, drop_tokens=False, ep_group=old.ep_group).eval()
        fill(layer.gate, 5)
        before = calls(moe)
        assert_as_unswapped(moe, x)
        assert calls(moe) == before + on_backend, kind
    layer.gate = old
    assert_close(run(moe, x)[0], want)
    before = calls(moe)
    layer.gate.wg = fill_linear(16)
    assert_as_unswapped(moe, x)  # DeepSpeed gives each expert the rows of two
    assert calls(moe) == before
    assert "its gate has 16 outputs for 8 experts" in ds_tilemoe.apply(moe).layers[0].reason


@case
def a_dtype_comes_back_on_one_rank(ctx):
    moe, x = swapped(), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    run(moe.bfloat16(), x.bfloat16())
    moe.float()
    assert_close(run(moe, x)[0], want, 2e-2)
    if ctx.rank:
        moe.bfloat16()
    error = raised(run, moe, x.bfloat16() if ctx.rank else x)
    assert isinstance(error, TileMoEError)
    assert "different dtypes: float32 on rank 0, bfloat16" in same_everywhere(str(error))
    assert_close(run(moe.float(), x)[0], want, 2e-2)


@case
def layers_in_another_order_on_one_rank(ctx):
    model, x = Model(), tokens(9, HIDDEN)
    ds_tilemoe.apply(model)
    want = run(model, x)
    error = raised(run, model.second if ctx.rank else model.first, x)
    assert isinstance(error, TileMoEError)
    text = same_everywhere(str(error))
    assert "different layers: ('first.deepspeed_moe',) on rank 0, ('second.deepspeed" in text
    assert torch.equal(run(model, x), want)


# -- apply and restore ------------------------------------------------------------------------


@case
def other_settings_and_back(ctx):
    model, x = Model(), tokens(9, HIDDEN)
    want = run(model, x)
    for block, kinds in (
        ({}, [TileMOELayer, TileMOELayer]),
        ({"layout": "aligned"}, [TileMOELayer, TileMOELayer]),
        ({"layers": "second"}, [MOELayer, TileMOELayer]),
        ({"layers": "first"}, [TileMOELayer, MOELayer]),
        ({"enabled": False}, [MOELayer, MOELayer]),
        ({"num_consumer_ctas": 2}, [TileMOELayer, TileMOELayer]),
    ):
        ds_tilemoe.apply(model, block)
        assert list(map(type, model.layers)) == kinds
        assert_close(run(model, x), want)
    for module, layers in ((model, 2), (model.first, 1)):
        assert ds_tilemoe.restore(module) == layers
        assert_close(run(model, x), want)
        assert len(ds_tilemoe.apply(model, {}).swapped) == 2
        assert_close(run(model, x), want)


@case
def a_part_and_then_the_whole(ctx):
    model, x = Model(), tokens(9, HIDDEN)
    want = run(model, x)
    ds_tilemoe.apply(model.first, {})
    assert_close(run(model, x), want)
    report = ds_tilemoe.apply(model, {})
    assert report.swapped == ("first.deepspeed_moe", "second.deepspeed_moe")
    assert_close(run(model, x), want)
    first, second = (layer._tile for layer in model.layers)
    assert first.session is second.session, "one heap for both"
    ds_tilemoe.apply(model.second, {"layout": "aligned"})
    assert_close(run(model, x), want)


@case
def one_layer_in_two_places_and_two_models(ctx):
    moe, other, x = make_moe(2, drop_tokens=False), make_moe(2, "swiglu"), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    twice, wider = nn.ModuleList([moe, moe]), nn.ModuleDict({"a": other, "b": moe})
    report = ds_tilemoe.apply(twice, {"strict": True})
    assert report.swapped == ("0.deepspeed_moe",)
    assert_close(run(twice[1], x)[0], want)
    for block in ({"strict": True}, {"layout": "aligned"}):
        assert len(ds_tilemoe.apply(wider, block).swapped) == 2
        for module in (twice[0], wider["b"]):
            assert_close(run(module, x)[0], want)
        assert_as_unswapped(other, x)
    assert ds_tilemoe.restore(twice) == 1
    assert torch.equal(run(moe, x)[0], want)
    assert_as_unswapped(other, x)
    assert calls(other) == 2, "with the settings of the second apply()"
    ds_tilemoe.check(wider)
    assert ds_tilemoe.restore(wider) == 1


@case
def copies_are_restored_alone(ctx):
    moe, x = make_moe(2, drop_tokens=False), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    ds_tilemoe.apply(moe)
    early = copy.deepcopy(moe)
    run(moe, x)
    late = copy.deepcopy(moe)
    ds_tilemoe.restore(moe)
    for module in (moe, early, late):
        assert_close(run(module, x)[0], want)
    ds_tilemoe.restore(late)
    ds_tilemoe.apply(early, {"layout": "aligned"})
    for module in (moe, early, late):
        assert_close(run(module, x)[0], want)
    kinds = [type(module.deepspeed_moe) for module in (moe, early, late)]
    assert kinds == [MOELayer, TileMOELayer, MOELayer]


@case
def shallow_copies_share_all(ctx):
    moe, x = swapped(), tokens(9, HIDDEN)
    want = run(moe, x)[0]
    twin = copy.copy(moe.deepspeed_moe)
    assert torch.equal(run(twin, x, None), want)
    assert calls(moe) == 2
    ds_tilemoe.restore(twin)
    assert_close(run(twin, x, None), want)
    assert torch.equal(run(moe, x)[0], want)
    assert calls(moe) == 3


@case
def parameters_are_replaced_and_frozen(ctx):
    moe, x = swapped(), tokens(9, HIDDEN)
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[2].weight = nn.Parameter(3 * expert[2].weight.detach())
        expert[0].bias = nn.Parameter(3 * expert[0].bias.detach())
    assert_as_unswapped(moe, x)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        loaded = {name: (value / 2).to(dtype) for name, value in moe.state_dict().items()}
        moe.load_state_dict(loaded, assign=True)
        assert_as_unswapped(moe, x.to(dtype), tolerance)
    experts = moe.float().deepspeed_moe.experts.deepspeed_experts
    experts[1][2].weight = experts[0][2].weight
    experts[2][2].weight = nn.Parameter(experts[2][2].weight.detach().t().contiguous().t())
    experts[3][2].bias = None
    assert_as_unswapped(moe, x)
    moe.requires_grad_(False)
    assert_as_unswapped(moe, x)
    assert calls(moe) == 5
    rows = x.clone().requires_grad_()
    moe(rows)[0].sum().backward()
    assert rows.grad is not None


@case
def hooks_of_the_layer_itself_run(ctx):
    moe, x = make_moe(2, drop_tokens=False), tokens(9, HIDDEN)
    want, layer = run(moe, x)[0], moe.deepspeed_moe
    layer.register_forward_hook(lambda module, args, output: 2 * output)
    ds_tilemoe.apply(moe)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0], args[1]))
    moe.register_forward_hook(lambda module, args, output: (3 * output[0], *output[1:]))
    seen = []
    layer.gate.register_forward_hook(lambda *_: seen.append("gate"))
    run(moe, x)
    assert (seen, calls(moe)) == (["gate"], 1)
    assert_as_unswapped(moe, x)
    layer._forward_pre_hooks.clear()
    assert_close(run(moe, x)[0], 6 * want)


# -- reports of pending layers ----------------------------------------------------------------


@case
def reports_say_what_was_decided(ctx):
    model, x = Model(parallel=False), tokens(9, HIDDEN)
    if ctx.rank:
        model.second.deepspeed_moe.experts.register_forward_hook(lambda *_: None)
    earlier = ds_tilemoe.apply(model, {"layout": "aligned"})
    report = ds_tilemoe.apply(model, {})
    entry = report.layers[0]
    assert report.pending[0] == entry.name == "first.deepspeed_moe"
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    engine.eval()
    run(engine, x)
    for told in (earlier, report):
        assert not told.pending
        assert told.swapped == ("first.deepspeed_moe",)
        assert "1 swapped, 1 kept" in str(told)
        assert same_everywhere(told.layers[1].reason).startswith("rank 1: its Experts module has")
    assert (entry.status, entry.reason) == ("swapped", "")
    assert entry.shape.endswith("F=96 float32 linear_act_linear(module:1)")
    ds_tilemoe.restore(engine)
    assert report.swapped == ("first.deepspeed_moe",), "of the past, as any report"


@case
def reports_hear_what_ends_the_wait(ctx):
    moe = make_moe(2, parallel=False, drop_tokens=False)
    ends = (
        (lambda: ds_tilemoe.restore(moe), "DeepSpeed's own layer was put back"),
        (lambda: ds_tilemoe.apply(moe, {"enabled": False}), "tile_overlap.enabled is false"),
        (moe.set_deepspeed_parallelism, None),
    )
    for end, reason in ends:
        report = ds_tilemoe.apply(moe, {})
        assert report.count("pending") == 1
        twin = copy.deepcopy(moe)
        end()
        if reason:
            assert (report.layers[0].status, report.layers[0].reason) == ("kept", reason)
    twin.set_deepspeed_parallelism()
    run(twin, tokens(9, HIDDEN))
    assert report.pending, "a copy is another layer"
    assert ds_tilemoe.apply(moe, {}).swapped == report.swapped == ("deepspeed_moe",)


@case
def a_build_that_failed_is_not_tried_again_in_a_forward(ctx):
    """Which it would delay by minutes; here it would succeed."""
    moe, x = make_moe(2, parallel=False, drop_tokens=False), tokens(9, HIDDEN)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank:
            patch.setattr(swap, "prepare_backend", fail_to_build)
        report = ds_tilemoe.apply(moe, {})
    assert report.pending
    assert ("no compiler" in report.layers[0].reason) == (ctx.rank == 1)
    moe.set_deepspeed_parallelism()
    run(moe, x)
    reason = same_everywhere(report.layers[0].reason)
    assert reason == "rank 1: the CPU backend could not be built: no compiler"
    assert type(moe.deepspeed_moe) is MOELayer
    assert ds_tilemoe.apply(moe, {}).swapped, "apply() tries again"
    assert_as_unswapped(moe, x)


def fail_to_build(*_, **__):
    raise BuildError("no compiler")


@case
def dropout_in_the_first_forward_decides_nothing(ctx):
    expert = nn.Sequential(nn.Linear(HIDDEN, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, HIDDEN))
    moe, x = make_moe(2, expert, parallel=False, drop_tokens=False), tokens(9, HIDDEN)
    report = ds_tilemoe.apply(moe, {})
    moe.set_deepspeed_parallelism()
    run(moe.train(), x)
    assert report.pending
    run(moe.eval(), x)
    assert report.swapped


@case
def a_heap_that_cannot_grow(ctx):
    """The old one has made room for it; who needs no larger one goes on with a new one."""
    moe, x = make_moe(2, drop_tokens=False).bfloat16(), tokens(9, HIDDEN)
    assert ds_tilemoe.apply(moe, {"max_tokens_per_rank": 64}).swapped
    want = run(moe, x.bfloat16())[0]
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    most, open_heap = runtime.backend._heap.shape.dispatch_bytes, cpu.open_heap

    def small(wanted, *rest):
        if wanted.dispatch_bytes > most:
            raise CapacityError("no room")
        return open_heap(wanted, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "open_heap", small)
        for _ in range(2):
            moe.float()
            assert str(raised(run, moe, x)) == "no room"
            moe.bfloat16()
            assert torch.equal(run(moe, x.bfloat16())[0], want)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
