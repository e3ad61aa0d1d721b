"""The oracle: a MoE layer in plain torch. Slow and obvious; every backend is compared with it.

Shape letters: T tokens of this rank, K top-k, E experts of the group, H hidden, N output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_tilemoe.routing import Routing


def moe(x: Tensor, routing: Routing, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """y[t] = sum over k of weights[t, k] * expert[expert_ids[t, k]](x[t]), in fp32, k ascending.

    Args:
        x: [T, H], this rank's tokens.
        routing: this rank's own gate decisions.
        experts: all E experts of the group, each [rows, H] -> [rows, N], or a tuple that starts
            with that (DeepSpeed drops the rest).

    Returns:
        [T, N] float32. A token whose routes were all dropped is 0.
    """
    y: Tensor | None = None
    for k in range(routing.expert_ids.shape[1]):
        for e, expert in enumerate(experts):
            tokens = (routing.expert_ids[:, k] == e).nonzero().flatten()
            rows = expert(x[tokens])
            rows = rows[0] if isinstance(rows, tuple) else rows
            if y is None:
                y = torch.zeros(x.shape[0], rows.shape[1], dtype=torch.float32, device=x.device)
            y[tokens] += routing.weights[tokens, k].unsqueeze(1) * rows.float()
    if y is None:
        raise ValueError(
            f"got {len(experts)} experts and top-{routing.expert_ids.shape[1]}; wanted at least one"
            " expert and top-1"
        )
    return y


def counts(expert_ids: Tensor, num_experts: int) -> Tensor:
    """This rank's row of C: [E] int64, kept routes per expert.

    Args:
        expert_ids: [T, K], -1 = dropped.
    """
    kept = expert_ids[expert_ids >= 0]
    return torch.bincount(kept.long(), minlength=num_experts)


def places_in_runs(expert_ids: Tensor) -> Tensor:
    """Where each route stands in its run, the rows of one expert and this owner.

    Args:
        expert_ids: [T, K], -1 = dropped.

    Returns:
        [T, K] int64: 0, 1, ... in (token, k) order among the routes to the same expert; -1 if
        dropped. The row of a route in the owner's receive buffer is the exclusive prefix of
        :func:`counts` at its expert, plus this.
    """
    places = torch.full_like(expert_ids, -1, dtype=torch.int64)
    seen: dict[int, int] = {}
    for t in range(expert_ids.shape[0]):
        for k in range(expert_ids.shape[1]):
            e = int(expert_ids[t, k])
            if e >= 0:
                places[t, k] = seen.get(e, 0)
                seen[e] = seen.get(e, 0) + 1
    return places
