"""Where a rank's tokens go: DeepSpeed's gate output as plain tensors.

The only file that knows the 7-tuple which ``deepspeed.moe.sharded_moe.TopKGate`` returns with
``sparse_routes=True`` (DeepSpeed 0.19.4 and later).

Shape letters: T tokens of this rank, K top-k, E experts of the group, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# deepspeed.moe.sharded_moe.TOPK_GATE_TIMER; written here so that this file imports no deepspeed.
GATE_TIMER = "topk_gate"


@dataclass(frozen=True)
class Places:
    """Where this rank's routes stand among its routes to the same expert, on the device.

    Attributes:
        positions: [T, K] int32, earlier kept routes to the same expert, in order of (token, k); no
            meaning where dropped.
        sources: [T * K] int32, token of each kept route, in order of (expert, token, k); no meaning
            behind them.
        counts: [E] int32, kept routes per expert: this rank's row of C.
    """

    positions: Tensor
    sources: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Routing:
    """Which experts this rank's tokens go to, and with what weight.

    Attributes:
        expert_ids: [T, K] int32, contiguous; -1 where the gate dropped the route.
        weights: [T, K] float32, contiguous; 0 where dropped.
        l_aux: 0-d, the gate's load-balancing loss.
        exp_counts: [E] int64, routes per expert before dropping, as DeepSpeed reports them. Rows
            that travel are those with ``expert_ids >= 0``.
        places: where the routes stand, if the router that decided them has found that too.
    """

    expert_ids: Tensor
    weights: Tensor
    l_aux: Tensor
    exp_counts: Tensor
    places: Places | None = None


def route(gate: Any, x: Tensor, used_token: Tensor | None = None) -> Routing:
    """Run DeepSpeed's gate on this rank's tokens, without its collective.

    The gate runs with ``ep_group`` None: its capacity all_reduce (sharded_moe.py, where drop_tokens
    is False) sizes buffers that we do not have, and would leave the peers of a rank that skips the
    gate or fails in it waiting.

    Args:
        gate: a ``TopKGate``.
        x: [T, H] tokens. With T = 0 the gate does not run: counts and l_aux are 0.
        used_token: mask over tokens, or None; read for k = 1 only, as in DeepSpeed.

    Raises:
        Whatever the gate raises; its ``ep_group`` and its timer are put back first.
    """
    if x.shape[0] == 0:
        return _no_tokens(gate, x.device)
    group, gate.ep_group = gate.ep_group, None
    try:
        l_aux, _, _, indices, _, gates, exp_counts = gate(x, used_token, True, False)
    except BaseException:
        if gate.wall_clock_breakdown:
            gate.timers(GATE_TIMER).reset()  # left running, it would fail the next call
        raise
    finally:
        gate.ep_group = group
    expert_ids = indices.t().to(torch.int32).contiguous()
    weights = gates.detach().t().to(torch.float32)
    weights = torch.where(expert_ids >= 0, weights, 0.0).contiguous()
    return Routing(expert_ids, weights, l_aux, exp_counts)


def _no_tokens(gate: Any, device: torch.device) -> Routing:
    return Routing(
        expert_ids=torch.empty(0, gate.k, dtype=torch.int32, device=device),
        weights=torch.empty(0, gate.k, dtype=torch.float32, device=device),
        l_aux=torch.zeros((), dtype=torch.float32, device=device),
        exp_counts=torch.zeros(gate.wg.out_features, dtype=torch.int64, device=device),
    )
