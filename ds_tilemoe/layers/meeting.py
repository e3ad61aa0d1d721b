"""When the ranks of a group meet in a forward, and what they decide about the call."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer
from torch import Tensor

from ds_tilemoe.backends.cuda_limits import router_fault
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.layers.agreement import Offer, meet
from ds_tilemoe.layers.layer_state import LayerState, Situation
from ds_tilemoe.layers.recognise import dtype_name
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.router_rules import uncovered

RANDOM = "dropout is active: training mode with p > 0"


def decide(
    layer: MOELayer,
    state: LayerState,
    runtime: Runtime,
    situation: Situation,
    grad: bool,
    input: tuple[Any, ...],
) -> tuple[Situation, bool]:
    """Decide about a call with the group: in ``state.shapes`` or ``state.kept``.

    Returns:
        The situation that was decided, and whether the layer stays as it is for good.

    Raises:
        What ``Runtime.preflight`` raises.
    """
    offer = state.offer(layer, situation.dtype)
    situation = state.situation(layer)  # the offer has looked at the experts anew
    if situation.is_random and not isinstance(offer.outcome, str):
        offer = Offer(state.name, RANDOM)
    if runtime.device == "cuda" and not grad:
        why_not = _why_not_fused(layer, input)
        if fault := router_fault(runtime.config, why_not, situation.dtype):
            offer = Offer(state.name, fault, unmet=True)
    # Strict is about what can be swapped, not about a hook or a dropout that comes and goes.
    strict = state.session.config.strict and not (state.shapes or situation.is_random)
    (decision,) = runtime.preflight(
        [offer],
        grad,
        _count_tokens(input),
        dtype_name(situation.dtype),
        strict,
        is_first(state, runtime),
    )
    state.stats.settings = runtime.settings()
    if grad:
        return situation, False
    if not isinstance(decision, str):
        state.shapes[situation], state.kept = decision, None
        state.tell(decision)
        return situation, False
    state.kept = (situation, decision)
    text = f"layer {state.name} takes DeepSpeed's path: {decision}"
    for_good = not state.shapes and RANDOM not in decision
    if for_good:
        state.tell(decision)
    else:
        text += "; it overlaps again when that is gone"
    state.session.say_once(text, runtime.group)
    return situation, for_good


def is_first(state: LayerState, runtime: Runtime) -> bool:
    """Whether a pre-flight now is one that all ranks of the job have in the same call."""
    return not (runtime.is_open and state.shapes)


def refuse_capture(state: LayerState, runtime: Runtime) -> None:
    if runtime.device == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TileMoEError(
            f"layer {state.name}: a CUDA graph is being captured, and the ranks have to meet, as"
            " before a layer's first call, the first one in another dtype or mode, and each one on"
            " DeepSpeed's path; fix: run one forward before the capture, as it will be captured"
        )


def has_to_meet(state: LayerState, runtime: Runtime, situation: Situation) -> bool:
    """Whether the group has to decide before this call; equal on all ranks in step.

    On the backend a change on one rank travels in the count exchange (CHANGED in native.py).
    DeepSpeed's path has no such word, so there the ranks ask each other in every call.
    """
    if state.kept is not None:
        refuse_capture(state, runtime)
        grad = torch.is_grad_enabled()
        meeting = runtime.meeting(is_first(state, runtime))
        is_new, what = situation != state.kept[0], "the meeting of the ranks"
        call = f"layer {state.name} on DeepSpeed's path"
        return any(meet(is_new, meeting, state.name, what, grad, call=call))
    return is_first(state, runtime)


def _count_tokens(input: tuple[Any, ...]) -> int:
    """Of an input that has not been checked: that is for the call, which tells all ranks."""
    x = input[0] if input else None
    return x.numel() // x.shape[-1] if isinstance(x, Tensor) and x.dim() and x.numel() else 0


def _why_not_fused(layer: MOELayer, input: tuple[Any, ...]) -> str:
    """:func:`uncovered` of a call. Never raises, as its peers would wait for this rank."""
    try:
        return uncovered(layer.gate, input[1] if len(input) > 1 else None, layer.use_tutel)
    except Exception:  # the router will, where all ranks hear of it
        return ""
