"""The launch of rank processes on this machine, under a wall limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_tilemoe.testing_case import CaseResult

TAIL_LINES = 30  # of each rank's output in a failure
CASE_LIMIT_S = 120.0  # a rank that is longer in one case prints its stacks and ends
GRACE_S = 20.0  # for the other ranks, once one has failed


class RanksError(AssertionError):
    """A launch or a case went wrong; the message ends with what every rank printed last.

    ``results`` is what the ranks had done by then.
    """

    def __init__(self, message: str, results: Sequence[RankResult] = ()) -> None:
        super().__init__(message)
        self.results = list(results)


@dataclass(frozen=True)
class RankResult:
    """What one rank did.

    Attributes:
        returncode: negative for a rank that a signal ended.
        cases: that it has run.
        doing: what it was doing last, such as "in CASE for 31 s"; "" without cases.
        stacks: of all its Python threads, where it had to be ended.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    cases: tuple[CaseResult, ...]
    doing: str = ""
    stacks: str = ""

    def tail(self) -> str:
        """What it did and was doing, its stacks, and the last lines of both outputs."""
        parts = [f"--- rank {self.rank}, exit {self.returncode}"]
        done = (f"{c.name} {'ok' if c.ok else 'FAILED'} {c.seconds:.1f} s" for c in self.cases)
        for name, text in (("done", ", ".join(done)), ("doing", self.doing)):
            if text:
                parts.append(f"[{name}] {text}")
        if self.stacks:
            parts += ["[stacks]", *self.stacks.splitlines()]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if lines := text.splitlines()[-TAIL_LINES:]:
                parts += [f"[{name}]", *lines]
        return "\n".join(parts)


def run_ranks(
    target: str | Path,
    world: int,
    *,
    timeout_s: float,
    case_timeout_s: float = CASE_LIMIT_S,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
) -> list[RankResult]:
    """Runs ``target`` in ``world`` processes of this machine, with gloo between them.

    Args:
        target: a Python file with cases; a Python file without (it runs as a script, and sets up
            torch.distributed itself); or "module:function", called as one case.
        world: number of processes; each sees RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*.
        timeout_s: wall limit, seconds. Past it each process group is killed.
        case_timeout_s: limit of each case; a rank that passes it prints its stacks and ends.
        env: environment variables to add.
        args: arguments of a script.

    Returns:
        One result a rank, in rank order, whatever the exit codes.

    Raises:
        RanksError: over the wall limit; every rank's stacks and last output are in the message.
    """
    for _ in range(3):
        results = _launch(str(target), world, timeout_s, case_timeout_s, env or {}, args)
        # Another process may take the port between our look and rank 0's bind.
        if not any("EADDRINUSE" in result.stderr for result in results):
            break
    return results


def free_port() -> int:
    """A TCP port of this machine that nobody else is given for a minute.

    A connection to the port has ended on its own side. While the kernel remembers that, which it
    does for a minute, it hands the port to nobody who lets it choose, as gloo does for each pair of
    ranks and group; who names the port and sets SO_REUSEADDR, as torch's store does, gets it.
    """
    with socket.socket() as server, socket.socket() as client:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
        accepted, _ = server.accept()
        accepted.close()
        client.recv(1)  # the end has come through; only now may the other side close
        return int(server.getsockname()[1])


def _launch(
    target: str,
    world: int,
    timeout_s: float,
    case_timeout_s: float,
    env: Mapping[str, str],
    args: Sequence[str],
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
        program = [sys.executable, "-m", "ds_tilemoe.testing_rank"]
        command = [*program, target, folder, str(case_timeout_s), *args]
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
    """Waits for all; returns the ranks that were over the limit. Who is left tells its stacks."""
    limit = time.monotonic() + timeout_s
    failed_at = None
    while any(process.poll() is None for process in ranks):
        now = time.monotonic()
        if failed_at is None and any(process.returncode for process in ranks):
            failed_at = now
        if now > limit or (failed_at is not None and now > failed_at + GRACE_S):
            left = [rank for rank, process in enumerate(ranks) if process.returncode is None]
            for rank in left:
                ranks[rank].send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return left if now > limit else []
        time.sleep(0.02)
    return []


def _result(where: Path, rank: int, returncode: int) -> RankResult:
    out, err = ((where / f"{rank}.{n}").read_text(errors="replace") for n in ("out", "err"))
    log = where / f"{rank}.jsonl"
    # A rank that was killed while it wrote leaves half a line, without an end: a case not run.
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    cases = tuple(CaseResult(**json.loads(line)) for line in lines)
    doing, stacks = where / f"{rank}.doing", where / f"{rank}.stacks"
    what = ""
    if doing.exists():
        what = f"{doing.read_text()} for {time.time() - doing.stat().st_mtime:.0f} s"
    seen = stacks.read_text(errors="replace") if stacks.exists() else ""
    return RankResult(rank, returncode, out, err, cases, what, seen)
