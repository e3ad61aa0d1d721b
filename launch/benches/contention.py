"""Latency against split, the controller's choice in it, and what happens when the routing switches.

    python launch/bench.py contention --simulate --seeds 100 --png contention_simulated.png
    deepspeed --num_gpus 4 launch/bench.py contention
    python launch/bench.py contention --part overhead

Per shape and routing one record "steady": static splits, sequential, the rule (the largest split
that adds no wave), the cost model alone, the controller from several first splits. Then "switch"
and "mixed" (lengths and routings in turn). With --simulate also "drift" and "bursts", and
calibrations that are wrong by up to 30 %; on GPUs "overhead": signals and controller on against
off, eager and as a CUDA graph. ``--part`` names some of them; on one GPU, where nothing is remote,
there is the overhead alone. Times of "switch" are of the calls after it, and those of traces are
means. Controllers learn from each call here; in a layer, of calls below 200 us, from one of 8.
With --simulate records go to docs/results/contention_simulated.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benches import contention_plot as plot
from benches.contention_calls import (
    MIXED_SPLITS,
    MIXED_TOKENS,
    Case,
    hot_ratio,
    in_turn,
    pool,
    traces,
)
from benches.contention_records import (
    OVERHEAD,
    PARTS,
    SETTLE,
    steady_record,
    switch_record,
    trace_record,
)
from benches.contention_simulate import simulate
from benches.contention_study import Trial, need_splits
from benches.records import MOST_RANKS, table
from demo.options import at_least, sizes, wrong
from demo.outputs import whole_file
from ds_tilemoe.config_block import BLOCK
from ds_tilemoe.simulator import TILES, Gpu, Simulator

CASES = (
    Case(16384, 8192, 2048, 16, 2, 256),
    Case(32768, 8192, 2048, 16, 2, 256),
    Case(32768, 4096, 1536, 32, 8, 256),
    Case(16384, 1024, 4096, 16, 2, 128),
    Case(16384, 512, 2048, 16, 2, 128),
)
QUICK_CASES = (CASES[0], CASES[3])
SPLITS = (1, *range(2, 25, 2))  # the paper's study
QUICK_SPLITS = (1, 4, 6, 8, 10, 12, 16, 24)
ROUTINGS = ("balanced", "moderate_skew", "stress_skew")
SWITCHES = (("balanced", "stress_skew"), ("stress_skew", "balanced"), ("uniform", "moderate_skew"))
STARTS = (None, 1, 24, 131)  # first splits; None = the cost model's
QUICK_STARTS = (1, 131)
FEWEST_SWITCHES, MOST_TRACES = 20, 20  # runs
FEWEST_ROUNDS, ROUNDS = SETTLE + 20, 60
SEEDS, SIMULATED_RANKS = 4, 4
SEGMENT, QUICK_SEGMENT = 16, 12  # calls behind a switch on GPUs
MOST_GPU_TRACES = 4
STEADY = ("steady",)
# Flags -> the parts that they change, in the simulator and on GPUs.
CHANGED = {
    "png": (STEADY, STEADY),
    "export": (STEADY, STEADY),
    "routing": (STEADY, STEADY),
    "rounds": (PARTS[:-1], ("steady", "mixed")),
    "seeds": (PARTS[:-1], ("steady", "switch")),
    "split": (PARTS[:-1], ("steady", "switch")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``contention``."""
    several = {"action": "extend", "nargs": "+"}
    names = "M,N,K,LOCAL_EXPERTS,TOPK,TILE_N"
    parser.add_argument("--simulate", action="store_true", help="one process, no GPU")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="repeatable; mixed has all traces; else all"
    )
    parser.add_argument(
        "--ranks", type=at_least(2, MOST_RANKS), help=f"simulated ones; else {SIMULATED_RANKS}"
    )
    parser.add_argument(
        "--seeds",
        type=at_least(1),
        help=f"runs of each case, else {SEEDS}; first splits in turn; simulated, a switch has"
        f" {FEWEST_SWITCHES} or more, a trace at most {MOST_TRACES}",
    )
    parser.add_argument(
        "--shape", **several, type=sizes(names), metavar=names, help="several (else the study's)"
    )
    parser.add_argument(
        "--routing", action="append", choices=[*ROUTINGS, "uniform"], help="steady ones; repeatable"
    )
    parser.add_argument("--split", type=sizes("..."), metavar="C,C,...", help="static ones")
    parser.add_argument(
        "--rounds",
        type=at_least(FEWEST_ROUNDS),
        help=f"calls of each run, {FEWEST_ROUNDS} or more; else {ROUNDS}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"of what is not named: {FEWEST_ROUNDS} rounds, {len(QUICK_STARTS)} runs, 2 shapes and"
        " 8 splits; on GPUs one pair of routings is switched, and one trace run",
    )
    parser.add_argument("--png", type=Path, help="draw it; needs matplotlib")
    parser.add_argument(
        "--export", type=Path, help="write the choice of one shape and routing as a config block"
    )


def check(args: argparse.Namespace) -> None:
    """What is wrong whatever the machine.

    Raises:
        InputError: names the flag.
    """
    if args.simulate and OVERHEAD in (args.part or ()):
        raise wrong("--part", OVERHEAD, "a part that can be simulated", "leave out --simulate")
    parts = _parts(args)
    for flag, (simulated, measured) in CHANGED.items():
        changed = simulated if args.simulate else measured
        if getattr(args, flag) is not None and not set(changed) & set(parts):
            got = f"it without --part {' or '.join(changed)}, all that it is about"
            fix = f"leave it out, or add --part {changed[0]}"
            raise wrong(f"--{flag}", f"{got} ({', '.join(parts)})", "both or neither", fix)
    if args.ranks is not None and not args.simulate:
        fix = f"deepspeed --num_gpus {args.ranks} launch/bench.py contention, or add --simulate"
        raise wrong("--ranks", f"{args.ranks} without --simulate", "both or neither", fix)
    cases, routings = _cases(args), _routings(args)
    if args.export is not None and len(cases) * len(routings) > 1:
        got = f"{len(cases)} shape(s) and {len(routings)} routing(s), each with a choice of its own"
        fix = "name one --shape and one --routing"
        raise wrong("--export", got, "one shape and one routing", fix)
    if args.png is not None:
        plot.need_matplotlib()
    for case in cases:
        _need_fitting(case, args)
    if args.simulate:
        need_splits(args.split or (), Gpu().sms - 1)


def _need_fitting(case: Case, args: argparse.Namespace) -> None:
    """Raises InputError for a shape that these ranks, or the simulator, cannot have."""
    flag = f"--shape {','.join(map(str, case))}"
    if left := case.m % case.topk:
        fix = f"M {case.m - left or case.topk}"
        raise wrong(flag, f"M {case.m}", f"a multiple of TOPK, {case.topk}", fix)
    ranks = _ranks(args) if args.simulate else int(os.environ.get("WORLD_SIZE", 1))
    experts = case.local_experts * ranks
    if case.topk > experts:
        wanted = f"1 to the experts of {ranks} rank(s), {experts}"
        raise wrong(flag, f"TOPK {case.topk}", wanted, "lower it")
    if args.simulate and (case.tile_n, case.n, case.k) not in TILES:
        got = f"N {case.n} K {case.k} tile_n {case.tile_n}"
        known = ", ".join(f"N {n} K {k} tile_n {t}" for t, n, k in TILES)
        raise wrong("--shape", got, "one that was measured", f"take one of {known}")


def _parts(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(args.part or (PARTS[:-1] if args.simulate else PARTS)))


def _cases(args: argparse.Namespace) -> list[Case]:
    named = [Case(*shape) for shape in dict.fromkeys(args.shape or ())]
    return named or list(QUICK_CASES if args.quick else CASES)


def _routings(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(args.routing or ROUTINGS))


def _ranks(args: argparse.Namespace) -> int:
    return args.ranks or SIMULATED_RANKS


COLUMNS = (
    *("study", "routing", "gemm_m", "gemm_n", "gemm_k", "best_static_split", "best_static_us"),
    *("controller_us", "controller_split", "controller_over_best", "iterations_to_settle"),
    *("changes_per_50", "rule_over_best", "worst_over_sequential", "sequential_us"),
    *("worst_static_over_controller", "on_over_off", "added_us"),
    *("graph_on_over_off", "graph_added_us"),
)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields records; see the module.

    Raises: what ``contention_gpus.on_gpus`` raises.
    """
    args.rounds = args.rounds or (FEWEST_ROUNDS if args.quick else ROUNDS)
    args.seeds = args.seeds or (len(QUICK_STARTS) if args.quick else SEEDS)
    parts, cases, routings = _parts(args), _cases(args), _routings(args)
    splits = args.split or (QUICK_SPLITS if args.quick else SPLITS)
    drawn: list[dict[str, Any]] = []
    writes = int(os.environ.get("RANK", 0)) == 0  # every rank has all records
    found = (_simulated if args.simulate else _on_gpus)(args, parts, cases, routings, splits)
    for record, trial in found:
        record |= {"parts": parts}
        drawn.append({"record": record, "trial": trial})
        if args.export is not None and record["study"] == "steady" and writes:
            _export(args.export, trial)
        yield record
    if writes:
        rows = [{column: one["record"].get(column) for column in COLUMNS} for one in drawn]
        print(table(rows), file=sys.stderr)
    if args.png is not None and writes:
        plot.draw(args.png, drawn)


def _simulated(
    args: argparse.Namespace,
    parts: Sequence[str],
    cases: Sequence[Case],
    routings: Sequence[str],
    splits: Sequence[int],
) -> Iterator[tuple[dict[str, Any], Trial]]:
    ranks = _ranks(args)
    starts = QUICK_STARTS if args.quick else STARTS
    for case in cases:
        simulators = {case.tokens: Simulator(case.problem(ranks))}
        for routing in routings if "steady" in parts else ():
            some = pool(case, routing, ranks)
            calls = in_turn(case, some, args.rounds)
            trials = simulate(simulators, calls, splits, range(args.seeds), starts)
            record = steady_record(case, routing, ranks, trials, True)
            yield record | {"hot_ratio": round(hot_ratio(some[0]), 3)}, trials[0]
        for before, after in SWITCHES if "switch" in parts else ():
            half = args.rounds // 2
            pools = pool(case, before, ranks), pool(case, after, ranks, hot=1)
            calls = in_turn(case, pools[0], half) + in_turn(case, pools[1], half)
            trials = simulate(simulators, calls, splits, range(max(FEWEST_SWITCHES, args.seeds)))
            record = switch_record(case, (before, after), ranks, half, trials, True)
            yield record | {"hot_ratio": [round(hot_ratio(p[0]), 3) for p in pools]}, trials[0]
    if "mixed" not in parts:
        return
    every = tuple(dict.fromkeys((*MIXED_SPLITS, *splits)))
    for case in {(c.n, c.k, c.tile_n): c for c in reversed(cases)}.values():
        lengths = dict.fromkeys((*MIXED_TOKENS, case.tokens))
        simulators = {
            tokens: Simulator(case._replace(m=tokens * case.topk).problem(ranks))
            for tokens in lengths
        }
        for study, calls in traces(case, ranks, 2 * args.rounds).items():
            trials = simulate(simulators, calls, every, range(min(MOST_TRACES, args.seeds)))
            yield trace_record(case, study, ranks, trials, MIXED_SPLITS, True), trials[0]


def _on_gpus(
    args: argparse.Namespace,
    parts: Sequence[str],
    cases: Sequence[Case],
    routings: Sequence[str],
    splits: Sequence[int],
) -> Iterator[tuple[dict[str, Any], Trial | None]]:
    # Needs torch, which the simulator does without.
    from benches.contention_gpus import PAIRS, Effort, on_gpus

    starts = QUICK_STARTS if args.quick else STARTS
    effort = Effort(
        parts=parts,
        rounds=args.rounds,
        starts=[starts[run % len(starts)] for run in range(args.seeds)],
        segment=QUICK_SEGMENT if args.quick else SEGMENT,
        pairs=PAIRS[:1] if args.quick else PAIRS,
        leading=1 if args.quick else 2,
        traces=1 if args.quick else MOST_GPU_TRACES,
    )
    return on_gpus(cases, routings, splits, effort)


def _export(path: Path, trial: Trial) -> None:
    """The choice of the rank that the group waits for: the one with most rows is rank 0 here."""
    block = {BLOCK: trial.controllers[0].export()}
    with whole_file("--export", path) as beside:
        beside.write_text(json.dumps(block, indent=2) + "\n")
