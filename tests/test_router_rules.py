"""The fused router's rules against DeepSpeed's own gates; the cases also serve the test on a GPU.

Logits are given: the gate's weight is the identity, so that its product is its input.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate, _capacity
from torch import Tensor

from ds_tilemoe.router_rules import (
    TIE_ULPS,
    Drop,
    Rule,
    Ties,
    find_ties,
    route_reference,
    rule_of,
    uncovered,
)
from ds_tilemoe.routing import Routing, route


@dataclass(frozen=True)
class Case:
    """A gate and its input. ``coarse``: logits are multiples of 1/2, so that many are equal."""

    tokens: int
    experts: int
    k: int
    drop: bool
    factor: float = 1.0
    min_capacity: int = 0
    training: bool = False
    coarse: bool = False
    seed: int = 0

    def logits(self, device: str = "cpu") -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(self.tokens, self.experts, generator=generator) * 2
        if self.coarse:
            logits = (logits * 2).round() / 2
        return logits.to(device)

    def gate(self, device: str = "cpu") -> Any:
        gate = TopKGate(
            self.experts,
            self.experts,
            k=self.k,
            capacity_factor=self.factor if self.training else 7.0,
            eval_capacity_factor=7.0 if self.training else self.factor,
            min_capacity=self.min_capacity,
            drop_tokens=self.drop,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        with torch.no_grad():
            gate.wg.weight.copy_(torch.eye(self.experts))
        return gate.train(self.training).requires_grad_(False).to(device)


def random_case(seed: int, coarse: bool, most_tokens: int, most_experts: int) -> Case:
    rng = random.Random(seed)
    few = rng.random() < 0.15
    tokens = rng.randint(0, 2) if few else rng.randint(3, most_tokens)
    experts = rng.choice([1, 2, 3, 8, *[rng.randint(4, most_experts) for _ in range(12)]])
    k = rng.choice([1, 2, 2, 3, rng.randint(3, 16)])
    return Case(
        tokens=tokens,
        experts=experts,
        k=min(k, experts),
        drop=rng.random() < 0.6,
        factor=rng.choice([0.25, 0.5, 1.0, 1.1, 1.25, 2]),
        min_capacity=rng.choice([0, 1, 4]) if tokens >= 4 else 0,
        training=rng.random() < 0.5,
        coarse=coarse,
        seed=seed,
    )


def ulps(a: Tensor, b: Tensor) -> Tensor:
    return (a.contiguous().view(torch.int32) - b.contiguous().view(torch.int32)).abs()


def dense(routing: Routing, experts: int) -> tuple[Tensor, Tensor]:
    """Kept or not, and the weight, of each token and expert."""
    kept = routing.expert_ids >= 0
    where = torch.where(kept, routing.expert_ids, experts).long()
    weights = torch.zeros(len(where), experts + 1, device=where.device)
    weights.scatter_(1, where, routing.weights)
    is_kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, where, kept)
    return is_kept[:, :experts], weights[:, :experts]


def difference(theirs: Routing, ours: Routing, k: int, logits: Tensor, ties: Ties) -> str:
    """What differs where torch leaves nothing open, or ""."""
    experts = logits.shape[1]
    is_sure = ~ties.experts
    (other, other_weights), (mine, weights) = dense(theirs, experts), dense(ours, experts)
    if (wrong := (mine != other) & is_sure).any():
        at = wrong.nonzero()[:3].tolist()
        return f"{int(wrong.sum())} routes kept by one only, first at (token, expert) {at}"
    if k == 1 and not torch.equal(mine.sum(dim=0), other.sum(dim=0)):
        return "an expert keeps another number of routes"
    if not torch.equal(ours.exp_counts[is_sure], theirs.exp_counts[is_sure]):
        return f"exp_counts {ours.exp_counts.tolist()}, wanted {theirs.exp_counts.tolist()}"
    same_choices = torch.equal(ours.exp_counts, theirs.exp_counts)
    if same_choices and not torch.allclose(ours.l_aux, theirs.l_aux, rtol=1e-5, atol=1e-7):
        return f"l_aux {ours.l_aux.item()}, wanted {theirs.l_aux.item()}"
    sure_tokens = ~((mine | other) & ties.experts).any(dim=1)
    off = ulps(weights, other_weights)[sure_tokens]
    if off.numel() and off.max() > 4:
        return f"weights off by up to {int(off.max())} ulp"
    # The order of a token's experts is open where two of its probabilities are equal.
    if k > 2 and len(logits):
        highest = torch.softmax(logits, dim=1).topk(k, dim=1).values
        sure_tokens &= (ulps(highest[:, 1:], highest[:, :-1]) > TIE_ULPS).all(dim=1)
    if not torch.equal(ours.expert_ids[sure_tokens], theirs.expert_ids[sure_tokens]):
        return "a token's experts are in another order"
    return ""


@pytest.mark.parametrize(("coarse", "cases"), [(False, 1000), (True, 100)])
def test_decides_as_deepspeeds_gate(coarse: bool, cases: int) -> None:
    compared = total = dropped = 0
    for seed in range(cases):
        case = random_case(seed, coarse, most_tokens=60, most_experts=24)
        logits, gate = case.logits(), case.gate()
        assert uncovered(gate) == ""
        rule = rule_of(gate, case.tokens)
        ours, theirs = route_reference(logits, case.k, rule), route(gate, logits)
        ties = find_ties(logits, case.k, rule)
        assert difference(theirs, ours, case.k, logits, ties) == "", case
        compared += int((~ties.experts).sum())
        total += case.experts
        dropped += int((ours.expert_ids < 0).sum())
    assert dropped > 1000 or coarse
    assert compared > total * (0.5 if coarse else 0.85)  # else the comparison says little


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("coarse", [False, True])
def test_kept_routes_are_those_that_the_rules_name(k: int, coarse: bool) -> None:
    """Route by route, without a sort: lower experts and lower tokens win ties."""
    case = Case(tokens=23, experts=5, k=k, drop=True, coarse=coarse, seed=k)
    logits, capacity = case.logits(), 6
    rule = Rule(Drop.POSITION if k <= 2 else Drop.PROBABILITY, capacity)
    gates = torch.softmax(logits, dim=1).tolist()
    chosen = []
    for t, row in enumerate(gates):
        ids = sorted(range(5), key=lambda e, row=row: (-row[e], e))[:k]
        if k == 2:
            others = [e for e in range(5) if e != ids[0]]
            ids[1] = min(others, key=lambda e, t=t: (-logits[t, e].item(), e))
        chosen.append(ids)
    routes = [(j, t) for j in range(k) for t in range(23)]  # first choices of all tokens first
    if k > 2:
        routes.sort(key=lambda route: (-gates[route[1]][chosen[route[1]][route[0]]], route[1]))
    kept, full = set(), [0] * 5
    for j, t in routes:
        full[chosen[t][j]] += 1
        if full[chosen[t][j]] <= capacity:
            kept.add((j, t))
    want = [[chosen[t][j] if (j, t) in kept else -1 for j in range(k)] for t in range(23)]
    assert len(kept) < 23 * k
    routing = route_reference(logits, k, rule)
    assert routing.expert_ids.tolist() == want
    assert routing.exp_counts.tolist() == full


def test_equal_logits_go_to_the_lowest_experts() -> None:
    for k in (1, 2, 5):
        routing = route_reference(torch.zeros(3, 7), k, Rule(Drop.NONE))
        assert routing.expert_ids.tolist() == [list(range(k))] * 3
        assert find_ties(torch.zeros(3, 7), k, Rule(Drop.NONE)).routes == (0 if k <= 2 else 21)


def test_ties_are_counted_at_the_cut_of_an_expert() -> None:
    logits = torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0], [3, 2, 1, -1]])
    ties = find_ties(logits, 3, Rule(Drop.PROBABILITY, 1))
    # Tokens 0 and 1 are alike; token 2 is surer of experts 0, 1 and 2 and wins them alone.
    assert (ties.routes, ties.experts.tolist()) == (0, [False] * 4)
    ties = find_ties(logits, 3, Rule(Drop.PROBABILITY, 2))
    assert (ties.routes, ties.experts.tolist()) == (6, [True, True, True, False])


def test_a_token_never_names_an_expert_twice() -> None:
    logits = torch.full((2, 4), float("-inf"))
    logits[:, 0] = 0
    for k in (2, 3):
        ids = route_reference(logits, k, Rule(Drop.NONE)).expert_ids
        assert ids.tolist() == [list(range(k))] * 2


def test_no_tokens() -> None:
    for rule in (Rule(Drop.NONE), Rule(Drop.PROBABILITY, 0)):
        routing = route_reference(torch.empty(0, 6), 3, rule)
        assert routing.expert_ids.shape == routing.weights.shape == (0, 3)
        assert routing.l_aux.item() == 0
        assert routing.exp_counts.tolist() == [0] * 6


@pytest.mark.parametrize("k", [1, 2, 6])
def test_capacity_is_deepspeeds(k: int) -> None:
    for tokens in [*range(1, 40), 511, 4096, 65535]:
        for factor in (0.1, 0.3, 1.0, 1.1, 1.25, 2, 3.7):
            for experts, least in ((7, 0), (60, 4), (256, 1)):
                case = Case(tokens, experts, k, True, factor, min(least, tokens))
                rule = rule_of(case.gate(), tokens)
                theirs = _capacity(
                    torch.empty(tokens, experts, device="meta"),
                    torch.tensor(factor * k),
                    torch.tensor(min(least, tokens)),
                )
                assert rule.capacity == min(int(theirs), tokens), case


def test_too_few_tokens_for_k_1_are_deepspeeds_error() -> None:
    for drop in (True, False):
        gate = Case(2, 4, 1, drop, min_capacity=3).gate()
        with pytest.raises(AssertionError, match="min_capacity") as theirs:
            route(gate, torch.zeros(2, 4))
        with pytest.raises(AssertionError) as ours:
            rule_of(gate, 2)
        assert str(ours.value) == str(theirs.value)
        rule_of(gate, 3)
        rule_of(gate, 0)  # runs no gate
    assert rule_of(Case(2, 4, 2, True, min_capacity=3).gate(), 2) == Rule(Drop.POSITION, 2)


def test_which_rule() -> None:
    assert rule_of(Case(8, 4, 2, False).gate(), 8) == Rule(Drop.NONE)
    assert rule_of(Case(8, 4, 1, True).gate(), 8) == Rule(Drop.POSITION, 2)
    assert rule_of(Case(8, 4, 2, True).gate(), 8) == Rule(Drop.POSITION, 4)
    assert rule_of(Case(8, 4, 3, True).gate(), 8) == Rule(Drop.PROBABILITY, 6)
    assert rule_of(Case(8, 4, 3, True, training=True).gate(), 8) == Rule(Drop.PROBABILITY, 6)


def gate_with(k: int = 2, experts: int = 8, training: bool = False, **options: Any) -> Any:
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, **options}
    return TopKGate(4, experts, k=k, **options).train(training)


class OtherGate(TopKGate):
    pass


@pytest.mark.parametrize(
    ("gate", "call", "reason"),
    [
        (gate_with(), {}, ""),
        (gate_with(1), {}, ""),
        (gate_with(16, 1024), {}, ""),
        (gate_with(1, use_rts=True), {}, "use_rts"),
        (gate_with(1, use_rts=True, drop_tokens=False), {}, ""),
        (gate_with(2, use_rts=True), {}, ""),
        (gate_with(2, top2_2nd_expert_sampling=True), {}, "top2_2nd_expert_sampling"),
        (gate_with(3, top2_2nd_expert_sampling=True), {}, ""),
        (gate_with(1, training=True, noisy_gate_policy="RSample"), {}, "RSample"),
        (gate_with(1, noisy_gate_policy="RSample"), {}, ""),
        (gate_with(2, training=True, noisy_gate_policy="RSample"), {}, ""),
        (gate_with(3, training=True, noisy_gate_policy="Jitter"), {}, "Jitter"),
        (gate_with(3, noisy_gate_policy="Jitter"), {}, ""),
        (gate_with(1), {"used_token": torch.ones(3)}, "used_token"),
        (gate_with(2), {"used_token": torch.ones(3)}, ""),
        (gate_with(2), {"use_tutel": True}, "tutel"),
        (gate_with(17, 32), {}, "k is 17, wanted 1 to 16"),
        (gate_with(2, 1), {}, "k is 2, wanted 1 to 1"),
        (gate_with(2, 1025), {}, "1025 experts"),
        (OtherGate(4, 8, k=3), {}, "OtherGate"),
    ],
)
def test_what_is_covered(gate: Any, call: dict[str, Any], reason: str) -> None:
    said = uncovered(gate, **call)
    assert reason in said
    assert bool(said) == bool(reason)


class Quantised(torch.Tensor):
    pass


def test_hooks_and_autocast_are_not_covered() -> None:
    gate = gate_with()
    plain = gate.wg.weight
    gate.wg.weight = torch.nn.Parameter(plain.detach().as_subclass(Quantised))
    assert "weight is a Quantised" in uncovered(gate)
    gate.wg.weight = plain
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in uncovered(gate)
    handle = gate.register_forward_hook(lambda *_: None)
    assert "hooks" in uncovered(gate)
    handle.remove()
    assert uncovered(gate) == ""
    gate.forward = lambda *_: None
    assert "replaced" in uncovered(gate)
