"""What the ranks of one expert-parallel group decide together before a layer runs.

A rank that took another path than its peers would leave them waiting. So each rank says what it
can do and wants, everyone reads the same messages and :func:`agree` comes to the same end on all:
a shape (the layer runs on our backend), a reason (it keeps DeepSpeed's path) or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.errors import BuildError, TileMoEError, UnsupportedLayerError

Decision = LayerShape | str  # a shape: our backend; text: why the layer keeps DeepSpeed's path


@dataclass(frozen=True)
class Offer:
    """What one rank says about one layer: a shape it can run, or the reason why it cannot."""

    layer: str
    outcome: Decision


@dataclass(frozen=True)
class Message:
    """What one rank brings to a pre-flight.

    Attributes:
        offers: in model order.
        protocol: settings and versions that must be equal.
        strict: whether this rank wants an error instead of a layer left as it is.
        grad: this rank's grad mode; None outside a forward.
        tokens: of this rank in this call; None outside a forward.
        situation: dtype and mode of this call in words; None outside a forward.
        fault: an explicit choice that this rank cannot meet; all ranks raise it.
    """

    offers: tuple[Offer, ...]
    protocol: tuple[tuple[str, Any], ...]
    strict: bool = False
    grad: bool | None = None
    tokens: int | None = None
    situation: str | None = None
    fault: str | None = None


def agree(messages: Sequence[Message]) -> list[Decision]:
    """The decision about each offered layer; the same on every rank, from the same messages.

    Args:
        messages: one a rank, in group order.

    Raises:
        TileMoEError: ranks disagree about what runs at all: layers, grad mode, dtype.
        BuildError: a rank cannot meet an explicit choice of backend.
        UnsupportedLayerError: a layer would be left as it is, and a rank is strict.
    """
    for rank, message in enumerate(messages):
        if message.fault:
            raise BuildError(f"rank {rank}: {message.fault}")
    names = [tuple(offer.layer for offer in message.offers) for message in messages]
    label = ", ".join(names[0])
    _demand_equal(
        names,
        "the ranks swap or run different layers",
        "build and call the model alike on all ranks",
    )
    _demand_equal(
        [{None: None, True: "enabled", False: "disabled"}[message.grad] for message in messages],
        f"layer {label}: the ranks are in different grad modes",
        "use torch.no_grad() on all ranks of the expert-parallel group or on none",
    )
    _demand_equal(
        [message.situation for message in messages],
        f"layer {label}: the ranks call it with different dtypes or modes",
        "cast, autocast and switch train()/eval() alike on all ranks",
    )
    common = _protocol_difference(messages)
    decisions = [
        common or _one_layer([message.offers[i] for message in messages])
        for i in range(len(messages[0].offers))
    ]
    if any(message.strict for message in messages):
        kept = [
            f"{offer.layer}: {decision}"
            for offer, decision in zip(messages[0].offers, decisions, strict=True)
            if isinstance(decision, str)
        ]
        if kept:
            raise UnsupportedLayerError(
                "strict is true and would leave as it is: " + "; ".join(kept)
            )
    return decisions


def _one_layer(offers: Sequence[Offer]) -> Decision:
    outcomes = [offer.outcome for offer in offers]
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            return outcome if len(set(outcomes)) == 1 else f"rank {rank}: {outcome}"
    for rank, outcome in enumerate(outcomes):
        if outcome != outcomes[0]:
            return f"shapes differ: {outcomes[0]} on rank 0, {outcome} on rank {rank}"
    return outcomes[0]


def _protocol_difference(messages: Sequence[Message]) -> str | None:
    for rank, message in enumerate(messages):
        for (name, first), (_, value) in zip(messages[0].protocol, message.protocol, strict=True):
            if value != first:
                return f"{name} differs: {first!r} on rank 0, {value!r} on rank {rank}"
    return None


def _demand_equal(values: Sequence[object], what: str, fix: str) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TileMoEError(f"{what}: {values[0]} on rank 0, {value} on rank {rank}; fix: {fix}")
