"""What the ranks of one expert-parallel group decide together before a layer runs.

A rank that took another path than its peers would leave them waiting. So each rank says what it
can do and wants, everyone reads the same messages and :func:`agree` comes to the same end on all:
a shape (the layer runs on our backend), a reason (it keeps DeepSpeed's path) or an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ds_tilemoe.backends.base import AUTO_TILE_M, LayerShape
from ds_tilemoe.errors import (
    BuildError,
    ConfigError,
    DeadlineError,
    TileMoEError,
    UnsupportedLayerError,
)
from ds_tilemoe.symmetric_heap import gather

Decision = LayerShape | str  # a shape: our backend; text: why the layer keeps DeepSpeed's path

# Reasons that are the user's own wish, and so no matter of ``strict`` where all ranks have them.
EXCLUDED = "its name does not match tile_overlap.layers"
DISABLED = "tile_overlap.enabled is false"

DEVICE = "the device of the layers"  # "cpu" or "cuda": its name among what must be equal


@dataclass(frozen=True)
class Offer:
    """What one rank says about one layer: a shape it can run, or the reason why it does not.

    Attributes:
        layer: its name.
        outcome: shape or reason.
        unmet: the reason is an explicit setting that this rank cannot meet; all ranks raise it.
    """

    layer: str
    outcome: Decision
    unmet: bool = False


@dataclass(frozen=True)
class Message:
    """What one rank brings to a pre-flight.

    Attributes:
        offers: in model order.
        protocol: settings and versions that must be equal.
        rank: who says it, for messages; None for the place in the group.
        strict: whether this rank wants an error instead of a layer left as it is.
        grad: this rank's grad mode; None outside a forward.
        tokens: of this rank in this call; None outside a forward.
        dtype: of the experts' output in this call; None outside a forward.
        fault: why this rank cannot run any layer, and may not fall back; all ranks raise it.
        left: of layers that are in no offer and stay as they are, name and reason in words: as
            much a matter of ``strict`` as those that are.
        backend: identity of this rank's backend; "" if it has none.
        inherits: that is one from before, which may go on only where all ranks have it.
    """

    offers: tuple[Offer, ...]
    protocol: tuple[tuple[str, Any], ...]
    rank: int | None = None
    strict: bool = False
    grad: bool | None = None
    tokens: int | None = None
    dtype: str | None = None
    fault: str | None = None
    left: tuple[str, ...] = ()
    backend: str = ""
    inherits: bool = False


class DifferentCalls(TileMoEError):
    """The ranks of a group are not in the same call, so that none may wait for the others there."""


def agree(messages: Sequence[Message]) -> list[Decision]:
    """The decision about each offered layer; the same on every rank, from the same messages.

    Args:
        messages: one a rank, in group order.

    Raises:
        TileMoEError: ranks disagree about what runs at all: layers, grad mode, dtype.
        DifferentCalls: some ranks are in apply(), and others in a forward.
        BuildError: a rank cannot meet an explicit choice of backend, or cannot make it.
        ConfigError: a layer cannot meet an explicit setting.
        UnsupportedLayerError: a layer would be left as it is, and a rank is strict.
    """
    ranks = [i if message.rank is None else message.rank for i, message in enumerate(messages)]
    for rank, message in zip(ranks, messages, strict=True):
        if message.fault:
            raise BuildError(f"rank {rank}: {message.fault}")
    for rank, message in zip(ranks, messages, strict=True):
        for offer in message.offers:
            if offer.unmet:
                raise ConfigError(f"rank {rank}, layer {offer.layer}: {offer.outcome}")
    names = [tuple(offer.layer for offer in message.offers) for message in messages]
    label = ", ".join(names[0])
    _demand_equal(
        ranks,
        names,
        "the ranks swap or run different layers",
        "build and call the model alike on all ranks",
    )
    _demand_equal(
        ranks,
        ["apply()" if message.grad is None else "a forward" for message in messages],
        f"layer {label}: the ranks are in different calls",
        "call ds_tilemoe.apply() on all ranks, in the same order",
        DifferentCalls,
    )
    _demand_equal(
        ranks,
        ["enabled" if message.grad else "disabled" for message in messages],
        f"layer {label}: the ranks are in different grad modes",
        "use torch.no_grad() on all ranks of the expert-parallel group or on none",
    )
    _demand_equal(
        ranks,
        [message.dtype for message in messages],
        f"layer {label}: the ranks call it with different dtypes",
        "cast and autocast alike on all ranks",
    )
    common = _protocol_difference(ranks, messages)
    decisions = [
        _one_layer(ranks, [message.offers[i] for message in messages], common)
        for i in range(len(messages[0].offers))
    ]
    if any(message.strict for message in messages):
        kept = [
            f"{offer.layer}: {decision}"
            for offer, decision in zip(messages[0].offers, decisions, strict=True)
            if isinstance(decision, str) and decision not in (EXCLUDED, DISABLED)
        ] + _left(ranks, messages)
        if kept:
            raise UnsupportedLayerError(
                "strict is true and would leave as it is: " + "; ".join(kept)
            )
    return decisions


# What the libraries behind torch's process groups say; the last once a group has failed before.
_OF_A_GROUP = re.compile("gloo|nccl|pair closure", re.IGNORECASE)


@contextlib.contextmanager
def collective(layers: str, what: str, grad: bool | None) -> Iterator[None]:
    """Says of a collective inside that does not end what its peers may have done instead.

    Args:
        layers: names, for the message.
        what: the collective is of.
        grad: this rank's grad mode, of which another one on a peer is the usual cause; None outside
            a forward.

    Raises:
        DeadlineError: it did not end. Any other error passes as it is.
    """
    try:
        yield
    except TileMoEError:
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _OF_A_GROUP.search(str(error)):
            raise
        wanted = "call ds_tilemoe.apply, and as often"
        if grad is not None:
            mode = "enabled" if grad else "disabled"
            wanted = (
                f"run the layer, in the same grad mode (here: {mode}), and before the first time"
                " call ds_tilemoe.apply with the same enabled and layers"
            )
        raise DeadlineError(
            f"layer {layers}: a collective of {what} did not end: {error}; every rank of the group"
            f" must {wanted}. torch does not use a process group again of which a collective has"
            " failed: start the job anew"
        ) from error


def meet(
    value: Any,
    group: dist.ProcessGroup | None,
    layers: str,
    what: str,
    grad: bool | None,
    *,
    call: str,
) -> list[Any]:
    """``value`` of every rank of the group, in rank order. A collective.

    Args:
        layers, what, grad: as of :func:`collective`.
        call: where in the program the rank is; ranks in different calls do not take one's values
            for the other's.

    Raises:
        DifferentCalls: on every rank.
        DeadlineError: a peer did not come.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    with collective(layers, what, grad):
        words = gather((rank, call, value), group)
    ranks, calls, values = zip(*words, strict=True)
    _demand_equal(
        ranks,
        calls,
        f"layer {layers}: the ranks are in different calls",
        "call ds_tilemoe.apply() and the layers on all ranks, in the same order",
        DifferentCalls,
    )
    return list(values)


def _left(ranks: Sequence[int], messages: Sequence[Message]) -> list[str]:
    if all(message.left == messages[0].left for message in messages):
        return list(messages[0].left)
    return [
        f"rank {rank}: {text}"
        for rank, message in zip(ranks, messages, strict=True)
        for text in message.left
    ]


def _one_layer(ranks: Sequence[int], offers: Sequence[Offer], common: str | None) -> Decision:
    shapes = []
    for rank, offer in zip(ranks, offers, strict=True):
        if isinstance(offer.outcome, str):
            is_common = all(other.outcome == offer.outcome for other in offers)
            return offer.outcome if is_common else f"rank {rank}: {offer.outcome}"
        shapes.append(offer.outcome)
    difference = _shape_difference(ranks, shapes)
    return common or (f"shapes differ: {difference}" if difference else shapes[0])


def _protocol_difference(ranks: Sequence[int], messages: Sequence[Message]) -> str | None:
    meanings = [_what_auto_stands_for(message) for message in messages]
    for entries in zip(*(message.protocol for message in messages), strict=True):
        name, values = entries[0][0], [value for _, value in entries]
        if name == "dispatch" and "auto" in values:
            continue  # it differs from layer to layer, and shapes have it
        meant = {
            meaning.get(name, value) if value == "auto" else value
            for meaning, value in zip(meanings, values, strict=True)
        }
        if len(meant) > 1:
            return f"{name} differs: {_difference(ranks, list(map(repr, values)))}"
    return None


def _what_auto_stands_for(message: Message) -> dict[str, Any]:
    """Setting -> value, of those where the device decides it, or nothing does."""
    device = dict(message.protocol).get(DEVICE)
    tile_m = AUTO_TILE_M.get(device, "auto")
    return {"layout": "compact", "transport": "mapped", "backend": device, "tile_m": tile_m}


def _demand_equal(
    ranks: Sequence[int],
    values: Sequence[object],
    what: str,
    fix: str,
    error: type[TileMoEError] = TileMoEError,
) -> None:
    if difference := _difference(ranks, values):
        raise error(f"{what}: {difference}; fix: {fix}")


def _shape_difference(ranks: Sequence[int], shapes: Sequence[LayerShape]) -> str:
    """Field by field; "" if there is none."""
    found = []
    for field in dataclasses.fields(LayerShape):
        values = [getattr(shape, field.name) for shape in shapes]
        if difference := _difference(ranks, values):
            found.append(f"{field.name} is {difference}")
    return "; ".join(found)


def _difference(ranks: Sequence[int], values: Sequence[object]) -> str | None:
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            return f"{values[0]} on rank {ranks[0]}, {value} on rank {rank}"
    return None
