"""What an operator is called with, and what a call tells: shapes, routings, variants, samples.

Shape letters: T tokens of a rank, K top-k, E experts of the group, E_l of a rank, W ranks, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from benches.ranks import World
from ds_tilemoe.plan_abi import PlanParams
from ds_tilemoe.routings import routing_counts, routing_ids


class OperatorShape(NamedTuple):
    """M (mean rows a rank), N and K of GEMM 2, experts a rank, top-k."""

    m: int
    n: int
    k: int
    local_experts: int
    topk: int


class Settings(NamedTuple):
    """What changes the protocol or the tiles; fields of the ``tile_overlap`` block."""

    layout: str
    tile_n: str | int
    bands_per_segment: int
    local_tail_waves: str | int


class Variant(NamedTuple):
    """One way to run the operator.

    mover: "sm" (consumer beside the producer), "none" (the drain ships all), "copy_engine" (CUDA),
    "sequential" (producer without drain, then the consumer, then scale) or "split" (the same with a
    clock between).
    ctas: of the consumer; threads on a CPU.
    """

    mover: str
    ctas: int


class Sample(NamedTuple):
    """One call on this rank, us; NaN where the variant does not tell.

    total: GEMM 2, return and weighted sum. exchange, front, gemm, copy, scale: of "split"; front is
    GEMM 1 where the operator has one. end, arrival: producer end and last arrival, from the
    producer's start. backlog, drained: chunks.
    """

    total: float
    exchange: float
    front: float
    gemm: float
    copy: float
    scale: float
    end: float
    arrival: float
    backlog: float
    drained: float


@dataclass(frozen=True)
class Routed:
    """Made-up routes of this rank and the counts of all.

    Attributes:
        counts: C [W, E] int32.
        ids: [T, K] int32. positions: earlier routes of this rank to the same expert.
        weights: [T, K] float32 in [0, 1).
    """

    counts: np.ndarray
    ids: np.ndarray
    positions: np.ndarray
    weights: np.ndarray


class Operator(Protocol):
    """GEMM 2, the return of its rows and the weighted sum on one rank of a group.

    Attributes:
        plan_params: of this rank's plans; chunk_rows need not be the backend's.
        rows: [layout rows, K], what GEMM 2 has read in the last call.
        y: [T, N], result of the last call.
        weights: [E_l, N, K].
    """

    plan_params: PlanParams
    weights: Tensor

    @property
    def rows(self) -> Tensor: ...

    @property
    def y(self) -> Tensor: ...

    def enqueue(self, variant: Variant, routing: int) -> Callable[[], Sample]:
        """One call with routing number ``routing``; its sample can be had after :meth:`finish`.
        Every rank calls it in the same order with the same arguments."""
        ...

    def finish(self) -> None:
        """Wait for the calls. Raises BenchError if one has failed."""
        ...


def make_routing(name: str, world: World, shape: OperatorShape, seed: int) -> Routed:
    """One of ``ds_tilemoe.routings.ROUTINGS``, equal seeds on all ranks.

    Raises:
        ValueError: these sizes cannot have it.
    """
    tokens, left = divmod(shape.m, shape.topk)
    if left:
        raise ValueError(f"M: got {shape.m}, wanted a multiple of topk, {shape.topk}")
    counts = routing_counts(
        name,
        world=world.ranks,
        local_experts=shape.local_experts,
        tokens=tokens,
        topk=shape.topk,
        seed=seed,
    )
    own_seed = seed * world.ranks + world.rank
    ids = routing_ids(counts[world.rank], topk=shape.topk, seed=own_seed)
    weights = np.random.default_rng(own_seed).random(ids.shape, dtype=np.float32)
    return Routed(counts, ids, positions_of(ids), weights)


def positions_of(ids: np.ndarray) -> np.ndarray:
    """[T, K] int32: earlier routes, in (token, k) order, to the same expert. No dropped ones."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    first = np.searchsorted(flat[order], flat[order])
    positions = np.empty_like(flat)
    positions[order] = np.arange(flat.size) - first
    return positions.reshape(ids.shape).astype(np.int32)


def hot_ratio(counts: np.ndarray) -> float:
    """Rows of the hottest rank over the mean."""
    ranks = len(counts)
    rows = counts.reshape(ranks, ranks, -1).sum(axis=(0, 2))
    return float(rows.max() / rows.mean())


def random_rows(shape: tuple[int, ...], scale: float, dtype: torch.dtype, seed: int, device):
    """Normal numbers on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    return made.mul_(scale)
