"""What a swapped layer knows of itself: its experts cut, what was agreed, why it may not run here.

Shape letters: E experts of the group, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts as DeepSpeedExperts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn
from torch.nn.modules import module as torch_module

from ds_tilemoe.backends.base import Experts, LayerShape
from ds_tilemoe.backends.cuda_limits import choose_dispatch, device_obstacle, layer_obstacle
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.layers.agreement import Offer
from ds_tilemoe.layers.experts import LocalExpert, Recipe, hooks_of
from ds_tilemoe.layers.recognise import (
    DTYPES,
    UnknownExpert,
    check_numbers,
    check_static,
    find_recipe,
)
from ds_tilemoe.layers.runtime import Runtime, Session
from ds_tilemoe.layers.watch import ExpertWatch
from ds_tilemoe.stats import LayerStats

RANDOM_REMARK = "DeepSpeed's path while its dropout is active"


class Situation(NamedTuple):
    """What a call on this rank depends on besides the layer; the group meets when one is new.

    Attributes:
        dtype: of the experts' output in this call, by autocast or by the weights.
        is_random: the experts' own forward would drop at random.
        version: how many times the experts turned out not to be those that were examined.
    """

    dtype: torch.dtype | None
    is_random: bool
    version: int

    def __str__(self) -> str:
        mode = "active dropout" if self.is_random else "no active dropout"
        return f"{dtype_name(self.dtype)}, {mode}, experts changed {self.version} times"


class LayerState:
    """All that a swapped layer has beyond DeepSpeed's; its one plain attribute ``_tile``.

    Args:
        name: the layer's name in the model.
        session: of the apply() that swapped it.
        expert_tp: whether its MoE module asks for tensor-parallel experts.

    Attributes:
        shapes: what the group runs on the backend, by this rank's situation then.
        kept: while the group is on DeepSpeed's path: this rank's situation at that decision, and
            the reason. A layer is on one of the two paths on all ranks of its group.
    """

    def __init__(self, name: str, session: Session, expert_tp: bool = False):
        self.name = name
        self.session = session
        self.expert_tp = expert_tp
        self.stats = LayerStats(name, keep_history=session.config.stats)
        self.forget()

    def forget(self) -> None:
        """Back to before the first examination; the stats stay."""
        self.recipe: Recipe | None = None
        self.watch: ExpertWatch | None = None
        self.version = 0
        self.shapes: dict[Situation, LayerShape] = {}
        self.kept: tuple[Situation, str] | None = None
        self._offers: dict[torch.dtype | None, Offer] = {}
        self._seen: object = None  # what experts that were refused looked like

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        # The copy has experts of its own, which its first forward examines, and the same heap.
        memo[id(self)] = twin = LayerState(self.name, self.session, self.expert_tp)
        return twin

    def runtime(self, layer: MOELayer) -> Runtime | None:
        """The layer's runtime, or None while its group does not exist."""
        weight = self.weight(layer)
        device = "cpu" if weight is None else backend_of(weight)
        if layer.ep_size == 1:
            return self.session.runtime(None, device)
        return None if layer.ep_group is None else self.session.runtime(layer.ep_group, device)

    def offer(self, layer: MOELayer, dtype: torch.dtype | None) -> Offer:
        """This rank's word about the layer outside of active dropout. Local, and never raises: a
        rank that did would leave its peers waiting for its word."""
        if dtype not in self._offers:
            try:
                self._offers[dtype] = Offer(self.name, self._check(layer, dtype))
            except Exception as error:
                reason = str(error)
                if not isinstance(error, UnknownExpert | ConfigError):
                    reason = f"it could not be examined: {type(error).__name__}: {error}"
                self.watch, self._seen = None, _look(layer)
                self._offers = {dtype: Offer(self.name, reason, isinstance(error, ConfigError))}
        return self._offers[dtype]

    def situation(self, layer: MOELayer) -> Situation:
        """Of a call now. Re-reads what users may change between calls: dtypes, modes, modules.

        Local, and raises as little as :meth:`offer`.
        """
        watch = self.watch
        if watch is None:
            is_current = self._seen == _look(layer)
        else:
            is_current = layer._modules.get("experts") is watch.holder and watch.look()
        if not is_current:
            self.version += 1
            self.recipe, self.watch, self._offers = None, None, {}
            self._seen = _look(layer)
        weight = self.weight(layer)
        dtype = None if weight is None else weight.dtype
        if weight is not None and torch.is_autocast_enabled(weight.device.type) and dtype in DTYPES:
            dtype = torch.get_autocast_dtype(weight.device.type)
        return Situation(dtype, self.watch is not None and self.watch.is_random, self.version)

    @property
    def experts(self) -> Experts:
        """The layer's experts, cut; empty where they were not examined or not recognised."""
        return Experts() if self.watch is None else self.watch.experts

    def weight(self, layer: MOELayer) -> torch.Tensor | None:
        """A parameter of the experts, as of the last look at them; None if they have none."""
        return first_weight(layer) if self.watch is None else self.watch.weight

    def settle(self, shape: LayerShape, runtime: Runtime) -> None:
        """Keep what the ranks agreed on outside a forward."""
        self.shapes[Situation(shape.dtype, False, self.version)] = shape
        self.stats.settings = runtime.settings()

    def remark(self) -> str:
        """What a report should add about a layer that is swapped."""
        is_random = self.watch is not None and self.watch.may_be_random
        return RANDOM_REMARK if is_random else ""

    def _check(self, layer: MOELayer, dtype: torch.dtype | None) -> LayerShape:
        """The layer's shape, or UnknownExpert with the reason why it has to stay as it is.

        Raises:
            ConfigError: a setting that it cannot meet.
        """
        check_host(layer, self.expert_tp)
        modules = list(layer.experts.deepspeed_experts)
        for module in modules:
            check_static(module)
        if len({p.dtype for m in modules for p in m.parameters()}) > 1:
            raise UnknownExpert("its experts differ in dtype")
        hidden = layer.gate.wg.in_features
        if self.recipe is None:
            self.recipe = find_recipe(modules[0], hidden)
        for module in modules:
            check_numbers(module, self.recipe, hidden)
        experts = [LocalExpert(module, self.recipe) for module in modules]
        watch = ExpertWatch(layer.experts, experts)
        widths = {tuple(cut.down_weight.shape) for cut in experts}
        if len(widths) > 1:
            raise UnknownExpert(f"its experts differ in shape: {sorted(widths)}")
        out, ffn = widths.pop()
        if out != hidden:
            raise UnknownExpert(f"its experts give rows of {out}, not of hidden size {hidden}")
        total, topk = len(modules) * layer.ep_size, layer.gate.k
        if topk > total:
            raise UnknownExpert(f"its gate chooses {topk} of {total} experts")
        shape = LayerShape(
            name=self.name,
            num_experts=total,
            topk=topk,
            hidden=hidden,
            ffn=ffn,
            out=out,
            dtype=dtype,
            device=backend_of(experts[0].down_weight),
        )
        if shape.device == "cuda":
            if reason := layer_obstacle(shape, layer.ep_size):
                raise UnknownExpert(reason)
            dispatch = choose_dispatch(experts, dtype, self.session.config.dispatch)
            shape = dataclasses.replace(shape, dispatch=dispatch)
        self.watch = watch
        return shape


# Of a module's own, in front of what its class and its parameters say.
_PATCHES = frozenset({"forward", "_call_impl", "weight", "bias"})


def _look(layer: MOELayer) -> object:
    """What an offer may refuse and a user may take back: hooks, patches, classes."""
    experts = getattr(layer, "experts", None)
    if not isinstance(experts, nn.Module):
        return None
    return hooks_around(experts), [
        (
            id(module),
            (kind := type(module)),
            kind.forward,
            hooks_of(module),
            _PATCHES & module.__dict__.keys(),
        )
        for module in experts.modules()
    ]


def hooks_around(experts: nn.Module) -> str:
    """Names of hooks that run where DeepSpeed calls its Experts module; "" if there is none."""
    world = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    names = [getattr(hook, "__qualname__", "global") for part in world for hook in part.values()]
    return ", ".join(filter(None, [*names, hooks_of(experts)]))


def first_weight(layer: MOELayer) -> torch.Tensor | None:
    """A parameter of the layer's experts; None if they have none."""
    experts = getattr(layer, "experts", None)
    return next(experts.parameters(), None) if isinstance(experts, nn.Module) else None


def backend_of(weight: torch.Tensor) -> str:
    """Which backend a layer with this weight runs on, "cpu" or "cuda"."""
    return "cuda" if weight.is_cuda else "cpu"


def dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def check_host(layer: MOELayer, expert_tp: bool) -> None:
    """Refuse what lies around the experts: parallelism, gate, device.

    Raises:
        UnknownExpert: with the reason.
    """
    if layer.use_tutel:
        raise UnknownExpert("it uses Tutel")
    if bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        raise UnknownExpert("its model is tensor-parallel")
    if groups._get_expert_model_parallel_world_size() > 1 or (expert_tp and groups.mpu is not None):
        raise UnknownExpert("its experts are tensor-parallel")
    if type(layer.gate) is not TopKGate:
        raise UnknownExpert(f"its gate is a {type(layer.gate).__name__}, not DeepSpeed's TopKGate")
    experts = layer.experts
    if type(experts) is not DeepSpeedExperts:
        raise UnknownExpert(f"its experts are a {type(experts).__name__}, not DeepSpeed's Experts")
    if hooks := hooks_around(experts):
        raise UnknownExpert(f"its Experts module has forward hooks ({hooks}), which would not run")
    if "forward" in vars(experts):
        raise UnknownExpert("its Experts module has a forward of its own, which would not run")
    check_device({parameter.device for parameter in layer.parameters()})
    total = layer.num_local_experts * layer.ep_size
    if layer.gate.wg.out_features != total:
        raise UnknownExpert(
            f"its gate has {layer.gate.wg.out_features} outputs for {total} experts"
        )
    if layer.ep_group is not None and dist.get_world_size(layer.ep_group) != layer.ep_size:
        raise UnknownExpert(
            f"ep_size is {layer.ep_size}, its group has {dist.get_world_size(layer.ep_group)} ranks"
        )


def check_device(devices: set[torch.device]) -> None:
    """Refuse parameters where no backend runs.

    Raises:
        UnknownExpert: with the reason.
    """
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise UnknownExpert(f"its parameters are on {names}; wanted all on the CPU or on one GPU")
    (device,) = devices
    if device.type == "cpu":
        return
    if device.index != torch.cuda.current_device():
        raise UnknownExpert(
            f"its parameters are on {device}, and this process's current device is"
            f" cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({device.index})"
        )
    if reason := device_obstacle(device):
        raise UnknownExpert(reason)
