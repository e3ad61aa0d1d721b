"""The routes of a call as our own router leaves them: one block of device memory.

Shape letters: T tokens of this rank, K top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_tilemoe.routing import Places, Routing

_LINE_WORDS = 32


def part_words(routes: int) -> int:
    """int32 words of a block's part for so many routes: whole cache lines."""
    return -(-routes // _LINE_WORDS) * _LINE_WORDS


class Routes(NamedTuple):
    """Addresses of a call's routes and places, as kernels want them."""

    expert_ids: int
    weights: int
    positions: int
    sources: int
    counts: int


class FusedRouting(Routing, Places):
    """A Routing with its own Places, all but ``l_aux`` and ``exp_counts`` in one block of memory.

    Kernels read it by its addresses. Its tensors are views that are made for those who ask, since
    each is a torch operation, and in a steady forward nobody does.

    Args:
        block: int32 words: expert_ids, weights, positions and sources in parts of equal length,
            then counts.
        part: words of a part.
        tokens, topk: T, K.
        l_aux, exp_counts: as of Routing.

    Attributes:
        at: addresses.
    """

    block: Tensor
    part: int
    tokens: int
    topk: int
    at: Routes

    def __init__(
        self,
        block: Tensor,
        part: int,
        tokens: int,
        topk: int,
        l_aux: Tensor,
        exp_counts: Tensor,
    ) -> None:
        base, step = block.data_ptr(), 4 * part
        at = Routes(base, base + step, base + 2 * step, base + 3 * step, base + 4 * step)
        # Past the __setattr__ of a frozen dataclass.
        self.__dict__.update(
            block=block,
            part=part,
            tokens=tokens,
            topk=topk,
            l_aux=l_aux,
            exp_counts=exp_counts,
            at=at,
        )

    @property
    def expert_ids(self) -> Tensor:
        return self._matrix(0)

    @property
    def weights(self) -> Tensor:
        return self._matrix(1).view(torch.float32)

    @property
    def places(self) -> Places:
        return self

    @property
    def positions(self) -> Tensor:
        return self._matrix(2)

    @property
    def sources(self) -> Tensor:
        return self._matrix(3).flatten()

    @property
    def counts(self) -> Tensor:
        return self.block[4 * self.part :]

    def _matrix(self, number: int) -> Tensor:
        first = number * self.part
        return self.block[first : first + self.tokens * self.topk].view(self.tokens, self.topk)
