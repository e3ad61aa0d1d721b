"""What the ranks measured, as one record and as text."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from tqdm import tqdm

import ds_tilemoe
from demo.process import rank

if TYPE_CHECKING:
    from demo.generation import Reading

FP32_LIMIT = 1e-5
HALF_LIMIT = 2e-2  # times the largest logit
# Of each layer the record gives the worst rank; the ranks' own rows stand beside it.
WORST = {
    "calls": max,
    "time_us": max,
    "exposed_combine_us": max,
    "combine_alone_us": max,
    "overlap_ratio": min,
    "backlog": max,
    "segments": min,
    "chunks_drained": max,
    "idle_spins": max,
}


@contextlib.contextmanager
def progress(label: str, tokens: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0's stderr, if that is a terminal; yields its advance function."""
    size = shutil.get_terminal_size()  # some terminals say 0 x 0, and tqdm would believe them
    shape = {"ncols": size.columns, "nrows": size.lines}
    hidden = None if rank() == 0 else True
    with tqdm(total=tokens, desc=label, unit="B", disable=hidden, **shape) as bar:
        yield bar.update


def of_rank(reading: Reading, plain: Reading | None, dtype: str) -> dict[str, Any]:
    """What a rank tells the others; ``plain`` is what DeepSpeed's own layers gave, if they ran."""
    mine: dict[str, Any] = {
        "nll": reading.nll,
        "predicted": reading.predicted,
        "text": reading.written,
        "read": reading.predicted + 1,
        "steps": reading.steps,
        "prefill_s": reading.prefill_s,
        "decode_s": reading.decode_s,
        "plain_nll": None,
        "max_abs_diff": None,
        "fault": None,
    }
    if plain is not None:
        # Logits compare only while both runs were given the same bytes.
        common = next(
            (i for i, pair in enumerate(zip(reading.written, plain.written, strict=True))
             if pair[0] != pair[1]), reading.steps,
        )  # fmt: skip
        rows = mine["read"] + min(common, reading.steps)
        diff = (reading.logits[:rows] - plain.logits[:rows]).abs().max().item()
        limit = FP32_LIMIT
        if dtype != "float32":
            limit = HALF_LIMIT * plain.logits[:rows].abs().max().item()
        mine |= {"plain_nll": plain.nll, "max_abs_diff": diff}
        if not diff <= limit:  # also if it is not a number
            mine["fault"] = f"max_abs_diff is {diff:.3g}; the limit is {limit:.3g}"
        elif dtype == "float32" and reading.written != plain.written:
            mine["fault"] = f"another text: {reading.written!r} for {plain.written!r}"
    return mine


def of_world(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The record that ``--json`` prints, from :func:`of_rank` of all ranks.

    Tokens are counted over all ranks, times are the slowest rank's.
    """
    first = everyone[0]
    prefill_s, decode_s = (max(r[name] for r in everyone) for name in ("prefill_s", "decode_s"))
    read, stepped = (sum(r[name] for r in everyone) for name in ("read", "steps"))
    compared = first["max_abs_diff"] is not None
    diffs = [r["max_abs_diff"] for r in everyone]
    return {
        "text": first["text"].decode("utf-8", errors="replace"),
        "perplexity": _perplexity(everyone, "nll"),
        "perplexity_unswapped": _perplexity(everyone, "plain_nll") if compared else None,
        # Null too where a logit is not a number, which JSON cannot say; "fault" then does.
        "max_abs_diff": max(diffs) if compared and all(map(math.isfinite, diffs)) else None,
        "tokens_per_s": (read + stepped) / (prefill_s + decode_s),
        "prefill_tokens_per_s": read / prefill_s,
        "decode_tokens_per_s": stepped / decode_s if stepped else None,
        "ranks": len(everyone),
        "layers": [_worst(rows) for rows in zip(*(r["layers"] for r in everyone), strict=True)],
        "versions": {
            "ds_tilemoe": ds_tilemoe.__version__,
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def fault(everyone: list[dict[str, Any]]) -> str | None:
    """What ``--compare`` found on the first rank that found something."""
    found = (f"rank {i}: {r['fault']}" for i, r in enumerate(everyone) if r["fault"])
    return next(found, None)


def show(record: dict[str, Any]) -> str:
    """The record as a newcomer wants to read it."""
    lines = ["continuation:", record["text"], ""]
    lines.append(f"perplexity            {record['perplexity']:.4f} a byte")
    if record["perplexity_unswapped"] is not None:
        lines.append(f"perplexity unswapped  {record['perplexity_unswapped']:.4f}")
        diff = record["max_abs_diff"]
        lines.append(f"max_abs_diff          {'not a number' if diff is None else f'{diff:.2e}'}")
    decode = record["decode_tokens_per_s"]
    decode = "-" if decode is None else f"{decode:.0f}"
    lines.append(
        f"tokens per second     {record['tokens_per_s']:.0f} (prefill"
        f" {record['prefill_tokens_per_s']:.0f}, decode {decode})"
        f" on {record['ranks']} rank(s), {record['backend']} backend"
    )
    if record["layers"]:
        lines += ["", "per layer and call, worst rank:"]
        lines.append(
            ds_tilemoe.stats.table([row | {"layer": row["name"]} for row in record["layers"]])
        )
        # Both runs that the ratio compares wait for peers that are late.
        lines.append(
            "exposed combine holds peers' lateness too; with more ranks than cores, mostly"
        )
    return "\n".join(lines)


def write_trace(path: str, traces: list[dict[str, Any]]) -> None:
    """Join the ranks' Chrome traces, a process a rank."""
    joined = {**traces[0], "traceEvents": [e for trace in traces for e in trace["traceEvents"]]}
    Path(path).write_text(json.dumps(joined), encoding="utf-8")


def _perplexity(everyone: list[dict[str, Any]], key: str) -> float:
    return math.exp(sum(r[key] for r in everyone) / sum(r["predicted"] for r in everyone))


def _worst(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One layer's rows of all ranks in one."""
    layer: dict[str, Any] = {"name": rows[0]["layer"]}
    for key, pick in WORST.items():
        known = [row[key] for row in rows if row[key] is not None]
        layer[key] = pick(known) if known else None
    return layer | {"ranks": list(rows)}
