"""The transport where it cannot start: every rank is told, and none waits for another.

What it does on GPUs is tested in tests/gpu/test_transport_ranks.py.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_tilemoe import transport
from ds_tilemoe.errors import BuildError
from ds_tilemoe.testing import RankContext, case, rank_tests


@case
def one_rank_cannot_start_and_all_raise(ctx: RankContext) -> None:
    if ctx.rank == 0:  # this one can, as far as it sees
        core = SimpleNamespace(Device=None)
        sys.modules["nvshmem"] = SimpleNamespace(core=core)
        for name in ("nvshmem.core", "cuda", "cuda.core"):
            sys.modules[name] = core
        torch.cuda.init = lambda: None
        torch.cuda.current_device = lambda: 0
    for _ in range(2):
        with pytest.raises(BuildError, match=r"^rank 1: nvshmem4py or CUDA does not start"):
            transport.start(ctypes.CDLL(None))


def library(status: int, pe: int, pes: int) -> Any:
    """Stands in for ours; attach gives these."""

    def attach(rank: Any, world: Any) -> int:
        rank._obj.value, world._obj.value = pe, pes
        return status

    return SimpleNamespace(
        tilemoe_transport_attach=attach,
        tilemoe_transport_detach=lambda: None,
        tilemoe_transport_peer_pointer=lambda pointer, rank: None,
    )


@pytest.mark.parametrize(
    ("status", "pe", "problem"),
    [
        (0, 1, ""),
        (0, 2, "NVSHMEM, started by others, calls this process PE 2 of 4"),
        (1, -1, "two copies of NVSHMEM's host library"),
        (2, -1, "does not take our library"),
    ],
)
def test_attach_says_what_is_wrong(status: int, pe: int, problem: str) -> None:
    told = transport._attach(library(status, pe, 4), rank=1, world=4)
    assert problem in told
    assert bool(problem) == bool(told)


test_ranks = pytest.mark.skipif(torch.cuda.is_available(), reason="here it may start")(
    rank_tests(__file__, world=2, timeout_s=100)
)
