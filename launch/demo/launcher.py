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
        if "CROSS_RANK" in os.environ and _is_adopted(os.getpid(), launcher):
            os.kill(os.getpid(), signal.SIGTERM)
        return
    is_same_python = _executable(launcher) == _executable(command)
    if _is_of_command(launcher) and (not is_same_python or _is_adopted(launcher, command)):
        os.kill(os.getpid(), signal.SIGTERM)
    names = {os.path.basename(word) for word in _words(command, "cmdline")[:3]}
    is_command = is_same_python and not names.isdisjoint(COMMANDS)
    if not is_command:
        return

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C without a traceback from every rank

    def watch() -> None:
        while os.getppid() == launcher and _parent(launcher) == command:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _is_of_command(launcher: int) -> bool:
    """Whether a launcher was started by the ``deepspeed`` command, which may be gone.

    The command writes these words, with the Python that runs it, and ``import deepspeed`` has set
    this variable before; a shell's launcher lacks one or the other.
    """
    written = ["-u", "-m", "deepspeed.launcher.launch"]
    imported = "PYTORCH_NVML_BASED_CUDA_CHECK=1"
    return _words(launcher, "cmdline")[1:4] == written and imported in _words(launcher, "environ")


def _is_adopted(pid: int, parent: int) -> bool:
    """Whether another process than ``parent`` started ``pid`` and has died; False if in doubt.

    A process begins in the session of its parent, and leaves it only to lead one of its own.
    """
    try:
        return _parent(pid) != parent or os.getsid(pid) not in (pid, os.getsid(parent))
    except ProcessLookupError:
        return True


def _parent(pid: int) -> int:
    """The parent's process id; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _words(pid: int, kind: str) -> list[str]:
    """The command line or the first environment of a process; empty if that cannot be read.

    Args:
        kind: "cmdline" or "environ".
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
