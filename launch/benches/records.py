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
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import ds_tilemoe

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]
FEWEST_ROUNDS = 50
PACKAGES = ("numpy", "torch", "deepspeed", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13")


class BenchError(Exception):
    """A run cannot start or must not be timed; the message says why, with the numbers."""


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Descriptions as they are written; flags with the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """An argument parser that speaks once for all ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, formatter_class=Formatter, **kwargs)

    def _print_message(self, message: str, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


# -- flags ------------------------------------------------------------------------------------


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--out`` and ``--commit``, which every bench has."""
    parser.add_argument(
        "--out",
        type=Path,
        help="file to append to, in a folder that exists; else docs/results/NAME.jsonl",
    )
    parser.add_argument("--commit", help="commit to record; else git is asked")


def at_least(lowest: int) -> Callable[[str], int]:
    """An argparse type: an integer from ``lowest`` on; 1_000 is one."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", ""))
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted an integer from {lowest} on")
        return value

    return parse


def sizes(names: str, lowest: int = 1) -> Callable[[str], tuple[int, ...]]:
    """An argparse type: integers for each of ``names``, "M,N,K"; "..." = as many as one likes."""
    count = None if names == "..." else len(names.split(","))

    def parse(text: str) -> tuple[int, ...]:
        try:
            values = tuple(int(word.replace("_", "")) for word in text.split(","))
        except ValueError:
            values = ()
        if not values or len(values) != (count or len(values)) or min(values) < lowest:
            wanted = f"integers from {lowest} on, {'A,B,...' if count is None else names}"
            raise argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}")
        return values

    return parse


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
        BenchError: no commit was given and git knows none.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or head_commit(),
        "versions": versions(),
    }


def append(out: Path, record: Mapping[str, Any]) -> None:
    """One line; the numbers in it are finite."""
    with out.open("a") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def need_writable(flag: str, path: Path) -> None:
    """Say so before anything is run; a folder that may be a slip of the pen is not made.

    Raises:
        BenchError: the file that ``flag`` names cannot be written.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        fix = f"mkdir -p {shlex.quote(str(folder))}"
        raise BenchError(f"{flag} {path}: there is no such folder; make it first: {fix}")
    if not os.access(path if path.exists() else folder, os.W_OK) or path.is_dir():
        raise BenchError(f"{flag}: got {str(path)!r}, wanted a file that can be written")


def head_commit() -> str:
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
