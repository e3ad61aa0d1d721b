"""What the kernels are compared with: the same work in plain torch, honest and unfused.

Shape letters: T tokens of a rank, K top-k, E experts of the group, E_l of a rank, W ranks,
H hidden, F ffn, N output width, M rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benches.calls import Routed


def grouped_mm(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Rows of each expert by its matrix: ``torch._grouped_mm``, or a loop on a CPU.

    Args:
        rows: [M, K], expert by expert. weights: [E_l, N, K]. counts: [E_l], rows of each expert;
            on the device of ``rows``.

    Returns:
        [M, N].
    """
    if rows.device.type == "cuda":
        return torch._grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0).int())
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    first = 0
    for weight, count in zip(weights, counts.tolist(), strict=True):
        torch.mm(rows[first : first + count], weight.t(), out=out[first : first + count])
        first += count
    return out


def all_to_all(
    rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Rows to their ranks by the group's all_to_all_single (NCCL or gloo)."""
    if group is None:
        return rows
    incoming = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(incoming, rows, receive, send, group=group)
    return incoming


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] * rows[places[t, k]], in fp32."""
    routes = rows[places.flatten()].view(*places.shape, rows.shape[1])
    return (routes.float() * weights.unsqueeze(2)).sum(dim=1).to(rows.dtype)


def route(x: Tensor, gate: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Weights in fp32 and expert ids, [T, K] each, by rules as DeepSpeed's: softmax in fp32, for
    k > 1 normalised over the chosen ones.

    Args:
        x: [T, H]. gate: [E, H].
    """
    logits = F.linear(x.float(), gate.float())
    weights, ids = logits.softmax(dim=1).topk(topk, dim=1)
    if topk > 1:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids


class TorchReturn:
    """GEMM 2, all_to_all and weighted sum on given routes: the operator of ``bench.py operator``.

    Args:
        group: of all ranks; None for one.
        rank: this one.
        routed: the routes.
        rows: [M, K] in order of (local expert, owner, position), no pad rows.
        weights: [E_l, N, K].
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        routed: Routed,
        rows: Tensor,
        weights: Tensor,
    ) -> None:
        world, experts = routed.counts.shape
        local = experts // world
        self._group, self._rows, self._weights = group, rows, weights
        runs = routed.counts[:, rank * local : (rank + 1) * local]  # [owner, local expert]
        first = np.cumsum(runs.T.ravel()) - runs.T.ravel()
        first = first.reshape(local, world)
        order = [
            np.arange(first[e, owner], first[e, owner] + runs[owner, e])
            for owner in range(world)
            for e in range(local)
        ]
        own = routed.counts[rank]
        places = (np.cumsum(own) - own)[routed.ids] + routed.positions
        device = rows.device
        self._order = torch.from_numpy(np.concatenate(order)).to(device)
        self._places = torch.from_numpy(places.astype(np.int64)).to(device)
        self._gates = torch.from_numpy(routed.weights).to(device)
        self._counts = torch.from_numpy(runs.sum(axis=0)).to(device)
        self._send = runs.sum(axis=1).tolist()
        self._receive = own.reshape(world, local).sum(axis=1).tolist()

    def gemm(self) -> Tensor:
        """GEMM 2 alone."""
        return grouped_mm(self._rows, self._weights, self._counts)

    def __call__(self) -> Tensor:
        """[T, N]."""
        rows = all_to_all(self.gemm()[self._order], self._send, self._receive, self._group)
        return weighted_sum(rows, self._places, self._gates)


class TorchMoE:
    """A dropless MoE layer: router, all_to_all, grouped GEMMs, all_to_all, weighted sum.

    Args:
        group: of all ranks; None for one.
        gate: [E, H], the router's matrix.
        ups: [E_l, F, H] each: (up,) or (gate, up).
        down: [E_l, H, F].
        activation: of the first of ``ups``.
        topk: K.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        gate: Tensor,
        ups: tuple[Tensor, ...],
        down: Tensor,
        activation: Callable[[Tensor], Tensor],
        topk: int,
    ) -> None:
        self._group, self._gate, self._ups, self._down = group, gate, ups, down
        self._activation, self._topk = activation, topk
        self._world = 1 if group is None else dist.get_world_size(group)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        weights, ids = route(x, self._gate, self._topk)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self._gate.shape[0])
        per_expert = counts.view(self._world, -1)  # of this rank's rows, [destination, E_l]
        incoming = per_expert
        if self._group is not None:
            incoming = torch.empty_like(per_expert)  # [source, E_l]
            dist.all_to_all_single(incoming, per_expert, group=self._group)
        send, receive = torch.stack([per_expert.sum(1), incoming.sum(1)]).tolist()
        rows = all_to_all(x[order // self._topk], send, receive, self._group)

        local = incoming.shape[1]
        experts = torch.arange(local, device=x.device).repeat(self._world)
        experts = experts.repeat_interleave(incoming.flatten(), output_size=rows.shape[0])
        by_expert = experts.argsort(stable=True)
        made = self._experts(rows[by_expert], incoming.sum(0))
        back = torch.empty_like(made)
        back[by_expert] = made

        returned = all_to_all(back, receive, send, self._group)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=x.device)
        return weighted_sum(returned, places.view_as(ids), weights)

    def _experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            return rows.new_empty(0, self._down.shape[1])
        made = [grouped_mm(rows, up, counts) for up in self._ups]
        hidden = self._activation(made[0])
        if len(made) == 2:
            hidden = hidden * made[1]
        return grouped_mm(hidden, self._down, counts)
