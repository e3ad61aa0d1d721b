"""What an engine or a model holds: MoE layers that may be swapped, and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_tilemoe.errors import UnsupportedLayerError
from ds_tilemoe.layers.layer_state import LayerState
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.layers.runtime import Session

# Engines that move or regroup parameters behind a layer's back.
REFUSED_ENGINES = ("PipelineEngine", "DeepSpeedHybridEngine")


def model_of(engine_or_model: Any) -> nn.Module:
    if isinstance(engine_or_model, DeepSpeedEngine | InferenceEngine):
        return engine_or_model.module
    if isinstance(engine_or_model, nn.Module):
        return engine_or_model
    raise TypeError(
        f"got a {type(engine_or_model).__name__}; wanted a DeepSpeed engine or a torch module"
    )


def refused_engine(engine: Any) -> str | None:
    for base in type(engine).__mro__:
        if base.__name__ in REFUSED_ENGINES:
            return f"a {base.__name__} moves parameters; not supported"
    return None


def native_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer, MoE | None]]:
    """Name, layer and MoE module around it, of each layer that may be swapped or is."""
    parents = {id(m.deepspeed_moe): m for m in model.modules() if isinstance(m, MoE)}
    for name, module in model.named_modules():
        if type(module) in (MOELayer, TileMOELayer):
            yield name, module, parents.get(id(module))


def demand_divisible(name: str, layer: MOELayer) -> None:
    if dist.is_initialized() and (world := dist.get_world_size()) % layer.ep_size:
        raise UnsupportedLayerError(
            f"{name}: ep_size is {layer.ep_size}, the world has {world} ranks; wanted an ep_size"
            " that divides it; fix: change ep_size of the MoE module or the number of ranks"
        )


def moe_layers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name of each MoE layer, in model order, and why it stays if it is no native one."""
    for name, module in model.named_modules():
        if isinstance(module, MOELayer | AutoEPMoELayer) or _is_foreign_moe(module):
            yield name, _why_not(module)


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


def state_for(name: str, layer: MOELayer, session: Session, parent: MoE | None) -> LayerState:
    """A new state for the layer. What waits for a decision, and what has been counted with these
    settings, stay with the layer."""
    tensor_parallel = parent is not None and parent.enable_expert_tensor_parallelism
    fresh = LayerState(name, session, tensor_parallel)
    before = getattr(layer, "_tile", None)
    if before is not None and not before.has_heir:  # else a shallow copy has been here
        before.has_heir = True
        # Earlier reports hear what is decided now.
        fresh.listeners, before.listeners = before.listeners, []
        if before.session.config == session.config:
            fresh.stats = before.stats
            fresh.stats.go_on(name)
    return fresh


def sessions_of(engine_or_model: Any) -> list[Session]:
    layers = [m for m in model_of(engine_or_model).modules() if isinstance(m, TileMOELayer)]
    return list({layer._tile.session: None for layer in layers if layer._tile is not None})
