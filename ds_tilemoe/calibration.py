"""What a machine does, measured in well under a second and kept on disk.

Whoever has the kernels passes two functions that run and time them; this file decides what to run,
makes a Machine of the times and caches it by GPU, link and version. Pure: no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cost_model import Machine

logger = logging.getLogger("ds_tilemoe")

REPEATS = 5
FEW_CTAS, MANY_CTAS = 2, 24  # far below what fills a link, and more than enough
COPY_BYTES_PER_CTA = 4 << 20  # about 100 us
INNER_WIDTHS = (1024, 4096)  # K of the GEMMs
DRAIN_SHARE = 0.35  # of a consumer CTA's rate: a producer CTA has a third of its copy warps

# What a file may say of a machine: field -> least and most.
_RANGES: dict[str, tuple[float, float]] = {
    "sms": (1, 1024),
    "rate_per_cta": (1e-6, 1e9),
    "drain_rate": (1e-6, 1e9),
    "link": (1e-6, 1e9),
    "tile_base_ns": (0, 1e12),
    "tile_ns_per_k": (0, 1e12),
    "lone_share": (0.01, 1),
    "start_share": (0, 2),
    "tile_n": (1, 4096),
    "consumer_takes_sm": (0, 1),
    "launch_ns": (0, 1e12),
    "drain_start_ns": (0, 1e12),
    "put_bytes": (0, 2**40),
}
_TYPES: dict[Any, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}

#: Runs so many consumer CTAs that ship so many bytes to peers together; returns ns.
MeasureCopy = Callable[[int, int], float]
#: Runs so many tiles of the reference width at inner width K on all SMs; returns ns.
MeasureGemm = Callable[[int, int], float]


def typical(sms: int) -> Machine:
    """A GPU of which nothing was measured: an H200's numbers (docs/gpu-notes.md)."""
    return Machine(
        sms=sms,
        rate_per_cta=41.0,
        drain_rate=41.0 * DRAIN_SHARE,
        link=358.0,
        tile_base_ns=600.0,
        tile_ns_per_k=11.6,
    )


def calibrate(sms: int, measure_copy: MeasureCopy, measure_gemm: MeasureGemm) -> Machine:
    """Measures a machine: 8 launches, ``REPEATS`` times each, medians.

    Args:
        sms: of the GPU.
        measure_copy, measure_gemm: see above; whatever they raise goes through.

    Raises:
        ValueError: the times cannot be (zero, negative or not finite).
    """

    def copy(ctas: int) -> float:
        size = ctas * COPY_BYTES_PER_CTA
        return size / _median(lambda: measure_copy(ctas, size), f"copy by {ctas} CTAs")

    def gemm(tiles: int, k: int) -> float:
        return _median(lambda: measure_gemm(tiles, k), f"GEMM of {tiles} tiles, K {k}")

    rate = copy(FEW_CTAS) / FEW_CTAS
    link = copy(MANY_CTAS)
    full, lone_shares, start_shares = [], [], []
    for k in INNER_WIDTHS:
        one, four = gemm(sms, k), gemm(4 * sms, k)
        more = gemm(4 * sms + max(1, sms // 16), k)
        tile = (four - one) / 3
        if tile <= 0:
            raise ValueError(f"calibration: GEMM of {sms} tiles took {one} ns, of 4x {four} ns")
        full.append(tile)
        lone_shares.append(min(1.0, max(0.3, (more - four) / tile)))
        start_shares.append(min(2.0, max(0.0, (one - tile) / tile)))
    per_k = max(0.0, (full[1] - full[0]) / (INNER_WIDTHS[1] - INNER_WIDTHS[0]))
    return Machine(
        sms=sms,
        rate_per_cta=rate,
        drain_rate=rate * DRAIN_SHARE,
        link=link,
        tile_base_ns=max(0.0, full[0] - per_k * INNER_WIDTHS[0]),
        tile_ns_per_k=per_k,
        lone_share=statistics.mean(lone_shares),
        start_share=statistics.mean(start_shares),
    )


def _median(measure: Callable[[], float], what: str) -> float:
    found = statistics.median(measure() for _ in range(REPEATS))
    if not (found > 0 and math.isfinite(found)):
        raise ValueError(f"calibration: {what} took {found} ns, wanted a time above 0")
    return found


def cached_machine(
    gpu: str,
    link: str,
    version: str,
    calibrate_now: Callable[[], Machine],
    cache_dir: str | Path | None = None,
) -> Machine:
    """The machine from the cache, or measured now and put there.

    Processes may do this at once: a file is replaced as a whole, the last one stays. A directory
    that cannot be written costs a warning and another calibration in the next process.

    Args:
        gpu, link, version: what the numbers hold for.
        calibrate_now: makes the numbers; what it raises goes through.
        cache_dir: ``~`` is the user's home; None for ``ds_tilemoe`` in the user's cache directory.
    """
    key = {"gpu": gpu, "link": link, "version": version}
    path = cache_file(key, cache_dir)
    machine = _read(path, key)
    if machine is None:
        machine = calibrate_now()
        _write(path, {"key": key, "machine": dataclasses.asdict(machine)})
    return machine


def cache_file(key: dict[str, str], cache_dir: str | Path | None = None) -> Path:
    """Where the numbers of that key are."""
    if cache_dir is None:
        cache_dir = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "ds_tilemoe")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", key["gpu"].lower()).strip("-")[:40]
    return Path(os.path.expanduser(cache_dir)) / f"{name or 'gpu'}-{digest}.json"


def _read(path: Path, key: dict[str, str]) -> Machine | None:
    if not os.path.exists(path):
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] != key:
            raise ValueError(f"it is of {found['key']}")
        return _machine_of(found["machine"])
    except Exception as error:  # whatever a damaged file does to its reader
        logger.warning(
            "the calibration in %s cannot be used (%s: %s); measuring anew",
            path,
            type(error).__name__,
            error,
        )
        return None


def _machine_of(numbers: dict[str, Any]) -> Machine:
    """The machine that a file holds.

    Raises:
        ValueError: a field is missing, unknown, of another type or out of range.
    """
    fields = dataclasses.fields(Machine)
    if different := {field.name for field in fields} ^ set(numbers):
        raise ValueError(f"missing or unknown: {', '.join(sorted(different))}")
    for field in fields:
        value, (least, most) = numbers[field.name], _RANGES[field.name]
        if type(value) not in _TYPES[field.type] or not least <= value <= most:
            raise ValueError(f"{field.name}: got {value!r}; wanted {field.type}, {least} to {most}")
    if numbers["tile_base_ns"] + numbers["tile_ns_per_k"] == 0:
        raise ValueError("a tile takes no time")
    return Machine(**numbers)


@functools.cache
def _warn_once(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # the ranks of a host share the folder
        logger.warning(message)


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:  # ValueError: a name that the system cannot write
        _warn_once(
            f"the calibration cannot be kept in {path.parent} ({error}), so that each process"
            " measures anew; fix: make that folder writable, or name another in"
            " tile_overlap.adaptive.cache_dir"
        )
