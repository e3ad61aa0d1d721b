"""What a swapped layer knows of itself: its experts cut, what was agreed, why it may not run here.

Each forward asks for its situation, for which the experts are looked at; when the ranks meet, they
ask for its offer, for which experts that are others are examined.

Shape letters: E experts of the group, H hidden.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ds_tilemoe.backends.base import Experts, LayerShape
from ds_tilemoe.backends.cuda_limits import choose_dispatch, layer_obstacle
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.layers.agreement import Decision, Offer
from ds_tilemoe.layers.appearance import appearance, unread_properties
from ds_tilemoe.layers.attributes import Written
from ds_tilemoe.layers.experts import LocalExpert, Recipe
from ds_tilemoe.layers.recognise import (
    DTYPES,
    UnknownExpert,
    check_numbers,
    check_static,
    dtype_name,
    find_recipe,
)
from ds_tilemoe.layers.runtime import Runtime, Session
from ds_tilemoe.layers.surroundings import check_host
from ds_tilemoe.layers.watch import ExpertWatch
from ds_tilemoe.stats import LayerStats

RANDOM_REMARK = "DeepSpeed's path while its dropout is active"


class GateForm(NamedTuple):
    """What of a gate decides how rows are laid out. Its other settings (capacity, dropping, noise)
    are read by the router in every call and are this rank's own business."""

    kind: type
    topk: int
    experts: int

    def __str__(self) -> str:
        return f"a {self.kind.__name__} with k={self.topk} of {self.experts} experts"


class Situation(NamedTuple):
    """What a call on this rank depends on besides the layer; the group meets when one is new.

    Attributes:
        dtype: of the experts' output in this call, by autocast or by the weights.
        weights: their own dtype: kernels read them as they lie, also under autocast.
        is_random: the experts' own forward would drop at random.
        version: how many times the experts turned out not to be those that were examined.
        gate: None where it cannot be read, and never could.
    """

    dtype: torch.dtype | None
    weights: torch.dtype | None
    is_random: bool
    version: int
    gate: GateForm | None

    def __str__(self) -> str:
        mode = "active dropout" if self.is_random else "no active dropout"
        return (
            f"{dtype_name(self.dtype)} of {dtype_name(self.weights)} weights, {mode}, experts"
            f" changed {self.version} times, its gate {self.gate}"
        )


class LayerState:
    """All that a swapped layer has beyond DeepSpeed's; its one plain attribute ``_tile``.

    Args:
        name: the layer's name in the model.
        session: of the apply() that swapped it.
        expert_tp: whether its MoE module asks for tensor-parallel experts.

    Attributes:
        shapes: what the group runs on the backend, by this rank's situation then. Of experts that
            are no longer, only the first: there is one for as long as the layer has had any.
        kept: while the group is on DeepSpeed's path: this rank's situation at that decision, and
            the reason. A layer is on one of the two paths on all ranks of its group.
        listeners: called, once, with the next decision that stands.
        has_heir: a later apply() has made another state go on with the stats and the listeners.
    """

    def __init__(self, name: str, session: Session, expert_tp: bool = False):
        self.name = name
        self.session = session
        self.expert_tp = expert_tp
        self.stats = LayerStats(name, keep_history=session.config.stats)
        self.listeners: list[Callable[[Decision], None]] = []
        self.has_heir = False
        self.forget()

    def forget(self) -> None:
        """Back to before the first examination; the stats and the listeners stay."""
        self.recipe: Recipe | None = None
        self.watch: ExpertWatch | None = None
        self.version = 0
        self.shapes: dict[Situation, LayerShape] = {}
        self.kept: tuple[Situation, str] | None = None
        self._offers: dict[tuple[torch.dtype | None, torch.dtype | None, GateForm | None], Offer]
        self._offers = {}  # by dtype of the output and of the weights, and gate
        self._written = Written()
        self._was_tried = False  # the last examination got as far as the experts' forwards
        self._refused: object = None  # what experts that were refused looked like
        self._unread: set[tuple[type, str]] = set()  # cached properties that had no value then
        self._gate: GateForm | None = None  # at the last look
        self._device: str | None = None  # where the shapes were agreed on, "cpu" or "cuda"

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        # The copy has experts of its own, which its first forward examines, and the same heap.
        memo[id(self)] = twin = LayerState(self.name, self.session, self.expert_tp)
        return twin

    def runtime(self, layer: MOELayer) -> Runtime | None:
        """The layer's runtime, or None while its group does not exist. To that of another device
        than before the layer is new."""
        weight = self.weight(layer)
        device = "cpu" if weight is None else backend_of(weight)
        if device != self._device:
            if self._device is not None:
                self.shapes, self.kept, self._offers = {}, None, {}
            self._device = device
        if layer.ep_size == 1:
            return self.session.runtime(None, device)
        return None if layer.ep_group is None else self.session.runtime(layer.ep_group, device)

    def offer(self, layer: MOELayer, dtype: torch.dtype | None) -> Offer:
        """This rank's word about the layer outside of active dropout. Local, and never raises: a
        rank that did would leave its peers waiting for its word."""
        weight = self.weight(layer)
        weights = None if weight is None else weight.dtype
        key = (dtype, weights, self._look_at_gate(layer))
        if key not in self._offers:
            try:
                self._offers[key] = Offer(self.name, self._check(layer, dtype))
            except Exception as error:
                reason = str(error)
                if not isinstance(error, UnknownExpert | ConfigError):
                    reason = f"it could not be examined: {type(error).__name__}: {error}"
                self.watch, self._unread = None, unread_properties(layer)
                self._refused = self._appearance(layer)
                self._offers = {key: Offer(self.name, reason, isinstance(error, ConfigError))}
        return self._offers[key]

    def situation(self, layer: MOELayer) -> Situation:
        """Of a call now. Re-reads what users may change between calls: dtypes, modes, modules.

        Local, and raises as little as :meth:`offer`.
        """
        if self.watch is None:
            is_current = self._refused == self._appearance(layer)
        else:
            is_current = layer._modules.get("experts") is self.watch.holder and self.watch.look()
        if not is_current:
            self.version += 1
            self.recipe, self.watch, self._offers = None, None, {}
            self.shapes = dict(itertools.islice(self.shapes.items(), 1))
            self._refused = self._appearance(layer)
        weight = self.weight(layer)
        dtype = weights = None if weight is None else weight.dtype
        if weight is not None and dtype in DTYPES and not weight.is_meta:  # it knows no such device
            device = weight.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        is_random = self.watch is not None and self.watch.is_random
        return Situation(dtype, weights, is_random, self.version, self._look_at_gate(layer))

    def _appearance(self, layer: MOELayer) -> object:
        """Of experts that are not watched. Attributes are no reason that is found without trying
        them out, such as a hook; and the hook may write some."""
        return appearance(layer, self._written | self._unread if self._was_tried else None)

    def _look_at_gate(self, layer: MOELayer) -> GateForm | None:
        """Of a gate that cannot be read it keeps the form that it had: the router will raise what
        is wrong, where all ranks hear of it."""
        form = self._gate
        try:
            gate = layer._modules["gate"]
            kind, topk, experts = gate.__class__, gate.k, gate._modules["wg"].out_features
            # Made anew only if need be, as this is done in every call.
            if form is None or (kind, topk, experts) != form:
                self._gate = GateForm(kind, topk, experts)
        except Exception:
            pass
        return self._gate

    @property
    def experts(self) -> Experts:
        """The layer's experts, cut; empty where they were not examined or not recognised."""
        return Experts() if self.watch is None else self.watch.experts

    def weight(self, layer: MOELayer) -> torch.Tensor | None:
        """A parameter of the experts, as of the last look at them; None if they have none."""
        return first_weight(layer) if self.watch is None else self.watch.weight

    def settle(self, shape: LayerShape, runtime: Runtime) -> None:
        """Keep what the ranks agreed on outside a forward."""
        assert self.watch is not None  # as the shape is also what this rank has offered
        weights = self.watch.weight.dtype
        self.shapes[Situation(shape.dtype, weights, False, self.version, self._gate)] = shape
        self.stats.settings = runtime.settings()

    def tell(self, decision: Decision) -> None:
        """To those who wait for it: what the ranks decided about the layer."""
        listeners, self.listeners = self.listeners, []
        for listener in listeners:
            listener(decision)

    def remark(self) -> str:
        """What a report should add about a layer that is swapped."""
        is_random = self.watch is not None and self.watch.may_be_random
        return RANDOM_REMARK if is_random else ""

    def _check(self, layer: MOELayer, dtype: torch.dtype | None) -> LayerShape:
        """The layer's shape, or UnknownExpert with the reason why it has to stay as it is.

        Raises:
            ConfigError: a setting that it cannot meet.
        """
        self._was_tried = False
        check_host(layer, self.expert_tp)
        experts = self._cut(layer)
        watch = ExpertWatch(layer.experts, experts, self._written)
        widths = {tuple(cut.down_weight.shape) for cut in experts}
        if len(widths) > 1:
            raise UnknownExpert(f"its experts differ in shape: {sorted(widths)}")
        (out, ffn), hidden = widths.pop(), layer.gate.wg.in_features
        if out != hidden:
            raise UnknownExpert(f"its experts give rows of {out}, not of hidden size {hidden}")
        total, topk = len(experts) * layer.ep_size, layer.gate.k
        if not 1 <= topk <= total:
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

    def _cut(self, layer: MOELayer) -> list[LocalExpert]:
        """The layer's experts by their recipe, or UnknownExpert."""
        modules = list(layer.experts.deepspeed_experts)
        for module in modules:
            check_static(module)
        if len({p.dtype for m in modules for p in m.parameters()}) > 1:
            raise UnknownExpert("its experts differ in dtype")
        self._was_tried = True
        hidden = layer.gate.wg.in_features
        if self.recipe is None:
            # Of each make the first: numbers of the moment would not tell one from another.
            makes = {_make_of(expert): expert for expert in reversed(modules)}
            recipes = {find_recipe(expert, hidden, self._written) for expert in makes.values()}
            if len(recipes) > 1:
                raise UnknownExpert(
                    f"its experts are built differently: {', '.join(sorted(map(str, recipes)))}"
                )
            (self.recipe,) = recipes
        for module in modules:
            check_numbers(module, self.recipe, hidden, self._written)
        return [LocalExpert(module, self.recipe) for module in modules]


def first_weight(layer: MOELayer) -> torch.Tensor | None:
    """A parameter of the layer's experts; None if they have none."""
    experts = getattr(layer, "experts", None)
    return next(experts.parameters(), None) if isinstance(experts, nn.Module) else None


def backend_of(weight: torch.Tensor) -> str:
    """Which backend a layer with this weight runs on, "cpu" or "cuda"."""
    return "cuda" if weight.is_cuda else "cpu"


def _make_of(expert: nn.Module) -> object:
    """The same of experts of which one stands for all."""
    tensors = [*expert.named_parameters(), *expert.named_buffers()]
    return (
        tuple((path, type(module)) for path, module in expert.named_modules()),
        tuple(name for name, _ in tensors),
    )
