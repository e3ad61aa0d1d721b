"""Each change of a layer's experts between two calls is seen, and looking costs little."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_library_fake import install
from deepspeed.ops.op_builder.builder import OpBuilder
from moe_models import HIDDEN, assert_close, make_moe, run, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import ds_tilemoe
from ds_tilemoe.errors import BuildError
from ds_tilemoe.layers import watch as watch_module
from ds_tilemoe.layers.experts import LocalExpert
from ds_tilemoe.layers.recognise import UnknownExpert, find_recipe
from ds_tilemoe.layers.watch import ExpertWatch
from ds_tilemoe.op_builder import CPUTileMoEBuilder, jit


@pytest.fixture(params=["extension", "interpreter"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what a look is made: all of them see the same."""
    extension = CPUTileMoEBuilder().load() if request.param == "extension" else None
    monkeypatch.setattr(watch_module, "_extension", lambda: extension)
    return request.param


class Functional(nn.Module):
    """Its activation is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.act = F.gelu
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def watched(kind: Any = "mlp", ffn: int = HIDDEN) -> tuple[ExpertWatch, nn.ModuleList]:
    """A look at four experts in bf16, and the experts."""
    holder = make_moe(1, kind, ffn=ffn, experts=4).bfloat16().deepspeed_moe.experts
    experts = holder.deepspeed_experts
    recipe = find_recipe(experts[0], HIDDEN)
    return ExpertWatch(holder, [LocalExpert(expert, recipe) for expert in experts]), experts


def hook_in_a_table_of_its_own(experts: nn.ModuleList) -> None:
    experts[3][1]._forward_hooks = OrderedDict()
    experts[3][1].register_forward_hook(print)


def view(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Another dtype at the same address, as memory that was given back may come again."""
    parameter.data = parameter.data.view(dtype)


def shorten(parameter: nn.Parameter) -> None:
    """Half as long at the same address, contiguous."""
    parameter.data = parameter.data[: len(parameter) // 2]


def reshape(parameter: nn.Parameter) -> None:
    """As many numbers at the same address, contiguous."""
    parameter.data = parameter.data.view(len(parameter) * 2, -1)


def replace(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    setattr(module, name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def hide(module: nn.Module, name: str) -> None:
    """Past __setattr__, which refuses it; what ``module.name`` is from now on."""
    vars(module)[name] = getattr(module, name).detach().clone()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook": lambda e: e[1][0].register_forward_hook(print),
    "pre-hook": lambda e: e[3].register_forward_pre_hook(print),
    "hook in a new table": hook_in_a_table_of_its_own,
    "patched forward": lambda e: setattr(e[2][1], "forward", F.relu),
    "parametrised": lambda e: parametrizations.weight_norm(e[0][2]),
    "other activation": lambda e: e[2].__setitem__(1, nn.ReLU()),
    "wrapped": lambda e: e[2].__setitem__(0, nn.Sequential(e[2][0])),
    "one more part": lambda e: e[1].append(nn.ReLU()),
    "part is gone": lambda e: e[1].pop(2),
    "weight is gone": lambda e: delattr(e[1][2], "weight"),
    "other expert": lambda e: e.__setitem__(1, e[0]),
    "other class": lambda e: setattr(e[1][1], "__class__", nn.ReLU),
    "cast apart": lambda e: e[3][2].half(),
    "bias cast apart": lambda e: view(e[3][2].bias, torch.float16),
    "half of the rows": lambda e: shorten(e[1][0].weight),
    "half of a bias": lambda e: shorten(e[1][0].bias),
    "wide where it was long": lambda e: reshape(e[1][0].weight),
    "a smaller parameter": lambda e: replace(e[1][0], "weight", (HIDDEN // 2, HIDDEN)),
    "a longer bias": lambda e: replace(e[1][0], "bias", (HIDDEN + 1,)),
    "weight is hidden": lambda e: hide(e[1][0], "weight"),
    "bias is hidden": lambda e: hide(e[1][2], "bias"),
    "bias is hidden by None": lambda e: vars(e[1][2]).update(bias=None),
    "patched call": lambda e: setattr(e[2][1], "_call_impl", F.relu),
    "other approximation": lambda e: setattr(e[2][1], "approximate", "tanh"),
    "no approximation": lambda e: delattr(e[2][1], "approximate"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_experts_are_seen(change: str, way: str) -> None:
    watch, experts = watched()
    assert watch.look()
    assert (watch._glance is not None) == (way == "extension")
    CHANGES[change](experts)
    assert not watch.look()
    assert not watch.look(), "and not forgotten"


def test_what_is_around_the_experts_is_seen() -> None:
    watch, _ = watched()
    handles = [
        watch.holder.register_forward_hook(print),
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: None),
    ]
    for handle in handles:
        assert not watch.look()
        handle.remove()
    assert watch.look()
    watch.holder.forward = F.relu
    assert not watch.look()


def test_another_function_as_activation_is_seen() -> None:
    watch, experts = watched(Functional())
    assert watch.look()
    experts[2].act = F.relu
    assert not watch.look()


class Worded(nn.Module):
    """A word says what its forward does; no module and no function of its own is the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.approximate = "none"
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def test_another_word_for_the_activation_is_seen() -> None:
    watch, experts = watched(Worded())
    assert watch.look()
    experts[3].approximate = "tanh"
    assert not watch.look()
    experts[3].approximate = "none"
    assert watch.look()


class Helped(Functional):
    def help(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.help()


def test_what_hides_a_method_is_seen_at_a_glance(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not asked for by its name, of which a class may have many."""
    watch, experts = watched(Helped())
    asked: list[bool] = []
    by_name = watch._hides_its_class
    monkeypatch.setattr(watch, "_hides_its_class", lambda: asked.append(True) or by_name())
    for _ in range(3):
        assert watch.look()
    assert len(asked) == (0 if way == "extension" else 3)
    vars(experts[2])["help"] = lambda: 3.0
    assert not watch.look()
    del experts[2].help
    assert watch.look()
    experts[2].note = "no name of the class"
    assert watch.look()


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
def test_another_function_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    watch, _ = watched()
    for cls in (nn.GELU, nn.Linear, nn.Sequential, *([] if name == "forward" else [nn.Module])):
        assert watch.look()
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda self, x: x, raising=False)
            assert not watch.look()
    assert watch.look()


def test_a_class_may_say_that_it_has_no_bias() -> None:
    """As Megatron's linears do: by an attribute that is None and hides nothing."""
    moe = make_moe(1, ffn=HIDDEN, experts=4).bfloat16()
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        del expert[0].bias
        vars(expert[0])["bias"] = None
    holder = moe.deepspeed_moe.experts
    recipe = find_recipe(holder.deepspeed_experts[0], HIDDEN)
    watch = ExpertWatch(holder, [LocalExpert(e, recipe) for e in holder.deepspeed_experts])
    assert watch.look()
    vars(holder.deepspeed_experts[2][0])["bias"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    assert not watch.look()


@pytest.mark.parametrize("name", ["weight", "bias", "_call_impl"])
def test_what_is_hidden_from_the_start_is_refused(name: str) -> None:
    watch, experts = watched()
    linear = experts[0][0]
    vars(linear)[name] = getattr(linear, name)
    with pytest.raises(UnknownExpert, match="hooks, patches or parts"):
        ExpertWatch(watch.holder, watch.experts)


def test_an_expert_that_knows_its_layer_is_collected() -> None:
    watch, experts = watched()
    assert watch.look()
    experts[0].layer = [watch]  # in a list: no submodule
    gone = weakref.ref(experts[0])
    del watch, experts
    gc.collect()
    assert gone() is None


def test_a_fault_of_the_extension_is_not_one_of_the_experts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise TypeError("incompatible constructor arguments")

    monkeypatch.setattr(watch_module, "_faults", set())
    monkeypatch.setattr(watch_module, "_extension", lambda: SimpleNamespace(Glance=fail))
    for _ in range(2):
        watch, experts = watched()
        assert watch.look()
        experts[1][0].register_forward_hook(print)
        assert not watch.look()
    assert caplog.text.count("TypeError: incompatible constructor arguments") == 1
    assert "hooks" not in caplog.text


def test_experts_that_no_look_would_find_in_order_are_refused() -> None:
    watch, experts = watched()
    experts[0].register_forward_hook(print)
    with pytest.raises(UnknownExpert, match="hooks, patches or parts"):
        ExpertWatch(watch.holder, watch.experts)


def moved(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


def load(experts: nn.ModuleList, assign: bool) -> None:
    state = {name: value.clone() for name, value in experts.state_dict().items()}
    experts.load_state_dict(state, assign=assign)


def view_all(experts: nn.ModuleList, dtype: torch.dtype) -> None:
    for parameter in experts.parameters():
        view(parameter, dtype)


def transpose(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t()


MOVES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda e: moved(e[3][2].weight),
    "bias": lambda e: moved(e[0][0].bias),
    "new parameter": lambda e: setattr(e[1][0], "weight", nn.Parameter(e[1][0].weight.clone())),
    "no bias": lambda e: setattr(e[1][0], "bias", None),
    "loaded by assignment": lambda e: load(e, True),
    "cast": lambda e: e.half(),
    "same address, other dtype": lambda e: view_all(e, torch.float16),
    "same address, transposed": lambda e: transpose(e[2][0].weight),
}


@pytest.mark.parametrize("move", MOVES)
def test_operands_elsewhere_get_another_stamp(move: str) -> None:
    watch, experts = watched()
    stamps = [watch.experts.stamp]
    for _ in range(2):
        assert watch.look()
        stamps.append(watch.experts.stamp)
    assert stamps[1] is stamps[2] is stamps[0] is not None
    MOVES[move](experts)
    assert watch.look()
    assert watch.experts.stamp not in stamps
    assert watch.weight is experts[0][0].weight
    last = watch.experts.stamp
    assert watch.look()
    assert watch.experts.stamp is last


def test_other_numbers_in_place_are_no_change() -> None:
    watch, experts = watched()
    stamp = watch.experts.stamp
    with torch.no_grad():
        experts[0][0].weight.mul_(2)
    load(experts, False)
    experts.train()
    experts[1][0].note = "an attribute"
    assert watch.look()
    assert watch.experts.stamp is stamp


def test_dropout_is_of_the_moment() -> None:
    expert = nn.Sequential(nn.Linear(HIDDEN, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, HIDDEN))
    watch, experts = watched(expert)
    assert watch.may_be_random
    assert not watch.is_random
    experts[2].train()
    assert watch.is_random
    experts[2][2].p = 0.0
    assert not watch.is_random


def test_experts_that_come_back_are_seen() -> None:
    watch, experts = watched()
    last = experts[3]
    experts[3] = experts[0]
    assert not watch.look()
    experts[3] = last
    assert watch.look()
    assert watch.look()


def make_launches_cheap(library: Any) -> None:
    for launch in ("widen", "router", "exchange", "producer", "combine"):
        setattr(library, f"tilemoe_{launch}_launch", lambda *params: 0)


def calls_of_a_forward(monkeypatch: pytest.MonkeyPatch, kind: str, experts: int) -> int:
    """Functions that Python calls in a steady forward on the CUDA backend, but for its launches."""
    moe = make_moe(1, kind, experts=experts, drop_tokens=False, min_capacity=0).bfloat16()
    with monkeypatch.context() as patch:
        library, _ = install(patch, None)
        report = ds_tilemoe.apply(moe)
        assert report.swapped, str(report)
        x = tokens(4, HIDDEN, dtype=torch.bfloat16)
        run(moe, x)
        make_launches_cheap(library)
        counts = []
        for _ in range(4):  # one of them looks at the records
            seen: list[str] = []
            sys.setprofile(lambda frame, event, argument, seen=seen: seen.append(event))
            run(moe, x)
            sys.setprofile(None)
            counts.append(sum(event in ("call", "c_call") for event in seen))
    return max(counts)


@pytest.mark.parametrize("kind", ["mlp", "swiglu"])
def test_a_steady_forward_costs_as_much_with_any_number_of_experts(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    few, many = (calls_of_a_forward(monkeypatch, kind, experts) for experts in (4, 64))
    assert many == few, "a call for each expert costs more than all that the kernels need"
    assert many <= 240


class Operations(TorchFunctionMode):
    """Counts what torch is asked for, but for what it knows of a tensor without an operation."""

    FREE = ("data_ptr", "dim", "is_contiguous", "contiguous", "__get__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = getattr(function, "__name__", "")
        if name not in self.FREE or (name == "contiguous" and not args[0].is_contiguous()):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "views"), [((4,), 0), ((2, 2), 2)])
def test_a_steady_forward_asks_torch_for_little(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], views: int
) -> None:
    """DeepSpeed's logits, and memory for what a user sees and for the routes."""
    moe = make_moe(1, drop_tokens=False, min_capacity=0).bfloat16()
    library, _ = install(monkeypatch, None)
    assert ds_tilemoe.apply(moe).swapped
    x = tokens(*shape, HIDDEN, dtype=torch.bfloat16)
    for _ in range(2):
        run(moe, x)
    make_launches_cheap(library)
    with torch.no_grad(), Operations() as operations:
        moe(x)
    wanted = Counter({"linear": 1, "empty": 4, "reshape": views})
    assert operations.seen == wanted


def test_experts_of_another_size_are_multiplied_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make_moe(1, ffn=128, drop_tokens=False, min_capacity=0).bfloat16()
    install(monkeypatch, None)
    assert ds_tilemoe.apply(moe).swapped
    x = tokens(20, HIDDEN, dtype=torch.bfloat16)
    run(moe, x)
    for up, _, down in moe.deepspeed_moe.experts.deepspeed_experts:
        shorten(up.weight)
        shorten(up.bias)
        down.weight.data = down.weight.data[:, :64].contiguous()
    got = run(moe, x)[0]
    shapes = moe.deepspeed_moe._tile.shapes.values()
    assert [shape.ffn for shape in shapes] == [128, 64], "on the backend, which was told"
    ds_tilemoe.restore(moe)
    assert_close(got.float(), run(moe, x)[0].float(), 2e-2)


def test_another_approximation_is_no_longer_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = make_moe(1, drop_tokens=False, min_capacity=0).bfloat16()
    install(monkeypatch, None)
    assert ds_tilemoe.apply(moe).swapped
    x = tokens(4, HIDDEN, dtype=torch.bfloat16)
    run(moe, x)
    state = moe.deepspeed_moe._tile
    assert state.experts[0].front_gemm.activation == "gelu"
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        expert[1].approximate = "tanh"
    assert run(moe, x)[0].isfinite().all()
    assert {cut.front_gemm for cut in state.experts} == {None}


def test_no_forward_compiles_the_extension(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers may be in a collective of NCCL meanwhile, which ends before a compilation has to."""
    commands: list[Any] = []

    def compile_nothing(recipe: Any, command: Any, *_: Any) -> None:
        commands.append(command)
        raise BuildError("the compiler was called")

    monkeypatch.setattr(jit, "_run", compile_nothing)
    monkeypatch.delitem(OpBuilder._loaded_ops, CPUTileMoEBuilder.NAME, raising=False)
    install(monkeypatch, None)
    moe = make_moe(1, drop_tokens=False, min_capacity=0).bfloat16()
    x = tokens(4, HIDDEN, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        assert ds_tilemoe.apply(moe).swapped
        assert commands, "where nothing is built, apply() builds"
        assert caplog.text.count("takes longer: the compiler was called") == 1
        commands.clear()
        run(moe, x)
        assert caplog.text.count("takes longer") == 1, "the first forward knows of it"
        state = moe.deepspeed_moe._tile
        for _ in range(2):  # layers that were pending in apply() are examined in a forward
            state.session._runtimes.clear()
            assert run(moe, x)[0].isfinite().all()
        assert not commands
        assert caplog.text.count("takes longer: its extension is not built") == 2
    assert CPUTileMoEBuilder.NAME not in OpBuilder._loaded_ops
    state.session._runtimes.clear()
    run(moe, x)
    assert CPUTileMoEBuilder.NAME in OpBuilder._loaded_ops, "what is built is loaded"
    assert caplog.text.count("takes longer") == 3


def test_without_a_compiler_looks_are_made_by_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any) -> None:
        raise BuildError("got no C++ compiler")

    monkeypatch.setattr(CPUTileMoEBuilder, "load", fail)
    moe = make_moe(1, drop_tokens=False, min_capacity=0).bfloat16()
    install(monkeypatch, None)
    assert ds_tilemoe.apply(moe).swapped
    assert run(moe, tokens(4, HIDDEN, dtype=torch.bfloat16))[0].isfinite().all()
    assert caplog.text.count("takes longer: got no C++ compiler") == 1
