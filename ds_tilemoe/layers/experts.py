"""Which expert modules we know: how an expert is cut into ``front`` and down projection.

An expert is cut by a :class:`Recipe`, plain data that names submodules, so that it survives copies
and pickles and a backend can read which matrices and which activation it has. Names are only
guesses of :mod:`ds_tilemoe.layers.recognise`; numbers decide.

Shape letters: H hidden, F ffn, N output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_tilemoe.backends.base import FrontGemm

Activation = Callable[[Tensor], Tensor]

# Tried in this order where an expert has no activation module of its own that fits.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "identity": lambda x: x,
}
# Tensor-parallel linears of Megatron: not nn.Linear, weight [out, in], forward returns (out, bias).
MEGATRON_LINEARS = ("ColumnParallelLinear", "RowParallelLinear")


@dataclass(frozen=True)
class ExpertParts:
    """What a describe function of :func:`register_expert` returns for one expert.

    Attributes:
        front: [rows, H] -> [rows, F], all before the down projection, with the live weights.
        down: the plain ``nn.Linear`` whose output is the expert's output.
    """

    front: Activation
    down: nn.Linear


_registered: dict[type[nn.Module], Callable[[Any], ExpertParts]] = {}


def register_expert(cls: type[nn.Module], describe: Callable[[Any], ExpertParts]) -> None:
    """Teach :func:`ds_tilemoe.apply` a class of experts that it does not recognise.

    The description is compared with the expert's own forward, as for every expert; if they differ,
    the layer keeps DeepSpeed's path.

    Args:
        cls: the expert's class, exactly.
        describe: expert -> :class:`ExpertParts`; called again for each copy of an expert.

    Raises:
        TypeError: they are not these.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_expert: got {cls!r}; wanted a subclass of torch.nn.Module")
    if not callable(describe):
        raise TypeError(f"register_expert: got {describe!r}; wanted expert -> ExpertParts")
    _registered[cls] = describe


def is_registered(expert: nn.Module) -> bool:
    return type(expert) in _registered


def described(expert: nn.Module) -> ExpertParts:
    """What has been registered of an expert's class.

    Raises:
        TypeError: it is not that of an expert.
        Whatever the describe function raises.
    """
    parts = _registered[type(expert)](expert)
    if not isinstance(parts, ExpertParts):
        raise TypeError(f"got {parts!r}; wanted ExpertParts(front, down)")
    if not callable(parts.front) or type(parts.down) is not nn.Linear:
        raise TypeError(
            f"got front {type(parts.front).__name__}, down {type(parts.down).__name__}; wanted a"
            " function [rows, H] -> [rows, F] and a plain nn.Linear"
        )
    return parts


@dataclass(frozen=True)
class Recipe:
    """How experts of one kind are cut.

    Attributes:
        kind: "linear" (the expert is its down projection), "linear_act_linear", "gated" (gate and
            up in two matrices), "gated_fused" (gate and up in one matrix, halves), "chain"
            (children of an nn.Sequential in turn) or "registered".
        ups: paths of the front's matrices inside the expert; (gate, up) for "gated".
        activation: a name in ACTIVATIONS, or "module:PATH" or "callable:PATH" of the expert.
        gate_first: for "gated_fused", whether the activation is on the first half.
        down: path of the down projection; "" is the expert itself.
        down_bias: whether the expert's output contains the down projection's bias.
        random_in_training: its forward in training mode is not the one in eval mode.
    """

    kind: str
    ups: tuple[str, ...] = ()
    activation: str = ""
    gate_first: bool = True
    down: str = ""
    down_bias: bool = True
    random_in_training: bool = False

    def __str__(self) -> str:
        return f"{self.kind}({self.activation})" if self.activation else self.kind


def is_linear(module: nn.Module) -> bool:
    """A matrix that we may read ourselves: weight [out, in] and maybe a bias, nothing else."""
    return type(module) is nn.Linear or type(module).__name__ in MEGATRON_LINEARS


class LocalExpert:
    """One expert as a backend sees it (``backends.base.Expert``), cut by a recipe.

    Weights are those of the moment, so they may be loaded, scaled or cast between two calls.

    Attributes:
        dropouts: its dropout modules.
    """

    def __init__(self, expert: nn.Module, recipe: Recipe):
        self.expert = expert
        self.recipe = recipe
        self.dropouts = [
            m for m in expert.modules() if isinstance(m, nn.modules.dropout._DropoutNd)
        ]
        self._ups = [expert.get_submodule(path) for path in recipe.ups]
        activation = _activation(expert, recipe.activation) if self._ups else None
        self._epilogue = _epilogue(activation)
        self._down: nn.Module
        if recipe.kind == "registered":
            parts = described(expert)
            self.front, self._down = parts.front, parts.down
        else:
            self._down = expert.get_submodule(recipe.down)
            self.front = _make_front(expert, recipe, self._ups, activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, H] -> [rows, N], as the recipe has it."""
        return F.linear(self.front(x), self.down_weight, self.down_bias)

    @property
    def front_gemm(self) -> FrontGemm | None:
        if self._epilogue is None:
            return None
        weights = tuple(up.weight for up in self._ups)
        biases = tuple(getattr(up, "bias", None) for up in self._ups)
        if self.recipe.kind == "gated_fused":
            parts = [None if t is None else t.chunk(2) for t in (weights[0], biases[0])]
            weights, biases = (p or (None, None) for p in parts)
            if not self.recipe.gate_first:
                weights, biases = weights[::-1], biases[::-1]
        return FrontGemm(self._epilogue, weights, biases)

    @property
    def down_weight(self) -> Tensor:
        return self._down.weight

    @property
    def down_bias(self) -> Tensor | None:
        return getattr(self._down, "bias", None) if self.recipe.down_bias else None

    @property
    def linears(self) -> list[nn.Module]:
        """The modules whose matrices it names."""
        return [*self._ups, self._down]

    @property
    def is_random(self) -> bool:
        """Whether the expert's own forward would now drop at random."""
        return any(d.training and d.p > 0 for d in self.dropouts) or (
            self.recipe.random_in_training and self.expert.training
        )

    @property
    def may_be_random(self) -> bool:
        """Whether it would be, in training mode."""
        return self.recipe.random_in_training or any(d.p > 0 for d in self.dropouts)


@dataclass(frozen=True)
class AutocastExpert:
    """An expert under ``torch.autocast``: rows come out in the dtype that autocast gives.

    Autocast is per thread, and a backend may call ``front`` on a thread of its own.
    """

    expert: LocalExpert
    dtype: torch.dtype

    def front(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.dtype):
            return self.expert.front(x).to(self.dtype)

    @property
    def front_gemm(self) -> FrontGemm | None:
        return None  # autocast may treat the activation as it likes

    @property
    def down_weight(self) -> Tensor:
        return self.expert.down_weight.to(self.dtype)

    @property
    def down_bias(self) -> Tensor | None:
        bias = self.expert.down_bias
        return None if bias is None else bias.to(self.dtype)


def _make_front(
    expert: nn.Module, recipe: Recipe, ups: Sequence[nn.Module], act: Activation | None
) -> Activation:
    if recipe.kind == "linear":
        return lambda x: x
    if recipe.kind == "chain":
        names = list(expert._modules)
        head = [expert.get_submodule(name) for name in names[: names.index(recipe.down)]]

        def chain(x: Tensor) -> Tensor:
            for child in head:
                x = child(x)
            return x

        return chain

    def up(i: int, x: Tensor) -> Tensor:
        return F.linear(x, ups[i].weight, getattr(ups[i], "bias", None))

    def fused(x: Tensor) -> Tensor:
        first, second = up(0, x).chunk(2, dim=-1)
        return act(first) * second if recipe.gate_first else first * act(second)

    if recipe.kind == "gated":
        return lambda x: act(up(0, x)) * up(1, x)
    if recipe.kind == "gated_fused":
        return fused
    return lambda x: act(up(0, x))


def _activation(expert: nn.Module, name: str) -> Activation:
    source, _, path = name.partition(":")
    if source == "module":
        return expert.get_submodule(path)
    if source == "callable":
        parent, _, attribute = path.rpartition(".")
        return getattr(expert.get_submodule(parent), attribute)
    return ACTIVATIONS[source]


_FORWARDS = {kind: kind.forward for kind in (nn.GELU, nn.SiLU, nn.ReLU)}  # torch's own


def _epilogue(activation: Activation | None) -> str | None:
    """Its name among those that a GEMM's epilogue can do, or None."""
    kind: Any = type(activation)
    if kind in _FORWARDS and kind.forward is not _FORWARDS[kind]:
        return None  # patched on the class
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    classes = {nn.SiLU: "silu", nn.ReLU: "relu"}
    functions = [(F.gelu, "gelu"), (F.silu, "silu"), (F.relu, "relu"), (torch.relu, "relu")]
    by_function = (name for function, name in functions if activation is function)
    return classes.get(kind) or next(by_function, None)
