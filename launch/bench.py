"""Times parts of ds_tilemoe and appends a JSON line per run to docs/results/NAME.jsonl.

    python launch/bench.py planner           # 4 ranks x 64 experts, 1,000,000 rows a rank
    python launch/bench.py planner --routing stress_skew --layout aligned

A run first proves what it times and refuses to time what is wrong. Times are medians in
microseconds with their 10th and 90th percentile; of ranks that work at once the slowest counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import ds_tilemoe
from ds_tilemoe.combine_plan import (
    CombinePlan,
    Layout,
    PlanParams,
    PlanSizes,
    build_plan,
    check_all,
)
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.routings import ROUTINGS, routing_counts

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
NOT_BUILT = ("operator", "layer", "contention")
FEWEST_REPEATS = 50
PLAN_ARRAYS = tuple(field.name for field in dataclasses.fields(CombinePlan))[2:]

NativePlanner = Callable[[PlanParams, np.ndarray], Mapping[str, Any]]


class BenchError(Exception):
    """A run cannot start or must not be timed; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        argv: the command line without the program's name; None = that of the process.

    Returns:
        The exit code: 0, or 1 if nothing was recorded.
    """
    args = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        out = args.out or ROOT / "docs" / "results" / f"{args.bench}.jsonl"
        _need_writable(out)
        record = {
            "schema": SCHEMA,
            "bench": args.bench,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": args.commit or _commit(),
            "versions": _versions(),
        }
        record |= args.run(args)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except (BenchError, TileMoEError, ValueError, OSError) as error:
        print(f"bench.py {args.bench}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(record, indent=1))
    print(f"appended to {out}")
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if argv and argv[0] in NOT_BUILT:
        parser.error(f"{argv[0]} is not built yet; built so far: planner")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="planner")

    planner = benches.add_parser(
        "planner",
        help="combine plans of all ranks, by the Python and by the native planner",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    planner.set_defaults(run=run_planner)
    planner.add_argument("--out", type=Path, help="file to append to (None: docs/results)")
    planner.add_argument("--commit", help="commit to record (None: ask git)")
    planner.add_argument("--ranks", type=_at_least(1), default=4)
    planner.add_argument("--local-experts", type=_at_least(1), default=64, help="experts a rank")
    planner.add_argument(
        "--rows", type=_at_least(1), default=1_000_000, help="rows that a rank gets on average"
    )
    planner.add_argument("--topk", type=_at_least(1), default=8, help="rows that a token makes")
    planner.add_argument("--tile-m", type=_at_least(1), default=128, help="rows of a band")
    planner.add_argument("--layout", choices=[x.name.lower() for x in Layout], default="compact")
    planner.add_argument("--bands-per-segment", type=_at_least(1), default=1)
    planner.add_argument(
        "--local-tail-bands",
        type=_at_least(-1),
        default=-1,
        help="local bands that go last; -1: all",
    )
    planner.add_argument(
        "--chunk-rows", type=_at_least(1), default=8, help="8 is 128 KiB of 8192 bf16 columns"
    )
    planner.add_argument("--routing", choices=list(ROUTINGS), default="uniform")
    planner.add_argument("--seed", type=_at_least(0), default=0)
    planner.add_argument(
        "--repeats", type=_at_least(FEWEST_REPEATS), default=100, help="fresh counts each time"
    )
    return parser.parse_args(argv)


def _at_least(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer from {lowest} on")
        return value

    return parse


def run_planner(args: argparse.Namespace) -> dict[str, Any]:
    """Times both planners on the same counts in turn, fresh counts each repeat.

    Args:
        args: the command line of ``planner``.

    Returns:
        The record's fields of this bench; native fields are null if the op does not load.

    Raises:
        BenchError: a shape that cannot be, or a native plan that differs.
        PlanError: a plan that does not pass its check.
    """
    tokens, left = divmod(args.rows, args.topk)
    if left:
        raise BenchError(f"--rows: got {args.rows}, wanted a multiple of --topk, {args.topk}")
    params = PlanParams(
        world=args.ranks,
        rank=0,
        local_experts=args.local_experts,
        tile_m=args.tile_m,
        layout=Layout[args.layout.upper()],
        bands_per_segment=args.bands_per_segment,
        local_tail_bands=args.local_tail_bands,
        chunk_rows=args.chunk_rows,
    )
    ranks = [dataclasses.replace(params, rank=rank) for rank in range(args.ranks)]
    native, reason = load_native_planner()
    if native is None:
        print(f"native planner not timed: {reason}", file=sys.stderr)

    python_us: list[float] = []
    native_us: list[float] = []
    sizes: list[PlanSizes] = []
    for repeat in range(-1, args.repeats):  # the first one warms up
        counts = routing_counts(
            args.routing,
            world=args.ranks,
            local_experts=args.local_experts,
            tokens=tokens,
            topk=args.topk,
            seed=args.seed + max(repeat, 0),
        )
        timed = [_timed(build_plan, rank, counts) for rank in ranks]
        plans = [plan for plan, _ in timed]
        check_all(plans, counts)
        native_times = []
        if native is not None:
            for plan in plans:
                got, elapsed = _timed(native, plan.params, counts)
                _need_same(plan, got)
                native_times.append(elapsed)
        if repeat >= 0:
            python_us.append(max(elapsed for _, elapsed in timed))
            if native_times:
                native_us.append(max(native_times))
            sizes.extend(plan.sizes for plan in plans)
    return {
        "gpu": None,
        "driver": None,
        "cpu": _cpu(),
        "ranks": args.ranks,
        "dtype": None,
        "routing": args.routing,
        "seed": args.seed,
        "topk": args.topk,
        "gemm_m": args.rows,
        "gemm_n": None,
        "gemm_k": None,
        "local_experts": args.local_experts,
        "tile_m": args.tile_m,
        "layout": args.layout,
        "bands_per_segment": args.bands_per_segment,
        "local_tail_bands": args.local_tail_bands,
        "chunk_rows": args.chunk_rows,
        "repeats": args.repeats,
        "most_bands": max(size.bands for size in sizes),
        "most_segments": max(size.segments for size in sizes),
        "most_chunks": max(size.chunks for size in sizes),
        "padding_share": sum(s.padding_rows for s in sizes) / max(sum(s.rows for s in sizes), 1),
        **_microseconds("python", python_us),
        **_microseconds("native", native_us),
    }


def load_native_planner() -> tuple[NativePlanner | None, str]:
    """The planner of the CPU op, built if need be.

    Returns:
        A function of params and counts that returns the plan's arrays by name, or None and why.
    """
    try:
        import torch

        from ds_tilemoe.op_builder import CPUTileMoEBuilder

        op = CPUTileMoEBuilder().load()
    except (ImportError, TileMoEError) as error:
        return None, str(error)

    def plan(params: PlanParams, counts: np.ndarray) -> Mapping[str, Any]:
        values: Mapping[str, Any] = op.plan(
            op.PlanParams(**{**vars(params), "layout": int(params.layout)}),
            torch.from_numpy(counts),
        )
        return values

    return plan, ""


def _timed(call: Callable[..., Any], *args: object) -> tuple[Any, float]:
    """What the call returns, and microseconds."""
    began = time.perf_counter_ns()
    result = call(*args)
    return result, (time.perf_counter_ns() - began) / 1000


def _need_same(plan: CombinePlan, native: Mapping[str, Any]) -> None:
    for name in PLAN_ARRAYS:
        if np.asarray(native[name]).tobytes() != getattr(plan, name).tobytes():
            rank = plan.params.rank
            raise BenchError(f"native {name} of rank {rank} differs from Python's; not timed")


def _microseconds(name: str, samples: list[float]) -> dict[str, float | None]:
    keys = (f"{name}_us", f"{name}_p10_us", f"{name}_p90_us")
    if not samples:
        return dict.fromkeys(keys)
    values = np.percentile(samples, [50, 10, 90])
    return {key: round(float(value), 2) for key, value in zip(keys, values, strict=True)}


def _commit() -> str:
    """HEAD, with -dirty if anything but results differs from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":(exclude)docs/results")
    except (OSError, subprocess.CalledProcessError):
        raise BenchError(f"git tells no commit of {ROOT}; pass it as --commit SHA") from None
    return f"{head}-dirty" if changed else head


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "ds_tilemoe": ds_tilemoe.__version__,
    }
    for package in ("numpy", "torch", "deepspeed"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _cpu() -> str:
    """Name of the CPU, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _need_writable(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out if out.exists() else out.parent, os.W_OK) or out.is_dir():
        raise BenchError(f"--out: got {str(out)!r}, wanted a file that can be written")


if __name__ == "__main__":
    sys.exit(main())
