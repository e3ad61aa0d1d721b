"""Whether what started this rank still lives: DeepSpeed's launcher, and the command behind it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

COMMANDS = ("deepspeed", "ds", "deepspeed.launcher.runner")


def end_with_launcher() -> None:
    """End this rank, and so its launcher, when the ``deepspeed`` command that started them dies, or
    at once if it died before; quietly on Ctrl-C.

    On one host that command does not pass SIGTERM on: it dies alone, and the ranks would go on.
    Who started a launcher without that command is left alone with it.
    """
    launcher = os.getppid()
    command = _parent(launcher)
    if "deepspeed.launcher.launch" not in _words(launcher, "cmdline"):
        # DeepSpeed's launcher sets CROSS_RANK, and others do not.
        if "CROSS_RANK" in os.environ and _is_reaper(launcher):
            os.kill(os.getpid(), signal.SIGTERM)
        return
    names = {os.path.basename(word) for word in _words(command, "cmdline")[:3]}
    # A shell may have the command among its own words.
    if _executable(launcher) != _executable(command) or names.isdisjoint(COMMANDS):
        if _is_of_command(launcher) and _is_reaper(command):
            os.kill(os.getpid(), signal.SIGTERM)
        return

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C without a traceback from every rank

    def watch() -> None:
        while os.getppid() == launcher and _parent(launcher) == command:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _is_of_command(launcher: int) -> bool:
    """Whether a launcher looks as if the ``deepspeed`` command had started it.

    The command writes these words, and ``import deepspeed`` has set this variable before. A shell
    that does both and then leaves its launcher to pid 1 cannot be told from it.
    """
    written = ["-u", "-m", "deepspeed.launcher.launch"]
    imported = "PYTORCH_NVML_BASED_CUDA_CHECK=1"
    return _words(launcher, "cmdline")[1:4] == written and imported in _words(launcher, "environ")


def _is_reaper(pid: int) -> bool:
    """Whether a process gets the orphans of others; False if in doubt."""
    return pid == 1 or _words(pid, "comm") == ["systemd\n"]


def _parent(pid: int) -> int:
    """The parent's process id; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _words(pid: int, kind: str) -> list[str]:
    """The command line, first environment or name of a process; empty if that cannot be read.

    Args:
        kind: "cmdline", "environ" or "comm".
    """
    try:
        return Path(f"/proc/{pid}/{kind}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _executable(pid: int) -> str:
    """The program file of a process; empty if that cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
