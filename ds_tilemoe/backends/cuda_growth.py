"""Whether a group's heap has to be made anew, and who may not: decided by all ranks alike.

Shape letters: W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cuda_plan import HeapNeeds
from ds_tilemoe.errors import CapacityError, DeadlineError
from ds_tilemoe.symmetric_heap import gather


class Held(NamedTuple):
    """What one rank has: the needs that its heap was made for, and whether the heap works and a
    CUDA graph holds its addresses."""

    needs: HeapNeeds
    usable: bool
    captured: bool


NOTHING = Held(HeapNeeds(), False, False)


def find_growth(
    held: Held,
    shapes: Sequence[LayerShape],
    needs_at: Callable[[LayerShape, int], HeapNeeds],
    max_tokens: int,
    meeting: dist.ProcessGroup | None,
    together: bool,
) -> HeapNeeds | None:
    """What a new heap has to hold; None if the old ones will do. A collective of ``meeting``.

    Args:
        held: of this rank.
        shapes: layers that the heap is for.
        needs_at: needs of a layer at so many tokens a rank.
        max_tokens: tokens a rank.
        meeting: the ranks that decide.
        together: they are all that have to make memory at once.

    Raises:
        CapacityError: it would have to grow and may not; on every rank of ``meeting``.
        DeadlineError: the heap has failed and cannot be replaced now; likewise.
    """
    # What one rank still holds need not be what another holds: all take the union.
    offers = [Held(*offer) for offer in gather(tuple(held), meeting)]
    tokens = max(max_tokens, *(offer.needs.max_tokens for offer in offers))
    wanted = functools.reduce(HeapNeeds.union, (offer.needs for offer in offers))
    for shape in shapes:
        wanted = wanted.union(needs_at(shape, tokens))
    if all(offer.needs == wanted and offer.usable for offer in offers):
        return None
    names = ", ".join(shape.name for shape in shapes)
    if any(offer.usable and offer.captured for offer in offers):
        why = "a CUDA graph has been captured with it"
    elif together:
        return wanted
    elif not all(offer.usable for offer in offers):
        raise DeadlineError(
            f"layer {names}: the expert-parallel group has failed; ds_tilemoe.apply() on all ranks"
            " makes a new heap"
        )
    else:
        why = "memory is made by all ranks of the job together, in apply() or the first forward"
    least = min((offer.needs for offer in offers), key=lambda needs: needs.nbytes)
    raise CapacityError(
        f"layer {names}: the heap would have to grow, but {why}: needed {wanted.nbytes} bytes for"
        f" {wanted.max_tokens} tokens a rank, available {least.nbytes} for {least.max_tokens}; set"
        " max_tokens_per_rank to the longest call, and run every layer once in each dtype and mode,"
        " before that"
    )
