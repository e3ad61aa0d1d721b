"""Finding the recipe of an expert module, and proving it with numbers.

Structure and names only propose; a proposal counts if it gives what the expert's own forward gives,
first on a copy with random weights (so that a zero-initialised projection proves nothing by
accident), then on the real weights of every expert.

Shape letters: H hidden, N output width.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ds_tilemoe.layers.attributes import Written, hooks_of, is_bookkeeping
from ds_tilemoe.layers.experts import (
    ACTIVATIONS,
    LocalExpert,
    Recipe,
    described,
    is_linear,
    is_registered,
)
from ds_tilemoe.router_rules import PLAIN

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 16  # rows of the comparison
FEW = 6  # of them
# Times these rows: past clamps of activations, of fp16's range, and of what is not finite.
FAR_OUT = (32.0, 2048.0, 2.0**26, math.inf)
# Of the largest output: the same operations in the same order, other GEMM shapes.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


class UnknownExpert(Exception):
    """Why an expert cannot be cut; the text is the reason in the swap report."""


def check_static(expert: nn.Module) -> None:
    """Refuse an expert whose parameters or submodules we may not bypass.

    Raises:
        UnknownExpert: with the reason.
    """
    for path, module in expert.named_modules():
        what = f"expert submodule {path or '(itself)'} ({type(module).__name__})"
        if hooks := hooks_of(module):
            raise UnknownExpert(f"{what} has forward hooks ({hooks}), which would not run")
        if "forward" in module.__dict__:
            raise UnknownExpert(f"{what} has a replaced forward, which would not run")
        if "lora" in type(module).__name__.lower() or type(module).__module__.startswith("peft."):
            raise UnknownExpert(f"{what} is a LoRA layer; merge it first")
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            raise UnknownExpert(f"{what} is a subclass of nn.Linear, not a plain one")
    dtypes = set()
    for name, parameter in expert.named_parameters():
        if any(hasattr(parameter, mark) for mark in ("ds_id", "ds_tensor", "ds_status")):
            raise UnknownExpert(f"expert parameter {name} is partitioned or offloaded by ZeRO-3")
        if type(parameter) not in PLAIN:
            raise UnknownExpert(f"expert parameter {name} is a {type(parameter).__name__}")
        if parameter.is_meta:
            raise UnknownExpert(f"expert parameter {name} is on the meta device")
        dtypes.add(parameter.dtype)
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise UnknownExpert(f"expert parameters have mixed dtypes ({names})")
    if not dtypes:
        raise UnknownExpert(f"an expert ({type(expert).__name__}) has no parameters")
    if (dtype := dtypes.pop()) not in DTYPES:
        wanted = ", ".join(map(dtype_name, DTYPES))
        raise UnknownExpert(f"expert dtype {dtype_name(dtype)} is not one of {wanted}")


def find_recipe(expert: nn.Module, hidden: int, written: Written | None = None) -> Recipe:
    """The recipe that gives what ``expert`` gives, found on a copy with random weights.

    Args:
        expert: any module [..., H] -> [..., N], or -> a tuple that starts with that.
        hidden: H.
        written: gets what its forward writes, in training mode too where there is a recipe.

    Raises:
        UnknownExpert: there is none that we know.
    """
    device = next(expert.parameters()).device
    written = Written() if written is None else written
    with _undisturbed(expert):
        with _trying_out(expert):
            probe = copy.deepcopy(expert).float().eval()
            _randomise(probe)
            x = _rows(hidden, device, torch.float32)
            want = _own_output(probe, x, written)
        for recipe in _proposals(probe, hidden, want.shape[-1]):
            if _agrees(probe, recipe, x, want) and _agrees_far_out(probe, recipe, x, written):
                is_random = not _same_in_training(probe, x, want, written)
                return dataclasses.replace(recipe, random_in_training=is_random)
        raise UnknownExpert(_describe_unknown(probe, x))


def check_numbers(
    expert: nn.Module, recipe: Recipe, hidden: int, written: Written | None = None
) -> None:
    """Compare the recipe with the expert's own eval-mode forward on its real weights.

    Training flags and random states are as before when it returns.

    Args:
        expert, recipe, hidden: see :func:`find_recipe`.
        written: gets what its forward writes, and what the parts of it write that a cut runs.

    Raises:
        UnknownExpert: they differ.
    """
    parameter = next(expert.parameters())
    written = Written() if written is None else written
    with _undisturbed(expert), _trying_out(expert):
        expert.eval()
        x = _rows(hidden, parameter.device, parameter.dtype)
        want = _own_output(expert, x, written)
        _own_output(expert, x[:FEW], written)  # writes what depends on their number
        with written.by(expert):
            same = not want.isfinite().all() or _agrees(expert, recipe, x, want)
    if not same:
        raise UnknownExpert(
            f"an expert ({type(expert).__name__}) does not compute what its structure says"
            f" ({recipe})"
        )


def _proposals(expert: nn.Module, hidden: int, out: int) -> Iterator[Recipe]:
    if is_registered(expert):
        yield Recipe("registered")
        return
    if is_linear(expert):
        yield Recipe("linear")
        yield Recipe("linear", down_bias=False)
        return
    linears = {path: m for path, m in expert.named_modules() if is_linear(m)}
    shapes = {path: tuple(m.weight.shape) for path, m in linears.items()}
    activations = list(_activations(expert))
    for order in itertools.permutations(linears) if len(linears) in (2, 3) else ():
        *ups, down = order
        ffn = shapes[down][1]
        if shapes[down][0] != out or any(shapes[up][1] != hidden for up in ups):
            continue
        widths = [shapes[up][0] for up in ups]
        biases = (True, False) if getattr(linears[down], "bias", None) is not None else (True,)
        for act, bias in itertools.product(activations, biases):
            if widths == [ffn]:
                yield Recipe("linear_act_linear", (ups[0],), act, True, down, bias)
            elif widths == [ffn, ffn]:
                yield Recipe("gated", (ups[0], ups[1]), act, True, down, bias)
            elif widths == [2 * ffn]:
                for gate_first in (True, False):
                    yield Recipe("gated_fused", (ups[0],), act, gate_first, down, bias)
    if type(expert) is nn.Sequential:
        own = [name for name, child in expert.named_children() if is_linear(child)]
        if own:
            yield Recipe("chain", down=own[-1])


def _activations(expert: nn.Module) -> Iterator[str]:
    """Names of what may be the activation: the expert's own first."""
    for path, module in expert.named_modules():
        if path and not module._modules and not is_linear(module):
            yield f"module:{path}"
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_") and not isinstance(value, type):
                yield f"callable:{path}.{name}" if path else f"callable:{name}"
    yield from ACTIVATIONS


def _agrees(expert: nn.Module, recipe: Recipe, x: Tensor, want: Tensor) -> bool:
    """Whether the recipe gives ``want``, all rows at once and a few of them alone."""
    try:
        cut = LocalExpert(expert, recipe)
        whole, few = cut(x), cut(x[5:8])
    except Exception:
        return False  # a proposal that does not even run
    # One scale for both: the few rows may all be near zero.
    return _close(whole, want) and _close(torch.cat([want[:5], few, want[8:]]), want)


def _agrees_far_out(probe: nn.Module, recipe: Recipe, x: Tensor, written: Written) -> bool:
    """Also where a clamp or a saturation would show, which ordinary rows do not reach; not asked of
    a registered description, whose front runs as its author wrote it."""
    for scale in FAR_OUT if recipe.kind != "registered" else ():
        want = _own_output(probe, scale * x, written)
        if want.isfinite().all() and not _agrees(probe, recipe, scale * x, want):
            return False
    return True


def _same_in_training(probe: nn.Module, x: Tensor, want: Tensor, written: Written) -> bool:
    probe.train()
    for module in probe.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # these are looked at in each call, where their p is known
    try:
        is_same = _close(_own_output(probe, x, written), want)
    except Exception:
        is_same = False
    with contextlib.suppress(Exception), torch.enable_grad():
        _own_output(probe, x, written)  # for what it writes
    return is_same


def _close(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    atol = TOLERANCE[want.dtype] * float(want.abs().max()) if want.numel() else 0.0
    return torch.allclose(got.float(), want.float(), rtol=0.0, atol=atol)


def _own_output(expert: nn.Module, x: Tensor, written: Written) -> Tensor:
    """The expert's own forward in the shape in which DeepSpeed calls it: [W, 1, rows, H]."""
    with written.by(expert):
        out = expert(x.view(2, 1, -1, x.shape[-1]))
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(x.shape[0], out.shape[-1])


def _rows(hidden: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (2 * torch.randn(ROWS, hidden, generator=generator, device="cpu")).to(device, dtype)


def _randomise(module: nn.Module) -> None:
    """Other numbers in all tensors that the forward may read: loading a checkpoint changes those of
    buffers as well."""
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for seed, parameter in enumerate(module.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        parameter.normal_(generator=generator).mul_(scale)
        known[id(parameter)] = parameter, parameter
    for part in module.modules():
        own = {name: value for name, value in vars(part).items() if not is_bookkeeping(name)}
        vars(part).update(_with_other_numbers(own, known))
        part._buffers.update(_with_other_numbers(dict(part._buffers), known))


def _with_other_numbers(value: Any, known: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A copy of ``value`` with other tensors in it.

    Args:
        value: a tensor, or a list, tuple or dict; anything else is given back.
        known: id of a tensor -> it, and the one to take its place everywhere.
    """
    if type(value) is dict:
        return {key: _with_other_numbers(item, known) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_other_numbers(item, known) for item in value)
    if not isinstance(value, Tensor):
        return value
    if id(value) not in known:
        known[id(value)] = value, _other_numbers(value, seed=len(known))
    return known[id(value)][1]


def _other_numbers(tensor: Tensor, seed: int) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator(tensor.device).manual_seed(seed)
        dtype = torch.complex64 if tensor.is_complex() else torch.float32
        options: dict[str, Any] = {"device": tensor.device, "dtype": dtype}
        # Above zero: it may be a variance.
        return torch.rand(tensor.shape, generator=generator, **options).add(0.5).to(tensor.dtype)
    # They may be indices, of which one out of range would end all use of a GPU: the same ones in
    # another order, or where they are all the same (a flag, a factor) none out of 0 and 1.
    other = tensor.flip(list(range(tensor.dim())))
    return (tensor == 0).to(tensor.dtype) if torch.equal(other, tensor) else other


@contextlib.contextmanager
def _undisturbed(expert: nn.Module) -> Iterator[None]:
    """No grad, no autocast; training flags and random states are put back at the end."""
    device = next(expert.parameters()).device
    modes = {module: module.training for module in expert.modules()}
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextlib.contextmanager
def _trying_out(expert: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UnknownExpert(
            f"an expert ({type(expert).__name__}) could not be tried out:"
            f" {type(error).__name__}: {error}"
        ) from error


def _describe_unknown(expert: nn.Module, x: Tensor) -> str:
    name = type(expert).__name__
    if is_registered(expert):
        try:
            described(expert).front(x)
        except Exception as error:
            return f"the description registered for {name}: {type(error).__name__}: {error}"
        return f"the description registered for {name} does not give what its forward gives"
    linears = [path for path, m in expert.named_modules() if is_linear(m)]
    found = ", ".join(linears) if linears else "none"
    return (
        f"expert {name} is not one that we know (its linear layers: {found}); wanted one that ends"
        " in a plain nn.Linear behind linear-activation or a gated pair; ds_tilemoe.register_expert"
        " teaches others"
    )
