"""One rank of ``ds_tilemoe.testing.run_ranks``: runs the cases and writes a JSON line for each."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ds_tilemoe.testing import COLLECTIVE_LIMIT_S, init_cpu_group, init_deepspeed, init_gpu_group
from ds_tilemoe.testing_case import Case, CaseResult, RankContext, cases_in


def cases_of_target(target: str) -> list[Case]:
    """Those of a file, or a function as one; [] for a script."""
    if target.endswith(".py"):
        return cases_in(Path(target))
    module, _, function = target.partition(":")
    return [Case(function, getattr(importlib.import_module(module), function))]


def _run_cases(cases: Sequence[Case], folder: Path, limit_s: float, stacks: TextIO) -> int:
    """Runs the cases, and says in a file of the folder where it is."""
    import torch.distributed as dist  # not for a script, which may do without

    doing = folder / f"{os.environ['RANK']}.doing"
    doing.write_text("starting")
    # Who waits in vain for a peer has to come back before its case's limit, to say so.
    collective_s = min(COLLECTIVE_LIMIT_S, limit_s * 2 / 3)
    if os.environ.get("DS_ACCELERATOR") == "cuda":
        init_gpu_group(collective_s)
    init_cpu_group(collective_s)
    if "deepspeed" in sys.modules:
        init_deepspeed(collective_s)
    rank, world = dist.get_rank(), dist.get_world_size()
    # Ranks meet between cases in a store of their own: no failed collective can break it.
    store = dist.FileStore(str(folder / "store"), world)
    context = RankContext(rank, world, folder / "shared")
    with open(folder / f"{rank}.jsonl", "w", buffering=1) as log:
        for number, entry in enumerate(cases):
            doing.write_text(f"in {entry.name}")
            faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
            result = _run_case(entry, context)
            faulthandler.cancel_dump_traceback_later()
            log.write(json.dumps(dataclasses.asdict(result)) + "\n")
            doing.write_text(f"behind {entry.name}, waiting for its peers")
            if not _still_together(store, number, rank, world, result.ok, limit_s):
                print(f"rank {rank}: the ranks are out of step after {entry.name}; rest not run")
                return 1
    doing.write_text("ending")
    dist.destroy_process_group()
    return 0


def _run_case(entry: Case, context: RankContext) -> CaseResult:
    began = time.perf_counter()
    error, value = "", None
    try:
        value = entry.run(context)
        json.dumps(value)
    except Exception:
        error = traceback.format_exc()
    return CaseResult(entry.name, not error, error, time.perf_counter() - began, value)


def _still_together(
    store: Any, number: int, rank: int, world: int, ok: bool, limit_s: float
) -> bool:
    """Waits for all ranks after a case; after a failure, whether the process group still works."""
    import torch
    import torch.distributed as dist

    def meet(what: str, mine: bool) -> bool:
        store.set(f"{number}/{what}/{rank}", "ok" if mine else "bad")
        keys = [f"{number}/{what}/{peer}" for peer in range(world)]
        store.wait(keys, datetime.timedelta(seconds=limit_s))
        return all(store.get(key) == b"ok" for key in keys)

    try:
        if meet("case", ok):
            return True
        # Ranks that left a collective at different places would be out of step from here on.
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with contextlib.suppress(RuntimeError):
            return meet("group", bool(work.wait(datetime.timedelta(seconds=10))))
        return meet("group", False)
    except RuntimeError as error:
        print(f"rank {rank}: a peer has not come out of case {number}: {error}")
        return False


def _end(code: int) -> None:
    """Ends this process behind its objects and exit handlers, without tearing Python down.

    DeepSpeed's tables keep process groups to the end, and now and then one of gloo's threads wants
    Python while that goes away: "terminate called without an active exception".
    """
    gc.collect()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """``python -m ds_tilemoe.testing_rank TARGET FOLDER CASE_LIMIT_S [ARGS]``."""
    target, folder, limit, *args = sys.argv[1:]
    # In a file of their own, so that no flood of messages pushes them out of the report.
    with open(Path(folder) / f"{os.environ['RANK']}.stacks", "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        if cases := cases_of_target(target):
            _end(_run_cases(cases, Path(folder), float(limit), stacks))
        sys.argv = [target, *args]
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
