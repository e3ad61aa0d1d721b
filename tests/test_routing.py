"""The gate's tuple as a Routing, with DeepSpeed's real gates."""

from __future__ import annotations

import pytest
import torch
from deepspeed.moe.sharded_moe import TopKGate
from moe_models import fill

from ds_tilemoe.routing import GATE_TIMER, route


def gate_of(k, **options):
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, **options}
    gate = TopKGate(16, 8, k=k, **options).eval()
    fill(gate, 0)
    return gate


def tokens(count, seed=0):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("drop", [True, False])
def test_equals_the_gates_own_tuple(k, drop):
    gate = gate_of(k, drop_tokens=drop, eval_capacity_factor=0.5, min_capacity=1)
    x = tokens(21)
    l_aux, _, _, indices, _, gates, exp_counts = gate(x, None, True)
    routing = route(gate, x)
    assert routing.expert_ids.shape == routing.weights.shape == (21, k)
    assert routing.expert_ids.dtype == torch.int32
    assert routing.weights.dtype == torch.float32
    assert routing.expert_ids.is_contiguous()
    assert routing.weights.is_contiguous()
    assert torch.equal(routing.expert_ids.t(), indices)
    kept = routing.expert_ids >= 0
    assert bool((~kept).any()) == drop
    assert torch.equal(routing.weights[kept], gates.t()[kept])
    assert (routing.weights[~kept] == 0).all()
    assert torch.equal(routing.l_aux, l_aux)
    assert torch.equal(routing.exp_counts, exp_counts)
    assert routing.places is None  # its locations have second choices behind all first ones


def test_no_tokens_skip_the_gate(monkeypatch):
    gate = gate_of(2)
    monkeypatch.setattr(gate, "forward", None)
    routing = route(gate, tokens(0))
    assert routing.expert_ids.shape == (0, 2)
    assert routing.expert_ids.dtype == torch.int32
    assert routing.weights.dtype == torch.float32
    assert routing.l_aux.item() == 0
    assert routing.l_aux.shape == ()
    assert routing.exp_counts.tolist() == [0] * 8
    assert routing.exp_counts.dtype == torch.int64


def test_the_gate_runs_without_its_group_and_gets_it_back():
    gate = gate_of(2, drop_tokens=False)
    gate.ep_group = group = object()  # DeepSpeed's all_reduce would choke on it
    seen = []
    gate.register_forward_pre_hook(lambda module, args: seen.append(module.ep_group))
    route(gate, tokens(5))
    assert seen == [None]
    assert gate.ep_group is group


def test_a_failing_gate_gets_group_and_timer_back():
    gate = gate_of(1, min_capacity=4)
    gate.ep_group = group = object()
    gate.wall_clock_breakdown = True
    with pytest.raises(AssertionError, match="min_capacity"):
        route(gate, tokens(2))
    assert gate.ep_group is group
    assert not gate.timers(GATE_TIMER).started_
    route(gate, tokens(9))
    assert gate.gate_time > 0


def test_used_token_masks_for_k_1():
    gate, x = gate_of(1, drop_tokens=False, min_capacity=0), tokens(7)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    routing = route(gate, x, mask)
    assert torch.equal(routing.expert_ids[:, 0] >= 0, mask.bool())


def test_weights_carry_no_grad():
    routing = route(gate_of(2), tokens(5))
    assert not routing.weights.requires_grad
