"""Failures that kernels tell the host, in words and as exceptions.

Shape letters: E experts of the group, W ranks.
"""

from __future__ import annotations

import torch.distributed as dist

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.errors import CapacityError, RankFailure, TileMoEError
from ds_tilemoe.plan_abi import Int64Array
from ds_tilemoe.symmetric_heap import gather

_USABLE = (abi.Outcome.RANK_FAILURE, abi.Outcome.LAYER_MISMATCH, abi.Outcome.CAPACITY)


def describe(record: abi.ErrorRecord) -> str:
    """What made a heap unusable."""
    if record.outcome == abi.Outcome.PLAN_OVERFLOW:
        return (
            f"rank {record.rank} got a plan of {record.seen} rows in call {record.epoch}, its"
            f" buffers hold {record.wanted}"
        )
    if record.outcome != abi.Outcome.DEADLINE:
        return f"rank {record.rank} ended call {record.epoch} with outcome {record.outcome}"
    who, call = f"rank {record.rank} of the group waited too long", f"call {record.epoch}"
    if record.wait == abi.Wait.COUNTS:
        return (
            f"{who} for the counts of rank {record.peer} ({call}, seen {record.seen}); all ranks"
            " must run the same layers equally often and agree on grad mode"
        )
    if record.wait == abi.Wait.BAND:
        return (
            f"{who} for its own band {record.band} ({call}: {record.seen} of {record.wanted} tiles)"
        )
    return (
        f"{who} for rows of rank {record.peer} ({call}: {record.seen} of {record.wanted} rows came)"
    )


def leaves_heap_usable(record: abi.ErrorRecord) -> bool:
    """Whether every rank has found the same at the count exchange, and the next call may go on."""
    return record.outcome in _USABLE


def refusal(
    record: abi.ErrorRecord,
    shape: LayerShape,
    problem: Exception | None,
    group: dist.ProcessGroup | None,
) -> TileMoEError:
    """The error of such a call, the same on every rank. A collective of the group.

    Args:
        problem: why this rank had no routing, if it is the one.
    """
    peer = record.peer
    if record.outcome == abi.Outcome.CAPACITY:
        return CapacityError(
            f"rank {peer} of the group has too many tokens in layer {shape.name}: needed"
            f" {record.seen}, available {record.wanted}; set max_tokens_per_rank to the longest"
            " call and apply() again"
        )
    if record.outcome == abi.Outcome.RANK_FAILURE:
        texts = gather(problem and f"{type(problem).__name__}: {problem}", group)
        return RankFailure(f"rank {peer} of the group failed in its routing: {texts[peer]}")
    names = gather(shape.name, group)
    return RankFailure(
        f"ranks run different layers in the same call: rank 0 {names[0]}, rank {peer}"
        f" {names[peer]}; layers of a group must run in one order"
    )


def overfull(counts: Int64Array, rows_in: int) -> str:
    """What a rank would say whose plan did not fit; "" if all do. Found alike on every rank.

    Args:
        counts: C [W, E].
        rows_in: most rows that a rank may be sent.
    """
    world = counts.shape[0]
    incoming = counts.reshape(world, world, -1).sum(axis=(0, 2))
    rank = int(incoming.argmax())
    if incoming[rank] <= rows_in:
        return ""
    return (
        f"rank {rank} of the group was to get {incoming[rank]} rows, its buffers hold {rows_in}: a"
        " gate names one expert twice for a token"
    )
