"""Dispatch by the group's all_to_all: rows of this rank's tokens into their experts' layout.

It needs the counts on the host, so each forward waits once for the device. It serves layers whose
front is not one GEMM, which need the counts on the host anyway.

Shape letters: T tokens of this rank, E experts of the group, E_l of this rank, W ranks, H hidden,
F ffn, M rows of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends.base import Expert
from ds_tilemoe.plan_abi import Int64Array, Layout


class Counts(NamedTuple):
    """What the count exchange has brought.

    Attributes:
        on_host: C [W, E] int64.
        on_device: the same, int32.
        first_rows: [E_l + 1], first layout row of each local expert, then all rows.
    """

    on_host: Int64Array
    on_device: Tensor
    first_rows: list[int]


def await_counts(on_device: Tensor, page_locked: Tensor, expert_row: Tensor) -> Counts:
    """Waits for the device.

    Args:
        on_device: C [W, E] int32.
        page_locked: [W, E] int32 on the host.
        expert_row: [E_l + 1] int64 of the plan.
    """
    page_locked.copy_(on_device, non_blocking=True)
    first_rows = expert_row.tolist()  # waits for both copies
    return Counts(page_locked.numpy().astype(np.int64), on_device, first_rows)


def layout_rows(runs: Tensor, run_row: Tensor, rows: int) -> Tensor:
    """Layout row of each row that comes in, source by source, expert by expert.

    Args:
        runs: [W, E_l] int, rows of each run: C's columns of this rank's experts.
        run_row: [E_l, W] int64, first layout row of each run, of the plan.
        rows: sum of runs, so that nobody has to ask the device.

    Returns:
        [rows] int64.
    """
    sizes = runs.flatten().long()
    skew = run_row.t().flatten() - (sizes.cumsum(0) - sizes)
    return torch.arange(rows, device=runs.device) + skew.repeat_interleave(sizes, output_size=rows)


def dispatch(
    x: Tensor,
    sources: Tensor,
    counts: Counts,
    run_row: Tensor,
    rank: int,
    group: dist.ProcessGroup | None,
    layout: Tensor,
    rooms: tuple[Tensor, Tensor],
) -> None:
    """Every kept route's row of ``x`` into the layout of its expert's rank. A collective of W.

    Takes no memory in front of NCCL's own work: a rank that failed there would leave its peers in
    it, where only the process group's timeout ends them.

    Args:
        x: [T, H], contiguous.
        sources: [kept routes, or more] int32, token of each kept route by expert.
        counts: of this call.
        run_row: [E_l, W] int64 on the device.
        group: None for W = 1.
        layout: [M, H], written here; pad rows are left as they are.
        rooms: for the rows that go, and for those that come, [that many or more, H]; overwritten.
    """
    world, experts = counts.on_host.shape
    per_rank = counts.on_host.reshape(world, world, -1).sum(axis=2)  # [source, destination]
    send, receive = per_rank[rank].tolist(), per_rank[:, rank].tolist()
    outgoing, incoming = rooms[0][: sum(send)], rooms[1][: sum(receive)]
    torch.index_select(x, 0, sources[: sum(send)], out=outgoing)
    if group is None:
        incoming = outgoing
    else:
        dist.all_to_all_single(incoming, outgoing, receive, send, group=group)
    if incoming.shape[0] == 0:
        return
    own = slice(rank * (experts // world), (rank + 1) * (experts // world))
    layout[layout_rows(counts.on_device[:, own], run_row, incoming.shape[0])] = incoming


def run_fronts(
    experts: Sequence[Expert],
    counts: Counts,
    rank: int,
    layout: Layout,
    rows: Tensor,
    hidden: Tensor,
) -> None:
    """Everything before the down projection, expert by expert, in torch.

    Args:
        experts: E_l.
        rows: [M, H], read. ``hidden``: [M, F], written.
    """
    first = counts.first_rows
    own = counts.on_host[:, rank * len(experts) : (rank + 1) * len(experts)]
    for e, valid in enumerate(own.sum(axis=0).tolist()):
        if valid:
            # Pad rows between runs of the aligned layout go with it: nobody reads the result.
            end = first[e + 1] if layout is Layout.ALIGNED else first[e] + valid
            at = slice(first[e], end)
            hidden[at].copy_(experts[e].front(rows[at]))
