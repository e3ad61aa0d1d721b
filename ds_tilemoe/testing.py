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

import contextlib
import datetime
import functools
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TAIL_LINES = 30  # of each rank's output in a failure
GRACE_S = 20.0  # for the other ranks, once one has failed
CASE_LIMIT_S = 120.0  # a rank that spends longer in a case than its peers is given up
COLLECTIVE_LIMIT_S = 60.0  # of torch's process group


class RanksError(AssertionError):
    """A launch or a case went wrong; the message ends with what every rank printed last.

    ``results`` is what the ranks had done by then.
    """

    def __init__(self, message: str, results: Sequence[RankResult] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


@dataclass(frozen=True)
class CaseResult:
    """What one case did on one rank: passed, or its traceback; and the value it returned."""

    name: str
    ok: bool
    error: str
    seconds: float
    value: Any = None


@dataclass(frozen=True)
class RankResult:
    """What one rank did. ``returncode`` is negative for a rank that a signal ended."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    cases: tuple[CaseResult, ...]

    def tail(self) -> str:
        """The last lines of both outputs, under a heading."""
        parts = [f"--- rank {self.rank}, exit {self.returncode}"]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if lines := text.splitlines()[-TAIL_LINES:]:
                parts += [f"[{name}]", *lines]
        return "\n".join(parts)


@dataclass(frozen=True)
class RankContext:
    """Handed to each case: this rank, the number of ranks, a directory that all of them share."""

    rank: int
    world: int
    shared_dir: Path


@dataclass(frozen=True)
class Case:
    """A named function of a context."""

    name: str
    run: Callable[[RankContext], Any]


_CASES: dict[str, list[Case]] = {}  # resolved source file -> cases in order of definition


def case(function: Callable[..., Any] | None = None, **axes: Sequence[Any]) -> Any:
    """Registers ``function(ctx)`` as a case, or ``function(ctx, **values)`` once for each choice.

    A case runs on every rank and may return anything that JSON can hold. ``@case(k=[1, 2])`` makes
    two cases, ``name[k=1]`` and ``name[k=2]``.
    """
    if function is None:
        return functools.partial(case, **axes)
    cases = _CASES.setdefault(str(Path(function.__code__.co_filename).resolve()), [])
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        suffix = ",".join(f"{name}={value}" for name, value in chosen.items())
        name = f"{function.__name__}[{suffix}]" if chosen else function.__name__
        cases.append(Case(name, functools.partial(function, **chosen)))
    return function


def cases_in(path: Path) -> list[Case]:
    """The cases of a file, which is imported for it unless it has been; [] for a script without."""
    path = path.resolve()
    if str(path) not in _CASES and re.search(r"^@case\b", path.read_text(), re.MULTILINE):
        _CASES[str(path)] = []
        if str(path.parent) not in sys.path:  # as pytest does for a test file
            sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, f"{path} does not end in .py"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return _CASES.get(str(path), [])


def cases_of(source: str | Path) -> list[str]:
    """Names of the cases in a Python file, in the order in which they run."""
    return [entry.name for entry in cases_in(Path(source))]


def rank_tests(source: str | Path, *, world: int, timeout_s: float, env: Any = None) -> Any:
    """One pytest test per case of ``source``, all fed by one launch at the first of them.

    Args:
        source: the file that holds the cases; ``__file__`` when called below them.
        world: number of ranks.
        timeout_s: wall limit of the launch.
        env: environment variables to add.

    Returns:
        A test function: ``test_ranks = rank_tests(__file__, world=4, timeout_s=120)``. The test of
        the last case also fails where ranks that had run all cases did not end well.
    """
    import pytest

    names = cases_of(source)

    @functools.cache
    def launched() -> tuple[list[RankResult], RanksError | None]:
        try:
            return run_ranks(source, world, timeout_s=timeout_s, env=env), None
        except RanksError as error:
            return error.results, error

    @pytest.mark.timeout(timeout_s + 60)
    @pytest.mark.parametrize("case_name", names)
    def test(case_name: str) -> None:
        results, error = launched()
        try:
            check_case(results, case_name)
        except RanksError as fault:
            raise error or fault from None
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


def run_ranks(
    target: str | Path,
    world: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
) -> list[RankResult]:
    """Runs ``target`` in ``world`` processes of this machine, with gloo between them.

    Args:
        target: a Python file with cases; a Python file without (it runs as a script, and sets up
            torch.distributed itself); or "module:function", called as one case.
        world: number of processes; each sees RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*.
        timeout_s: wall limit, seconds. Past it each process group is killed.
        env: environment variables to add.
        args: arguments of a script.

    Returns:
        One result a rank, in rank order, whatever the exit codes.

    Raises:
        RanksError: over the wall limit; every rank's stacks and last output are in the message.
    """
    for _ in range(3):
        results = _launch(str(target), world, timeout_s, env or {}, args)
        # Another process may take the port between our look and rank 0's bind.
        if not any("EADDRINUSE" in result.stderr for result in results):
            break
    return results


def init_cpu_group(timeout_s: float = COLLECTIVE_LIMIT_S) -> None:
    """Starts torch.distributed with gloo from RANK, WORLD_SIZE and MASTER_*; a no-op if it runs."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))


def init_gpu_group(timeout_s: float = COLLECTIVE_LIMIT_S) -> None:
    """As init_cpu_group, with NCCL for tensors on this rank's own GPU, which becomes current."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)


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

    mixed = torch.arange(hidden, dtype=torch.int64)
    for part in (token[..., None].long(), expert[..., None].long(), rank, iteration):
        # Steps of a 31-bit linear generator: a change of any part changes every number.
        mixed = ((mixed + part) * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return ((mixed >> 11) & 0xFFFFF).to(torch.float32) * 2.0**-20


def free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(
    target: str, world: int, timeout_s: float, env: Mapping[str, str], args: Sequence[str]
) -> list[RankResult]:
    base = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    with tempfile.TemporaryDirectory(prefix="ds_tilemoe-ranks-") as folder:
        where = Path(folder)
        (where / "shared").mkdir()
        command = [sys.executable, "-m", "ds_tilemoe.testing_rank", target, folder, *args]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                mine = {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(_start(command, mine, where / str(rank)))
            late = _wait(ranks, timeout_s)
        finally:
            for process in ranks:
                # The leader may be gone and its children not; the group outlives it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        results = [_result(where, rank, process.returncode) for rank, process in enumerate(ranks)]
    if late:
        tails = "\n".join(result.tail() for result in results)
        raise RanksError(
            f"{target}: ranks {late} still ran after {timeout_s:g} s\n{tails}", results
        )
    return results


def _start(
    command: Sequence[str], env: Mapping[str, str], outputs: Path
) -> subprocess.Popen[bytes]:
    out, err = outputs.with_suffix(".out"), outputs.with_suffix(".err")
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Waits for all; returns the ranks that were over the limit (after printing their stacks)."""
    limit = time.monotonic() + timeout_s
    failed_at = None
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in ranks):
            failed_at = now
        if now > limit:
            late = [rank for rank, process in enumerate(ranks) if process.returncode is None]
            for rank in late:
                ranks[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return late
        if failed_at is not None and now > failed_at + GRACE_S:
            break
        time.sleep(0.02)
    return []


def _result(where: Path, rank: int, returncode: int) -> RankResult:
    out, err = ((where / f"{rank}.{n}").read_text(errors="replace") for n in ("out", "err"))
    log = where / f"{rank}.jsonl"
    # A rank that was killed while it wrote leaves half a line, without an end: a case not run.
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    cases = tuple(CaseResult(**json.loads(line)) for line in lines)
    return RankResult(rank, returncode, out, err, cases)
