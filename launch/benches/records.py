"""Records of benchmarks and the flags that all of them have. No torch.

A record is one JSON line: what :func:`header` says, the fields of the bench, and times in
microseconds as ``NAME_us`` (median) beside ``NAME_p10_us`` and ``NAME_p90_us``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ds_tilemoe
from demo.options import word, wrong
from demo.outputs import append_whole

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]
FEWEST_ROUNDS = 50
MOST_RANKS = 72  # of a group; kMaxWorld of the GPU code
PACKAGES = ("numpy", "torch", "deepspeed", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13")


class BenchError(Exception):
    """A run cannot go on or must not be timed; the message says why, with the numbers. What is
    wrong with the command line is a ``demo.options.InputError``."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--out`` and ``--commit``, which every bench has."""
    parser.add_argument("--out", type=Path, help="file to append to; else docs/results/NAME.jsonl")
    commit = word("a commit without blanks")
    parser.add_argument("--commit", type=commit, help="commit to record; else git is asked")


# -- numbers ----------------------------------------------------------------------------------


def microseconds(
    name: str, samples: Sequence[float] | np.ndarray, suffix: str = "_us"
) -> dict[str, float | None]:
    """Median, 10th and 90th percentile as ``NAME_us``, ``NAME_p10_us`` and ``NAME_p90_us``.

    Args:
        samples: NaN stands for no sample. All three are None if there is none.
        suffix: "" for what is no time.
    """
    keys = (f"{name}{suffix}", f"{name}_p10{suffix}", f"{name}_p90{suffix}")
    values = np.asarray(samples, dtype=np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return dict.fromkeys(keys)
    found = np.percentile(values, [50, 10, 90])
    digits = 2 if suffix else 4
    return {key: round(float(value), digits) for key, value in zip(keys, found, strict=True)}


def ratio(name: str, above: np.ndarray, below: np.ndarray) -> dict[str, float | None]:
    """:func:`microseconds` without a unit, of the ratio of each pair; NaN in either = no pair."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return microseconds(name, above / below, suffix="")


def median(samples: Sequence[float] | np.ndarray) -> float:
    """Of the finite ones; NaN if there is none."""
    values = np.asarray(samples, dtype=np.float64)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else float("nan")


def number(value: float, digits: int = 2) -> float | None:
    """Rounded, for a record; None for NaN."""
    return round(float(value), digits) if np.isfinite(value) else None


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Records as text, a column a key of the first; None is "-", large floats lose their digits."""

    def show(value: Any) -> str:
        if value is None:
            return "-"
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
        return str(value)

    rows = list(rows)
    cells = [list(rows[0]), *([show(row[key]) for key in rows[0]] for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


# -- what is written --------------------------------------------------------------------------


def header(bench: str, commit: str | None) -> dict[str, Any]:
    """The first fields of every record.

    Raises:
        InputError: no commit was given and git knows none.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or head_commit(),
        "versions": versions(),
    }


def append(out: Path, record: Mapping[str, Any]) -> None:
    """One line, whole or not at all; the numbers in it are finite.

    Raises:
        OutputError: it cannot be written.
    """
    append_whole("--out", out, json.dumps(record, allow_nan=False) + "\n")


def head_commit() -> str:
    """HEAD, with -dirty if anything but results differs from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":(exclude)docs/results")
    except (OSError, subprocess.CalledProcessError):
        wanted, fix = f"a commit that git tells of {ROOT}", "pass it: --commit SHA"
        raise wrong("--commit", "none", wanted, fix) from None
    return f"{head}-dirty" if changed else head


def versions() -> dict[str, str | None]:
    """Of Python, this package and what it runs on; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "ds_tilemoe": ds_tilemoe.__version__,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    """Name of the CPU, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None
