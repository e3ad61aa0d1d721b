"""What ``apply()`` did with each MoE layer, and why."""

from __future__ import annotations

from dataclasses import dataclass

SWAPPED = "swapped"
PENDING = "pending"
KEPT = "kept"
NOT_SUPPORTED = "not supported"


@dataclass
class LayerReport:
    """One MoE layer: what ``apply()`` did with it.

    Of a layer without an expert-parallel group that is not final: the ranks decide in the first
    forward, or in a later ``apply()``, and from then on the same object says what they decided.

    Attributes:
        name: its name in the model.
        status: "swapped"; "pending" (the ranks have not decided yet); "kept" (it stays on
            DeepSpeed's path) or "not supported" (a kind of layer that no code here handles).
        reason: why, for the last two; a remark otherwise, or "".
        shape: the layer's numbers in words, or "" where they are unknown.
    """

    name: str
    status: str
    reason: str = ""
    shape: str = ""

    def become(self, status: str, reason: str = "", shape: str = "") -> None:
        """It has been decided."""
        self.status, self.reason, self.shape = status, reason, shape


@dataclass(frozen=True)
class SwapReport:
    """All MoE layers of a model, in model order. ``str()`` gives a table.

    Layers that were pending when it was made are reported as they are now.
    """

    layers: tuple[LayerReport, ...]

    def count(self, status: str) -> int:
        """Layers with this status."""
        return sum(layer.status == status for layer in self.layers)

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the layers that run on our backend."""
        return tuple(layer.name for layer in self.layers if layer.status == SWAPPED)

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the layers that the first forward decides about."""
        return tuple(layer.name for layer in self.layers if layer.status == PENDING)

    def __str__(self) -> str:
        if not self.layers:
            return "ds_tilemoe: no MoE layers"
        counts = (f"{self.count(s)} {s}" for s in (SWAPPED, PENDING, KEPT, NOT_SUPPORTED))
        head = "ds_tilemoe: " + ", ".join(text for text in counts if not text.startswith("0 "))
        rows = [("layer", "status", "shape", "reason")]
        rows += [(entry.name, entry.status, entry.shape, entry.reason) for entry in self.layers]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join((head, *lines))
