"""Faster expert-parallel MoE inference in DeepSpeed: the combine hidden behind the down projection.

``report = ds_tilemoe.apply(engine)`` after ``deepspeed.initialize`` is all that a script needs.
Names below are imported when they are first used, so ``import ds_tilemoe`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_tilemoe import stats
    from ds_tilemoe.config import TileOverlapConfig, load_config, split_config
    from ds_tilemoe.errors import (
        BuildError,
        CapacityError,
        ConfigError,
        DeadlineError,
        PlanError,
        RankFailure,
        TileMoEError,
        UnsupportedLayerError,
    )
    from ds_tilemoe.layers.experts import ExpertParts, register_expert
    from ds_tilemoe.report import LayerReport, SwapReport
    from ds_tilemoe.swap import apply, check, measure_combine_alone, restore

__version__ = "0.1.0"

_HOMES = {
    "apply": "swap",
    "check": "swap",
    "measure_combine_alone": "swap",
    "restore": "swap",
    "load_config": "config",
    "split_config": "config",
    "TileOverlapConfig": "config",
    "ExpertParts": "layers.experts",
    "register_expert": "layers.experts",
    "LayerReport": "report",
    "SwapReport": "report",
    "BuildError": "errors",
    "CapacityError": "errors",
    "ConfigError": "errors",
    "DeadlineError": "errors",
    "PlanError": "errors",
    "RankFailure": "errors",
    "TileMoEError": "errors",
    "UnsupportedLayerError": "errors",
}

__all__ = [
    "BuildError",
    "CapacityError",
    "ConfigError",
    "DeadlineError",
    "ExpertParts",
    "LayerReport",
    "PlanError",
    "RankFailure",
    "SwapReport",
    "TileMoEError",
    "TileOverlapConfig",
    "UnsupportedLayerError",
    "__version__",
    "apply",
    "check",
    "load_config",
    "measure_combine_alone",
    "register_expert",
    "restore",
    "split_config",
    "stats",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in ("stats", "testing"):
        return importlib.import_module(f"ds_tilemoe.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"ds_tilemoe.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ds_tilemoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
