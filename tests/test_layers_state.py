"""What experts' forwards write is no change of theirs; what somebody else does is. One process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from cuda_library_fake import install
from moe_models import FFN, HIDDEN, make_moe, run, tokens
from torch import nn

import ds_tilemoe
from ds_tilemoe.layers import experts as registry
from ds_tilemoe.layers import watch as watch_module
from ds_tilemoe.layers.experts import ExpertParts
from ds_tilemoe.layers.layer_state import LayerState
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.op_builder import CPUTileMoEBuilder


@pytest.fixture(params=["extension", "interpreter"])
def way(request, monkeypatch):
    """By what a look is made."""
    extension = CPUTileMoEBuilder().load() if request.param == "extension" else None
    monkeypatch.setattr(watch_module, "_extension", lambda: extension)


class Counting(nn.Module):
    """GELU that writes in each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.gelu(x)


class Writer(nn.Module):
    """An expert that writes in each call; its numbers of the output are one."""

    calls, factor = 0, 1.0

    def __init__(self, act=F.gelu):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.act, self.drop, self.scale = act, nn.Dropout(0.0), 1.0
        self.first = self.rows = self.trained = self.with_grad = None
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("last", None)
        self.register_buffer("read", torch.ones(()), persistent=False)

    @functools.cached_property
    def notes(self):
        return object()

    @functools.cached_property
    def one(self):
        return 1.0

    def write(self, x):
        pass

    def forward(self, x):
        self.write(x)
        return self.drop(self.down(self.act(self.up(x)))) * self.scale * self.factor * self.one


class Calls(Writer):
    def write(self, x):
        self.calls += 1  # the class has the first


class CallsOfTheClass(Writer):
    def write(self, x):
        type(self).calls += 1


class Statistics(Writer):
    def write(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.last = x.detach().amax()


class Sizes(Writer):
    def write(self, x):
        self.rows = x.shape[-2]
        self.first = self.first or x.shape


class OfTraining(Writer):
    def write(self, x):
        if self.training:
            self.trained = object()
        if torch.is_grad_enabled():
            self.with_grad = object()


class Registered(Writer):
    """Its front is none of its forward, and writes as well."""

    def front(self, x):
        self.rows = object()
        return F.gelu(self.up(x))


WRITERS = {
    "calls": Calls,
    "calls of the class": CallsOfTheClass,
    "statistics": Statistics,
    "sizes": Sizes,
    "in training": OfTraining,
    "activation": lambda: Writer(Counting()),
    "registered front": Registered,
    "chain": lambda: nn.Sequential(
        nn.Linear(HIDDEN, FFN), Counting(), nn.LayerNorm(FFN), nn.Linear(FFN, HIDDEN)
    ),
}


def experts_of(moe):
    return moe.deepspeed_moe.experts.deepspeed_experts


@pytest.fixture
def looks(monkeypatch):
    """The names of what is done when experts are found to be others."""
    seen: list[str] = []

    def count(kind, name):
        function = getattr(kind, name)

        def counted(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(kind, name, counted)

    monkeypatch.setitem(registry._registered, Registered, lambda e: ExpertParts(e.front, e.down))
    count(LayerState, "_check")
    count(Runtime, "preflight")
    return seen


def make_writers(name, looks):
    """Swapped, after their first calls, and all that was done in these is no longer in looks."""
    moe = make_moe(kind=WRITERS[name](), drop_tokens=False, min_capacity=0)
    report = ds_tilemoe.apply(moe)
    assert report.swapped, str(report)
    pass_by(moe, 2)
    looks.clear()
    return moe, moe.deepspeed_moe._tile


def pass_by(moe, calls):
    for call in range(calls):
        run(moe, tokens(3 + 5 * call, HIDDEN, seed=call))


@pytest.mark.parametrize("name", WRITERS)
def test_what_forwards_write_is_no_change(name, looks, way):
    moe, state = make_writers(name, looks)
    pass_by(moe, 6)
    assert (looks, state.version, state.stats.calls) == ([], 0, 8)
    for call in range(4):  # DeepSpeed's path, and back
        moe(tokens(5 + call, HIDDEN).requires_grad_())
        pass_by(moe, 1)
    assert (looks, state.version, state.stats.calls) == ([], 0, 12)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "chain"])
def test_what_forwards_write_is_none_on_deepspeeds_path(name, looks, way):
    moe, state = make_writers(name, looks)
    moe.train()
    for expert in experts_of(moe):
        expert.drop.p = 0.5
    pass_by(moe, 6)
    assert (looks, state.stats.calls) == (["preflight"], 2), "for the dropout, examined before"
    moe.eval()
    pass_by(moe, 2)
    assert (looks, state.stats.calls, len(state.shapes)) == (2 * ["preflight"], 4, 1)


@pytest.mark.parametrize("name", WRITERS)
def test_what_forwards_and_hooks_write_is_none_under_a_hook(name, looks, way):
    moe, state = make_writers(name, looks)
    handle = experts_of(moe)[1].register_forward_hook(
        lambda module, args, output: setattr(module, "output", output)
    )
    pass_by(moe, 6)
    assert (looks, state.version, state.stats.calls) == (["_check", "preflight"], 1, 2)
    handle.remove()
    pass_by(moe, 6)
    assert (looks, state.version) == (2 * ["_check", "preflight"], 2)
    assert state.stats.calls == 8


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "chain"])
def test_other_changes_of_what_writes_are_seen(name, looks, way):
    moe, state = make_writers(name, looks)
    x = tokens(40, HIDDEN)
    want = run(moe, x)[0]
    looks.clear()
    for attribute, after in (("scale", 1.0), ("factor", None), ("one", 1.0)):
        expert, calls = experts_of(moe)[2], state.stats.calls
        setattr(expert, attribute, 3.0)
        got = [run(moe, x)[0] for _ in range(6)][-1]
        assert not torch.allclose(got, want)
        assert looks == ["_check", "preflight"], "refused for its numbers, and only once"
        assert state.stats.calls == calls
        delattr(expert, attribute) if after is None else setattr(expert, attribute, after)
        for _ in range(6):
            assert torch.equal(run(moe, x)[0], want)
        assert looks == 2 * ["_check", "preflight"]
        assert state.stats.calls == calls + 6
        looks.clear()


@pytest.mark.parametrize("name", ["calls", "activation"])
@pytest.mark.parametrize("is_refused", [False, True])
def test_reading_a_cached_property_is_no_change(name, is_refused, looks, way):
    moe, state = make_writers(name, looks)
    if is_refused:
        experts_of(moe)[1].scale = 3.0
        pass_by(moe, 1)
        assert looks.pop(0) == "_check"
        looks.clear()
    calls = state.stats.calls
    for expert in experts_of(moe):
        assert expert.notes is expert.notes
        pass_by(moe, 1)
    assert looks == []
    assert state.stats.calls == calls + (0 if is_refused else len(experts_of(moe)))


def test_a_name_that_comes_as_another_goes_is_seen(way):
    """Their number is as before."""
    moe = make_moe(kind=Writer(), drop_tokens=False)
    ds_tilemoe.apply(moe)
    expert, watch = experts_of(moe)[3], moe.deepspeed_moe._tile.watch
    expert.note = 1
    assert watch.look()
    assert watch.look()
    del expert.note
    expert.factor = 3.0
    assert not watch.look()
    del expert.factor
    assert watch.look()


@pytest.mark.parametrize("name", ["activation", "statistics", "registered front"])
def test_experts_without_rows_are_as_those_with(name, looks, way, monkeypatch):
    """Fronts run in torch, of those experts only that have rows."""
    moe = make_moe(kind=WRITERS[name](), drop_tokens=False, min_capacity=0).bfloat16()
    install(monkeypatch, None)
    assert ds_tilemoe.apply(moe, {"dispatch": "nccl"}).swapped
    state = moe.deepspeed_moe._tile
    run(moe, tokens(1, HIDDEN, dtype=torch.bfloat16))
    looks.clear()
    for call in range(6):
        run(moe, tokens(call % 2, HIDDEN, seed=call, dtype=torch.bfloat16))
    assert (looks, state.version, len(state.shapes)) == ([], 0, 1)


def test_shapes_of_experts_that_are_no_longer_are_dropped():
    moe, x = make_moe(kind=Writer(), drop_tokens=False), tokens(9, HIDDEN)
    ds_tilemoe.apply(moe)
    state = moe.deepspeed_moe._tile
    for call in range(12):
        experts_of(moe)[1].scale = 3.0 if call % 2 else 1.0
        run(moe, x)
        assert state.shapes, "one carries the news of a change"
    assert state.version > 9
    assert len(state.shapes) <= 2
