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
            torch.distributed itself); or "module:function", called as one case. On the CPU cases
            are imported once, and the ranks are forks: RANK and LOCAL_RANK come behind the import.
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
        command = [sys.executable, "-m", "ds_tilemoe.testing_fork", target, folder]
        command += [str(case_timeout_s), *args]
        with open(where / "start", "wb") as output:
            starter = subprocess.Popen(
                command,
                env=base,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        ranks = [_Rank(starter, where, rank) for rank in range(world)]
        try:
            late = _wait(starter, ranks, timeout_s)
        finally:
            if not all(rank.has_begun for rank in ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(starter.pid, signal.SIGKILL)  # and no more of them begin
            for rank in ranks:
                rank.kill()
            starter.wait()
        results = [_result(where, number, rank.end()) for number, rank in enumerate(ranks)]
        missing = [number for number, rank in enumerate(ranks) if not rank.has_begun]
        said = (where / "start").read_text(errors="replace")
    if late or missing:
        what = f"ranks {late} still ran after {timeout_s:g} s" if late else f"no ranks {missing}"
        tails = "\n".join(result.tail() for result in results)
        raise RanksError(f"{target}: {what}\n{said}{tails}", results)
    return results


class _Rank:
    """A rank, which is its starter's child: see testing_fork.py.

    Attributes:
        returncode: None while it runs.
    """

    def __init__(self, starter: subprocess.Popen[bytes], folder: Path, rank: int) -> None:
        self._starter = starter
        self._pid, self._code = folder / f"{rank}.pid", folder / f"{rank}.code"
        self.returncode: int | None = None

    @property
    def has_begun(self) -> bool:
        return self._pid.exists()

    def poll(self) -> int | None:
        """The exit code, once it has one."""
        if self.returncode is None:
            # Asked first: its last act is to write the code.
            is_alone = self._starter.poll() is not None
            if self._code.exists():
                self.returncode = int(self._code.read_text())
            elif is_alone:
                self.returncode = -signal.SIGKILL
        return self.returncode

    def end(self) -> int:
        """The exit code, when the starter has ended."""
        code = self.poll()
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        """To the process, if there is one."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(self._pid.read_text()), number)

    def kill(self) -> None:
        """Ends it and its children."""
        if self.returncode is None:
            self.signal(signal.SIGKILL)  # it may have no group yet
        # The leader may be gone and its children not; the group outlives it.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(int(self._pid.read_text()), signal.SIGKILL)


def _wait(starter: subprocess.Popen[bytes], ranks: Sequence[_Rank], timeout_s: float) -> list[int]:
    """Waits for all; returns the ranks that were over the limit. Who is left tells its stacks."""
    limit = time.monotonic() + timeout_s
    failed_at = None
    while None in (codes := [rank.poll() for rank in ranks]):
        now = time.monotonic()
        if failed_at is None and any(codes):
            failed_at = now
        if now > limit or (failed_at is not None and now > failed_at + GRACE_S):
            left = [number for number, code in enumerate(codes) if code is None]
            for number in left:
                ranks[number].signal(signal.SIGUSR1)
            starter.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            return left if now > limit else []
        time.sleep(0.02)
    return []


def _result(where: Path, rank: int, returncode: int) -> RankResult:
    outputs = [where / f"{rank}.{name}" for name in ("out", "err")]
    out, err = (path.read_text(errors="replace") if path.exists() else "" for path in outputs)
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
