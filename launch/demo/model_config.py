"""Sizes of a demo model. No torch: a wrong file is refused before anything heavy is imported."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from demo.options import MOST, refusal


class ModelConfigError(ValueError):
    """A model config is wrong. Recover: fix the named key."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a demo model.

    Attributes:
        hidden: H; a multiple of twice ``heads``.
        ffn: width between an expert's two matrices.
        layers: number of blocks; each has one MoE layer.
        heads: A.
        num_experts: experts of a layer over all ranks.
        topk: experts that a token is sent to.
        window: keys that a query sees, itself included. Relative positions past it never occur, so
            texts longer than the training context are read as well as short ones.
        max_positions: the most tokens a rank can read and write together.
        rope_base: base of the rotary frequencies.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    num_experts: int
    topk: int
    window: int
    max_positions: int
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind, what = (int | float, "") if name == "rope_base" else (int, "whole ")
            is_one = isinstance(value, kind) and not isinstance(value, bool)
            if not is_one or not 1 <= value <= MOST:  # NaN neither
                wanted = f"a {what}number from 1 to {MOST}"
                raise ModelConfigError(f"{name}: {refusal(repr(value), wanted, 'change it')}")
        if self.hidden % (2 * self.heads):
            wanted = f"a multiple of 2 * heads, {2 * self.heads}"
            raise ModelConfigError(f"hidden: {refusal(self.hidden, wanted, 'change it')}")
        if self.topk > self.num_experts:
            wanted = f"at most num_experts, {self.num_experts}"
            raise ModelConfigError(f"topk: {refusal(self.topk, wanted, 'lower it')}")

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a JSON file.

        Raises:
            ModelConfigError: the file is missing, is not a JSON object, or a key or value is wrong.
        """
        thing = f"model config {str(path)!r}"
        wanted = "a JSON object of sizes, as launch/demo/config.json"
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"), parse_int=_integer)
        except OSError as error:
            got = f"{error.strerror}"
            raise ModelConfigError(f"{thing}: {refusal(got, wanted, 'name one')}") from error
        except (ValueError, RecursionError) as error:
            got = f"what is not JSON ({error})"
            raise ModelConfigError(f"{thing}: {refusal(got, wanted, 'mend it')}") from error
        if not isinstance(values, dict):
            got = f"a {type(values).__name__}"
            raise ModelConfigError(f"{thing}: {refusal(got, wanted, 'wrap it in braces')}")
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                fix = f"write {near[0]!r}" if near else "take it out"
                got = f"the unknown key {key!r}"
                raise ModelConfigError(f"{thing}: {refusal(got, f'one of {sorted(known)}', fix)}")
        if missing := sorted(known - {"rope_base"} - values.keys()):
            got = f"no {', '.join(missing)}"
            raise ModelConfigError(f"{thing}: {refusal(got, 'all sizes', 'add what is missing')}")
        try:
            return cls(**values)
        except ModelConfigError as error:
            raise ModelConfigError(f"{thing}: {error}") from error


def _integer(text: str) -> int | float:
    """As int(); infinite where there are more digits than Python reads, as JSON's 1e999 is."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def ep_size_of(ranks: int, experts: int) -> int:
    """Ranks that share the experts of a layer: DeepSpeed wants it to divide both numbers."""
    return math.gcd(ranks, experts)


def unshared(ranks: int, experts: int) -> str:
    """A line for a job whose ranks do not all exchange rows; "" where they do."""
    ep_size = ep_size_of(ranks, experts)
    if ep_size == ranks:
        return ""
    what = (
        f"rows are exchanged among {ep_size} ranks each" if ep_size > 1 else "no row is exchanged"
    )
    fix = f"fix: for all to, start as many ranks as divide {experts}"
    return f"note: ep_size {ep_size} with {ranks} ranks and {experts} experts: {what}; {fix}"
