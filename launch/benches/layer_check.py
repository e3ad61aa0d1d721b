"""Whether the swapped layers give what DeepSpeed's own give, each time the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

import ds_tilemoe
from benches.operator_check import TOLERANCE, bits, check_peer
from benches.ranks import World


def check(
    world: World,
    swapped: Any,
    plain: Any,
    dropless: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
) -> float:
    """Compare both rules of dropping, swapped with plain, and ``dropless`` with plain.

    Args:
        swapped, plain: {"nodrop": MoE, "drop": MoE}.
        dropless: the torch layer.

    Returns:
        Largest ||ours - DeepSpeed's|| / ||DeepSpeed's|| of a token, over ranks and inputs.

    Raises:
        BenchError: it is above twice the tolerance of an operator, since both sides round; two
            calls differ; or a token that DeepSpeed drops is not 0. On every rank.
    """
    worst = 0.0
    for x in inputs:
        for rule in ("nodrop", "drop"):
            got, again, want = (layer[rule](x)[0] for layer in (swapped, swapped, plain))
            different = int((bits(got) != bits(again)).sum())
            text = f"{rule}: {different} elements of two calls differ: not timed"
            world.agree(text if different else "")
            error = float(world.reduce(np.array([token_error(got, want)]))[0])
            limit = 2 * TOLERANCE[x.dtype]
            text = f"{rule}: a token is off by {error:.2e} of its norm, wanted at most {limit:.0e}"
            world.agree("" if error <= limit else f"{text}: not timed")
            worst = max(worst, error)
        check_peer(world, "the torch layer", dropless(x), plain["nodrop"](x)[0])
    return worst


def check_replays(world: World, replay: Any, inputs: Sequence[Tensor]) -> None:
    """A graph gives the bits of its eager forward, on inputs that it was not captured with too.

    Args:
        replay: has ``load(x)``, is called, and has the ``forward`` that it was captured from.

    Raises:
        BenchError: it does not; on every rank.
    """
    for x in inputs:
        replay.load(x)
        got = replay().clone()
        _need_same(world, "as a graph", got, replay.forward(x))


def check_sequential(world: World, alone: Any, swapped: Any, x: Tensor) -> None:
    """One part after the other gives the bits of the layer that overlaps them.

    Args:
        alone, swapped: {"nodrop": MoE}; the first is called inside ``measure_combine_alone``.

    Raises:
        BenchError: it does not; on every rank.
    """
    with ds_tilemoe.measure_combine_alone(alone):
        got = alone["nodrop"](x)[0]
    _need_same(world, "sequential:", got, swapped["nodrop"](x)[0])


def _need_same(world: World, name: str, got: Tensor, want: Tensor) -> None:
    different = int((bits(got) != bits(want)).sum())
    text = f"{name} {different} of {got.numel()} elements are others: not timed"
    world.agree(text if different else "")


def token_error(got: Tensor, want: Tensor) -> float:
    """Largest relative error of a token; one that is 0 in ``want`` counts as it is in ``got``."""
    if not want.numel():
        return 0.0
    norms = want.float().norm(dim=-1)
    errors = (got.float() - want.float()).norm(dim=-1) / norms.where(norms > 0, 1.0)
    worst = float(errors.max())
    return worst if np.isfinite(worst) else 1e9
