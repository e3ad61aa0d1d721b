"""``apply()``, ``restore()`` and ``check()``: our layers in a DeepSpeed model and out of it."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_tilemoe.config import TileOverlapConfig, load_config
from ds_tilemoe.errors import ConfigError, TileMoEError, UnsupportedLayerError
from ds_tilemoe.layers.agreement import DISABLED, EXCLUDED, Decision, Offer
from ds_tilemoe.layers.layer_state import LayerState, dtype_name, first_weight
from ds_tilemoe.layers.native import TileMOELayer, attach, release
from ds_tilemoe.layers.runtime import Runtime, Session, say
from ds_tilemoe.report import KEPT, NOT_SUPPORTED, PENDING, SWAPPED, LayerReport, SwapReport

# Engines that move or regroup parameters behind a layer's back.
REFUSED_ENGINES = ("PipelineEngine", "DeepSpeedHybridEngine")


def apply(
    engine_or_model: Any, config: TileOverlapConfig | Mapping[str, Any] | str | Path | None = None
) -> SwapReport:
    """Swap the MoE layers of a model in place. Every rank of the model calls it, in the same order.

    After ``deepspeed.initialize`` the ranks of each expert-parallel group decide together, here.
    Before it, layers are reported as pending and the first forward decides. Calling it again with
    the same settings changes nothing, reports how things stand, and makes a new heap at the next
    forward if the old one has failed or was too small; with other settings it swaps anew.

    Args:
        engine_or_model: a DeepSpeed engine or any module.
        config: the ``tile_overlap`` settings, as for :func:`ds_tilemoe.load_config`; None reads the
            engine's ds_config, or takes the defaults for a module.

    Returns:
        What became of every MoE layer.

    Raises:
        ConfigError: the settings are wrong. Peers whose settings are right keep DeepSpeed's path.
        UnsupportedLayerError: ``strict``, and a layer or all would be left as they are; or an
            ep_size that the world cannot be divided by. No layer of the model stays swapped.
        TileMoEError: the ranks disagree; see ``layers.agreement.agree``.
    """
    model = _model_of(engine_or_model)
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
        unwanted = _refused_engine(engine_or_model) if settings.enabled else DISABLED
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
    swapped = [m for m in _model_of(engine_or_model).modules() if isinstance(m, TileMOELayer)]
    for layer in swapped:
        release(layer)
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
    for session in _sessions(engine_or_model):
        for runtime in session.runtimes():
            runtime.check()


@contextlib.contextmanager
def measure_combine_alone(engine_or_model: Any) -> Iterator[None]:
    """Inside, layers make all tiles first and move rows after, and the moving is timed.

    Run the same calls inside as outside: ``stats`` then knows what the combine takes when nothing
    hides it, and with it the overlap ratio. Results are the same; only the time is not. Local, but
    to mean something it has to be done on all ranks.
    """
    sessions = _sessions(engine_or_model)
    try:
        for session in sessions:
            session.measuring = True
        yield
    finally:
        for session in sessions:
            session.measuring = False


def _swap(
    model: nn.Module, settings: TileOverlapConfig, unwanted: str | None
) -> dict[str, LayerReport]:
    """Attach, let the ranks agree, release what stays; name -> report, in model order.

    A rank with a reason against all layers (``unwanted``) brings it to the meeting of each group
    like any other: a rank that did not come would leave its peers waiting.
    """
    session = _session_of(model, settings)
    for known in session.runtimes():
        known.reset()
    # Native layers get their own report below; a dict keeps the place of its first entry.
    reports = {
        name: LayerReport(name, NOT_SUPPORTED, _why_not(module))
        for name, module in model.named_modules()
        if isinstance(module, MOELayer | AutoEPMoELayer) or _is_foreign_moe(module)
    }
    together: dict[Runtime, list[tuple[MOELayer, LayerState, Offer]]] = {}
    for name, layer, parent in list(_native_layers(model)):
        state = _state_for(name, layer, session, parent)
        reason = unwanted or (None if re.search(settings.layers, name) else EXCLUDED)
        if reason is None:
            _demand_divisible(name, layer)
            attach(layer, state)
            weight = first_weight(layer)
            offer = state.offer(layer, None if weight is None else weight.dtype)
        else:
            release(layer)
            offer = Offer(name, reason)
        reports[name] = _report(layer, state, offer.outcome, PENDING)
        runtime = state.runtime(layer)
        if runtime is not None:
            together.setdefault(runtime, []).append((layer, state, offer))
        elif reason is None:
            state.forget()  # deepspeed.initialize may cast and part what was examined
    failure: TileMoEError | None = None
    for runtime, members in together.items():
        offers = [offer for _, _, offer in members]
        if failure:  # in another group; this one has to hear of it
            offers = [Offer(o.layer, f"apply() has failed there: {failure}") for o in offers]
        try:
            decisions = runtime.preflight(offers)
        except TileMoEError as error:
            failure = failure or error
            continue
        for (layer, state, _), decision in zip(members, decisions, strict=True):
            reports[state.name] = _report(layer, state, decision, SWAPPED)
            if isinstance(decision, str):
                release(layer)
            else:
                state.settle(decision, runtime)
    if failure:
        raise failure
    return reports


def _report(layer: MOELayer, state: LayerState, decision: Decision, status: str) -> LayerReport:
    if isinstance(decision, str):
        return LayerReport(state.name, KEPT, decision)
    shape = (
        f"E={decision.num_experts} ep={layer.ep_size} K={decision.topk} H={decision.hidden}"
        f" F={decision.ffn} {dtype_name(decision.dtype)} {state.recipe}"
    )
    return LayerReport(state.name, status, state.remark(), shape)


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
    say(text, *([layer.ep_group for _, layer, _ in _native_layers(model)] or [None]))


def _model_of(engine_or_model: Any) -> nn.Module:
    if isinstance(engine_or_model, DeepSpeedEngine | InferenceEngine):
        return engine_or_model.module
    if isinstance(engine_or_model, nn.Module):
        return engine_or_model
    raise TypeError(
        f"got a {type(engine_or_model).__name__}; wanted a DeepSpeed engine or a torch module"
    )


def _refused_engine(engine: Any) -> str | None:
    for base in type(engine).__mro__:
        if base.__name__ in REFUSED_ENGINES:
            return f"a {base.__name__} moves parameters; not supported"
    return None


def _native_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer, MoE | None]]:
    """Name, layer and MoE module around it, of each layer that may be swapped or is."""
    parents = {id(m.deepspeed_moe): m for m in model.modules() if isinstance(m, MoE)}
    for name, module in model.named_modules():
        if type(module) in (MOELayer, TileMOELayer):
            yield name, module, parents.get(id(module))


def _state_for(name: str, layer: MOELayer, session: Session, parent: MoE | None) -> LayerState:
    state = getattr(layer, "_tile", None)
    if state is not None and state.session is session:
        state.forget()
        state.name = state.stats.name = name  # another root may call it otherwise
        return state
    tensor_parallel = parent is not None and parent.enable_expert_tensor_parallelism
    return LayerState(name, session, tensor_parallel)


def _session_of(model: nn.Module, settings: TileOverlapConfig) -> Session:
    for module in model.modules():
        state = getattr(module, "_tile", None) if isinstance(module, TileMOELayer) else None
        if state is not None and state.session.config == settings:
            return state.session
    return Session(settings)


def _sessions(engine_or_model: Any) -> list[Session]:
    layers = [m for m in _model_of(engine_or_model).modules() if isinstance(m, TileMOELayer)]
    return list({layer._tile.session: None for layer in layers if layer._tile is not None})


def _demand_divisible(name: str, layer: MOELayer) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layer.ep_size > 1 and dist.is_initialized() and world % layer.ep_size:
        raise UnsupportedLayerError(
            f"{name}: ep_size is {layer.ep_size}, the world has {world} ranks; wanted an ep_size"
            " that divides it; fix: change ep_size of the MoE module or the number of ranks"
        )


def _is_foreign_moe(module: nn.Module) -> bool:
    """A Hugging Face style block: experts beside a gate or a router."""
    children = module._modules
    return (
        "experts" in children
        and ("gate" in children or "router" in children)
        and not isinstance(module, MoE)
    )


def _why_not(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, AutoEPMoELayer):
        return f"{name} (DeepSpeed AutoEP) is not supported yet"
    if isinstance(module, MOELayer):
        return f"{name} is a subclass of MOELayer that is not known"
    return (
        f"{type(module).__module__}.{name} is a MoE block that is not known; DeepSpeed's AutoEP has"
        " not replaced it"
    )
