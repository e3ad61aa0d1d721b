"""Dispatch by the group's all_to_all: rows of this rank's tokens into their experts' layout.

It needs the counts on the host, so each forward waits once for the device.

Shape letters: T tokens of this rank, K top-k, E experts of the group, W ranks, H hidden, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.plan_abi import Int64Array


@dataclass(frozen=True)
class Places:
    """Where this rank's routes stand in its runs, made on the device without waiting for it.

    Attributes:
        counts: [E] int32, this rank's row of C.
        positions: [T, K] int32, earlier routes of this rank to the same expert; of a dropped route
            no meaning.
        order: [T * K] int64, routes by expert, then in (token, k) order; dropped ones last.
    """

    counts: Tensor
    positions: Tensor
    order: Tensor


def find_places(expert_ids: Tensor, num_experts: int) -> Places:
    """Counts and positions of routes.

    Args:
        expert_ids: [T, K] int32, -1 = dropped.
    """
    flat = expert_ids.flatten()
    experts = torch.where(flat < 0, num_experts, flat)
    ordered, order = torch.sort(experts, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=ordered.dtype, device=flat.device)
    first = torch.searchsorted(ordered, bounds)  # dropped routes begin at first[E]
    places = torch.arange(flat.numel(), device=flat.device) - first[ordered.long()]
    positions = torch.empty_like(expert_ids)
    positions.view(-1)[order] = places.to(positions.dtype)
    return Places(first.diff().to(torch.int32), positions, order)


def layout_rows(runs: Tensor, run_row: Tensor, rows: int) -> Tensor:
    """Layout row of each row that comes in, source by source, expert by expert.

    Args:
        runs: [W, E / W] int, rows of each run: C's columns of this rank's experts.
        run_row: [E / W, W] int64, first layout row of each run, of the plan.
        rows: sum of runs, so that nobody has to ask the device.

    Returns:
        [rows] int64.
    """
    sizes = runs.flatten().long()
    skew = run_row.t().flatten() - (sizes.cumsum(0) - sizes)
    return torch.arange(rows, device=runs.device) + skew.repeat_interleave(sizes, output_size=rows)


def dispatch(
    x: Tensor,
    places: Places,
    topk: int,
    counts: Int64Array,
    counts_on_device: Tensor,
    run_row: Tensor,
    rank: int,
    group: dist.ProcessGroup | None,
    layout: Tensor,
) -> None:
    """Every kept route's row of ``x`` into the layout of its expert's rank. A collective of W.

    Args:
        x: [T, H], contiguous.
        counts: C [W, E] on the host; ``counts_on_device`` the same, int32.
        run_row: [E / W, W] int64 on the device.
        group: None for W = 1.
        layout: [rows of the layout, H], written here; pad rows are left as they are.
    """
    world, experts = counts.shape
    per_rank = counts.reshape(world, world, experts // world).sum(axis=2)  # [source, destination]
    send, receive = per_rank[rank].tolist(), per_rank[:, rank].tolist()
    kept = int(np.sum(send))
    outgoing = x[places.order[:kept] // topk]
    incoming = outgoing
    if group is not None:
        incoming = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(incoming, outgoing, receive, send, group=group)
    if incoming.shape[0] == 0:
        return
    own = slice(rank * (experts // world), (rank + 1) * (experts // world))
    layout[layout_rows(counts_on_device[:, own], run_row, incoming.shape[0])] = incoming
