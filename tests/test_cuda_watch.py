"""Each change of a layer's experts between two calls is seen, and looking costs little."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_library_fake import install
from moe_models import HIDDEN, make_moe, run, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

import ds_tilemoe
from ds_tilemoe.errors import BuildError
from ds_tilemoe.layers import watch as watch_module
from ds_tilemoe.layers.experts import LocalExpert
from ds_tilemoe.layers.recognise import UnknownExpert, find_recipe
from ds_tilemoe.layers.watch import ExpertWatch
from ds_tilemoe.op_builder import CPUTileMoEBuilder


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
    """Another dtype at the same address, as memory that was given back may come again."""
    for parameter in experts.parameters():
        parameter.data = parameter.data.view(dtype)


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
    for launch in ("router", "exchange", "producer", "combine"):
        setattr(library, f"tilemoe_{launch}_launch", lambda params, *rest: 0)


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
    wanted = Counter({"float": 2, "linear": 1, "empty": 4, "reshape": views})
    assert operations.seen == wanted


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
    assert "takes longer: got no C++ compiler" in caplog.text
