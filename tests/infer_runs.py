"""Ways to start launch/infer.py, for its tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ds_tilemoe.testing import free_port

ROOT = Path(__file__).parent.parent
INFER = ROOT / "launch" / "infer.py"
RANKS = 4
LIMIT_S = 300  # of a run that hangs; machines differ by more than three times in speed


def environment(**changes: str) -> dict[str, str]:
    """As in a fresh shell: no rank, and DeepSpeed has to find out that it runs on a CPU."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in (*ours, "DS_ACCELERATOR")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])} | changes


def command(*args: object, ranks: int = RANKS, port: int | None = None) -> list[str]:
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    return [*runner, "--master_port", str(port or free_port()), str(INFER), *map(str, args)]


def launch(
    *args: object, stdin: bytes = b"", timeout_s: float = LIMIT_S, **where: int
) -> subprocess.CompletedProcess[str]:
    begun = time.monotonic()
    with subprocess.Popen(
        command(*args, **where),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{args} did not end\n{out.decode()[-2000:]}\n{err.decode()[-4000:]}")
    done = subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())
    print(f"{time.monotonic() - begun:.1f} s", done.stderr, sep="\n")
    return done


def alone(*args: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(INFER), *map(str, args)],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def record_in(stdout: str) -> dict[str, Any]:
    """The one JSON object; the launcher's own log lines share its stdout."""
    objects = [line for line in stdout.splitlines() if line.startswith("{")]
    assert len(objects) == 1, stdout
    rest = [line for line in stdout.splitlines() if line and not line.startswith(("{", "[20"))]
    assert not rest, rest
    return json.loads(objects[0])
