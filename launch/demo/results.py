"""What the ranks measured, as one record and as text."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from tqdm import tqdm

import ds_tilemoe
from demo.outputs import OutputError, whole_file
from demo.process import complain, rank
from ds_tilemoe.stats import PARTS

if TYPE_CHECKING:
    from pathlib import Path

    from demo.generation import Reading

# Of each layer the record gives the worst rank; the ranks' own rows stand beside it.
WORST = {
    "calls": max,
    "time_us": max,
    **{f"{part}_us": max for part in PARTS},
    "combine_alone_us": max,
    "overlap_ratio": min,
    "backlog": max,
    "segments": min,
    "chunks_drained": max,
    "idle_spins": max,
    "split": max,
}


@contextlib.contextmanager
def progress(label: str, tokens: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on rank 0's stderr, if that is a terminal; yields its advance function."""
    size = shutil.get_terminal_size()  # some terminals say 0 x 0, and tqdm would believe them
    shape = {"ncols": size.columns, "nrows": size.lines}
    hidden = None if rank() == 0 else True
    with tqdm(total=tokens, desc=label, unit="B", disable=hidden, **shape) as bar:
        yield bar.update


def of_rank(reading: Reading, plain: Reading | None) -> dict[str, Any]:
    """What a rank tells the others; ``plain`` is what DeepSpeed's own layers gave, if they ran."""
    return {
        "nll": reading.nll,
        "predicted": reading.predicted,
        "text": reading.written,
        "read": reading.predicted + 1,
        "steps": reading.steps,
        "prefill_s": reading.prefill_s,
        "decode_s": reading.decode_s,
        "plain_nll": None if plain is None else plain.nll,
        "plain_s": None if plain is None else plain.prefill_s + plain.decode_s,
    }


def of_world(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The record that ``--json`` prints, from :func:`of_rank` of all ranks.

    Tokens are counted over all ranks, times are the slowest rank's. A perplexity is None where it
    is no finite number.
    """
    first = everyone[0]
    prefill_s, decode_s = (max(r[name] for r in everyone) for name in ("prefill_s", "decode_s"))
    read, stepped = (sum(r[name] for r in everyone) for name in ("read", "steps"))
    compared = first["plain_nll"] is not None
    return {
        "text": first["text"].decode("utf-8", errors="replace"),
        "perplexity": _perplexity(everyone, "nll"),
        "perplexity_unswapped": _perplexity(everyone, "plain_nll") if compared else None,
        "tokens_per_s": (read + stepped) / (prefill_s + decode_s),
        "tokens_per_s_unswapped": (
            (read + stepped) / max(r["plain_s"] for r in everyone) if compared else None
        ),
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


def show(record: dict[str, Any]) -> str:
    """The record as a newcomer wants to read it."""
    before = " ".join(record["text_before"].split())
    lines = [f'continuation of "... {before}":', record["text"], ""]
    lines.append(f"perplexity            {_perplexity_text(record['perplexity'])} a byte")
    if record["tokens_per_s_unswapped"] is not None:
        unswapped = _perplexity_text(record["perplexity_unswapped"])
        lines.append(f"perplexity unswapped  {unswapped}")
        diff, limit = map(_number, (record["max_abs_diff"], record["max_abs_diff_limit"]))
        lines.append(f"max_abs_diff          {diff}; allowed {limit}")
        if record["backend"] == "deepspeed":
            lines.append("no layer was swapped: both runs are of DeepSpeed's own layers")
        if record["rerouted_share"] is not None:
            lines += [
                f"worst layer           {_number(record['layer_diff'])} x its largest output, with"
                " the input of DeepSpeed's own",
                f"rerouted              {record['rerouted_share']:.2%} of tokens and layers, where"
                " experts nearly tie",
            ]
    decode = record["decode_tokens_per_s"]
    decode = "-" if decode is None else f"{decode:.0f}"
    lines.append(
        f"tokens per second     {record['tokens_per_s']:.0f} (prefill"
        f" {record['prefill_tokens_per_s']:.0f}, decode {decode})"
        f" on {record['ranks']} rank(s), {record['backend']} backend, {record['dtype']}"
    )
    if record["tokens_per_s_unswapped"] is not None:
        lines.append(
            f"unswapped             {record['tokens_per_s_unswapped']:.0f} tokens per second, with"
            " DeepSpeed's own layers"
        )
    if record["layers"]:
        lines += ["", "per layer and call, worst rank:"]
        lines.append(
            ds_tilemoe.stats.table([row | {"layer": row["name"]} for row in record["layers"]])
        )
        for row in record["layers"]:
            known = [part for part in PARTS if row[f"{part}_us"] is not None]
            if known[1:]:  # more than the exposed combine, which the table has
                parts = ", ".join(f"{part} {row[f'{part}_us']:.0f}" for part in known)
                lines.append(f"{row['name']} [us]: {parts}")
        if any(row["overlap_ratio"] is not None for row in record["layers"]):
            # Both runs that the ratio compares wait for peers that are late.
            mostly = "; on a CPU, which ranks share, mostly" if record["backend"] == "cpu" else ""
            lines.append(f"exposed combine holds peers' lateness too{mostly}")
    return "\n".join(lines)


def save_trace(path: Path, traces: list[dict[str, Any]], has_calls: bool) -> bool:
    """Join the ranks' Chrome traces, a process a rank; True where the file cannot be written, which
    is said, and leaves the other results as they are."""
    if not has_calls:
        print("warning: --trace: no layer was swapped, so the trace has no calls", file=sys.stderr)
    joined = {**traces[0], "traceEvents": [e for trace in traces for e in trace["traceEvents"]]}
    try:
        with whole_file("--trace", path) as beside:
            beside.write_text(json.dumps(joined), encoding="utf-8")
    except OutputError as error:
        complain(str(error))
        return True
    return False


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2e}"


def _perplexity_text(value: float | None) -> str:
    return "not a finite number" if value is None else f"{value:.4f}"


def _perplexity(everyone: list[dict[str, Any]], key: str) -> float | None:
    """None where it is not a number or too large for one, which JSON cannot say."""
    nll = sum(r[key] for r in everyone) / sum(r["predicted"] for r in everyone)
    return math.exp(nll) if nll < math.log(sys.float_info.max) else None


def _worst(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One layer's rows of all ranks in one."""
    layer: dict[str, Any] = {"name": rows[0]["layer"]}
    for key, pick in WORST.items():
        known = [row[key] for row in rows if row[key] is not None]
        layer[key] = pick(known) if known else None
    return layer | {"ranks": list(rows)}
