"""What the fused router decides: the rules of DeepSpeed's TopKGate, given its logits.

The kernels of csrc/router do the same as :func:`route_reference`. Source of the rules:
``deepspeed.moe.sharded_moe`` (top1gating, top2gating, topkgating, TopKGate.forward).

Where torch leaves the order of equal values open, the lower index wins: of equal probabilities the
lower expert comes first, and an expert keeps the routes of lower tokens. A token never names an
expert twice (DeepSpeed's second choice does where all other logits are -inf).

Shape letters: T tokens of this rank, K top-k, E experts of the group.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_tilemoe.routing import Routing

MAX_TOPK = 16  # kMaxTopk
MAX_EXPERTS = 1024  # kMaxRouterExperts
TIE_ULPS = 4
EPSILON = torch.finfo(torch.float32).eps
_GATE = ("deepspeed.moe.sharded_moe", "TopKGate")
# Classes of tensors that are their numbers: a subclass (quantised, distributed) may hold others.
PLAIN = (Tensor, nn.Parameter)
# DeepSpeed's own words, so that a model fails alike with both.
_TOO_FEW_TOKENS = (
    "No. of tokens (batch-size) should be greater than min_capacity. Either set min_capacity to 0"
    " or increase your batch size."
)


class Drop(enum.IntEnum):
    """Which routes an expert keeps: all, those of the earliest choices, the most probable ones."""

    NONE = 0
    POSITION = 1
    PROBABILITY = 2


@dataclass(frozen=True)
class Rule:
    """How many routes each expert keeps of a rank's tokens.

    Attributes:
        drop: POSITION for k <= 2 (first choices of all tokens in token order, then second ones),
            PROBABILITY for more, NONE without dropping.
        capacity: routes that an expert keeps; 0 and without meaning for NONE.
    """

    drop: Drop
    capacity: int = 0


NO_DROP = Rule(Drop.NONE)


def uncovered(gate: Any, used_token: Tensor | None = None, use_tutel: bool = False) -> str:
    """Why the fused router cannot stand for this gate in its present mode, or "" if it can.

    Args:
        gate: a ``TopKGate``.
        used_token: what ``MOELayer.forward`` got beside its input; read for k = 1 only.
        use_tutel: the layer's ``use_tutel``.
    """
    kind = type(gate)
    if (kind.__module__, kind.__qualname__) != _GATE:
        return f"the gate is a {kind.__module__}.{kind.__qualname__}"
    if "forward" in vars(gate) or gate._forward_hooks or gate._forward_pre_hooks:
        return "the gate's forward is replaced or has hooks"
    wg, k = gate.wg, gate.k
    weight = wg.weight
    if type(weight) not in PLAIN:
        return f"the gate's weight is a {type(weight).__name__}"
    experts = wg.out_features
    if not 1 <= k <= min(MAX_TOPK, experts):
        return f"k is {k}, wanted 1 to {min(MAX_TOPK, experts)}"
    if experts > MAX_EXPERTS:
        return f"there are {experts} experts, wanted at most {MAX_EXPERTS}"
    if use_tutel:
        return "use_tutel is on"
    if k == 1 and used_token is not None:
        return "a used_token mask is given"
    if k == 1 and gate.use_rts and gate.drop_tokens:
        return "use_rts drops tokens at random"
    if k == 2 and gate.top2_2nd_expert_sampling:
        return "top2_2nd_expert_sampling is on"
    noise = gate.noisy_gate_policy if gate.training else None
    if noise == "Jitter" or (noise == "RSample" and k == 1):
        return f"noisy_gate_policy is {noise}"
    if torch.is_autocast_enabled(weight.device.type):
        return "autocast is on"
    return ""


def rule_of(gate: Any, tokens: int) -> Rule:
    """The rule for a rank with ``tokens`` tokens, by the gate's mode and settings.

    Raises:
        AssertionError: as DeepSpeed's gate for k = 1 and fewer tokens than ``min_capacity``, with
            dropping and without. Not for a rank without tokens, which runs no gate.
    """
    assert gate.k != 1 or tokens >= gate.min_capacity or tokens == 0, _TOO_FEW_TOKENS
    if not gate.drop_tokens:
        return NO_DROP
    factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
    capacity = _capacity(
        tokens,
        gate.wg.out_features,
        factor * gate.k,
        gate.min_capacity,
        torch.get_default_dtype(),
    )
    return Rule(Drop.POSITION if gate.k <= 2 else Drop.PROBABILITY, capacity)


@functools.lru_cache(maxsize=4096)
def _capacity(
    tokens: int, experts: int, factor: float, min_capacity: int, dtype: torch.dtype
) -> int:
    """``sharded_moe._capacity``, at most T: an expert gets no more. The dtype is of its factor."""
    capacity = torch.ceil((tokens / experts) * torch.tensor(factor, device="cpu")).to(torch.int64)
    least = torch.tensor(min_capacity, device="cpu").to(torch.int64)
    return min(int(torch.maximum(capacity, least)), tokens)


def route_reference(logits: Tensor, k: int, rule: Rule) -> Routing:
    """Choices, weights and counts in plain torch, on the device of the logits.

    Args:
        logits: [T, E] float32.
        k: 1 to E.
        rule: which routes are dropped.

    Returns:
        The routing, without places.
    """
    tokens, experts = logits.shape
    gates = torch.softmax(logits, dim=1)
    order = gates.sort(dim=1, descending=True, stable=True).indices
    if k == 2:
        by_logit = logits.sort(dim=1, descending=True, stable=True).indices
        first = order[:, 0]
        second = torch.where(by_logit[:, 0] == first, by_logit[:, 1], by_logit[:, 0])
        order = torch.stack([first, second], dim=1)
    chosen = order[:, :k]
    probabilities = gates.gather(1, chosen)
    exp_counts = torch.bincount(chosen.flatten(), minlength=experts)
    counted = chosen[:, :1] if k == 2 else chosen
    share = torch.bincount(counted.flatten(), minlength=experts) / max(tokens, 1)
    l_aux = (gates.sum(dim=0) / max(tokens, 1) * share).sum() * experts / (k if k > 2 else 1)

    kept = torch.ones_like(chosen, dtype=torch.bool)
    if rule.drop is Drop.POSITION:
        by_choice = _ranks(chosen.t().flatten()).view(k, tokens)
        kept = by_choice.t() < rule.capacity
    elif rule.drop is Drop.PROBABILITY:
        falling = probabilities.flatten().sort(descending=True, stable=True).indices
        ranks = torch.empty_like(falling)
        ranks[falling] = _ranks(chosen.flatten()[falling])
        kept = ranks.view(tokens, k) < rule.capacity
    weights = torch.where(kept, probabilities, 0.0)
    if k > 1:
        total = weights.sum(dim=1, keepdim=True, dtype=torch.float64).to(torch.float32)
        weights = torch.where(kept, weights / total.clamp(min=EPSILON), 0.0)
    expert_ids = torch.where(kept, chosen, -1).to(torch.int32)
    return Routing(expert_ids.contiguous(), weights.contiguous(), l_aux, exp_counts)


def _ranks(experts: Tensor) -> Tensor:
    """Earlier entries of the same expert, for each of [N]."""
    ordered, order = experts.sort(stable=True)
    ranks = torch.empty_like(order)
    places = torch.arange(len(order), device=order.device)
    ranks[order] = places - torch.searchsorted(ordered, ordered)
    return ranks


@dataclass(frozen=True)
class Ties:
    """Where torch leaves open what is chosen or kept, or a rounding could decide.

    Attributes:
        experts: [E] bool, experts of such routes; all others keep the same routes by any rule.
        routes: how many routes lie within ``TIE_ULPS`` of the cut that they are at.
    """

    experts: Tensor
    routes: int


def find_ties(logits: Tensor, k: int, rule: Rule) -> Ties:
    """Routes within ``TIE_ULPS`` of a token's k-th probability or of an expert's last kept one.

    For k <= 2 DeepSpeed takes the first of equal values, as torch.argmax promises; only its choice
    of tokens for k = 1 with dropping is open, wherever an expert has more than it keeps.

    Args:
        logits, k, rule: as of :func:`route_reference`.
    """
    tokens, experts = logits.shape
    gates = torch.softmax(logits, dim=1)
    is_tied = torch.zeros_like(gates, dtype=torch.bool)
    ids = route_reference(logits, k, NO_DROP).expert_ids.long()
    routed = torch.zeros_like(is_tied).scatter_(1, ids, True)
    if k == 1 and rule.drop is Drop.POSITION:
        is_tied |= routed & (routed.sum(dim=0) > rule.capacity)
    if k <= 2:
        return Ties(is_tied.any(dim=0), int(is_tied.sum()))
    if k < experts and tokens:
        cuts = gates.topk(k + 1, dim=1).values
        last, next_one = cuts[:, k - 1 : k], cuts[:, k:]
        at_cut = _near(gates, last) | _near(gates, next_one)
        is_tied |= at_cut & _near(last, next_one)
    if rule.drop is Drop.PROBABILITY and 0 < rule.capacity < tokens:
        # DeepSpeed's topk over tokens sees 0 where a token has no route to the expert.
        column = torch.where(routed, gates, 0.0)
        cuts = column.topk(rule.capacity + 1, dim=0).values
        last, next_one = cuts[-2:-1], cuts[-1:]
        at_cut = _near(column, last) | _near(column, next_one)
        is_tied |= routed & at_cut & _near(last, next_one)
    return Ties(is_tied.any(dim=0), int(is_tied.sum()))


def _near(a: Tensor, b: Tensor) -> Tensor:
    """Within TIE_ULPS, of numbers of one sign: their bits count the floats between them."""
    return (a.view(torch.int32) - b.contiguous().view(torch.int32)).abs() <= TIE_ULPS
