"""What an expert's forward reads beside its matrices, and what a layer is refused for: changes are
seen, and so is their end. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_library_fake import install
from moe_models import FFN, HIDDEN, assert_close, make_moe, run, tokens
from torch import nn

import ds_tilemoe
from ds_tilemoe.layers import watch as watch_module
from ds_tilemoe.op_builder import CPUTileMoEBuilder


@pytest.fixture(params=["extension", "interpreter"])
def way(request, monkeypatch):
    """By what a look is made."""
    extension = CPUTileMoEBuilder().load() if request.param == "extension" else None
    monkeypatch.setattr(watch_module, "_extension", lambda: extension)


class Factors:
    power = 1


class Reader(Factors, nn.Module):
    """Multiplies by numbers that are all one, from every place where a module may have one."""

    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.factor, self.count, self._private, self.flag, self.tuple = 1.0, 1, 1.0, False, (1.0,)
        self.maybe = None
        self.register_buffer("no_buffer", None)
        self.register_parameter("no_parameter", None)

    def help(self):
        return 1.0

    def forward(self, x):
        y = self.down(F.gelu(self.up(x))) * self.factor * self.count * self._private * self.tuple[0]
        for number in (self.maybe, self.no_buffer, self.no_parameter):
            y = y if number is None else y * number
        return (3 * y if self.flag else y) * self.of_class * self.help() * self.power


def of_the_class(name: str, value: Any):
    def change(expert):
        owner = next(base for base in Reader.__mro__ if name in vars(base))
        before = vars(owner)[name]
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def of_the_expert(name: str, value: Any):
    def change(expert):
        is_own = name in vars(expert) or name in expert._buffers or name in expert._parameters
        before = getattr(expert, name)
        setattr(expert, name, value)
        return (lambda: setattr(expert, name, before)) if is_own else lambda: delattr(expert, name)

    return change


CHANGES = {
    "float": of_the_expert("factor", 3.0),
    "int": of_the_expert("count", 3),
    "private": of_the_expert("_private", 3.0),
    "flag": of_the_expert("flag", True),
    "tuple": of_the_expert("tuple", (3.0,)),
    "tensor where a float was": of_the_expert("factor", torch.tensor(3.0)),
    "something where nothing was": of_the_expert("maybe", 3.0),
    "buffer where none was": of_the_expert("no_buffer", torch.tensor(3.0)),
    "parameter where none was": of_the_expert("no_parameter", nn.Parameter(torch.tensor(3.0))),
    "in front of the class": of_the_expert("of_class", 3.0),
    "method in front of the class": of_the_expert("help", lambda: 3.0),
    "class": of_the_class("of_class", 3.0),
    "method of the class": of_the_class("help", lambda self: 3.0),
    "base class": of_the_class("power", 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_forward_reads_is_watched(name, way):
    moe, x = make_moe(kind=Reader(), drop_tokens=False), tokens(40, HIDDEN)
    report = ds_tilemoe.apply(moe)
    assert report.swapped, str(report)
    stats, want = moe.deepspeed_moe._tile.stats, run(moe, x)[0]
    run(moe, x)
    assert stats.calls == 2
    undo = CHANGES[name](moe.deepspeed_moe.experts.deepspeed_experts[2])
    try:
        got = [run(moe, x)[0] for _ in range(2)]
    finally:
        undo()
    assert not torch.allclose(got[0], want)
    assert torch.equal(*got)
    assert stats.calls == 2, "on the backend, which does not read it"
    assert torch.equal(run(moe, x)[0], want)
    assert stats.calls == 3


def test_a_change_of_all_experts_alike_is_none_of_the_recipe(way):
    moe, x = make_moe(kind=Reader(), drop_tokens=False), tokens(9, HIDDEN)
    ds_tilemoe.apply(moe)
    run(moe, x)
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert.maybe, expert.note = 1.0, "new, and not read"
    run(moe, x)
    assert moe.deepspeed_moe._tile.stats.calls == 2, "examined anew, and as good as before"


class Plain(nn.Module):
    """As Scaled, but for a number that is one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Scaled(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("at", [0, 3])
def test_one_expert_of_another_make_is_examined_by_itself(at):
    moe = make_moe(kind=Plain())
    moe.deepspeed_moe.experts.deepspeed_experts[at] = Scaled().eval()
    (entry,) = ds_tilemoe.apply(moe).layers
    assert (entry.status, "expert Scaled is not one" in entry.reason) == ("kept", True)


def narrow(expert):
    """Half as wide, in parameters of its own; the old ones come back."""
    old = expert[0].weight, expert[0].bias, expert[2].weight
    halves = old[0][:48], old[1][:48], old[2][:, :48]
    expert[0].weight, expert[0].bias, expert[2].weight = (nn.Parameter(h.clone()) for h in halves)

    def undo():
        expert[0].weight, expert[0].bias, expert[2].weight = old

    return undo


def cast(expert):
    """One expert of another dtype, which DeepSpeed's path cannot run either."""
    expert.bfloat16()
    return expert.float


@pytest.mark.parametrize(
    ("change", "reason"), [(narrow, "differ in shape"), (cast, "differ in dtype")]
)
def test_a_layer_whose_experts_differ_for_a_while_comes_back(change, reason):
    moe, x = make_moe(drop_tokens=False), tokens(40, HIDDEN)
    ds_tilemoe.apply(moe)
    state, want = moe.deepspeed_moe._tile, run(moe, x)[0]
    undo = change(moe.deepspeed_moe.experts.deepspeed_experts[1])
    for _ in range(2):
        if change is narrow:
            run(moe, x)
        else:
            with pytest.raises(RuntimeError, match="same dtype"):
                run(moe, x)
        assert reason in state.kept[1]
    undo()
    for calls in (2, 3):
        assert_close(run(moe, x)[0], want, 2e-2)
        assert (state.stats.calls, state.kept) == (calls, None)


def test_weights_cast_under_autocast_are_another_situation(monkeypatch):
    """Autocast's dtype is as before; kernels would read fp32 weights as bf16."""
    moe = make_moe(drop_tokens=False, min_capacity=0).bfloat16()
    x = tokens(9, HIDDEN, dtype=torch.bfloat16)
    install(monkeypatch, None)
    assert ds_tilemoe.apply(moe).swapped
    shapes = moe.deepspeed_moe._tile.shapes
    with torch.autocast("cpu", torch.bfloat16):
        first = run(moe, x)[0]
        assert [shape.dispatch for shape in shapes.values()] == ["fused"]
        moe.float()
        assert_close(run(moe, x)[0].float(), first.float(), 2e-2)
        assert [shape.dispatch for shape in shapes.values()] == ["fused", "nccl"]
        moe.bfloat16()
        assert torch.equal(run(moe, x)[0], first)
        assert len(shapes) == 2, "known"
    assert all("bfloat16 of " in str(situation) for situation in shapes)


def test_a_layer_that_moves_to_a_gpu_is_new_to_its_backend(monkeypatch):
    moe = make_moe(drop_tokens=False, min_capacity=0).bfloat16()
    x = tokens(9, HIDDEN, dtype=torch.bfloat16)
    ds_tilemoe.apply(moe)
    want, state = run(moe, x)[0], moe.deepspeed_moe._tile
    for device in ("cuda", "cpu", "cuda"):
        with monkeypatch.context() as patch:
            if device == "cuda":
                install(patch, None)
            assert_close(run(moe, x)[0].float(), want.float(), 2e-2)
            assert {shape.device for shape in state.shapes.values()} == {device}
            assert state.runtime(moe.deepspeed_moe).backend.name == device
