"""cases.md 9 on GPUs: NVSHMEM has less symmetric memory than a layer wants.

Two launches, as NVSHMEM reads its settings once a process: memory of a given size, taken at the
start, which is how it is without CUDA VMM; and memory that grows up to a limit, where that size
should not matter.
"""

from __future__ import annotations

import os

from gpu_models import SMALL, agree, assert_right, built, gpu_rank_tests, make, rows, swap
from moe_models import raised, same_everywhere

import ds_tilemoe
from ds_tilemoe.errors import CapacityError
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]
HIDDEN = SMALL["hidden"]
FIXED = {"NVSHMEM_DISABLE_CUDA_VMM": "1", "NVSHMEM_SYMMETRIC_SIZE": "16M"}
GROWING = {"NVSHMEM_SYMMETRIC_SIZE": "1M", "NVSHMEM_MAX_MEMORY_PER_GPU": "1G"}
TOO_MANY = 1 << 22  # tokens a rank: their returning rows alone are 1 GiB


@case
def what_fits_is_right(ctx: RankContext) -> None:
    for count in (1, 32, 256):
        moe = swap(make(**SMALL), max_tokens_per_rank=count)
        assert_right(moe, rows(count, HIDDEN))
    ds_tilemoe.check(moe)


@case
def what_does_not_fit_is_refused_by_all_ranks(ctx: RankContext) -> None:
    moe = swap(make(**SMALL), max_tokens_per_rank=32)
    assert_right(moe, rows(32, HIDDEN))
    is_fixed = "NVSHMEM_DISABLE_CUDA_VMM" in os.environ
    setting = "NVSHMEM_SYMMETRIC_SIZE" if is_fixed else "NVSHMEM_MAX_MEMORY_PER_GPU"
    error = raised(ds_tilemoe.apply, moe, {"max_tokens_per_rank": TOO_MANY})
    agree("" if isinstance(error, CapacityError) else repr(error))
    for part in (" bytes", setting, "max_tokens_per_rank"):
        assert part in same_everywhere(str(error)), str(error)
    moe = swap(make(**SMALL), max_tokens_per_rank=33)  # makes memory anew
    assert_right(moe, rows(33, HIDDEN))
    ds_tilemoe.check(moe)


test_fixed_memory = gpu_rank_tests(__file__, env=FIXED)
test_growing_memory = gpu_rank_tests(__file__, env=GROWING)
