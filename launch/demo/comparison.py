"""Whether swapped layers give what DeepSpeed's own give: the rule of ``infer.py --compare``.

In fp32 the two runs of the whole model have to agree. In bf16 and fp16 that says nothing: where two
experts nearly tie for a token, the rounding of an earlier layer decides between them, and from
there on the runs do different things, both right. So one more run gives each swapped layer the
input that DeepSpeed's own had in its place. Both then decide about the same numbers, so each
layer's output and the logits compare for every token.

Shape letters: T tokens of a forward, H hidden, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional as F

from demo.generation import Reading

FP32_LIMIT = 1e-5
HALF_LIMIT = 2e-2  # times the largest number of what is compared
# Of pairs of a token and a layer. The demo has 0.3 %, twelve layers of 64 experts and top-8 3 %.
REROUTED_LIMIT = 0.2


class LayerCalls:
    """What the MoE layers of a model were given and gave, forward by forward.

    It stays on the model's device: a copy to the host would wait for it after each layer, and a
    race between layers that follow each other closely would not show.

    Args:
        model: any module with ``deepspeed.moe`` layers, swapped or not.

    Attributes:
        routed: pairs of a token and a layer that were replayed.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = {name: part for name, part in model.named_modules() if isinstance(part, MoE)}
        self._names, self._layers = list(layers), list(layers.values())
        self._calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        # 0-d tensors, put together only when they are asked for.
        self._rerouted: list[Tensor] = []
        self._diffs: list[list[Tensor]] = [[] for _ in layers]
        self.routed = 0

    @property
    def rerouted(self) -> int:
        """How many of ``routed`` would have gone to other experts with the layer's own input."""
        return int(torch.stack(self._rerouted).sum()) if self._rerouted else 0

    def worst_layer(self) -> tuple[str, float]:
        """Name, and largest difference of an output over the largest output, of a replayed layer.

        ("", 0.0) if none was; a ratio that is not a number comes before all others.
        """
        worst = ("", 0.0)
        for name, calls, diffs in zip(self._names, self._calls, self._diffs, strict=True):
            if diffs:
                largest = torch.stack([y.abs().max() for _, y in calls]).max().item()
                ratio = torch.stack(diffs).max().item() / (largest or 1.0)
                worst = max(worst, (name, ratio), key=lambda found: _finite(found[1], math.inf))
        return worst

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Inside, keep what each layer is given and gives."""

        def keep(index: int, x: Tensor, y: Tensor) -> None:
            self._calls[index].append((x, y))

        with self._around_each(lambda index, x: x, keep):
            yield

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Inside, give each layer what it had when recorded. The same forwards, in their order."""
        coming = [iter(calls) for calls in self._calls]
        wanted: list[Tensor | None] = [None] * len(coming)

        def give(index: int, x: Tensor) -> Tensor:
            given, wanted[index] = next(coming[index])
            gate = self._layers[index].deepspeed_moe.gate
            moved = (_experts_of(gate, x) != _experts_of(gate, given)).any(dim=-1)
            self._rerouted.append(moved.sum())
            self.routed += moved.numel()
            return given

        def compare(index: int, x: Tensor, y: Tensor) -> None:
            self._diffs[index].append((y - wanted[index]).abs().max())

        with self._around_each(give, compare):
            yield

    @contextlib.contextmanager
    def _around_each(
        self,
        before: Callable[[int, Tensor], Tensor],
        after: Callable[[int, Tensor, Tensor], None],
    ) -> Iterator[None]:
        """Each layer gets ``before(index, x)``; then ``after(index, that, its output)``."""

        def put_hooks(index: int, layer: nn.Module) -> list[Any]:
            return [
                layer.register_forward_pre_hook(lambda _, a: (before(index, a[0]), *a[1:])),
                layer.register_forward_hook(lambda _, a, out: after(index, a[0], out[0])),
            ]

        hooks = [put_hooks(index, layer) for index, layer in enumerate(self._layers)]
        try:
            yield
        finally:
            for hook in itertools.chain(*hooks):
                hook.remove()


def of_rank(
    plain: Reading, reading: Reading, again: Reading, replayed: Reading | None, calls: LayerCalls
) -> dict[str, Any]:
    """What a rank found.

    Args:
        plain: the run of DeepSpeed's own layers.
        reading: the run of the swapped layers that users are shown.
        again: a second such run, with the rows moved in another way and so at other times.
        replayed: in bf16 and fp16, a third such run with ``plain``'s layer inputs and bytes; None
            for the rule of fp32.
        calls: of ``plain``, after ``replayed``.

    Returns:
        "max_abs_diff" and its "limit", "layer_diff" of the worst layer, "rerouted" and "routed"
        tokens, and "fault", what is wrong or None.
    """
    compared = reading if replayed is None else replayed
    # Logits compare only while both runs were given the same bytes.
    pairs = zip(compared.written, plain.written, strict=True)
    common = next((i for i, (mine, its) in enumerate(pairs) if mine != its), plain.steps)
    rows = plain.predicted + 1 + min(common, plain.steps)
    diff = (compared.logits[:rows] - plain.logits[:rows]).abs().max().item()
    limit = FP32_LIMIT
    if replayed is not None:
        limit = HALF_LIMIT * plain.logits[:rows].abs().max().item()
    name, ratio = calls.worst_layer()
    fault = None
    if not ratio <= HALF_LIMIT:
        fault = (
            f"given the same input, {name} differs by {ratio:.3g} x its largest output; the limit"
            f" is {HALF_LIMIT:.3g} x"
        )
    elif not diff <= limit:  # also if it is not a number
        fault = f"max_abs_diff is {diff:.3g}; the limit is {limit:.3g}"
    elif replayed is None and reading.written != plain.written:
        fault = f"another text: {reading.written!r} for {plain.written!r}"
    elif not torch.equal(reading.logits, again.logits):
        fault = "two runs of the swapped layers differ; their results have to repeat bit for bit"
    return {
        "max_abs_diff": diff,
        "limit": limit,
        "layer_diff": ratio,
        "rerouted": calls.rerouted,
        "routed": calls.routed,
        "fault": fault,
    }


def of_world(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks found, from their :func:`of_rank`, for the record; all null without ranks.

    A number is null too where a logit is not a number, which JSON cannot say; "fault" then does.
    """
    if not everyone:
        names = ("max_abs_diff", "max_abs_diff_limit", "layer_diff", "rerouted_share", "fault")
        return dict.fromkeys(names)
    faults = [f"rank {i}: {r['fault']}" for i, r in enumerate(everyone) if r["fault"]]
    rerouted, routed = (sum(r[name] for r in everyone) for name in ("rerouted", "routed"))
    share = rerouted / routed if routed else None
    if share is not None and share > REROUTED_LIMIT:
        faults.append(
            f"{rerouted} of {routed} tokens of a layer would have gone to other experts; the limit"
            f" is {REROUTED_LIMIT:.0%}"
        )
    worst = max(everyone, key=lambda r: _finite(r["max_abs_diff"] - r["limit"], math.inf))
    layer_diff = max((r["layer_diff"] for r in everyone), key=lambda diff: _finite(diff, math.inf))
    return {
        "max_abs_diff": _finite(worst["max_abs_diff"], None),
        "max_abs_diff_limit": _finite(worst["limit"], None),
        "layer_diff": _finite(layer_diff, None) if routed else None,
        "rerouted_share": share,
        "fault": faults[0] if faults else None,
    }


def _experts_of(gate: nn.Module, x: Tensor) -> Tensor:
    """x [..., H] -> [T, K]: the experts that DeepSpeed's gate chooses, in ascending order."""
    logits = F.linear(x.reshape(-1, x.shape[-1]).float(), gate.wg.weight.float())
    return logits.topk(gate.k, dim=-1).indices.sort(dim=-1).values


def _finite(value: float, otherwise: Any) -> Any:
    return value if math.isfinite(value) else otherwise
