"""Where the rows of each rank's experts lie.

Words, used everywhere in the package:

- tile: tile_m x tile_n piece of GEMM 2's output.
- band: tile_m rows of one expert, all columns; the unit of readiness. A remote band has a row of
  another owner. Bands are numbered in schedule order (schedule.py).
- run: rows of one expert and one owner, in (token, k) order.
- segment: part of a run that is waited for together. chunk: what one CTA or thread claims of it.
- owner: rank whose token a row is; source at dispatch, destination at combine.

A rank's layout holds its experts in order, each from a multiple of tile_m on; inside an expert one
run per owner: rank + 1, rank + 2, ... (mod W), the rank itself last. ``compact`` packs the runs and
pads the expert; ``aligned`` pads every run to tile_m (the paper's Algorithm 1). Either way every
tile_m rows of a layout hold at least one valid row, and the valid rows of a band come first.

Shape letters: E experts of the group, W ranks, B bands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan_abi import Int64Array, Layout, PlanParams


def owners_in_layout(params: PlanParams) -> Int64Array:
    """Owners in the order in which this rank's experts hold their runs, [W]; the rank is last."""
    return (params.rank + 1 + np.arange(params.world)) % params.world


@dataclass(frozen=True)
class Layouts:
    """The layouts of all W ranks, which every rank derives alike from C.

    Attributes:
        expert_row: int64 [W, E_local + 1], first row of each expert of each rank, then its rows.
        run_row: int64 [E, W], first row of the run (expert, owner) on the expert's rank; of an
            empty run, where it would start.
        remote_rows: int64 [E], rows of the expert before its local run, pad rows included.
    """

    expert_row: Int64Array
    run_row: Int64Array
    remote_rows: Int64Array


def build_layouts(params: PlanParams, counts: Int64Array) -> Layouts:
    """Lays out all ranks, in O(W * E).

    Args:
        params: all but ``rank`` and the sending options counts.
        counts: C as ``as_counts`` gives it, int64 [W, E].

    Returns:
        The layouts. Source: paper section 3.2.1, Algorithm 1 (aligned).
    """
    world, local_experts = params.world, params.local_experts
    places = np.arange(1, world + 1)
    owners = np.repeat((np.arange(world)[:, None] + places) % world, local_experts, axis=0)
    rows = np.take_along_axis(counts.T, owners, axis=1)
    room = _pad(rows, params.tile_m) if params.layout is Layout.ALIGNED else rows
    end = np.cumsum(room, axis=1)
    begin = end - room
    expert_row = np.zeros((world, local_experts + 1), np.int64)
    expert_room = _pad(end[:, -1], params.tile_m).reshape(world, local_experts)
    np.cumsum(expert_room, axis=1, out=expert_row[:, 1:])
    run_row = np.empty_like(begin)
    np.put_along_axis(run_row, owners, begin + expert_row[:, :-1].reshape(-1, 1), axis=1)
    return Layouts(expert_row, run_row, begin[:, -1])


def valid_rows_of_bands(params: PlanParams, counts: Int64Array, bands: int) -> Int64Array:
    """Valid rows of every tile_m rows of this rank's layout.

    Args:
        params: the rank and its layout.
        counts: C, int64 [W, E].
        bands: B, rows of the layout over tile_m.

    Returns:
        int64 [B] in layout order (not in schedule order).
    """
    rows = counts[:, params.own_experts].T
    if params.layout is Layout.ALIGNED:
        blocks = rows[:, owners_in_layout(params)].ravel()
    else:
        blocks = rows.sum(axis=1)
    blocks = blocks[blocks > 0]
    room = _pad(blocks, params.tile_m)
    valid = np.full(bands, params.tile_m, np.int64)
    valid[np.cumsum(room) // params.tile_m - 1] -= room - blocks
    return valid


def _pad(rows: Int64Array, tile_m: int) -> Int64Array:
    return -(-rows // tile_m) * tile_m
