"""The oracle against sums written out by hand."""

from __future__ import annotations

import pytest
import torch

from ds_tilemoe import reference
from ds_tilemoe.routing import Routing


def routing_of(ids, weights):
    ids = torch.tensor(ids, dtype=torch.int32)
    return Routing(ids, torch.tensor(weights), torch.zeros(()), torch.zeros(3).long())


EXPERTS = [lambda x: x, lambda x: 10 * x, lambda x: (100 * x, "bias that DeepSpeed drops")]


def test_weighted_sum_of_kept_routes():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    routing = routing_of([[0, 2], [1, -1], [-1, -1]], [[0.25, 0.5], [2.0, 0.0], [0.0, 0.0]])
    want = torch.tensor([[50.25, 100.5], [60.0, 80.0], [0.0, 0.0]])
    assert torch.equal(reference.moe(x, routing, EXPERTS), want)


def test_sums_in_fp32():
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    y = reference.moe(x, routing_of([[0, 1]], [[1.0, 2.0**-12]]), EXPERTS[:2])
    assert y.dtype == torch.float32
    assert y.item() == 1 + 10 * 2.0**-12


def test_no_tokens():
    empty = Routing(
        torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), torch.zeros(()), torch.zeros(3)
    )
    assert reference.moe(torch.empty(0, 5), empty, EXPERTS).shape == (0, 5)


def test_no_experts():
    with pytest.raises(ValueError, match="0 experts"):
        reference.moe(torch.ones(1, 1), routing_of([[0]], [[1.0]]), [])


def test_counts_and_places():
    ids = torch.tensor([[2, 0], [-1, 2], [2, 1], [0, -1]])
    assert reference.counts(ids, 4).tolist() == [2, 1, 3, 0]
    assert reference.places_in_runs(ids).tolist() == [[0, 0], [-1, 1], [2, 0], [1, -1]]
