"""What a backend does for the layers: the one seam between DeepSpeed's world and the kernels.

Shape letters: T tokens of this rank, K top-k, E experts of the group, H hidden, F ffn (input width
of the down projection), N output width of the down projection (= H), M rows of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_tilemoe.routing import Routing
from ds_tilemoe.stats import IterationStats


@dataclass(frozen=True)
class LayerShape:
    """The rank-invariant numbers of one MoE layer; equal on every rank of the group.

    Attributes:
        name: the layer's name in the model, for messages and stats.
        num_experts: E, over the whole group.
        topk: K.
        hidden: H, width of the rows that are dispatched.
        ffn: F, width of the rows that the down projection reads.
        out: N, width of the rows that come back.
        dtype: dtype of the expert weights and of the rows.
    """

    name: str
    num_experts: int
    topk: int
    hidden: int
    ffn: int
    out: int
    dtype: torch.dtype


class Expert(Protocol):
    """One local expert as the backend sees it; ``layers/experts.py`` makes them."""

    def front(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, F]: everything before the down projection."""
        ...

    @property
    def down_weight(self) -> torch.Tensor:
        """[N, F], read again in every call, so that weights may change between calls."""
        ...

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[N] or None."""
        ...


class Backend(Protocol):
    """One backend of one expert-parallel group.

    Every rank calls ``ensure`` and ``forward`` in one order; the rest is local.

    Attributes:
        name: "cpu".
        tile_m: rows of a band.
        mover: "auto", "sm", "none", or "sequential" for measuring: rows move when all tiles are
            made. May be set between calls, on each rank alone.
        last_stats: of the last forward.
    """

    name: str
    tile_m: int
    mover: str
    last_stats: IterationStats | None

    @property
    def chosen(self) -> dict[str, object]:
        """Settings of the block, with what "auto" stands for."""
        ...

    def ensure(self, shapes: Sequence[LayerShape], max_tokens: int) -> None:
        """Make the heap large enough for ``shapes`` at ``max_tokens`` tokens a rank.

        A collective of the group: every rank passes the same values. A heap that is large enough
        and not failed is kept.

        Raises:
            CapacityError: the memory is not there (on every rank).
        """
        ...

    def forward(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: torch.Tensor,
        routing: Routing | Exception,
    ) -> torch.Tensor:
        """Dispatch, expert GEMMs, combine and scale of one layer.

        Args:
            shape: the layer.
            experts: this rank's E / W experts, in order.
            x: [T, H], the rows to dispatch; T may be zero and may differ between ranks.
            routing: where the rows go, or the exception that kept this rank from knowing. It then
                travels in the count exchange, so that every rank raises.

        Returns:
            [T, N] in ``shape.dtype``.

        Raises:
            RankFailure: a rank passed an exception as its routing.
            CapacityError: a rank has more tokens than the heap was made for.
            DeadlineError: a peer did not do its part in time, or the heap failed earlier.
        """
        ...

    def failure(self) -> str:
        """The first cause that made the heap unusable, or ""."""
        ...
