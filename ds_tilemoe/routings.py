"""Made-up routings for tests and benchmarks: counts with a known skew, and expert ids to match.

Shape letters: T tokens a rank, K top-k, E experts of the group, W ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Rows of the hottest rank over the mean of all ranks; None where chance decides.
ROUTINGS: dict[str, float | None] = {
    "balanced": 1.0,
    "uniform": None,
    "moderate_skew": 1.6,
    "stress_skew": 2.6,
}


def routing_counts(
    name: str, *, world: int, local_experts: int, tokens: int, topk: int, seed: int
) -> npt.NDArray[np.int32]:
    """Draws C for one of ``ROUTINGS``.

    Args:
        name: balanced gives every expert the same; uniform draws each row's expert; the skews send
            one rank (drawn too) their multiple of the mean, the others sharing the rest.
        world: W.
        local_experts: experts a rank; E = world * local_experts.
        tokens: T, the same on every rank.
        topk: K, different experts a token.
        seed: equal seeds give equal counts.

    Returns:
        C[source rank, expert], int32 [W, E]; every row adds up to T * K.

    Raises:
        ValueError: no such routing, or none of these sizes has the wanted ratio to within 2 %.
    """
    if name not in ROUTINGS:
        raise ValueError(f"routing: got {name!r}, wanted one of {', '.join(ROUTINGS)}")
    experts, rows = world * local_experts, tokens * topk
    if not 1 <= topk <= experts:
        raise ValueError(f"topk: got {topk}, wanted 1 to {experts}, the number of experts")
    rng = np.random.default_rng(seed)
    wanted = ROUTINGS[name]
    if name == "balanced":
        counts = np.full((world, experts), rows // experts)
        extra = rows % experts
        for rank in range(world):
            counts[rank, (rank * extra + np.arange(extra)) % experts] += 1
    elif wanted is None:
        counts = np.stack([_draw(rng, rows, experts, tokens) for _ in range(world)])
    else:
        hot_rows = round(rows * wanted / world)
        if wanted > world or hot_rows > local_experts * tokens:
            raise ValueError(
                f"routing {name}: one of {world} ranks cannot get {wanted} times the mean with "
                f"topk {topk} and {local_experts} experts a rank; use more ranks or experts a rank"
            )
        to_rank = np.full(world, (rows - hot_rows) // (world - 1))
        to_rank[: (rows - hot_rows) % (world - 1)] += 1
        hot = rng.integers(world)
        to_rank = np.insert(to_rank[:-1], hot, hot_rows)
        shares = [[_draw(rng, n, local_experts, tokens) for n in to_rank] for _ in range(world)]
        counts = np.array(shares).reshape(world, experts)
    per_rank = counts.reshape(world, world, local_experts).sum(axis=(0, 2))
    ratio = float(per_rank.max() / max(per_rank.mean(), 1e-9))
    if wanted is not None and rows and abs(ratio / wanted - 1) > 0.02:
        raise ValueError(
            f"routing {name}: the hottest rank gets {ratio:.3f} times the mean, wanted {wanted} to "
            f"within 2 %; {tokens} tokens a rank are too few"
        )
    return counts.astype(np.int32)


def routing_ids(counts: npt.NDArray[np.int32], *, topk: int, seed: int) -> npt.NDArray[np.int32]:
    """Makes expert ids that a rank's counts come from exactly.

    Args:
        counts: one rank's row of C, [E]; adds up to T * K, no expert more often than T.
        topk: K.
        seed: equal seeds give equal ids.

    Returns:
        Expert ids, int32 [T, K]; the experts of a token differ.

    Raises:
        ValueError: no such ids exist.
    """
    tokens, left = divmod(int(counts.sum()), topk)
    if left or counts.max() > tokens:
        raise ValueError(
            f"counts: got sum {counts.sum()} and maximum {counts.max()}, wanted a multiple of topk "
            f"{topk} and no expert more than sum / topk times"
        )
    rng = np.random.default_rng(seed)
    experts = rng.permutation(len(counts))
    # Entries of one expert are neighbours and at most T, a token's entries are T apart.
    ids = np.repeat(experts, counts[experts]).reshape(topk, tokens).T
    return rng.permuted(rng.permutation(ids), axis=1).astype(np.int32)


def _draw(rng: np.random.Generator, rows: int, experts: int, most: int) -> npt.NDArray[np.int64]:
    """Rows over experts at random, [experts], at most `most` each; the excess is drawn again."""
    counts = rng.multinomial(rows, np.full(experts, 1 / experts))
    while (excess := int(np.maximum(counts - most, 0).sum())) > 0:
        counts = np.minimum(counts, most)
        free = counts < most
        counts[free] += rng.multinomial(excess, np.full(free.sum(), 1 / free.sum()))
    return counts
