"""``bench.py planner``: combine plans of all ranks, by the Python and by the native planner."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from benches.records import FEWEST_ROUNDS, MOST_RANKS, BenchError, cpu_name, microseconds
from demo.options import at_least, wrong
from ds_tilemoe.combine_plan import (
    CombinePlan,
    Layout,
    PlanParams,
    PlanSizes,
    build_plan,
    check_all,
)
from ds_tilemoe.errors import PlanError, TileMoEError
from ds_tilemoe.routings import ROUTINGS, routing_counts

PLAN_ARRAYS = tuple(field.name for field in dataclasses.fields(CombinePlan))[2:]

# Of all ranks' plans and what makes and checks them: measured, and rounded up.
BYTES_A_CHUNK, BYTES_A_SEGMENT, BYTES_A_COUNT = 32, 128, 400
MOST_BYTES = 512 * 2**20

NativePlanner = Callable[[PlanParams, np.ndarray], Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``planner``."""
    parser.add_argument("--ranks", type=at_least(1, MOST_RANKS), default=4)
    parser.add_argument("--local-experts", type=at_least(1), default=64, help="experts a rank")
    parser.add_argument(
        "--rows", type=at_least(1), default=1_000_000, help="rows that a rank gets on average"
    )
    parser.add_argument("--topk", type=at_least(1), default=8, help="rows that a token makes")
    parser.add_argument("--tile-m", type=at_least(1), default=128, help="rows of a band")
    parser.add_argument("--layout", choices=[x.name.lower() for x in Layout], default="compact")
    parser.add_argument("--bands-per-segment", type=at_least(1), default=1)
    parser.add_argument(
        "--local-tail-bands",
        type=at_least(-1),
        default=-1,
        help="local bands that go last; -1: all",
    )
    parser.add_argument(
        "--chunk-rows", type=at_least(1), default=8, help="8 is 128 KiB of 8192 bf16 columns"
    )
    parser.add_argument("--routing", choices=list(ROUTINGS), default="uniform")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument(
        "--repeats",
        type=at_least(FEWEST_ROUNDS),
        default=100,
        help=f"{FEWEST_ROUNDS} or more, with fresh counts each time",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse before any work what cannot be planned.

    Raises:
        InputError: names the flag.
    """
    if left := args.rows % args.topk:
        wanted = f"a multiple of --topk, {args.topk}"
        raise wrong("--rows", args.rows, wanted, f"--rows {args.rows - left + args.topk}")
    _need_room(args)
    try:
        _params(args)
        _counts(args, 0)
    except (PlanError, ValueError) as error:
        got, wanted = f"a case that cannot be ({error})", "sizes and a routing that go together"
        raise wrong("planner", got, wanted, "change one of them") from None


def _need_room(args: argparse.Namespace) -> None:
    """Before the counts, which may themselves be too large."""
    room = f"for which the plans fit into {MOST_BYTES // 2**20} MiB"
    most = MOST_BYTES // 2 // BYTES_A_COUNT // args.ranks**2  # half of it, which leaves the rows
    if args.local_experts > most:
        wanted = f"at most {most} on {args.ranks} rank(s), {room}"
        raise wrong("--local-experts", args.local_experts, wanted, f"--local-experts {most}")
    left = MOST_BYTES - BYTES_A_COUNT * args.local_experts * args.ranks**2
    # A row begins a band, whose edge cuts a run, every tile_m; no plan has more pieces than rows.
    a_row = BYTES_A_CHUNK / args.chunk_rows + 2 * BYTES_A_SEGMENT / args.tile_m
    most = int(left / a_row) // args.ranks // args.topk * args.topk
    if args.rows > most:
        wanted = f"at most {most} with these sizes, {room}"
        fix = f"--rows {most}" if most else "lower --topk"
        raise wrong("--rows", args.rows, wanted, fix)


def _params(args: argparse.Namespace) -> PlanParams:
    """Of rank 0."""
    return PlanParams(
        world=args.ranks,
        rank=0,
        local_experts=args.local_experts,
        tile_m=args.tile_m,
        layout=Layout[args.layout.upper()],
        bands_per_segment=args.bands_per_segment,
        local_tail_bands=args.local_tail_bands,
        chunk_rows=args.chunk_rows,
    )


def _counts(args: argparse.Namespace, repeat: int) -> np.ndarray:
    return routing_counts(
        args.routing,
        world=args.ranks,
        local_experts=args.local_experts,
        tokens=args.rows // args.topk,
        topk=args.topk,
        seed=args.seed + repeat,
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times both planners on the same counts in turn, fresh counts each repeat.

    Yields:
        One record; its native fields are null if the op does not load.

    Raises:
        BenchError: a native plan that differs.
        PlanError: a plan that does not pass its check.
    """
    params = _params(args)
    ranks = [dataclasses.replace(params, rank=rank) for rank in range(args.ranks)]
    native, reason = load_native_planner()
    if native is None:
        print(f"native planner not timed: {reason}", file=sys.stderr)

    python_us: list[float] = []
    native_us: list[float] = []
    sizes: list[PlanSizes] = []
    hidden = not sys.stderr.isatty()
    # The first one warms up.
    for repeat in tqdm(range(-1, args.repeats), "planner", disable=hidden, dynamic_ncols=True):
        counts = _counts(args, max(repeat, 0))
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
    yield {
        "gpu": None,
        "driver": None,
        "cpu": cpu_name(),
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
        **microseconds("python", python_us),
        **microseconds("native", native_us),
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
