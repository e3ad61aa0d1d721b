"""The time line of one call of a layer: ``bench.py layer --timeline FILE``.

Two panels: the swapped layer as it is set, and below it the same call where no row moves before the
GEMM has ended (``mover`` none). A rank is a row: its parts one after the other, and under them a
line from its first segment ready to its last put. The call shown is the one of median length among
``CALLS``, each behind a barrier of all ranks and, on a GPU, with its launches done before.

Clocks. On a GPU the times of a rank are its own GPU's, counted from where its count exchange began,
and say nothing of another's. But all ranks meet in that exchange: none leaves it before the last
has come, and then all do. So its end, with the plan made, is taken for the same moment on all
ranks; the latency of a flag and unlike plans, a few us, cannot be seen. What lies before the
router (logits, and the launch) is what the call's CUDA events span beyond its record. On a CPU the
ranks are processes of one host and share its monotonic clock: nothing is moved. The backend times
there only GEMM 2 and what follows it, and those stand as if the last of them ended with the call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

import ds_tilemoe
from benches.clock import Timer
from benches.layer_times import kind_of
from benches.ranks import World
from benches.records import BenchError
from demo.options import wrong
from demo.outputs import whole_file
from ds_tilemoe.config_block import without_unused
from ds_tilemoe.stats import Call

CALLS = 21
PANELS = {"as set": {}, "mover none: rows move when the GEMM has ended": {"mover": "none"}}
# Part -> (label, colour), in the order of a call.
PARTS = {
    "before": ("router, counts, GEMM 1", "0.75"),
    "logits": ("logits", "0.6"),
    "gate": ("DeepSpeed's gate", "0.6"),
    "router": ("router", "C4"),
    "counts_and_plan": ("counts and plan", "C5"),
    "gemm1": ("GEMM 1 with dispatch", "C9"),
    "gemm2": ("GEMM 2", "C0"),
    "exposed_combine": ("exposed combine", "C3"),
    "scale": ("scale", "C2"),
}
SHIPPING = "first segment ready to last put"


class Seen(NamedTuple):
    """A call as one rank saw it, and its length by the device's events (on a CPU by the host)."""

    call: Call
    us: float


class Row(NamedTuple):
    """One rank, us.

    Attributes:
        bars: part -> begin and end.
        shipping: first segment ready and last put; None if no row left.
        met: end of the count exchange; None where it is not known.
    """

    bars: dict[str, tuple[float, float]]
    shipping: tuple[float, float] | None
    met: float | None


class Panel(NamedTuple):
    """One call on all ranks; ``us`` is the slowest one's length."""

    title: str
    us: float
    rows: list[Row]


def need_matplotlib() -> None:
    """Say before anything is run what would fail behind it.

    Raises:
        InputError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        fix = 'pip install "ds_tilemoe[bench]"'
        raise wrong("--timeline", "no matplotlib", "it to be installed", fix)


def make(
    path: Path,
    world: World,
    observed: Any,
    x: Tensor,
    mode: str,
    block: dict[str, Any],
    title: str,
) -> None:
    """Call, and draw on rank 0. A collective.

    Args:
        observed: {"nodrop": MoE}; it is swapped with ``block`` and stats.
        mode: "eager" or "graph".

    Raises:
        BenchError: no call was seen whole.
    """
    panels = []
    for name, change in PANELS.items():
        ds_tilemoe.apply(observed, without_unused({**block, "stats": True, **change}))
        seen = _watch(world, observed, x, mode)
        panels.append(Panel(name, max(rank.us for rank in seen), rows_of(seen)))
    if world.rank == 0:
        draw(path, f"{title}, {mode}, {world.ranks} ranks", panels)
    world.say(f"time line of a call: {path}")


def _watch(world: World, observed: Any, x: Tensor, mode: str) -> list[Seen]:
    """All ranks' view of the call whose slowest rank is the median of ``CALLS``."""
    call = kind_of(mode)(lambda rows: observed["nodrop"](rows)[0], x)
    timer = Timer(world, call)
    history = observed["nodrop"].deepspeed_moe._tile.stats.history
    seen = []
    for _ in range(CALLS):
        us = timer.alone()
        ds_tilemoe.check(observed)  # on a GPU it reads the record
        seen.append(Seen(history[-1], us))
    slowest = world.reduce(np.array([one.us for one in seen]))
    if np.isnan(slowest).all():
        raise BenchError(f"--timeline: the host was late in all of {CALLS} calls; run it again")
    chosen = int(np.nanargmin(np.abs(slowest - np.nanmedian(slowest))))
    return world.gather(seen[chosen])


def rows_of(seen: Sequence[Seen]) -> list[Row]:
    """Ranks on one clock, which begins with the first of them."""
    rows = [_on_gpu(one) if one.call.times is not None else _on_host(one) for one in seen]
    zero = min(begin for row in rows for begin, _ in row.bars.values())

    def moved(span: tuple[float, float]) -> tuple[float, float]:
        return span[0] - zero, span[1] - zero

    return [
        Row(
            {part: moved(span) for part, span in row.bars.items()},
            row.shipping and moved(row.shipping),
            None if row.met is None else row.met - zero,
        )
        for row in rows
    ]


def _on_gpu(seen: Seen) -> Row:
    """us from the end of the count exchange."""
    iteration, times = seen.call.iteration, seen.call.times
    assert times is not None
    first = "logits" if times.router_start else "gate"
    spans = {first: (times.scale_end - seen.us * 1e3, times.router_start), **times.spans}
    met = times.exchange_end
    bars = {
        part: ((begin - met) / 1e3, (end - met) / 1e3)
        for part, (begin, end) in spans.items()
        if end > begin
    }
    return Row(bars, _way(iteration, (times.down_start - met) / 1e3), 0.0)


def _on_host(seen: Seen) -> Row:
    """us of the host's clock."""
    call, iteration = seen.call, seen.call.iteration
    assert call.begin is not None and call.end is not None
    last = max(iteration.producer_end, iteration.last_put, iteration.last_arrival)
    begin, end = call.begin / 1e3, call.end / 1e3
    start = max(begin, end - last / 1e3)
    made, arrived = (start + at / 1e3 for at in (iteration.producer_end, iteration.last_arrival))
    bars = {"before": (begin, start), "gemm2": (start, made)}
    if arrived > made:
        bars["exposed_combine"] = (made, arrived)
    return Row(bars, _way(iteration, start), None)


def _way(iteration: Any, start: float) -> tuple[float, float] | None:
    """From the first segment ready to the last put, with GEMM 2 begun at ``start``."""
    if not iteration.segments or iteration.last_put <= iteration.first_segment_ready:
        return None
    return start + iteration.first_segment_ready / 1e3, start + iteration.last_put / 1e3


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Writes one picture.

    Args:
        path: the file; its suffix says of which kind.
        panels: top to bottom, on one scale.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = max(len(panel.rows) for panel in panels)
    size = (11.0, len(panels) * (0.7 + 0.5 * ranks) + 1.1)
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size, sharex=True, squeeze=False)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _panel(axis, panel)
    rows = [row for panel in panels for row in panel.rows]
    last = max(end for row in rows for _, end in (*row.bars.values(), row.shipping or (0, 0)))
    axes[-1][0].set(xlabel="us", xlim=(0, 1.02 * last))
    shown = {part for row in rows for part in row.bars}
    keys = [
        pyplot.Rectangle((0, 0), 1, 1, color=colour, label=label)
        for part, (label, colour) in PARTS.items()
        if part in shown
    ]
    keys.append(pyplot.Line2D([], [], color="k", marker="|", label=SHIPPING))
    if any(row.met is not None for row in rows):
        line = {"color": "0.3", "linestyle": ":"}
        keys.append(pyplot.Line2D([], [], label="counts exchanged, clocks laid together", **line))
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=keys, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    with whole_file("--timeline", path) as beside:
        figure.savefig(beside, dpi=130)
    pyplot.close(figure)


def _panel(axis: Any, panel: Panel) -> None:
    for rank, row in enumerate(panel.rows):
        for part, (begin, end) in row.bars.items():
            axis.barh(rank, end - begin, left=begin, height=0.5, color=PARTS[part][1])
        if row.shipping is not None:
            height = rank + 0.36
            axis.plot(row.shipping, (height, height), "k", marker="|", linewidth=1.5)
        if row.met is not None:
            axis.axvline(row.met, color="0.3", linestyle=":", linewidth=1)
    axis.set_title(f"{panel.title}: {panel.us:.0f} us", fontsize=10, loc="left")
    axis.set_yticks(range(len(panel.rows)), [f"rank {rank}" for rank in range(len(panel.rows))])
    axis.set_ylim(len(panel.rows) - 0.4, -0.6)  # the first on top
