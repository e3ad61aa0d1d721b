"""Made-up routings: the wanted ratio, exact ids, repeatable."""

from __future__ import annotations

import numpy as np
import pytest

from ds_tilemoe.routings import ROUTINGS, routing_counts, routing_ids


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("world", "local_experts", "topk"), [(4, 2, 2), (8, 16, 8), (3, 4, 1)])
def test_counts_and_ids(name, world, local_experts, topk):
    shape = {"world": world, "local_experts": local_experts, "tokens": 500, "topk": topk}
    counts = routing_counts(name, seed=5, **shape)
    assert counts.dtype == np.int32
    assert (counts.sum(axis=1) == 500 * topk).all()
    assert np.array_equal(counts, routing_counts(name, seed=5, **shape))
    if ROUTINGS[name] is not None:
        rows = counts.reshape(world, world, local_experts).sum(axis=(0, 2))
        assert rows.max() / rows.mean() == pytest.approx(ROUTINGS[name], rel=0.02)
    if name != "balanced":
        assert not np.array_equal(counts, routing_counts(name, seed=6, **shape))
    for row in counts:
        ids = routing_ids(row, topk=topk, seed=7)
        assert ids.shape == (500, topk)
        assert ids.dtype == np.int32
        assert np.array_equal(np.bincount(ids.ravel(), minlength=len(row)), row)
        ordered = np.sort(ids, axis=1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all()


def test_every_expert_of_every_token_may_be_taken():
    counts = routing_counts("uniform", world=2, local_experts=2, tokens=9, topk=4, seed=0)
    assert (counts == 9).all()
    assert (np.sort(routing_ids(counts[0], topk=4, seed=0)) == np.arange(4)).all()


def test_what_cannot_be_is_refused():
    shape = {"local_experts": 2, "tokens": 100, "seed": 0}
    with pytest.raises(ValueError, match=r"one of 2 ranks cannot get 2.6 times the mean"):
        routing_counts("stress_skew", world=2, topk=2, **shape)
    with pytest.raises(ValueError, match=r"one of 4 ranks cannot get 2.6 times .* topk 8"):
        routing_counts("stress_skew", world=4, topk=8, **shape)
    with pytest.raises(ValueError, match=r"gets 2.000 times the mean, wanted 1.6"):
        routing_counts("moderate_skew", world=4, topk=2, **{**shape, "tokens": 1})
    with pytest.raises(ValueError, match="topk: got 9, wanted 1 to 8"):
        routing_counts("uniform", world=4, topk=9, **shape)
    with pytest.raises(ValueError, match="routing: got 'skew', wanted one of balanced, uniform"):
        routing_counts("skew", world=4, topk=2, **shape)
    with pytest.raises(ValueError, match="got sum 5 and maximum 3, wanted a multiple of topk 2"):
        routing_ids(np.array([3, 2]), topk=2, seed=0)
