"""Times parts of ds_tilemoe and appends a JSON line per case to docs/results/NAME.jsonl.

    python launch/bench.py planner                        # combine plans, no GPU
    deepspeed --num_gpus 4 launch/bench.py operator       # GEMM 2 beside the return of its rows
    deepspeed --num_gpus 4 launch/bench.py layer          # whole MoE layers beside DeepSpeed's
    python launch/bench.py operator --quick               # one rank; the CPU backend if no GPU

A run first proves what it times and refuses to time what is wrong. Times are medians in
microseconds with their 10th and 90th percentile; of ranks that work at once the slowest counts.
`bench.py NAME --help` lists the flags of one bench.

Exit codes: 0; 1 if a check or the run fails; 2 for an input that is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from pathlib import Path

from benches import records
from benches.records import BenchError
from demo.options import InputError, Parser, wrong
from demo.outputs import OutputError, make_folders, need_writable
from demo.process import (
    BAD_INPUT,
    FAILED,
    begin,
    choose_accelerator,
    complain,
    end,
    leave,
    prepare_environment,
    tell,
)
from ds_tilemoe.errors import ConfigError, TileMoEError

BENCHES = {
    "planner": "combine plans of all ranks, by the Python and by the native planner",
    "operator": "GEMM 2, the return of its rows and the weighted sum, at each split",
    "layer": "whole MoE layers beside deepspeed.moe and a plain torch layer",
    "contention": "latency against split, and the controller's choice",
}
ALONE = ("planner",)  # benches of one process; so is all that is simulated
# Flags that name a file to write -> its endings; "" is none.
WRITTEN = {
    "out": (".jsonl", ""),
    "export": (".json", ""),
    "png": (".png",),
    "timeline": (".png", ".svg", ".pdf"),
}
# torch's words for it, on a CPU and on a GPU.
NO_ROOM = re.compile("can't allocate memory|out of memory", re.IGNORECASE)


def main(argv: list[str] | None = None) -> int:
    """Runs one bench.

    Args:
        argv: the command line without the program's name; None = that of the process.

    Returns:
        The exit code: 0, 1 if something was not recorded, 2 if the command line is wrong.
    """
    args = _arguments(sys.argv[1:] if argv is None else argv)
    ranks, rank = (int(os.environ.get(name, x)) for name, x in (("WORLD_SIZE", 1), ("RANK", 0)))
    try:
        said = _run(args, ranks, rank)
    except (InputError, ConfigError) as error:
        text, code = str(error), BAD_INPUT
    except (BenchError, OutputError, TileMoEError, ValueError, OSError) as error:
        text, code = str(error), FAILED
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not NO_ROOM.search(str(error)):
            raise
        wanted = "a case that fits into this machine's memory"
        text, code = str(wrong(args.bench, error, wanted, "make it smaller")), BAD_INPUT
    else:
        if rank == 0 and not tell(said):
            return FAILED
        return 0
    if ranks > 1:
        leave(text, code)
    complain(text)
    return code


def _run(args: argparse.Namespace, ranks: int, rank: int) -> str:
    """Checks what can be before the ranks meet, then runs; returns what to say on stdout."""
    simulated = getattr(args, "simulate", False)
    if (args.bench in ALONE or simulated) and ranks > 1:
        command = f"python launch/bench.py {args.bench}{' --simulate' if simulated else ''}"
        raise wrong("ranks", ranks, "one process", command)
    # What was computed is kept apart from what was measured.
    name = f"{args.bench}_simulated" if simulated else args.bench
    args.out = args.out or records.ROOT / "docs" / "results" / f"{name}.jsonl"
    named = {flag: getattr(args, flag, None) for flag in WRITTEN}
    files = {f"--{flag}": (path, WRITTEN[flag]) for flag, path in named.items() if path is not None}
    need_writable(files, appended=["--out"])
    args.check(args)
    header = records.header(args.bench, args.commit)
    written, said = 0, ""
    if rank == 0:
        make_folders(files)
    for found in args.run(args):
        if rank == 0:
            record = header | found
            records.append(args.out, record)
            if args.bench in ALONE:
                said += json.dumps(record, indent=1) + "\n"
        written += 1
    return f"{said}{written} record(s) appended to {args.out}\n"


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="bench.py", description=__doc__)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    benches = parser.add_subparsers(dest="bench", required=True, metavar="|".join(_built()))
    named = next((word for word in argv if word in _built()), None)
    for name in _built():
        bench = benches.add_parser(name, help=BENCHES[name])
        if name != named:
            continue  # its module is not imported: most want torch and DeepSpeed
        if name not in ALONE and "--simulate" not in argv:
            prepare_environment()
            choose_accelerator("auto")
        module = importlib.import_module(f"benches.{name}")
        bench.description = module.__doc__
        # What is wrong whatever the machine; most of what depends on it says run, at its start.
        check = getattr(module, "check", lambda args: None)
        bench.set_defaults(run=module.run, check=check)
        records.add_output_arguments(bench)
        module.add_arguments(bench)
    return parser.parse_args(argv)


def _built() -> list[str]:
    folder = Path(__file__).parent / "benches"
    return [name for name in BENCHES if (folder / f"{name}.py").exists()]


if __name__ == "__main__":
    begin()
    end(main())
