"""In which order a rank makes its bands, and with that their numbers.

Experts with more remote bands first, ties by lower id, so that the largest transfers start
earliest. Remote bands go before local ones, which nobody waits for; but running all local bands in
a pass of their own reads every expert's weights twice, so only ``local_tail_bands`` of them need go
last and the others follow their own expert's remote bands.

Shape letters: B bands, of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import Layouts
from .plan_abi import Int64Array, PlanParams


@dataclass(frozen=True)
class Schedule:
    """Bands of one rank in the order in which it makes them.

    Attributes:
        experts: int64 [E_local], local experts in schedule order.
        first_band: int64 [E_local], number of the first remote band of each local expert; the
            others follow it without a gap.
        remote_bands: int64 [E_local], remote bands of each local expert.
        band_expert: int64 [B], local expert of each band.
        band_row: int64 [B], first layout row of each band.
    """

    experts: Int64Array
    first_band: Int64Array
    remote_bands: Int64Array
    band_expert: Int64Array
    band_row: Int64Array

    @property
    def last_remote_band(self) -> int:
        """Number of the last remote band; -1 if there is none. The first one is band 0."""
        return int(
            np.max((self.first_band + self.remote_bands - 1)[self.remote_bands > 0], initial=-1)
        )


def build_schedule(params: PlanParams, layouts: Layouts) -> Schedule:
    """Orders the bands of ``params.rank``, in O(E_local + B).

    Args:
        params: the rank, ``tile_m`` and ``local_tail_bands``.
        layouts: the layouts of all ranks.

    Returns:
        The schedule. Source: paper section 3.2.2; ``local_tail_bands`` is ours.
    """
    tile_m = params.tile_m
    expert_row = layouts.expert_row[params.rank]
    remote = -(-layouts.remote_rows[params.own_experts] // tile_m)
    local = np.diff(expert_row) // tile_m - remote
    experts = np.argsort(-remote, kind="stable")

    # Local bands of the walk stay with their expert until only the tail is left.
    local_walk = local[experts]
    before = np.cumsum(local_walk) - local_walk
    all_local = int(local_walk.sum())
    tail = params.local_tail_bands if params.local_tail_bands >= 0 else all_local
    kept = np.clip(all_local - tail - before, 0, local_walk)

    # One piece: `count` neighbouring bands of one expert, from its band `index` on.
    remote_walk = remote[experts]
    count = np.concatenate([np.stack([remote_walk, kept], axis=1).ravel(), local_walk - kept])
    index = np.concatenate(
        [np.stack([np.zeros_like(kept), remote_walk], axis=1).ravel(), remote_walk + kept]
    )
    expert = np.concatenate([np.repeat(experts, 2), experts])
    number = np.cumsum(count) - count
    first_band = np.empty_like(remote)
    first_band[experts] = number[: 2 * len(experts) : 2]

    band_expert = np.repeat(expert, count)
    first_row = expert_row[expert] + (index - number) * tile_m
    band_row = np.repeat(first_row, count) + np.arange(len(band_expert)) * tile_m
    return Schedule(experts, first_band, remote, band_expert, band_row)
