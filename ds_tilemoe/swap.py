"""``apply()``, ``restore()`` and ``check()``: our layers in a DeepSpeed model and out of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.config import TileOverlapConfig, load_config
from ds_tilemoe.errors import ConfigError, DeadlineError, TileMoEError, UnsupportedLayerError
from ds_tilemoe.layers.agreement import DISABLED, EXCLUDED, Decision, DifferentCalls, Offer
from ds_tilemoe.layers.device_op import device_to_be, prepare_backend
from ds_tilemoe.layers.layer_state import LayerState, first_weight
from ds_tilemoe.layers.native import TileMOELayer, attach, release
from ds_tilemoe.layers.recognise import dtype_name
from ds_tilemoe.layers.runtime import Runtime, Session, say
from ds_tilemoe.layers.survey import (
    demand_divisible,
    model_of,
    moe_layers,
    native_layers,
    refused_engine,
    sessions_of,
    state_for,
)
from ds_tilemoe.report import KEPT, NOT_SUPPORTED, PENDING, SWAPPED, LayerReport, SwapReport

PUT_BACK = "DeepSpeed's own layer was put back"
NOT_THERE_YET = "its parameters are on the meta device until now"

Member = tuple[MOELayer, LayerState, Offer]  # of a group: a layer and this rank's word on it

logger = logging.getLogger("ds_tilemoe")


def apply(
    engine_or_model: Any, config: TileOverlapConfig | Mapping[str, Any] | str | Path | None = None
) -> SwapReport:
    """Swap the MoE layers of a model in place. Every rank of the model calls it, in the same order.

    After ``deepspeed.initialize`` the ranks of each expert-parallel group decide together, here.
    Before it, layers are reported as pending and the first forward decides; what they need is
    compiled here, ``enabled`` and ``layers`` have to be the same on all ranks, and where this
    raises on one rank the job has to end. Calling it again begins anew: the experts are examined,
    and the next forward makes a new heap if the old one has failed or was too small. With settings
    that are the same as before on all ranks of a group, heap, controller and ``stats`` go on.

    Args:
        engine_or_model: a DeepSpeed engine or any module.
        config: the ``tile_overlap`` settings, as for :func:`ds_tilemoe.load_config`; None reads the
            engine's ds_config, or takes the defaults for a module.

    Returns:
        What became of every MoE layer. Of a pending one it says so until the ranks have decided,
        and then what they decided.

    Raises:
        ConfigError: the settings are wrong. Peers whose settings are right keep DeepSpeed's path.
        UnsupportedLayerError: ``strict``, and a layer or all would be left as they are; or an
            ep_size that the world cannot be divided by. No layer of the model stays swapped.
        TileMoEError: the ranks disagree; see ``layers.agreement.agree``.
    """
    model = model_of(engine_or_model)
    if config is None and model is not engine_or_model:
        config = engine_or_model  # its ds_config holds the block
    try:
        try:
            settings = load_config(config)
        except Exception as error:  # maybe on this rank alone: its peers wait for its word
            _swap(model, TileOverlapConfig(), f"its settings are wrong: {error}")
            if isinstance(error, ConfigError):
                raise
            cause = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the settings cannot be read: {cause}") from error
        unwanted = refused_engine(engine_or_model) if settings.enabled else DISABLED
        report = SwapReport(tuple(_swap(model, settings, unwanted).values()))
        if settings.enabled:
            _judge(model, report, settings)
    except Exception:
        restore(model)
        raise
    return report


def restore(engine_or_model: Any) -> int:
    """Put DeepSpeed's own layers back, in place; returns how many.

    No communication, but every rank has to do it before the next forward.
    """
    swapped = [m for m in model_of(engine_or_model).modules() if isinstance(m, TileMOELayer)]
    for layer in swapped:
        _put_back(layer, PUT_BACK)
    return len(swapped)


def check(engine_or_model: Any) -> None:
    """Raise a failure that no forward has raised yet. Local.

    On CUDA it waits for the device first: call it where you read results, after each step. A
    failure that a later forward hears instead, or that has calls launched behind it, fails the
    group on all ranks: they may be out of step, and ``apply()`` puts that right.

    On the CPU every forward raises its own failure; what is left to say is that a heap has failed
    and that no later forward can succeed.

    Raises:
        RankFailure, CapacityError: a call failed on another rank (CUDA), once.
        DeadlineError: the heap has failed; with the first cause.
    """
    for session in sessions_of(engine_or_model):
        for runtime in session.runtimes():
            runtime.check()


@contextlib.contextmanager
def measure_combine_alone(engine_or_model: Any) -> Iterator[None]:
    """Inside, layers make all tiles first and move rows after, and the moving is timed.

    Run the same calls inside as outside: ``stats`` then knows what the combine takes when nothing
    hides it, and with it the overlap ratio. Results are the same; only the time is not. Local, but
    to mean something it has to be done on all ranks.
    """
    before = {session: session.measuring for session in sessions_of(engine_or_model)}
    try:
        for session in before:
            session.measuring = True
        yield
    finally:
        others = dict.fromkeys(sessions_of(engine_or_model), any(before.values()))  # of apply()
        for session, measuring in (others | before).items():
            session.measuring = measuring


def _swap(
    model: nn.Module, settings: TileOverlapConfig, unwanted: str | None
) -> dict[str, LayerReport]:
    """Attach, let the ranks agree, release what stays; name -> report, in model order.

    A rank with a reason against all layers (``unwanted``) brings it to the meeting of each group
    like any other: a rank that did not come would leave its peers waiting.
    """
    # A new one, as a copy of the model may go on with the one before.
    session = Session(settings)
    for _, layer, _ in native_layers(model):
        if (state := getattr(layer, "_tile", None)) is not None:
            session.follow(state.session)
    # Native layers get their own report below; a dict keeps the place of its first entry.
    reports = {name: LayerReport(name, NOT_SUPPORTED, reason) for name, reason in moe_layers(model)}
    together: dict[Runtime, list[Member]] = {}
    devices: dict[str, list[LayerReport]] = {}  # that pending layers will run on
    for name, layer, parent in list(native_layers(model)):
        state, weight = state_for(name, layer, session, parent), first_weight(layer)
        reason = unwanted or (None if re.search(settings.layers, name) else EXCLUDED)
        if reason is None:
            demand_divisible(name, layer)
            attach(layer, state)
            offer = state.offer(layer, None if weight is None else weight.dtype)
        else:
            _put_back(layer, reason)
            state.tell(reason)
            offer = Offer(name, reason)
        reports[name] = _report(layer, state, offer.outcome, PENDING)
        runtime = state.runtime(layer)
        if runtime is not None:
            together.setdefault(runtime, []).append((layer, state, offer))
        elif reason is None:
            device = None if isinstance(offer.outcome, str) else offer.outcome.device
            if weight is not None and weight.is_meta:
                reports[name], device = LayerReport(name, PENDING, NOT_THERE_YET), "cpu"
            state.listeners.append(functools.partial(_decided, reports[name], layer))
            state.forget()  # deepspeed.initialize may cast and part what was examined
            if device is not None:
                device = device_to_be(device, settings)
                devices.setdefault(device, []).append(reports[name])
    left = [f"{e.name}: {e.reason}" for e in reports.values() if e.status == NOT_SUPPORTED]
    for device, entries in devices.items():
        _build_for(device, session, entries)
    _agree(together, left, reports, settings.strict)
    return reports


def _agree(
    together: Mapping[Runtime, Sequence[Member]],
    left: Sequence[str],
    reports: dict[str, LayerReport],
    strict: bool,
) -> None:
    """Let the ranks of each group agree on its layers, and do and report what they agree on.

    Args:
        together: the layers of each group.
        left: layers that no code here handles, and why.
        reports: name -> report; gets those of ``together``.
        strict: this rank's setting.

    Raises:
        TileMoEError: a group could not agree, or its ranks are in different calls. Groups that this
            rank is in have heard of it.
    """
    failure: TileMoEError | None = None
    lost: set[Runtime] = set()  # nobody comes there
    settled: list[tuple[MOELayer, LayerState, LayerShape]] = []
    for runtime, members in together.items():
        offers = [offer for _, _, offer in members]
        if failure:  # in another group; this one has to hear of it
            offers = [Offer(o.layer, f"apply() has failed there: {failure}") for o in offers]
        try:
            decisions = runtime.preflight(offers, left=left)
        except TileMoEError as error:
            failure = failure or error
            if isinstance(error, DeadlineError | DifferentCalls):
                lost.add(runtime)
            continue
        for (layer, state, _), decision in zip(members, decisions, strict=True):
            reports[state.name] = _report(layer, state, decision, SWAPPED)
            if isinstance(decision, str):
                _put_back(layer, decision)
            else:
                state.settle(decision, runtime)
                settled.append((layer, state, decision))
    # A rank that fails in a later group puts all of its layers back, also those agreed on before.
    # Peers may have groups that this rank has not. DeepSpeed's groups lie in each other: what a
    # rank hears in a large one, and fails by, it has still to tell in the smaller ones.
    for runtime in sorted(together, key=lambda runtime: runtime.world, reverse=True):
        if runtime in lost:
            continue
        members = together[runtime]
        names = ", ".join(state.name for _, state, _ in members)
        try:
            heard = runtime.hear(str(failure or ""), names)
        except TileMoEError as error:
            failure = failure or error
            continue
        if heard and failure is None:
            reason = f"apply() has failed on another rank: {heard}"
            for layer, state, _ in members:
                reports[state.name] = LayerReport(state.name, KEPT, reason)
                _put_back(layer, reason)
            if strict:
                failure = UnsupportedLayerError(f"{names}: {reason}")
    if failure:
        raise failure
    for layer, state, decision in settled:
        if isinstance(layer, TileMOELayer):
            state.tell(decision)


def _report(layer: MOELayer, state: LayerState, decision: Decision, status: str) -> LayerReport:
    if isinstance(decision, str):
        return LayerReport(state.name, KEPT, decision)
    shape = (
        f"E={decision.num_experts} ep={layer.ep_size} K={decision.topk} H={decision.hidden}"
        f" F={decision.ffn} {dtype_name(decision.dtype)} {state.recipe}"
    )
    return LayerReport(state.name, status, state.remark(), shape)


def _decided(entry: LayerReport, layer: MOELayer, decision: Decision) -> None:
    """Into a report that says "pending"; see ``LayerState.listeners``."""
    if isinstance(decision, str):
        entry.become(KEPT, decision)
    else:  # by the layer's state now: a later apply() may have brought a new one
        found = _report(layer, layer._tile, decision, SWAPPED)
        entry.become(found.status, found.reason, found.shape)


def _put_back(layer: MOELayer, reason: str) -> None:
    state = getattr(layer, "_tile", None)
    release(layer)
    if state is not None:
        state.tell(reason)


def _build_for(device: str, session: Session, entries: Sequence[LayerReport]) -> None:
    """Builds what pending layers will run with. In their first forward, where all ranks hear if it
    could not be built here, peers would wait for the compiler with a deadline.

    Args:
        device: "cpu" or "cuda".
        session: of the layers.
        entries: of these layers; get a remark where it cannot be built.
    """
    try:
        prepare_backend(device, session.config, alone=False)
    except Exception as error:
        session.obstacles[device] = error
        remark = str(error)
        if not isinstance(error, ConfigError):
            remark = f"the {device.upper()} backend could not be built: {error}"
        logger.warning("layers that are pending may keep DeepSpeed's path: %s", remark)
        for entry in entries:
            entry.reason = remark


def _judge(model: nn.Module, report: SwapReport, settings: TileOverlapConfig) -> None:
    """Nothing swapped, or less than strict wants, must not go unnoticed."""
    left = [
        f"{entry.name}: {entry.reason}"
        for entry in report.layers
        if entry.status in (KEPT, NOT_SUPPORTED) and entry.reason != EXCLUDED
    ]
    nothing = not report.swapped and not report.pending
    if not report.layers:
        seen = Counter(type(m).__name__ for m in model.modules() if not m._modules or m is model)
        classes = ", ".join(f"{n} {name}" for name, n in seen.most_common(8))
        left = [f"no MoE layer in {type(model).__name__}; it consists of {classes}"]
    elif nothing and not left:
        left = [f'none of {len(report.layers)} MoE layers matches layers "{settings.layers}"']
    if not left:
        return
    head = "0 layers swapped" if nothing else "some MoE layers are not swapped"
    text = f"{head}: " + "; ".join(left)
    if settings.strict:
        raise UnsupportedLayerError(f"{text}; fix: change the model, or set strict to false")
    say(text, *([layer.ep_group for _, layer, _ in native_layers(model)] or [None]))
