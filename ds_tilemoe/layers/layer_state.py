"""What a swapped layer knows of itself: its experts cut, its decisions, whether it may be swapped.

Shape letters: E experts of the group, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.layers.agreement import Decision, Offer
from ds_tilemoe.layers.experts import LocalExpert, Recipe
from ds_tilemoe.layers.recognise import (
    DTYPES,
    UnknownExpert,
    check_numbers,
    check_static,
    find_recipe,
)
from ds_tilemoe.layers.runtime import Runtime, Session
from ds_tilemoe.stats import LayerStats

RANDOM_REMARK = "DeepSpeed's path while its dropout is active"


class Situation(NamedTuple):
    """What a call depends on besides the layer; one decision each.

    Attributes:
        dtype: of the experts' output in this call, by autocast or by the weights.
        is_random: the experts' own forward would drop at random.
        structure: how many times the experts turned out not to be those that were checked.
    """

    dtype: torch.dtype
    is_random: bool
    structure: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        mode = "active dropout" if self.is_random else "no active dropout"
        return f"{dtype}, {mode}, experts changed {self.structure} times"


class LayerState:
    """All that a swapped layer has beyond DeepSpeed's; its one plain attribute ``_tile``.

    Args:
        name: the layer's name in the model.
        session: of the apply() that swapped it.
        expert_tp: whether its MoE module asks for tensor-parallel experts.
    """

    def __init__(self, name: str, session: Session, expert_tp: bool = False):
        self.name = name
        self.session = session
        self.expert_tp = expert_tp
        self.recipe: Recipe | None = None
        self.experts: list[LocalExpert] = []
        self.structure = 0
        self.decisions: dict[Situation, Decision] = {}
        self.stats = LayerStats(name, keep_history=session.config.stats)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        # The copy has experts of its own and runs on the same heap.
        twin = LayerState(self.name, self.session, self.expert_tp)
        twin.recipe, twin.structure = self.recipe, self.structure
        twin.decisions = dict(self.decisions)
        memo[id(self)] = twin
        return twin

    def runtime(self, layer: MOELayer) -> Runtime | None:
        """The layer's runtime, or None while its group does not exist."""
        if layer.ep_size == 1:
            return self.session.runtime(None)
        return None if layer.ep_group is None else self.session.runtime(layer.ep_group)

    def forget(self) -> None:
        """Back to before the first check; the stats stay."""
        self.recipe, self.experts, self.structure, self.decisions = None, [], 0, {}

    def offer(self, layer: MOELayer, dtype: torch.dtype) -> Offer:
        """This rank's word about the layer outside of active dropout. Local."""
        try:
            return Offer(self.name, self._check(layer, dtype))
        except UnknownExpert as reason:
            return Offer(self.name, str(reason))

    def situation(self, layer: MOELayer, device: torch.device) -> Situation:
        """Of a call now. Re-reads what users may change between calls: dtypes, modes, modules."""
        if not self.experts and self.recipe is not None:
            self._cut(layer)
        if self.experts and not self._is_current(layer):
            self.structure += 1
            self.recipe, self.experts = None, []
        dtype = weights_dtype(layer)
        if torch.is_autocast_enabled(device.type) and dtype in DTYPES:
            dtype = torch.get_autocast_dtype(device.type)
        return Situation(dtype, any(cut.is_random for cut in self.experts), self.structure)

    def _is_current(self, layer: MOELayer) -> bool:
        """Whether the experts are still those that were checked."""
        modules = layer.experts.deepspeed_experts
        return (
            len(modules) == len(self.experts)
            and all(cut.expert is module for cut, module in zip(self.experts, modules, strict=True))
            and all(cut.is_current() for cut in self.experts)
            and len({cut.down_weight.dtype for cut in self.experts}) == 1
        )

    def settle(self, shape: LayerShape, runtime: Runtime) -> None:
        """Keep what the ranks agreed on outside a forward."""
        self.decisions[Situation(shape.dtype, False, self.structure)] = shape
        self.stats.settings = runtime.settings()

    def remark(self) -> str:
        """What a report should add about a layer that is swapped."""
        return RANDOM_REMARK if any(cut.may_be_random for cut in self.experts) else ""

    def _cut(self, layer: MOELayer) -> None:
        assert self.recipe is not None
        self.experts = [LocalExpert(e, self.recipe) for e in layer.experts.deepspeed_experts]

    def _check(self, layer: MOELayer, dtype: torch.dtype) -> LayerShape:
        """The layer's shape, or UnknownExpert with the reason why it has to stay as it is."""
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
        self._cut(layer)
        widths = {tuple(cut.down_weight.shape) for cut in self.experts}
        if len(widths) > 1:
            raise UnknownExpert(f"its experts differ in shape: {sorted(widths)}")
        out, ffn = widths.pop()
        if out != hidden:
            raise UnknownExpert(f"its experts give rows of {out}, not of hidden size {hidden}")
        return LayerShape(
            name=self.name,
            num_experts=len(modules) * layer.ep_size,
            topk=layer.gate.k,
            hidden=hidden,
            ffn=ffn,
            out=out,
            dtype=dtype,
        )


def weights_dtype(layer: MOELayer) -> torch.dtype:
    return next(layer.experts.parameters()).dtype


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
    if type(experts) is not Experts:
        raise UnknownExpert(f"its experts are a {type(experts).__name__}, not DeepSpeed's Experts")
    if experts._forward_hooks or experts._forward_pre_hooks:
        raise UnknownExpert("its Experts module has forward hooks, which would not run")
    devices = {parameter.device.type for parameter in layer.parameters()}
    if "cuda" in devices:
        raise UnknownExpert("the CUDA backend is not built yet")
    if devices != {"cpu"}:
        raise UnknownExpert(f"its parameters are on {', '.join(sorted(devices))}; wanted cpu")
    total = layer.num_local_experts * layer.ep_size
    if layer.gate.wg.out_features != total:
        raise UnknownExpert(
            f"its gate has {layer.gate.wg.out_features} outputs for {total} experts"
        )
    if layer.ep_group is not None and dist.get_world_size(layer.ep_group) != layer.ep_size:
        raise UnknownExpert(
            f"ep_size is {layer.ep_size}, its group has {dist.get_world_size(layer.ep_group)} ranks"
        )
