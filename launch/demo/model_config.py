"""Sizes of a demo model. No torch: a wrong file is refused before anything heavy is imported."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


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
            kind = (int, float) if name == "rope_base" else int
            if isinstance(value, bool) or not isinstance(value, kind) or value < 1:
                raise ModelConfigError(
                    f"{name} is {value!r}; it must be a whole number of at least 1"
                )
        if self.hidden % (2 * self.heads):
            raise ModelConfigError(
                f"hidden is {self.hidden}; it must be a multiple of 2 * heads = {2 * self.heads}"
            )
        if self.topk > self.num_experts:
            raise ModelConfigError(
                f"topk is {self.topk}; it must be at most num_experts = {self.num_experts}"
            )

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a JSON file.

        Raises:
            ModelConfigError: the file is missing, is not a JSON object, or a key or value is wrong.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelConfigError(f"cannot read model config {path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelConfigError(f"model config {path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelConfigError(
                f"model config {path} holds a {type(values).__name__}, not an object"
            )
        known = {field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {sorted(known)}"
                raise ModelConfigError(f"model config {path} has an unknown key {key!r}{hint}")
        missing = known - {"rope_base"} - values.keys()
        if missing:
            raise ModelConfigError(f"model config {path} lacks {sorted(missing)}")
        try:
            return cls(**values)
        except ModelConfigError as error:
            raise ModelConfigError(f"model config {path}: {error}") from error
