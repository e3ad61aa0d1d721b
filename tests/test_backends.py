"""What both backends have in common: their functions, what "auto" stands for, exports."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from cuda_library_fake import install

from ds_tilemoe import stats
from ds_tilemoe.backends import cuda_abi
from ds_tilemoe.backends.base import AUTO_TILE_M, Backend, bands_per_segment
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.backends.cuda import CudaBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import check_cpu_config, without_unused
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.layers import agreement
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.stats import IterationStats, LayerStats

BACKENDS: dict[str, Any] = {"cpu": CpuBackend, "cuda": CudaBackend}


@pytest.fixture(params=["cpu", "cuda"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        install(monkeypatch, None)
    return request.param


def test_functions_are_those_of_the_protocol() -> None:
    shared = [name for name, value in vars(Backend).items() if callable(value) and name[:1] != "_"]
    assert {"ensure", "forward", "failure"} <= set(shared)
    for kind, function in itertools.product(BACKENDS.values(), shared):
        found, wanted = (
            [(parameter.name, parameter.default) for parameter in signature.parameters.values()]
            for signature in (inspect.signature(getattr(cls, function)) for cls in (kind, Backend))
        )
        assert found == wanted, (kind, function)


def test_what_auto_stands_for(name: str) -> None:
    """The ranks compare it: one that says "auto" and one that says the same in words agree."""
    config = TileOverlapConfig()
    assert AUTO_TILE_M["cuda"] == cuda_abi.TILE_M
    protocol = Runtime(None, config, name)._protocol()
    meant = agreement._what_auto_stands_for(agreement.Message((), protocol))
    chosen = BACKENDS[name](None, config).chosen
    assert meant["transport"] == "mapped"
    for key in ("backend", "layout", "tile_m"):
        assert meant[key] == chosen[key], key
    for value, wanted in (("auto", 1), (1, 1), (5, 5)):
        given = TileOverlapConfig(bands_per_segment=value)
        assert bands_per_segment(given) == wanted
        assert BACKENDS[name](None, given).chosen["bands_per_segment"] == wanted


def blocks(name: str) -> Iterator[TileOverlapConfig]:
    """All that a backend takes, of settings that may stand in each other's way."""
    values: dict[str, tuple[Any, ...]] = {
        "mover": ("auto", "sm", "copy_engine", "none"),
        "dispatch": ("auto", "fused", "nccl"),
        "num_consumer_ctas": ("auto", 3),
        "min_consumer_ctas": (1, 2),
        "max_consumer_ctas": ("auto", 6),
        "num_dispatch_ctas": ("auto", 7),
    }
    for block in itertools.product(*values.values()):
        try:
            config = TileOverlapConfig(backend=name, **dict(zip(values, block, strict=True)))
        except ConfigError:
            continue
        yield config


def test_exports_can_be_read_back(name: str) -> None:
    found = list(blocks(name))
    assert {config.mover for config in found} >= {"auto", "sm", "none"}
    call = IterationStats(*[0] * len(IterationStats._fields))
    for config in found:
        layer = LayerStats("mlp")
        layer.settings = config.model_dump() | BACKENDS[name](None, config).chosen
        choices = [Choice(3, 2, 1, "sm"), Choice(0, ALL_TAIL_WAVES, 1, "none")]
        if config.mover != "auto":
            consumers = 3 if config.mover == "sm" else 0
            choices = [Choice(consumers, 2, 1, config.mover)]
        for choice in (None, *choices):
            if choice is not None:
                layer.add(call, 0, 1, choice=choice, reason="")
            block = stats.export_config()["tile_overlap"]
            read = TileOverlapConfig(**block)
            if name == "cpu":
                check_cpu_config(read)
            assert ("num_consumer_ctas" in block) is (read.mover == "sm")
            assert ("num_dispatch_ctas" in block) is (read.dispatch != "nccl")
            assert without_unused(block) == block
            again = BACKENDS[name](None, read).chosen
            assert {key: block[key] for key in block.keys() & again.keys()} == {
                key: again[key] for key in block.keys() & again.keys()
            }, "what is read back is in force"
