"""Latency against split, the controller's choice in it, and what happens when the routing switches.

    python launch/bench.py contention --simulate --seeds 100 --png docs/results/contention.png
    deepspeed --num_gpus 4 launch/bench.py contention
    python launch/bench.py contention --part overhead

Per shape and routing one record "steady": static splits, sequential, the rule (the largest split
that adds no wave), the cost model alone, the controller from several first splits. Then "switch"
and "mixed" (lengths and routings in turn). With --simulate also "drift" and "bursts", and
calibrations that are wrong by up to 30 %; on GPUs "overhead": signals and controller on against
off, eager and as a CUDA graph. ``--part`` names some of them; on one GPU, where nothing is remote,
there is the overhead alone. Controllers learn from each call here; in a layer, of calls below
200 us, from one of 8.
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
from benches.contention_study import Trial
from benches.records import MOST_RANKS, table
from demo.options import at_least, sizes, wrong
from demo.outputs import whole_file
from ds_tilemoe.config_block import BLOCK
from ds_tilemoe.simulator import TILES, Simulator

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
FEWEST_ROUNDS = SETTLE + 20
SEGMENT, QUICK_SEGMENT = 16, 12  # calls behind a switch on GPUs
MOST_GPU_TRACES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``contention``."""
    several = {"action": "extend", "nargs": "+"}
    names = "M,N,K,LOCAL_EXPERTS,TOPK,TILE_N"
    parser.add_argument("--simulate", action="store_true", help="one process, no GPU")
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="repeatable; mixed has all traces; else all"
    )
    parser.add_argument("--ranks", type=at_least(2, MOST_RANKS), default=4, help="simulated ranks")
    parser.add_argument(
        "--seeds", type=at_least(1), default=4, help="runs of each case; first splits in turn"
    )
    parser.add_argument(
        "--shape", **several, type=sizes(names), metavar=names, help="several (else the study's)"
    )
    parser.add_argument("--routing", action="append", choices=[*ROUTINGS, "uniform"])
    parser.add_argument("--split", type=sizes("..."), metavar="C,C,...", help="static ones")
    parser.add_argument(
        "--rounds",
        type=at_least(FEWEST_ROUNDS),
        default=60,
        help=f"calls of each run, {FEWEST_ROUNDS} or more",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{FEWEST_ROUNDS} rounds, 2 runs; what is not named: 2 shapes and 8 splits; on GPUs a"
        " pair of routings switched",
    )
    parser.add_argument("--png", type=Path, help="draw it; needs matplotlib")
    parser.add_argument("--export", type=Path, help="write the choices as a config block")


def check(args: argparse.Namespace) -> None:
    """What is wrong whatever the machine.

    Raises:
        InputError: names the flag.
    """
    if args.simulate and OVERHEAD in (args.part or ()):
        raise wrong("--part", OVERHEAD, "a part that can be simulated", "leave out --simulate")
    if args.part and "steady" not in args.part:
        for flag in ("png", "export"):
            if getattr(args, flag) is not None:
                got = f"it without --part steady, whose results it shows ({' '.join(args.part)})"
                raise wrong(f"--{flag}", got, "both or neither", "add --part steady")
    if args.png is not None:
        plot.need_matplotlib()
    for case in (Case(*shape) for shape in args.shape or () if args.simulate):
        if (case.tile_n, case.n, case.k) not in TILES:
            got = f"N {case.n} K {case.k} tile_n {case.tile_n}"
            known = ", ".join(f"N {n} K {k} tile_n {t}" for t, n, k in TILES)
            raise wrong("--shape", got, "one that was measured", f"take one of {known}")


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
    if args.quick:
        args.rounds, args.seeds = FEWEST_ROUNDS, len(QUICK_STARTS)
    named = [Case(*shape) for shape in args.shape or ()]
    parts = list(dict.fromkeys(args.part or (PARTS[:-1] if args.simulate else PARTS)))
    cases = named or (QUICK_CASES if args.quick else CASES)
    routings = args.routing or list(ROUTINGS)
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
    ranks = args.ranks
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
