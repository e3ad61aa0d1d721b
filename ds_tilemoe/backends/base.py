"""What a backend does for the layers: the one seam between DeepSpeed's world and the kernels.

Shape letters: T tokens of this rank, K top-k, E experts of the group, H hidden, F ffn (input width
of the down projection), N output width of the down projection (= H), M rows of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.cost_model import Choice
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.routing import Routing
from ds_tilemoe.stats import IterationStats

AUTO_TILE_M = {"cpu": 16, "cuda": 128}  # by name of the backend; on CUDA the only one


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
        device: type of the device that the experts are on, "cpu" or "cuda".
        dispatch: on CUDA, how rows reach their experts: "fused" in GEMM 1's kernel, or "nccl". On
            the CPU there is one way.
    """

    name: str
    num_experts: int
    topk: int
    hidden: int
    ffn: int
    out: int
    dtype: torch.dtype
    device: str = "cpu"
    dispatch: str = "fused"


@dataclass(frozen=True)
class FrontGemm:
    """A front that is act(x W^T + b), or act(gate) * up with two matrices.

    Attributes:
        activation: "gelu" (the erf form), "silu" or "relu"; of the gate.
        weights: (up,) or (gate, up), each [F, H].
        biases: of each, [F] or None.
    """

    activation: str
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]


class Expert(Protocol):
    """One local expert as the backend sees it; ``layers/experts.py`` makes them."""

    def front(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [rows, F]: everything before the down projection."""
        ...

    @property
    def front_gemm(self) -> FrontGemm | None:
        """The front as one GEMM with an activation, if that is what it is."""
        ...

    @property
    def down_weight(self) -> torch.Tensor:
        """[N, F], read again in every call, so that weights may change between calls."""
        ...

    @property
    def down_bias(self) -> torch.Tensor | None:
        """[N] or None."""
        ...


class Experts(list[Expert]):
    """This rank's experts, in order, and a word that says when to look at them again.

    Attributes:
        stamp: another object once an operand of theirs lies elsewhere or is of another dtype than
            in the call before; None: nobody has looked.
    """

    stamp: object | None = None


class LayerChange(TileMoEError):
    """As a routing: this rank calls the layer in another way than its ranks have agreed on.

    The ranks have to meet. On the CPU it travels like any failure of a rank; on CUDA ``forward``
    raises it if every rank has said the same in the same call, so that all can meet at once.
    """


class Backend(Protocol):
    """One backend of one expert-parallel group.

    Every rank calls ``ensure`` and ``forward`` in one order; the rest is local.

    Attributes:
        name: "cpu" or "cuda".
        tile_m: rows of a band.
        mover: "auto", "sm", "none", or "sequential" for measuring: rows move when all tiles are
            made. May be set between calls, on each rank alone.
        last_choice, last_reason: the split of the last forward, and why it is what it is. On CUDA
            a call's record has them.
    """

    name: str
    tile_m: int
    mover: str
    last_choice: Choice | None
    last_reason: str

    @property
    def has_heap(self) -> bool:
        """Whether ``ensure`` has made one that is still there, usable or not."""
        ...

    @property
    def last_stats(self) -> IterationStats | None:
        """Of the last forward. On CUDA it waits for its end, and is None but for the mover
        "sequential", not captured; other calls leave records that nobody waits for."""
        ...

    @property
    def chosen(self) -> dict[str, object]:
        """Settings of the block, with what "auto" stands for."""
        ...

    def ensure(self, shapes: Sequence[LayerShape], max_tokens: int, together: bool = True) -> None:
        """Make the heap large enough for ``shapes`` at ``max_tokens`` tokens a rank.

        A collective of the group: every rank passes the same values. A heap that is large enough
        and not failed is kept.

        Args:
            shapes: layers, beside those that it was made for before.
            max_tokens: tokens a rank.
            together: on CUDA: all ranks of the job are in this call, each for its own group, as
                new memory wants it. Else the heap may not grow.

        Raises:
            CapacityError: the memory is not there, or may not grow (on every rank).
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
            experts: this rank's E / W experts, in order; ``Experts`` with a stamp save a look at
                each of them.
            x: [T, H], the rows to dispatch; T may be zero and may differ between ranks.
            routing: where the rows go, or the exception that kept this rank from knowing. It then
                travels in the count exchange, so that every rank raises.

        Returns:
            [T, N] in ``shape.dtype``.

        Raises:
            RankFailure: a rank passed an exception as its routing.
            CapacityError: a rank has more tokens than the heap was made for.
            DeadlineError: a peer did not do its part in time, or the heap failed earlier.

        On CUDA nothing waits for the device: the rank at fault raises its own exception, at its
        peers the result is NaN, and their next forward (or ``check``) raises.
        """
        ...

    def failure(self) -> str:
        """The first cause that made the heap unusable, or "". On CUDA it waits for the device."""
        ...


def bands_per_segment(config: TileOverlapConfig) -> int:
    """The setting; "auto" is 1, as stores into mapped memory gain nothing by more."""
    return 1 if config.bands_per_segment == "auto" else config.bands_per_segment


def local_problem(
    shape: LayerShape, x: torch.Tensor, routing: Routing | Exception, device: str
) -> Exception | None:
    """Why this rank cannot take part; told to all ranks, so that none waits for this one."""
    if isinstance(routing, Exception):
        return routing
    if str(x.device) != device:
        return ValueError(f"rows are on {x.device}, wanted {device}")
    if x.dim() != 2 or x.shape[1] != shape.hidden:
        return ValueError(f"rows have shape {list(x.shape)}, wanted [tokens, {shape.hidden}]")
    if x.dtype != shape.dtype:
        return TypeError(
            f"rows are {x.dtype}, the experts' weights {shape.dtype}: cast one of them or run "
            "under torch.autocast"
        )
    if tuple(routing.expert_ids.shape) != (x.shape[0], shape.topk):
        return ValueError(
            f"expert_ids has shape {list(routing.expert_ids.shape)}, wanted "
            f"[{x.shape[0]}, {shape.topk}]"
        )
    return None
