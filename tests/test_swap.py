"""apply, restore and check in one process: reports, strictness, what is left as it is."""

from __future__ import annotations

import copy
import logging
import weakref

import pytest
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from moe_models import HIDDEN, assert_close, make_moe, oracle, raised, run, tokens
from torch import nn

import ds_tilemoe
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.errors import (
    BuildError,
    ConfigError,
    DeadlineError,
    RankFailure,
    UnsupportedLayerError,
)
from ds_tilemoe.layers import runtime
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.swap import measure_combine_alone


class Quantised(torch.Tensor):
    """Its linear gives other numbers than its memory would."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs)
        is_linear = function is torch.nn.functional.linear
        return 2 * out.as_subclass(torch.Tensor) if is_linear else out


class Odd(nn.Module):
    """An expert that nobody knows."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc(x) + x


class MixtralSparseMoeBlock(nn.Module):
    """The outline of a Hugging Face block."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = nn.Module()


def model_of(*parts):
    return nn.Sequential(nn.LayerNorm(HIDDEN), *parts).eval()


def test_swap_in_place_and_back():
    model, x = model_of(make_moe(), make_moe(kind="swiglu", k=1, drop_tokens=False)), tokens(9, 64)
    layers = [model[1].deepspeed_moe, model[2].deepspeed_moe]
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    modules = list(map(id, model.modules()))
    report = ds_tilemoe.apply(model)
    assert report.swapped == ("1.deepspeed_moe", "2.deepspeed_moe")
    assert [type(layer) for layer in layers] == [TileMOELayer] * 2
    assert all(isinstance(layer, MOELayer) for layer in layers)
    assert_close(run(model[2], x)[0], oracle(model[2], x))
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == parameters
    assert list(map(id, model.modules())) == modules
    assert list(model.buffers()) == []
    assert ds_tilemoe.restore(model) == 2
    assert ds_tilemoe.restore(model) == 0
    assert [type(layer) for layer in layers] == [MOELayer] * 2
    assert "_tile" not in vars(layers[0])


def test_apply_twice():
    moe, x = make_moe(drop_tokens=False), tokens(9, HIDDEN)
    first = ds_tilemoe.apply(moe)
    state, y = moe.deepspeed_moe._tile, run(moe, x)[0]
    assert str(ds_tilemoe.apply(moe)) == str(first)
    assert torch.equal(run(moe, x)[0], y)
    again = moe.deepspeed_moe._tile
    assert again.stats is state.stats and again.stats.calls == 2
    (runtime,) = again.session.runtimes()
    assert [known.backend for known in state.session.runtimes()] == [runtime.backend]
    old = weakref.ref(runtime.backend)
    del state, again, runtime
    ds_tilemoe.apply(moe, {"layout": "aligned"})
    assert old() is None, "its heap goes before the new one comes"
    assert_close(run(moe, x)[0], y)
    assert moe.deepspeed_moe._tile.stats.calls == 1, "of other settings"


def test_apply_on_a_part_keeps_one_heap():
    model, x = model_of(make_moe(drop_tokens=False), make_moe(drop_tokens=False)), tokens(9, HIDDEN)
    ds_tilemoe.apply(model)
    run(model[1], x)
    ds_tilemoe.apply(model[2])
    run(model[2], x)
    first, second = (model[i].deepspeed_moe._tile.session.runtimes() for i in (1, 2))
    assert first[0].backend is second[0].backend
    run(model[1], x)
    assert [model[i].deepspeed_moe._tile.stats.calls for i in (1, 2)] == [2, 1]


def test_stats_of_layers_that_are_swapped_again():
    """A shallow copy in the same model counts for itself; the layer swapped last is exported."""
    model, x = model_of(make_moe(drop_tokens=False), make_moe(drop_tokens=False)), tokens(9, HIDDEN)
    for i, bands in ((1, 2), (2, 3), (1, 2)):
        ds_tilemoe.apply(model[i], {"bands_per_segment": bands})
        run(model[i], x)
        assert ds_tilemoe.stats.export_config()["tile_overlap"]["bands_per_segment"] == bands
    twin = copy.copy(model[1].deepspeed_moe)
    both = nn.ModuleDict({"a": model[1].deepspeed_moe, "b": twin})
    ds_tilemoe.apply(both, {"bands_per_segment": 2})
    run(both["a"], x, None)
    run(both["b"], x, None)
    assert [both[name]._tile.stats.name for name in "ab"] == ["a", "b"]
    assert [both[name]._tile.stats.calls for name in "ab"] == [3, 1]


def test_measuring_goes_on_behind_apply():
    moe, x = make_moe(drop_tokens=False), tokens(9, HIDDEN)
    ds_tilemoe.apply(moe)
    with measure_combine_alone(moe):
        with measure_combine_alone(moe):
            ds_tilemoe.apply(moe, {"layout": "aligned"})
            assert moe.deepspeed_moe._tile.session.measuring
        assert moe.deepspeed_moe._tile.session.measuring
        run(moe, x)
    assert not moe.deepspeed_moe._tile.session.measuring


def test_report_as_text():
    report = ds_tilemoe.apply(model_of(make_moe(), make_moe(kind=Odd())))
    lines = str(report).splitlines()
    assert lines[0] == "ds_tilemoe: 1 swapped, 1 kept"
    assert lines[1].split() == ["layer", "status", "shape", "reason"]
    assert "E=8 ep=1 K=2 H=64 F=96 float32 linear_act_linear(module:1)" in lines[2]
    assert "expert Odd is not one that we know" in lines[3]
    with pytest.raises(AttributeError):
        report.layers = ()


def test_layers_chooses_by_name():
    model = model_of(make_moe(), make_moe())
    assert ds_tilemoe.apply(model, {"layers": r"^2\."}).swapped == ("2.deepspeed_moe",)
    assert ds_tilemoe.apply(model, {"layers": r"^1\.", "strict": True}).swapped == (
        "1.deepspeed_moe",
    )
    assert type(model[2].deepspeed_moe) is MOELayer
    with pytest.raises(UnsupportedLayerError, match='none of 2 MoE layers matches layers "nope"'):
        ds_tilemoe.apply(model, {"layers": "nope", "strict": True})


def test_nothing_swapped_is_loud(caplog):
    with caplog.at_level(logging.WARNING, "ds_tilemoe"):
        assert str(ds_tilemoe.apply(nn.Linear(2, 2))) == "ds_tilemoe: no MoE layers"
    assert "0 layers swapped: no MoE layer in Linear" in caplog.text
    with pytest.raises(UnsupportedLayerError, match=r"consists of 1 Sequential, 1 LayerNorm"):
        ds_tilemoe.apply(model_of(), {"strict": True})


def test_strict_leaves_nothing_swapped():
    model = model_of(make_moe(), make_moe(kind=Odd()))
    with pytest.raises(UnsupportedLayerError, match=r"2\.deepspeed_moe: expert Odd"):
        ds_tilemoe.apply(model, {"strict": True})
    assert not any(isinstance(module, TileMOELayer) for module in model.modules())


def test_unknown_blocks_are_named(caplog):
    model = model_of(make_moe(), MixtralSparseMoeBlock())
    report = ds_tilemoe.apply(model)
    assert [entry.status for entry in report.layers] == ["swapped", "not supported"]
    assert "MixtralSparseMoeBlock is a MoE block that is not known" in report.layers[1].reason
    assert "some MoE layers are not swapped: 2: " in caplog.text
    with pytest.raises(UnsupportedLayerError, match="MixtralSparseMoeBlock"):
        ds_tilemoe.apply(model_of(MixtralSparseMoeBlock()), {"strict": True})


def test_autoep_layers_are_recognised():
    layer = AutoEPMoELayer.__new__(AutoEPMoELayer)
    nn.Module.__init__(layer)
    layer.router, layer.experts = nn.Linear(2, 2), nn.Module()
    report = ds_tilemoe.apply(model_of(layer))
    (entry,) = report.layers
    assert (entry.name, entry.status) == ("1", "not supported")
    assert "AutoEP) is not supported yet" in entry.reason


def test_disabled():
    moe = make_moe()
    ds_tilemoe.apply(moe)
    report = ds_tilemoe.apply(moe, {"enabled": False})
    assert report.layers[0].reason == "tile_overlap.enabled is false"
    assert type(moe.deepspeed_moe) is MOELayer


def use_tutel(moe, monkeypatch):
    moe.deepspeed_moe.use_tutel = True


def use_model_parallel(moe, monkeypatch):
    mpu = type("Mpu", (), {"get_tensor_model_parallel_world_size": lambda self: 2})()
    monkeypatch.setattr(groups, "mpu", mpu)


def use_expert_tensor_parallel(moe, monkeypatch):
    monkeypatch.setattr(groups, "expert_tensor_parallel_world_size", 2)


def use_own_gate(moe, monkeypatch):
    moe.deepspeed_moe.gate.__class__ = type("OwnGate", (TopKGate,), {})


def hook_experts(moe, monkeypatch):
    moe.deepspeed_moe.experts.register_forward_pre_hook(lambda *_: None)


def widen(moe, monkeypatch):
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[2] = nn.Linear(96, 32)


def differ_in_width(moe, monkeypatch):
    expert = moe.deepspeed_moe.experts.deepspeed_experts[3]
    expert[0], expert[2] = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)


def patch_its_forward(moe, monkeypatch):
    moe.deepspeed_moe.forward = moe.deepspeed_moe.forward


def take_an_expert_out(moe, monkeypatch):
    del moe.deepspeed_moe.experts.deepspeed_experts[7]


def differ_in_dtype(moe, monkeypatch):
    moe.deepspeed_moe.experts.deepspeed_experts[3].bfloat16()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (use_tutel, "it uses Tutel"),
        (use_model_parallel, "its model is tensor-parallel"),
        (use_expert_tensor_parallel, "its experts are tensor-parallel"),
        (use_own_gate, "its gate is a OwnGate, not DeepSpeed's TopKGate"),
        (hook_experts, "its Experts module has forward hooks"),
        (widen, "its experts give rows of 32, not of hidden size 64"),
        (differ_in_width, "its experts differ in shape"),
        (differ_in_dtype, "its experts differ in dtype"),
        (patch_its_forward, "it has a forward of its own"),
        (take_an_expert_out, "it has 7 experts on this rank, its num_local_experts is 8"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_keeps_a_layer(change, reason, monkeypatch):
    moe = make_moe()
    change(moe, monkeypatch)
    report = ds_tilemoe.apply(moe)
    assert report.count("kept") == 1
    assert report.layers[0].reason.startswith(reason)
    assert type(moe.deepspeed_moe) is MOELayer


def test_unknown_subclasses_of_moelayer():
    moe = make_moe()
    moe.deepspeed_moe.__class__ = type("OwnLayer", (MOELayer,), {})
    (entry,) = ds_tilemoe.apply(moe).layers
    assert "OwnLayer is a subclass of MOELayer that is not known" in entry.reason


def test_arguments_that_are_no_model():
    with pytest.raises(TypeError, match="got a str; wanted a DeepSpeed engine or a torch module"):
        ds_tilemoe.apply("model")
    with pytest.raises(ConfigError, match="strikt"):
        ds_tilemoe.apply(nn.Linear(1, 1), {"strikt": True})


def fail_to_build(*_, **__):
    raise BuildError("g++ is not there; install it")


def test_no_compiler(monkeypatch, caplog):
    monkeypatch.setattr(runtime, "prepare_backend", fail_to_build)
    moe, x = make_moe(), tokens(5, HIDDEN)
    want = run(moe, x)[0]
    report = ds_tilemoe.apply(moe)
    assert "could not be built: g++ is not there" in report.layers[0].reason
    assert "g++ is not there" in caplog.text
    assert torch.equal(run(moe, x)[0], want)
    # An explicit choice that cannot be met is an error; only "auto" may fall back.
    with pytest.raises(BuildError, match="g\\+\\+ is not there"):
        ds_tilemoe.apply(moe, {"backend": "cpu"})
    assert type(moe.deepspeed_moe) is MOELayer


class Refusal(Exception):
    """Says nothing."""


def test_a_backend_that_cannot_be_made(monkeypatch):
    def fail(*_):
        raise Refusal

    moe, x = make_moe(drop_tokens=False), tokens(5, HIDDEN)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "make_backend", fail)
        with pytest.raises(BuildError, match="rank 0: the CPU backend cannot be made: Refusal"):
            ds_tilemoe.apply(moe)
    assert type(moe.deepspeed_moe) is MOELayer
    assert ds_tilemoe.apply(moe).swapped
    assert_close(run(moe, x)[0], oracle(moe, x))


def exported():
    block = ds_tilemoe.stats.export_config()
    return ds_tilemoe.load_config(block).max_tokens_per_rank


def test_settings_can_be_exported_at_any_time():
    moe, x = make_moe(), tokens(5, HIDDEN)
    for block, known in (({}, 1024), ({"max_tokens_per_rank": 64}, 64)):
        for _ in range(2):
            ds_tilemoe.apply(moe, block)
            assert exported() == block.get("max_tokens_per_rank", "auto")
            run(moe, x)
            assert exported() == known


class Told(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[gloo/pair.cc] Timed out"), DeadlineError),
        (Told("nothing of the kind"), Told),
        (ConfigError('dispatch: got "nccl"'), ConfigError),
    ],
)
def test_a_heap_that_is_never_made(error, wanted, monkeypatch):
    def fail(*_, **__):
        raise error

    moe = make_moe()
    monkeypatch.setattr(CpuBackend, "ensure", fail)
    ds_tilemoe.apply(moe)
    told = raised(run, moe, tokens(5, HIDDEN))
    assert type(told) is wanted
    if wanted is DeadlineError:
        assert "layer deepspeed_moe: a collective of the making of the heap did not" in str(told)
        assert "in the same grad mode (here: disabled)" in str(told)
        assert "with the same enabled and layers" in str(told)
    else:
        assert told is error


def test_copies_of_a_group_of_one():
    moe, x = make_moe(drop_tokens=False), tokens(6, HIDDEN)
    ds_tilemoe.apply(moe)
    want = run(moe, x)[0]
    twin = copy.deepcopy(moe)
    with torch.no_grad():
        for parameter in twin.deepspeed_moe.experts.parameters():
            parameter.zero_()
    assert (run(twin, x)[0] == 0).all()
    assert torch.equal(run(moe, x)[0], want)
    assert twin.deepspeed_moe._tile.session is moe.deepspeed_moe._tile.session


def test_errors_of_the_gate():
    moe = make_moe(k=1, min_capacity=4)
    ds_tilemoe.apply(moe)
    error = raised(run, moe, tokens(2, HIDDEN))
    assert isinstance(error, RankFailure)
    assert isinstance(error.__cause__, AssertionError)
    assert_close(run(moe, tokens(9, HIDDEN))[0], oracle(moe, tokens(9, HIDDEN)))


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (None, "got a NoneType as input; wanted a plain tensor [..., 64]"),
        ([1.0], "got a list as input; wanted a plain tensor"),
        (torch.ones(2, HIDDEN).as_subclass(Quantised), "got a Quantised as input"),
        (torch.tensor(1.0), "got input [] torch.strided; wanted a dense tensor"),
        (torch.eye(HIDDEN).to_sparse(), "got input [64, 64] torch.sparse_coo; wanted a dense"),
        (
            torch.ones(2, HIDDEN, device="meta"),
            "got input on meta; wanted it on cpu, as its experts",
        ),
        (torch.ones(2, HIDDEN + 1), "got input of width 65; wanted its hidden size 64"),
    ],
    ids=["None", "list", "subclass", "number", "sparse", "meta", "wide"],
)
def test_inputs_that_are_no_rows(x, told):
    moe = make_moe()
    ds_tilemoe.apply(moe)
    run(moe, tokens(2, HIDDEN))
    error = raised(run, moe, x)
    assert isinstance(error, RankFailure)
    assert told in str(error)
    assert told in str(error.__cause__)
    assert_close(run(moe, tokens(9, HIDDEN))[0], oracle(moe, tokens(9, HIDDEN)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_tensors_that_are_not_their_numbers(name):
    """Put on after the swap."""
    moe, x = make_moe(drop_tokens=False), tokens(40, HIDDEN)
    assert ds_tilemoe.apply(moe).swapped
    want = run(moe, x)[0]
    linear = moe.deepspeed_moe.experts.deepspeed_experts[0][2]
    plain = getattr(linear, name)
    setattr(linear, name, nn.Parameter(plain.detach().as_subclass(Quantised), requires_grad=False))
    got = run(moe, x)[0]
    state = moe.deepspeed_moe._tile
    assert f"expert parameter 2.{name} is a Quantised" in state.kept[1]
    assert not torch.allclose(got, want)
    own = MOELayer.forward
    assert torch.equal(run(own, moe.deepspeed_moe, x, None), got)
    setattr(linear, name, plain)
    assert torch.equal(run(moe, x)[0], want)
    assert state.kept is None
    # The same object, of another class.
    odd = plain.detach().clone().as_subclass(Quantised)
    torch.utils.swap_tensors(getattr(linear, name), nn.Parameter(odd, requires_grad=False))
    assert not torch.allclose(run(moe, x)[0], want)
    assert "is a Quantised" in state.kept[1]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_another_default_device(device):
    moe, x = make_moe(drop_tokens=False), tokens(40, HIDDEN)
    want = run(moe, x)[0]
    with torch.device(device):
        assert ds_tilemoe.apply(moe).swapped
        got = run(moe, x)[0]
    assert_close(got, want)


def movers_of(moe, monkeypatch):
    """The mover of each call from now on."""
    seen = []
    runtime = moe.deepspeed_moe._tile.runtime(moe.deepspeed_moe)
    forward = runtime.backend.forward
    spy = lambda *args: (seen.append(runtime.backend.mover), forward(*args))[1]  # noqa: E731
    monkeypatch.setattr(runtime.backend, "forward", spy)
    return seen


def test_measuring_ends_with_its_block(monkeypatch):
    moe, x = make_moe(), tokens(5, HIDDEN)
    ds_tilemoe.apply(moe, {"mover": "none"})
    run(moe, x)
    seen = movers_of(moe, monkeypatch)

    def fail():
        with measure_combine_alone(moe):
            run(moe, x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    run(moe, x)
    assert seen == ["sequential", "none"]


def test_measuring_before_the_first_forward():
    moe, x = make_moe(), tokens(5, HIDDEN)
    ds_tilemoe.apply(moe)
    stats = moe.deepspeed_moe._tile.stats
    with measure_combine_alone(moe):
        run(moe, x)
    assert stats.combine_alone_ns is not None
    assert stats.calls == 0
    run(moe, x)
    assert stats.calls == 1


def test_check():
    moe, x = make_moe(), tokens(5, HIDDEN)
    ds_tilemoe.check(moe)
    ds_tilemoe.apply(moe)
    ds_tilemoe.check(moe)
    run(moe, x)
    state = moe.deepspeed_moe._tile
    for cut in state.experts:
        cut.front = lambda rows: rows[:, :3]  # fails in mid-call
    raised(run, moe, x)
    assert "has failed" in str(raised(ds_tilemoe.check, moe))
    ds_tilemoe.apply(moe)
    ds_tilemoe.check(moe)  # the failed heap is no longer in use
    assert_close(run(moe, x)[0], oracle(moe, x))


def test_more_choices_than_experts(caplog):
    moe, x = make_moe(experts=1, k=2, drop_tokens=False), tokens(5, HIDDEN)
    want = run(moe, x)[0]
    (entry,) = ds_tilemoe.apply(moe).layers
    assert (entry.status, entry.reason) == ("kept", "its gate chooses 2 of 1 experts")
    assert entry.reason in caplog.text
    assert torch.equal(run(moe, x)[0], want)


class NoParameters(nn.Module):
    def forward(self, x):
        return x.relu()


def test_experts_without_parameters():
    moe, x = make_moe(kind=NoParameters(), experts=2, k=1), tokens(6, HIDDEN)
    want = run(moe, x)[0]
    (entry,) = ds_tilemoe.apply(moe).layers
    assert (entry.status, entry.reason) == ("kept", "an expert (NoParameters) has no parameters")
    assert torch.equal(run(moe, x)[0], want)


def test_what_cannot_be_examined_is_a_reason():
    moe = make_moe()
    del moe.deepspeed_moe.gate.wg
    (entry,) = ds_tilemoe.apply(moe).layers
    assert entry.status == "kept"
    assert "it could not be examined: AttributeError: " in entry.reason
    assert "wg" in entry.reason


def test_another_root_gives_a_layer_another_name():
    moe = make_moe(drop_tokens=False)
    ds_tilemoe.apply(moe, {})
    report = ds_tilemoe.apply(torch.nn.ModuleDict({"outer": moe}), {})
    assert [entry.name for entry in report.layers] == ["outer.deepspeed_moe"]


def test_weights_moved_to_the_meta_device_are_no_crash_of_a_look():
    """A rank that raised there would leave its peers waiting."""
    moe = make_moe()
    ds_tilemoe.apply(moe)
    run(moe, tokens(8, HIDDEN))
    state = moe.deepspeed_moe._tile
    moe.deepspeed_moe.experts.deepspeed_experts[0].to("meta")
    assert state.situation(moe.deepspeed_moe).weights == torch.float32
    with pytest.raises(RuntimeError, match="meta"):
        run(moe, tokens(8, HIDDEN))
