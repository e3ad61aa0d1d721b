"""The transport where it cannot start or has no room: every rank is told, none waits for another.

What it does on GPUs is tested in tests/gpu/test_transport_ranks.py, how it foresees what NVSHMEM
does in test_transport_room.py.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_models import raised, same_everywhere
from nvshmem_heap import GIB, MIB, NvshmemHeap

from ds_tilemoe import transport
from ds_tilemoe.errors import BuildError, CapacityError, TileMoEError
from ds_tilemoe.testing import RankContext, case, rank_tests
from ds_tilemoe.transport_room import read_settings


def pretend_there_is_nvshmem(modules: dict[str, Any]) -> None:
    """As far as a rank sees that asks its own machine only."""
    properties = SimpleNamespace(
        virtual_memory_management_supported=True, gpu_direct_rdma_with_cuda_vmm_supported=True
    )
    device = SimpleNamespace(properties=properties, set_current=lambda: None)
    core = SimpleNamespace(Device=lambda index: device)
    modules["nvshmem"] = SimpleNamespace(core=core)
    for name in ("nvshmem.core", "cuda", "cuda.core"):
        modules[name] = core


@case
def one_rank_cannot_start_and_all_raise(ctx: RankContext) -> None:
    if ctx.rank == 0:  # this one can, as far as it sees
        pretend_there_is_nvshmem(sys.modules)
        torch.cuda.init = lambda: None
        torch.cuda.current_device = lambda: 0
    for _ in range(2):
        with pytest.raises(BuildError, match=r"^rank 1: nvshmem4py or CUDA does not start"):
            transport.start(ctypes.CDLL(None))


@case
def one_rank_has_a_setting_that_is_refused(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        modules: dict[str, Any] = {}
        pretend_there_is_nvshmem(modules)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(torch.cuda, "init", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        if ctx.rank == 1:
            patch.setenv("NVSHMEM_ENABLE_ALIGNED_MALLOC", "1")
        error = raised(transport.start, ctypes.CDLL(None))
        assert isinstance(error, BuildError)
        text = same_everywhere(str(error))
        assert text.startswith("rank 1: NVSHMEM_ENABLE_ALIGNED_MALLOC: got '1'; wanted 0")
        assert text.endswith("unset it on all ranks"), "and nothing is to be installed"


@contextmanager
def started(heap: NvshmemHeap, free: int = 1 << 50) -> Iterator[transport.Transport]:
    """A transport on a heap that is played; ``free``: bytes of device memory."""
    bindings = SimpleNamespace(malloc=heap.malloc, free=heap.free)
    library = SimpleNamespace(tilemoe_transport_peer_pointer=heap.peer_pointer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nvshmem", SimpleNamespace(bindings=bindings))
        patch.setitem(sys.modules, "nvshmem.bindings", bindings)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 50))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        block = lambda address, *_: SimpleNamespace(data_ptr=lambda: address)  # noqa: E731
        patch.setattr(transport, "_as_tensor", block)
        device = torch.device("cuda", 0)
        settings = read_settings(heap.environment, has_vmm=True)
        yield transport.Transport(library, device, torch.distributed.get_rank(), 2, settings)


@case
def more_than_nvshmem_may_take(ctx: RankContext) -> None:
    """By the limit of one rank; NVSHMEM is not asked, as it would not survive."""
    limit = (8, 3)[ctx.rank] * GIB
    with started(NvshmemHeap(limit=limit)) as link:
        first = link.allocate(1 * GIB)  # beside the piece of NVSHMEM's own blocks
        error = raised(link.allocate, 1 * GIB + 1)
        assert isinstance(error, CapacityError)
        said = f"needed {GIB + 1} bytes, available {GIB}, as NVSHMEM's heap stays below"
        assert said in same_everywhere(str(error).partition(", here")[0])
        assert f"NVSHMEM_MAX_MEMORY_PER_GPU, here {limit}" in str(error)
        # 1.5 GiB there are; a piece more than 1 GiB; and one that stays free.
        assert f"set that to {3.5 * GIB:.0f} on all ranks" in str(error)
        assert "max_tokens_per_rank" in str(error)
        link.free(first)
        link.allocate(1 * GIB)
        link.allocate(1 * GIB)


@case
def less_device_memory_than_needed(ctx: RankContext) -> None:
    """It counts only where NVSHMEM takes memory; what it has taken it keeps."""
    with started(NvshmemHeap(), free=(1 << 50, GIB)[ctx.rank]) as link:
        text = same_everywhere(str(raised(link.allocate, GIB + 1)))
        said = f"needed {GIB + 1} bytes, {GIB + 512 * MIB} with NVSHMEM's rounding, available {GIB}"
        assert f"{said} on" in text
        assert "rank 1; set a smaller max_tokens_per_rank" in text
        block = link.allocate(512 * MIB)
        link.free(block)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 50))
            link.allocate(512 * MIB)
            assert isinstance(raised(link.allocate, 512 * MIB), CapacityError)
    with started(NvshmemHeap(), free=GIB) as link:
        link.allocate(GIB)  # whole pieces, of which it takes no more


@case
def a_failure_of_one_rank_alone(ctx: RankContext) -> None:
    """Its peers are on their way to where all meet next."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with started(NvshmemHeap()) as link:
        for place, name in (
            (torch.cuda, "mem_get_info"),
            (sys.modules["nvshmem.bindings"], "malloc"),
            (transport, "_as_tensor"),
        ):
            with pytest.MonkeyPatch.context() as patch:
                if ctx.rank == 1:
                    patch.setattr(place, name, fail)
                error = raised(link.allocate, 512 * MIB)
            assert type(error) is TileMoEError
            said = "rank 1: blocks of NVSHMEM cannot be made: RuntimeError: CUDA error: unspecified"
            assert same_everywhere(str(error)).startswith(said)
        link.allocate(512 * MIB)


@case
def a_heap_of_one_size(ctx: RankContext) -> None:
    """Without CUDA VMM it refuses by itself, and no device memory is wanted."""
    with started(NvshmemHeap(fixed=16 * MIB), free=0) as link:
        block = link.allocate(16 * MIB)
        error = raised(link.allocate, 1 * GIB)
        assert isinstance(error, CapacityError)
        text = same_everywhere(str(error))
        said = rf"no room for {GIB} bytes; raise NVSHMEM_SYMMETRIC_SIZE, here {16 * MIB}, .*_VMM"
        assert re.search(said, text), text
        assert "MAX_MEMORY" not in text
        assert "max_tokens_per_rank" in text
        link.free(block)
        link.allocate(16 * MIB)


@case
def sizes_that_differ(ctx: RankContext) -> None:
    for fixed in (None, 16 * MIB):
        heap = NvshmemHeap(fixed=fixed)
        with started(heap) as link:
            before = dict(heap.used)
            for size in (64 + ctx.rank, 0, -1):
                error = raised(link.allocate, size)
                assert type(error) is TileMoEError
                assert "wanted one size above 0" in same_everywhere(str(error))
            assert heap.used == before


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
    rank_tests(__file__, world=2, timeout_s=300)
)
