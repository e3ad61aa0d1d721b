"""Records of ``bench.py contention``: what of its trials is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benches.contention_calls import Case
from benches.contention_study import CLOSE, Trial, is_close
from benches.records import cpu_name, microseconds, number, ratio
from ds_tilemoe.controller import Controller
from ds_tilemoe.simulator import Floats

OVERHEAD = "overhead"
PARTS = ("steady", "switch", "mixed", OVERHEAD)  # of the bench; traces are the third
SETTLE = 20  # calls in which the controller has to settle
STEADY = slice(SETTLE, None)
AFTER_SWITCH = 8
CHANGES_TOLD = 12  # of a rank


def shape_fields(case: Case, routing: str, ranks: int) -> dict[str, Any]:
    """What every record says of its calls; a machine with GPUs names them itself."""
    return {
        "gpu": None,
        "driver": None,
        "cpu": cpu_name(),
        "ranks": ranks,
        "dtype": "bfloat16",
        "routing": routing,
        "seed": 0,
        "topk": case.topk,
        "gemm_m": case.m,
        "gemm_n": case.n,
        "gemm_k": case.k,
        "local_experts": case.local_experts,
        "tile_n": case.tile_n,
    }


def _fields(
    case: Case,
    routing: str,
    ranks: int,
    trials: Sequence[Trial],
    simulated: bool,
    summary: Callable[[str, Floats], dict[str, float | None]] = microseconds,
) -> dict[str, Any]:
    """``summary``: makes fields of a name and the times of all calls, in us."""
    first = trials[0]
    every = {c: np.concatenate([t.static[c] for t in trials]) for c in first.static}
    best = min(every, key=lambda c: every[c].mean())
    return {
        **shape_fields(case, routing, ranks),
        "simulated": simulated,
        "runs": len(trials),
        "calls": len(first.controller),
        "static_us": {str(c): round(float(us.mean()), 2) for c, us in sorted(every.items())},
        "best_static_split": best,
        **summary("best_static", every[best]),
        **summary("rule", np.concatenate([t.rule for t in trials])),
        **summary("sequential", np.concatenate([t.sequential for t in trials])),
    }


def _mean(name: str, us: Floats) -> dict[str, float | None]:
    return {f"{name}_us": number(us.mean())}


def steady_record(
    case: Case, routing: str, ranks: int, trials: Sequence[Trial], simulated: bool
) -> dict[str, Any]:
    """Of one routing all the time; what counts comes after ``SETTLE`` calls."""
    excess = [trial.excess(STEADY) for trial in trials]
    settled = [trial.settled_at(STEADY) for trial in trials]
    length = len(trials[0].controller) - SETTLE
    changes = [trial.changes_after(SETTLE) * 50 / length for trial in trials]
    best = [t.static[t.best_split(STEADY)][STEADY] for t in trials]
    mean = [us.mean() for us in best]
    rule = [t.rule[STEADY].mean() / b for t, b in zip(trials, mean, strict=True)]
    open_loop = [t.open_loop[STEADY].mean() / b for t, b in zip(trials, mean, strict=True)]
    controller = np.concatenate([t.controller[STEADY] for t in trials])
    sequential = np.concatenate([t.sequential[STEADY] for t in trials])
    return _fields(case, routing, ranks, trials, simulated) | {
        "study": "steady",
        **microseconds("controller", controller),
        "controller_split": trials[0].splits[-1].tolist(),
        "controller_over_best": round(float(np.median([e[0] for e in excess])) + 1, 4),
        "controller_over_best_worst": round(max(e[0] for e in excess) + 1, 4),
        # Call by call, and so blind to the few in which it tries another split.
        **ratio("controller_over_best_paired", controller, np.concatenate(best)),
        **ratio("controller_over_sequential", controller, sequential),
        "share_close": round(float(np.mean([is_close(e) for e in excess])), 4),
        "iterations_to_settle": sorted(settled, key=_or_never)[int(0.9 * (len(settled) - 1))],
        "share_settled": round(float(np.mean([_or_never(s) <= SETTLE for s in settled])), 4),
        "changes_per_50": round(float(np.mean(changes)), 3),
        "rule_over_best": number(float(np.median(rule)), 4),
        **microseconds("open_loop_over_best", open_loop, suffix=""),
    }


def runs_told(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """How each run of :func:`steady_record` went, for whoever asks why it chose what it chose."""
    return [
        {
            "start": trial.splits[0].tolist(),
            "end": trial.splits[-1].tolist(),
            "best_static_split": trial.best_split(STEADY),
            "controller_over_best": round(trial.excess(STEADY)[0] + 1, 4),
            "settled_at": trial.settled_at(STEADY),
            "changes": [_changes(controller) for controller in trial.controllers],
        }
        for trial in trials
    ]


def _changes(controller: Controller) -> list[str]:
    """The latest, oldest first."""
    return [
        f"{change.observations}: {change.after.num_consumer_ctas}, {change.reason}"
        for change in list(controller.changes)[-CHANGES_TOLD:]
    ]


def _or_never(call: int | None) -> float:
    return float("inf") if call is None else call


def switch_record(
    case: Case,
    routings: tuple[str, str],
    ranks: int,
    at: int,
    trials: Sequence[Trial],
    simulated: bool,
) -> dict[str, Any]:
    """Medians over runs per call after a switch at call ``at``. Times ``NAME_us`` and ``static_us``
    are of the calls from the ``AFTER_SWITCH``th behind it on."""
    after = [trial.part(slice(at + AFTER_SWITCH, None)) for trial in trials]
    over_best = []
    for trial in trials:
        best = trial.static[trial.best_split(slice(at, None))]
        over_best.append(np.where(trial.controller - best > 0, trial.controller / best, 1.0)[at:])
    over = np.median(over_best, axis=0)
    sequential = np.median([(t.controller / t.sequential)[at:] for t in trials], axis=0)
    settled = [i for i in range(len(over)) if over[i:].max() <= 1 + CLOSE + 0.01]
    return _fields(case, "->".join(routings), ranks, after, simulated) | {
        "study": "switch",
        "calls": len(trials[0].controller),
        "switch_at": at,
        **microseconds("controller", np.concatenate([t.controller for t in after])),
        "controller_split": trials[0].splits[-1].tolist(),
        "over_best_after_switch": [round(float(x), 4) for x in over],
        "iterations_to_settle": settled[0] if settled else None,
        "worst_over_sequential": round(float(sequential.max()), 4),
    }


def trace_record(
    case: Case,
    study: str,
    ranks: int,
    trials: Sequence[Trial],
    told: Sequence[int],
    simulated: bool,
) -> dict[str, Any]:
    """Totals of input that does not stand still against those of single static splits. Times
    ``NAME_us`` are means over all calls, as lengths are mixed.

    Args:
        told: the splits whose worst run is told.
    """
    totals = [{c: t.static[c].sum() / t.controller.sum() for c in t.static} for t in trials]
    return _fields(case, study, ranks, trials, simulated, _mean) | {
        "study": study,
        **_mean("controller", np.concatenate([t.controller for t in trials])),
        "static_over_controller": {
            str(c): round(float(np.median([t[c] for t in totals])), 4) for c in totals[0]
        },
        "worst_static_over_controller": {
            str(c): round(min(float(t[c]) for t in totals), 4) for c in told
        },
    }
