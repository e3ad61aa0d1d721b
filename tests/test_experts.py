"""Which experts are recognised, how they are cut, and what is left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from moe_models import FFN, HIDDEN, KINDS, Megatron, SwiGLU, fill, mlp
from torch import nn

from ds_tilemoe.layers import experts as registry
from ds_tilemoe.layers.experts import ExpertParts, LocalExpert, register_expert
from ds_tilemoe.layers.recognise import UnknownExpert, check_numbers, check_static, find_recipe


class Named(nn.Module):
    """Two linears under any names, a functional activation, any forward."""

    def __init__(self, first="fc1", second="fc2", forward=None, width=FFN):
        super().__init__()
        self.first, self.second = first, second
        setattr(self, first, nn.Linear(HIDDEN, width))
        setattr(self, second, nn.Linear(FFN, HIDDEN))
        self.run = forward or (lambda up, down, x: down(F.gelu(up(x))))

    def forward(self, x):
        return self.run(getattr(self, self.first), getattr(self, self.second), x)


class HuggingFaceMLP(nn.Module):
    """down, up and gate in the wrong order and of equal shapes: only numbers can tell."""

    def __init__(self):
        super().__init__()
        for name in ("down_proj", "up_proj", "gate_proj"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ColumnParallelLinear(nn.Module):
    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in))
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x):
        return F.linear(x, self.weight), self.bias


class RowParallelLinear(ColumnParallelLinear):
    pass


class ParallelMLP(nn.Module):
    """Megatron's own: no nn.Linear, the bias is added with the activation."""

    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(HIDDEN, FFN)
        self.dense_4h_to_h = RowParallelLinear(FFN, HIDDEN)

    def forward(self, x):
        inner, bias = self.dense_h_to_4h(x)
        return self.dense_4h_to_h(F.gelu(inner + bias, approximate="tanh"))


def glu(up, down, x):
    first, second = up(x).chunk(2, dim=-1)
    return down(first * F.silu(second))


def first_column_normalised(up, down, x):
    return down(F.relu(up(x)).softmax(dim=-2))


KNOWN = {
    **{name: (lambda make=make: make(HIDDEN, FFN), None) for name, make in KINDS.items()},
    "fc1/fc2": (Named, "linear_act_linear(gelu)"),
    "w2/w1": (lambda: Named("w2", "w1"), "linear_act_linear(gelu)"),
    "tanh gelu": (
        lambda: Named(forward=lambda up, down, x: down(F.gelu(up(x), approximate="tanh"))),
        "linear_act_linear(gelu_tanh)",
    ),
    "functional dropout": (
        lambda: Named(forward=lambda up, down, x: down(F.dropout(F.relu(up(x)), 0.5, up.training))),
        "linear_act_linear(relu)",
    ),
    "fused pair": (lambda: Named(forward=glu, width=2 * FFN), "gated_fused(silu)"),
    "hugging face": (HuggingFaceMLP, "gated(module:act_fn)"),
    "megatron": (ParallelMLP, "linear_act_linear(gelu_tanh)"),
    "norm first": (
        lambda: nn.Sequential(
            nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FFN), nn.ReLU(), nn.Linear(FFN, HIDDEN)
        ),
        "chain",
    ),
    "dropouts": (
        lambda: nn.Sequential(
            nn.Linear(HIDDEN, FFN), nn.ReLU(), nn.Dropout(), nn.Linear(FFN, HIDDEN), nn.Dropout()
        ),
        "linear_act_linear(module:1)",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_known_experts(name, dtype):
    make, kind = KNOWN[name]
    expert = make().to(dtype)
    fill(expert, 1)
    check_static(expert)
    recipe = find_recipe(expert, HIDDEN)
    assert kind in (None, str(recipe))
    check_numbers(expert, recipe, HIDDEN)
    x = torch.randn(7, HIDDEN).to(dtype)
    cut = LocalExpert(expert, recipe)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    with torch.no_grad():
        want = expert.eval()(x)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(cut(x), want, rtol=2e-2, atol=atol)
        assert cut.front(x).shape == (7, cut.down_weight.shape[1])
        next(expert.parameters()).mul_(2)  # weights are read anew in each call
        again = expert(x)
        again = again[0] if isinstance(again, tuple) else again
        torch.testing.assert_close(cut(x), again, rtol=2e-2, atol=2 * atol)
        assert not torch.equal(again, want)


@pytest.mark.parametrize(
    "forward",
    [
        lambda up, down, x: 2 * down(F.gelu(up(x))),
        lambda up, down, x: down(F.gelu(up(x))) + x,
        lambda up, down, x: down(F.celu(up(x), 0.3)),
        lambda up, down, x: F.relu(down(F.gelu(up(x)))),
        first_column_normalised,
        lambda up, down, x: down(F.gelu(up(x)).clamp(max=40)),
        lambda up, down, x: down(F.gelu(up(x))).clamp(-3000, 3000),
        lambda up, down, x: down(F.gelu(up(x))).clamp(-64000, 64000),  # as for fp16
        lambda up, down, x: down(F.gelu(up(x))).nan_to_num(),
    ],
    ids=[
        *("scaled", "skip", "odd activation", "activation last", "rows depend on rows"),
        *("clamped", "clamped at the end", "clamped for fp16", "made finite"),
    ],
)
def test_experts_that_compute_something_else(forward):
    expert = Named(forward=forward)
    nn.init.zeros_(expert.fc2.weight)  # with these weights alone nothing could be told
    nn.init.zeros_(expert.fc2.bias)
    with pytest.raises(UnknownExpert, match=r"expert Named is not one that we know .*fc1, fc2"):
        find_recipe(expert, HIDDEN)


class Reader(nn.Module):
    """Multiplies its output by what ``read`` finds of its own; that is one until somebody loads or
    writes another number."""

    def __init__(self, read, **own):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.read = read
        for name, value in own.items():
            if name.startswith("buffer"):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) * self.read(self)


READERS = {
    "buffer": lambda: Reader(lambda e: e.buffer, buffer=torch.ones(())),
    "buffer of a row": lambda: Reader(lambda e: e.buffer, buffer=torch.ones(1).expand(HIDDEN)),
    "added buffer": lambda: Reader(lambda e: 1 + e.buffer, buffer=torch.zeros(HIDDEN)),
    "integers": lambda: Reader(lambda e: e.buffer, buffer=torch.ones(HIDDEN, dtype=torch.long)),
    "a flag": lambda: Reader(lambda e: 2 - e.buffer.int(), buffer=torch.tensor(True)),
    "a permutation": lambda: Reader(
        lambda e: 1 + e.buffer[0], buffer=torch.arange(HIDDEN, dtype=torch.int32)
    ),
    "a tensor": lambda: Reader(lambda e: e.factor, factor=torch.ones(HIDDEN)),
    "a tensor in a list": lambda: Reader(lambda e: e.factors[0], factors=[torch.ones(HIDDEN)]),
    "a tensor in a table": lambda: Reader(lambda e: e.table["a"], table={"a": torch.ones(())}),
}


@pytest.mark.parametrize("name", READERS)
def test_numbers_that_are_one_today_are_not_overlooked(name):
    with pytest.raises(UnknownExpert, match="expert Reader is not one that we know"):
        find_recipe(READERS[name](), HIDDEN)


class Shifted(nn.Module):
    """Has numbers that the recipe leaves to it, and some that nobody reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(FFN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("variance", torch.ones(FFN))
        self.width = FFN

    def forward(self, x):
        return F.relu(x + self.shift) * self.variance.rsqrt()


def test_buffers_that_are_read_in_each_call_do_no_harm():
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), Shifted(), nn.Linear(FFN, HIDDEN)).eval()
    cut, x = LocalExpert(expert, find_recipe(expert, HIDDEN)), torch.randn(3, HIDDEN)
    expert[1].shift.fill_(3)
    with torch.no_grad():
        torch.testing.assert_close(cut(x), expert(x))
    assert torch.equal(expert[1].variance, torch.ones(FFN)), "it was tried out on a copy"


def test_a_tensor_that_is_a_parameter_stays_one():
    expert = Named()
    expert.tied, expert.note = [expert.fc1.weight], (1, "word", None)
    assert str(find_recipe(expert, HIDDEN)) == "linear_act_linear(gelu)"


def test_an_expert_that_differs_from_its_class():
    expert = Named()
    recipe = find_recipe(expert, HIDDEN)
    expert.run = lambda up, down, x: down(F.relu(up(x)))
    with pytest.raises(UnknownExpert, match="does not compute what its structure says"):
        check_numbers(expert, recipe, HIDDEN)


class QuantisedLinear(nn.Linear):
    pass


class Quantised(torch.Tensor):
    """Its numbers are not those that a linear computes with."""


class LoraLayer(nn.Module):
    pass


def with_hook(expert):
    expert[1].register_forward_hook(lambda *_: None)


def with_subclass(expert):
    expert[2].__class__ = QuantisedLinear


def with_replaced_forward(expert):
    expert[0].forward = lambda x: x


def with_lora(expert):
    expert.lora = LoraLayer()


def with_zero3(expert):
    expert[0].weight.ds_id = 3


def with_mixed_dtypes(expert):
    expert[0].bfloat16()


def with_fp64(expert):
    expert.double()


def with_int8(expert):
    for module in (expert[0], expert[2]):
        module.bias = None
        module.weight = nn.Parameter(module.weight.to(torch.int8), requires_grad=False)


def with_tensor_subclass(expert):
    expert[2].weight = nn.Parameter(expert[2].weight.detach().as_subclass(Quantised))


def on_meta(expert):
    expert.to("meta")


def with_weight_norm(expert):
    nn.utils.parametrizations.weight_norm(expert[0])


REFUSED = {
    with_hook: "submodule 1 \\(GELU\\) has forward hooks",
    with_subclass: "submodule 2 \\(QuantisedLinear\\) is a subclass of nn.Linear",
    with_replaced_forward: "submodule 0 \\(Linear\\) has a replaced forward",
    with_lora: "LoraLayer\\) is a LoRA layer",
    with_zero3: "0.weight is partitioned or offloaded by ZeRO-3",
    with_mixed_dtypes: "mixed dtypes \\(bfloat16, float32\\)",
    with_fp64: "float64 is not one of float32, bfloat16, float16",
    with_int8: "int8 is not one of",
    with_tensor_subclass: "parameter 2.weight is a Quantised",
    on_meta: "on the meta device",
    with_weight_norm: "subclass of nn.Linear",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda f: f.__name__)
def test_what_may_not_be_bypassed(change):
    expert = mlp(HIDDEN, FFN)
    change(expert)
    with pytest.raises(UnknownExpert, match=REFUSED[change]):
        check_static(expert)


def test_an_expert_without_parameters():
    with pytest.raises(UnknownExpert, match=r"ReLU\) has no parameters"):
        check_static(nn.ReLU())


def test_an_expert_that_fails():
    def fail(up, down, x):
        raise RuntimeError("needs a mask")

    with pytest.raises(UnknownExpert, match="could not be tried out: RuntimeError: needs a mask"):
        find_recipe(Named(forward=fail), HIDDEN)


def test_nothing_is_disturbed():
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Dropout(), nn.Linear(FFN, HIDDEN)).train()
    expert[1].eval()
    before = copy.deepcopy(expert.state_dict())
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    check_numbers(expert, find_recipe(expert, HIDDEN), HIDDEN)
    assert torch.equal(torch.rand(3), want)
    assert [m.training for m in expert.modules()] == [True, True, False, True]
    assert all(torch.equal(before[name], value) for name, value in expert.state_dict().items())
    assert all(parameter.grad is None for parameter in expert.parameters())


def test_active_dropout_is_seen():
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Dropout(0.1), nn.Linear(FFN, HIDDEN))
    cut = LocalExpert(expert, find_recipe(expert, HIDDEN))
    assert cut.may_be_random
    assert cut.is_random
    expert.eval()
    assert not cut.is_random
    expert.train()
    expert[1].p = 0.0
    assert not cut.is_random
    functional = KNOWN["functional dropout"][0]()
    cut = LocalExpert(functional, find_recipe(functional, HIDDEN))
    assert cut.is_random
    functional.eval()
    assert not cut.is_random


class Users(nn.Module):
    """Ends in a Linear behind something that is nobody's standard."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, FFN)
        self.out = nn.Linear(FFN, HIDDEN)

    def front(self, x):
        return torch.cos(self.inner(x)).cumsum(-1)

    def forward(self, x):
        return self.out(self.front(x))


@pytest.fixture
def users_registered():
    yield register_expert
    registry._registered.clear()


def test_register_expert(users_registered):
    with pytest.raises(UnknownExpert, match="register_expert"):
        find_recipe(Users(), HIDDEN)
    users_registered(Users, lambda expert: ExpertParts(expert.front, expert.out))
    expert = Users()
    recipe = find_recipe(expert, HIDDEN)
    assert str(recipe) == "registered"
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(LocalExpert(expert, recipe)(x), expert(x))
    users_registered(Users, lambda expert: ExpertParts(expert.inner, expert.out))
    with pytest.raises(UnknownExpert, match="registered for Users does not give"):
        find_recipe(expert, HIDDEN)


@pytest.mark.parametrize(
    ("describe", "why"),
    [
        (lambda e: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda e: e.upp, "AttributeError: .*has no attribute 'upp'"),
        (lambda e: 5, "TypeError: got 5; wanted ExpertParts"),
        (lambda e: ExpertParts(e.down, e.up.forward), "got front Linear, down method; wanted"),
        (lambda e: ExpertParts(lambda x: x @ x, e.down), "RuntimeError: "),
        (lambda e: ExpertParts(e.up, e.down), "does not give what its forward gives"),
    ],
)
def test_what_is_wrong_with_a_description_is_told(users_registered, describe, why):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x):
            return self.down(torch.cos(self.up(x)))

    users_registered(Named, describe)
    with pytest.raises(UnknownExpert, match=f"registered for Named.*{why}"):
        find_recipe(Named(), 64)


def test_register_expert_wants_a_module_class():
    with pytest.raises(TypeError, match=r"got 3; wanted a subclass of torch.nn.Module"):
        register_expert(3, lambda expert: None)
    with pytest.raises(TypeError, match=r"got 5; wanted expert -> ExpertParts"):
        register_expert(nn.Module, 5)


def test_recipes_name_the_matrices():
    gated = find_recipe(SwiGLU(HIDDEN, FFN), HIDDEN)
    assert (gated.ups, gated.down, gated.activation) == (("w1", "w3"), "w2", "silu")
    megatron = find_recipe(Megatron(HIDDEN, FFN), HIDDEN)
    assert megatron.down == "dense_4h_to_h"
    assert not megatron.down_bias, "DeepSpeed drops it"
