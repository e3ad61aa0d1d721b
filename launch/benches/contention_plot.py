"""Pictures of ``bench.py contention``: latency against split, and time lines across switches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demo.options import wrong
from demo.outputs import whole_file

COLOURS = {"balanced": "C0", "uniform": "C2", "moderate_skew": "C1", "stress_skew": "C3"}


def need_matplotlib() -> None:
    """Say so before anything is run.

    Raises:
        InputError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        fix = 'pip install "ds_tilemoe[bench]"'
        raise wrong("--png", "no matplotlib", "it to be installed", fix)


def draw(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Writes one PNG.

    Args:
        path: the file.
        found: "record" and "trial" of each study, as ``contention.run`` makes them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steady = [f for f in found if f["record"]["study"] == "steady"]
    switches = [f for f in found if f["record"]["study"] == "switch"]
    shapes = list(dict.fromkeys(_title(f["record"]) for f in found))
    figure, axes = pyplot.subplots(
        2 if switches else 1, len(shapes), figsize=(4.2 * len(shapes), 7), squeeze=False
    )
    for column, shape in enumerate(shapes):
        top = axes[0][column]
        for f in (f for f in steady if _title(f["record"]) == shape):
            _splits(top, f["record"])
        top.set(title=shape, xlabel="consumer CTAs (cCTA)", ylabel="latency [us]", ylim=(0, None))
        top.legend(fontsize=7)
        if switches:
            own = [f for f in switches if _title(f["record"]) == shape]
            if own:
                _time_line(axes[1][column], own[0]["record"], own[0]["trial"])
    figure.suptitle(
        ("simulated: " if found and found[0]["record"]["simulated"] else "")
        + "latency against split; * the controller, dotted: sequential"
    )
    figure.tight_layout()
    with whole_file("--png", path) as beside:
        figure.savefig(beside, dpi=110)
    pyplot.close(figure)


def _title(record: dict[str, Any]) -> str:
    return f"M {record['gemm_m']} N {record['gemm_n']} K {record['gemm_k']}"


def _splits(axes: Any, record: dict[str, Any]) -> None:
    colour = COLOURS[record["routing"]]
    splits = [int(c) for c in record["static_us"]]
    axes.plot(splits, list(record["static_us"].values()), colour, label=record["routing"])
    axes.axhline(record["sequential_us"], color=colour, linestyle=":", linewidth=1)
    # Of a skew the first rank is the hottest, which the others wait for.
    axes.plot(record["controller_split"][0], record["controller_us"], colour + "*", markersize=12)


def _time_line(axes: Any, record: dict[str, Any], trial: Any) -> None:
    at = record["switch_at"]
    calls = np.arange(len(trial.controller))
    axes.plot(calls, trial.sequential, "0.6", linestyle=":", label="sequential")
    for part, label in ((slice(0, at), "best static split of each half"), (slice(at, None), None)):
        best = trial.static[trial.best_split(part)]
        axes.plot(calls[part], best[part], "C2", linewidth=1, label=label)
    axes.plot(calls, trial.controller, "k", linewidth=1, label="controller")
    axes.axvline(at, color="0.8")
    axes.set(title=record["routing"], xlabel="call", ylabel="latency [us]", ylim=(0, None))
    axes.legend(fontsize=7, loc="lower left")
    right = axes.twinx()
    right.step(calls, trial.splits.max(axis=1), "C0", where="mid", linewidth=1)
    right.set(ylabel="most consumer CTAs of a rank", ylim=(0, max(25, trial.splits.max() + 1)))
