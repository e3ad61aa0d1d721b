"""Starts the ranks of ``ds_tilemoe.testing.run_ranks`` and writes down how each has ended.

On the CPU they are forks of this process, which has imported the cases: the imports of torch and
DeepSpeed take longer than most cases do. Files of the folder, R a rank: ``R.pid``, ``R.code``,
``R.out``, ``R.err``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from ds_tilemoe import testing_rank


def main() -> None:
    """``python -m ds_tilemoe.testing_fork TARGET FOLDER CASE_LIMIT_S [ARGS]``."""
    target, folder = sys.argv[1], Path(sys.argv[2])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    can_share = os.environ["DS_ACCELERATOR"] == "cpu" and _import_cases(target)
    ranks: dict[int, int] = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            _become(rank, folder)
            if not can_share:
                command = [sys.executable, "-m", "ds_tilemoe.testing_rank", *sys.argv[1:]]
                os.execv(sys.executable, command)
            testing_rank.main()
            return
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        _write_whole(folder / f"{ranks.pop(pid)}.code", str(os.waitstatus_to_exitcode(status)))


def _import_cases(target: str) -> bool:
    """False where a fork could not go on with them."""
    try:
        testing_rank.cases_of_target(target)
    except BaseException:
        return False  # each rank will find the same, and say so
    return len(os.listdir("/proc/self/task")) == 1  # a fork loses other threads


def _become(rank: int, folder: Path) -> None:
    """This process is a rank from now on, with a session, environment and outputs of its own."""
    _write_whole(folder / f"{rank}.pid", str(os.getpid()))
    os.setsid()  # until here a kill of the starter's group ends it, and from here on its own
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)


def _write_whole(path: Path, text: str) -> None:
    """A reader finds all of it or no file."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main()
