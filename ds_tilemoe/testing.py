"""A small launcher for tests, and for trying things, on several CPU ranks of one machine.

``run_ranks`` starts the ranks, gives up on them after a wall limit, and hosts many cases in one
launch, because starting four Python processes with torch and DeepSpeed costs more than most cases::

    # tests/test_something_ranks.py
    @case
    def sums(ctx):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        assert total.item() == ctx.world

    test_ranks = rank_tests(__file__, world=4, timeout_s=120)
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_tilemoe.testing_case import Case, CaseResult, RankContext, case, cases_in, cases_of
from ds_tilemoe.testing_launch import CASE_LIMIT_S, RankResult, RanksError, free_port, run_ranks

if TYPE_CHECKING:
    import torch

__all__ = [
    "Case",
    "CaseResult",
    "RankContext",
    "RankResult",
    "RanksError",
    "case",
    "cases_in",
    "cases_of",
    "check_case",
    "check_end",
    "disable_deepspeed_shm",
    "free_port",
    "init_cpu_group",
    "init_deepspeed",
    "init_gpu_group",
    "rank_tests",
    "run_ranks",
    "tagged_rows",
]

COLLECTIVE_LIMIT_S = 60.0  # of torch's process group


def rank_tests(
    source: str | Path,
    *,
    world: int,
    timeout_s: float,
    case_timeout_s: float = CASE_LIMIT_S,
    env: Any = None,
) -> Any:
    """One pytest test per case of ``source``, all fed by one launch at the first of them.

    Args:
        source: the file that holds the cases; ``__file__`` when called below them.
        world: number of ranks.
        timeout_s, case_timeout_s: wall limits of the launch and of each case.
        env: environment variables to add.

    Returns:
        A test function: ``test_ranks = rank_tests(__file__, world=4, timeout_s=120)``. The test of
        the last case also fails where ranks that had run all cases did not end well.
    """
    import pytest

    names = cases_of(source)
    limits = {"timeout_s": timeout_s, "case_timeout_s": case_timeout_s}
    told: list[str] = []  # the case whose test has reported all that the ranks did

    @functools.cache
    def launched() -> tuple[list[RankResult], RanksError | None]:
        try:
            return run_ranks(source, world, **limits, env=env), None
        except RanksError as error:
            return error.results, error

    @pytest.mark.timeout(timeout_s + 60)
    @pytest.mark.parametrize("case_name", names)
    def test(case_name: str) -> None:
        results, error = launched()
        if all(case_name in [entry.name for entry in result.cases] for result in results):
            check_case(results, case_name)
        elif told:
            raise RanksError(f"not run by all ranks; why: see the test of {told[0]}", results)
        else:
            told.append(case_name)
            tails = "\n".join(result.tail() for result in results)
            raise error or RanksError(f"{case_name} was not run by all ranks\n{tails}", results)
        if case_name == names[-1]:
            check_end(results, error)

    return test


def check_case(results: Sequence[RankResult], name: str) -> None:
    """Raises RanksError unless the case passed on every rank."""
    faults = []
    for result in results:
        found = next((entry for entry in result.cases if entry.name == name), None)
        if found is None:
            faults.append(f"rank {result.rank} has not run {name}\n{result.tail()}")
        elif not found.ok:
            faults.append(f"rank {result.rank}: {found.error}")
    if faults:
        raise RanksError("\n".join(faults), results)


def check_end(results: Sequence[RankResult], error: RanksError | None = None) -> None:
    """Raises ``error``, else RanksError unless every rank ended with exit code 0."""
    if error is not None:
        raise error
    if bad := [result for result in results if result.returncode]:
        tails = "\n".join(result.tail() for result in bad)
        ranks = [result.rank for result in bad]
        raise RanksError(f"ranks {ranks} did not end well after their cases\n{tails}", results)


def init_cpu_group(timeout_s: float = COLLECTIVE_LIMIT_S) -> None:
    """Starts torch.distributed with gloo from RANK, WORLD_SIZE and MASTER_*; a no-op if it runs."""
    _init_group("gloo", timeout_s)


def init_gpu_group(timeout_s: float = COLLECTIVE_LIMIT_S) -> None:
    """As init_cpu_group, with NCCL for tensors on this rank's own GPU, which becomes current.

    Ranks share GPUs where there are fewer of them; then gloo, as NCCL refuses that.
    """
    import torch

    gpus = torch.cuda.device_count()
    device = int(os.environ["LOCAL_RANK"]) % gpus
    os.environ["LOCAL_RANK"] = str(device)  # which DeepSpeed takes for it
    torch.cuda.set_device(device)
    shared = int(os.environ["WORLD_SIZE"]) > gpus
    _init_group("cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl", timeout_s)


def _init_group(backend: str, timeout_s: float) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=timeout_s)
        # DeepSpeed makes its groups with torch's default, half an hour.
        dist.distributed_c10d.default_pg_timeout = limit
        dist.distributed_c10d.default_pg_nccl_timeout = limit
        dist.init_process_group(backend, timeout=limit)


def init_deepspeed(timeout_s: float = COLLECTIVE_LIMIT_S) -> None:
    """Starts deepspeed.comm on gloo without its shared-memory op; a no-op if it runs."""
    import deepspeed

    disable_deepspeed_shm()
    init_cpu_group(timeout_s)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def disable_deepspeed_shm() -> None:
    """Keeps DeepSpeed from building and using ``deepspeed_shm_comm`` in this process.

    The op takes half a minute to build, fails without a compiler, and leaves a segment of 66 MiB a
    rank in /dev/shm that nothing unlinks. Only ``inference_all_reduce`` gains from it. Call this
    before ``deepspeed.init_distributed`` or ``deepspeed.initialize``.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def tagged_rows(
    iteration: int, rank: int, token: torch.Tensor, expert: torch.Tensor, hidden: int
) -> torch.Tensor:
    """Rows whose every number says what they are, so that a row in a wrong place is a wrong value.

    Args:
        iteration: number of the call.
        rank: rank whose tokens they are.
        token: [...] token numbers, any integer type.
        expert: [...] global expert of each row, same shape.
        hidden: H, numbers a row.

    Returns:
        [..., H] float32 in [0, 1), multiples of 2**-20, so exact and equal on every rank.
    """
    import torch

    mixed = torch.arange(hidden, dtype=torch.int64, device=token.device)
    for part in (token[..., None].long(), expert[..., None].long(), rank, iteration):
        # Steps of a 31-bit linear generator: a change of any part changes every number.
        mixed = ((mixed + part) * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return ((mixed >> 11) & 0xFFFFF).to(torch.float32) * 2.0**-20
