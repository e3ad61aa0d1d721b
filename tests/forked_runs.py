"""Command lines of launch/bench.py, each in a process of its own, for one start of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from infer_runs import ROOT, environment

BENCH = ROOT / "launch" / "bench.py"
# The imports of torch and DeepSpeed take longer than most command lines do. Each runs in a fork of
# a process that has made them, as bench.py would: the environment first, then the bench's module.
PROGRAM = """
import importlib, json, os, runpy, sys, traceback

script, folder, runs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, os.path.dirname(script))
from demo.process import choose_accelerator, prepare_environment

prepare_environment()
choose_accelerator("auto")
for name in sorted({run[0] for run in runs}):
    importlib.import_module(f"benches.{name}")
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"


def run(number, words):
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = [script, *words]
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


codes = []
for number, words in enumerate(runs):
    if not (pid := os.fork()):
        run(number, words)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


def refused(
    folder: Path, bench: str, all_flags: Sequence[Sequence[str]], timeout_s: float = 200
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What ``python launch/bench.py BENCH FLAGS`` says to each of several FLAGS.

    Args:
        folder: an empty directory for what they write.
        bench: its name.
        all_flags: the flags of each command line; none names ``--out``, which is added as the last.
        timeout_s: limit of all of them, seconds.

    Returns:
        By the flags, joined by blanks.
    """
    runs = [
        [bench, *flags, "--commit", "abc", "--out", f"{folder}/{number}.jsonl"]
        for number, flags in enumerate(all_flags)
    ]
    command = [sys.executable, "-c", PROGRAM, str(BENCH), str(folder), json.dumps(runs)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for number, code in enumerate(json.loads(done.stdout.splitlines()[-1])):
        out, err = ((folder / f"{number}.{name}").read_text() for name in ("out", "err"))
        run = subprocess.CompletedProcess(runs[number], code, out, err)
        found[" ".join(all_flags[number])] = run
    return found
