"""Calls of ``bench.py contention``: layers, routings, switches between them, traces.

Shape letters: W ranks, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_tilemoe.routings import ROUTINGS, routing_counts
from ds_tilemoe.simulator import Problem

Counts = npt.NDArray[np.int32]
Calls = list[tuple[int, Counts]]  # tokens of a rank, C [W, E]

POOL = 8  # different routings of one name
MOST_SKEW = 0.95  # of all rows: no hot rank gets more
NAMES = ("balanced", "uniform", "moderate_skew", "stress_skew")
MIXED_TOKENS = (8192, 4096, 2048)
MIXED_SPLITS = (8, 14, 16)  # static ones beside a trace
LONGEST_STRETCH = 8  # calls


class Case(NamedTuple):
    """M (mean rows a rank), N, K of GEMM 2, experts a rank, top-k, columns of a tile."""

    m: int
    n: int
    k: int
    local_experts: int
    topk: int
    tile_n: int

    @property
    def tokens(self) -> int:
        return self.m // self.topk

    def problem(self, ranks: int) -> Problem:
        """The simulator's."""
        return Problem(
            ranks, self.local_experts, self.tokens, self.topk, self.n, self.k, self.tile_n
        )


def pool(case: Case, routing: str, ranks: int, hot: int = 0) -> list[Counts]:
    """Different C of one routing. A skew keeps its hot rank: that is what steady means. Where so
    few ranks cannot have it, nearly all rows go to one rank: records have the hot_ratio."""
    made = []
    for seed in range(POOL):
        if routing.endswith("skew") and (ROUTINGS[routing] or 0) > MOST_SKEW * ranks:
            counts = _most_skewed(case, ranks, seed)
        else:
            counts = routing_counts(
                routing,
                world=ranks,
                local_experts=case.local_experts,
                tokens=case.tokens,
                topk=case.topk,
                seed=seed,
            )
        if routing.endswith("skew"):
            rows = counts.reshape(ranks, ranks, -1).sum(axis=(0, 2))
            shift = (hot - int(rows.argmax())) * case.local_experts
            counts = np.roll(counts, shift, axis=1)
        made.append(counts)
    return made


def _most_skewed(case: Case, ranks: int, seed: int) -> Counts:
    """``MOST_SKEW`` of each rank's rows to one, the others sharing the rest."""
    rng = np.random.default_rng(seed)
    to_rank = np.full(ranks, round((1 - MOST_SKEW) * case.m / (ranks - 1)))
    to_rank[rng.integers(ranks)] += case.m - to_rank.sum()
    even = np.full(case.local_experts, 1 / case.local_experts)
    shares = [[rng.multinomial(rows, even) for rows in to_rank] for _ in range(ranks)]
    return np.array(shares).reshape(ranks, -1).astype(np.int32)


def hot_ratio(counts: Counts) -> float:
    """Rows of the hottest rank over the mean."""
    rows = counts.reshape(len(counts), len(counts), -1).sum(axis=(0, 2))
    return float(rows.max() / rows.mean())


def in_turn(case: Case, some: Sequence[Counts], count: int) -> Calls:
    """So many calls."""
    return [(case.tokens, some[i % len(some)]) for i in range(count)]


def back_and_forth(
    case: Case, pools: tuple[Sequence[Counts], Sequence[Counts]], visits: int, first: int, more: int
) -> tuple[Calls, list[int]]:
    """Calls of one routing, of the other, of the first again, ...

    Args:
        pools: of both.
        visits: of the second one, and as many returns.
        first, more: calls before the first switch, and behind each.

    Returns:
        The calls, and the first one behind each switch; those to the second routing are even.
    """
    endless = [itertools.cycle(some) for some in pools]
    calls = [(case.tokens, next(endless[0])) for _ in range(first)]
    switches = []
    for switch in range(2 * visits):
        switches.append(len(calls))
        calls += [(case.tokens, next(endless[(switch + 1) % 2])) for _ in range(more)]
    return calls, switches


def traces(case: Case, ranks: int, count: int) -> dict[str, Calls]:
    """Input that does not stand still, ``count`` calls or a few more of each kind: "mixed" and
    "bimodal" have ``MIXED_TOKENS``, the others the case's tokens."""
    rng = np.random.default_rng(0)
    shorter = [case._replace(m=length * case.topk) for length in MIXED_TOKENS]
    pools = {(c, n): pool(c, n, ranks) for c in (*shorter, case) for n in NAMES}

    def blend(share: float, index: int) -> Counts:
        low, high = pools[case, "balanced"][index % POOL], pools[case, "stress_skew"][index % POOL]
        return np.rint((1 - share) * low + share * high).astype(np.int32)

    # Stretches of one routing and length, as requests bring them.
    mixed: Calls = []
    while len(mixed) < count:
        c, name = shorter[rng.integers(len(shorter))], NAMES[rng.integers(len(NAMES))]
        some = pools[c, name]
        stretch = int(rng.integers(1, LONGEST_STRETCH + 1))
        mixed += [(c.tokens, some[i % POOL]) for i in range(stretch)]
    bimodal = [
        (c.tokens, pools[c, "uniform"][i % POOL])
        for i, c in enumerate(shorter[0] if rng.random() < 0.5 else shorter[-1] for _ in mixed)
    ]
    drift = [(case.tokens, blend(i / count, i // 8)) for i in range(count)]
    bursts = [
        (case.tokens, pools[case, "stress_skew" if i % 8 == 7 else "balanced"][i % POOL])
        for i in range(count)
    ]
    return {"mixed": mixed, "bimodal": bimodal, "drift": drift, "bursts": bursts}
