"""NVSHMEM between two GPUs: puts from our own kernel, mapped peers, growth, a clean end."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_tilemoe.testing import RankContext, case, rank_tests

WORLD = 2
# As in gpu_models.py, which imports DeepSpeed.
IS_SHARED = 0 < torch.cuda.device_count() < WORLD and "TILEMOE_TEST_RANKS" in os.environ
ARRIVAL_LIMIT_S = 20.0
WORD_BYTES = 256  # room of an arrival word, on its own lines


def started() -> Any:
    """The transport of this rank, on its own GPU. DeepSpeed is imported here: the launcher's
    process group is to be torch's."""
    from ds_tilemoe import transport

    torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
    return transport.start(op())


def op() -> ctypes.CDLL:
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    return CUDATileMoEBuilder().load()


def payload(rank: int, nbytes: int) -> torch.Tensor:
    """Bytes that say whose they are and where they belong; never the poison."""
    return ((torch.arange(nbytes, device="cuda") * 7 + rank * 101) % 251).to(torch.uint8)


def put_around(nbytes: int) -> None:
    """Each rank puts ``nbytes`` to the next one; all look at what the one before put."""
    link = started()
    block, word = link.allocate(nbytes + 32), link.allocate(WORD_BYTES)
    block.fill_(255)
    word.zero_()
    source = payload(link.rank, nbytes)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    status = op().tilemoe_transport_test_put(
        ctypes.c_void_p(block.data_ptr()),
        ctypes.c_void_p(source.data_ptr()),
        ctypes.c_int64(nbytes),
        ctypes.c_void_p(word.data_ptr()),
        ctypes.c_int32((link.rank + 1) % link.world),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    assert status == 0, f"cudaError {status}"
    # The word is added behind the data, so data is looked at as soon as it is seen.
    arrived, began = word[:8].view(torch.int64), time.monotonic()
    while arrived.item() != nbytes:
        waited = time.monotonic() - began
        assert waited < ARRIVAL_LIMIT_S, f"saw {arrived.item()} of {nbytes} bytes"
    assert torch.equal(block[:nbytes], payload((link.rank - 1) % link.world, nbytes))
    assert bool((block[nbytes:] == 255).all()), "a put wrote behind its end"
    torch.cuda.synchronize()
    torch.distributed.barrier()
    link.free(word)
    link.free(block)


@case(nbytes=[16, 48, 4096 + 16, (1 << 20) + 48])
def put_from_our_kernel(ctx: RankContext, nbytes: int) -> None:
    put_around(nbytes)


@case
def ranks_are_pes_and_start_is_once(ctx: RankContext) -> None:
    link = started()
    assert (link.rank, link.world) == (ctx.rank, ctx.world)
    assert started() is link


@case
def mapped_peer(ctx: RankContext) -> None:
    link = started()
    memory, mine = link.allocate(4096), payload(link.rank, 1024)
    memory.zero_()
    torch.cuda.synchronize()
    torch.distributed.barrier()
    assert link.peer_pointer(memory, link.rank) == memory.data_ptr()
    peer = (link.rank + 1) % link.world
    address = link.peer_pointer(memory, peer)
    assert address, "these GPUs see each other, and the memory is not mapped"
    assert link.peer_pointer(payload(0, 64), peer) is None  # not symmetric
    torch.cuda.synchronize()
    # Not as a tensor: torch would see the peer's device behind the address.
    copied = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2(
        ctypes.c_uint64(address + 1024), ctypes.c_uint64(mine.data_ptr()), ctypes.c_size_t(1024)
    )
    assert copied == 0, f"CUresult {copied}"
    torch.cuda.synchronize()
    torch.distributed.barrier()
    wanted = torch.zeros_like(memory)
    wanted[1024:2048] = payload(peer, 1024)
    assert torch.equal(memory, wanted)
    torch.distributed.barrier()
    link.free(memory)


@case
def growth_and_more_than_there_is(ctx: RankContext) -> None:
    from ds_tilemoe.errors import CapacityError, TileMoEError

    link = started()
    large = link.allocate(1 << 30)  # more than a piece of the heap
    put_around(1 << 16)
    with pytest.raises(CapacityError, match="max_tokens_per_rank"):
        link.allocate(1 << 45)
    with pytest.raises(TileMoEError, match="one size above 0"):
        link.allocate(64 + ctx.rank)
    put_around(1 << 16)
    link.free(large)


@case
def beside_nccl(ctx: RankContext) -> None:
    started()
    # NCCL refuses ranks that share a GPU.
    group = torch.distributed.new_group(backend="gloo" if IS_SHARED else "nccl")
    total = torch.ones(1 << 20, device="cuda")
    torch.distributed.all_reduce(total, group=group)
    put_around(4096)
    torch.distributed.all_reduce(total, group=group)
    assert bool((total == ctx.world**2).all())
    torch.distributed.destroy_process_group(group)


@case
def closed_and_started_again(ctx: RankContext) -> None:
    link = started()
    link.allocate(4096)  # left to close()
    link.close()
    assert started() is not link
    put_around(4096)
    started().close()


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    """The library, before the ranks start: it takes minutes and each case has a limit."""
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    builder = CUDATileMoEBuilder()
    if not builder.is_compatible():
        pytest.skip(f"the CUDA op cannot be built here: {builder.error_log}")
    return builder.build()


test_ranks = pytest.mark.gpu(
    pytest.mark.skipif(
        torch.cuda.device_count() < (1 if IS_SHARED else WORLD),
        reason=f"needs {WORLD} CUDA GPUs, and torch sees {torch.cuda.device_count()}",
    )(rank_tests(__file__, world=WORLD, timeout_s=300))
)
