"""What the CUDA backend refuses, and in which words; no GPU needed."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from moe_models import SwiGLU, mlp
from torch import nn

from ds_tilemoe.backends import cuda_abi, cuda_limits
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cuda_errors import describe
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.layers.device_op import prepare_backend
from ds_tilemoe.layers.experts import LocalExpert, Recipe
from ds_tilemoe.layers.recognise import UnknownExpert, find_recipe
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.layers.surroundings import check_device

SHAPE = LayerShape("moe", 64, 2, 4096, 1536, 4096, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("change", "ranks", "reason"),
    [
        ({}, 4, None),
        ({}, 1, None),
        ({"dtype": torch.float16}, 4, None),
        ({"dtype": torch.float32}, 4, "give float32; on CUDA only bfloat16 and float16"),
        ({"hidden": 4100}, 4, "hidden width is 4100.* multiple of 8"),
        ({"ffn": 33}, 4, "ffn width is 33"),
        ({"out": 12}, 4, "out width is 12"),
        ({"topk": 17}, 4, "chooses 17 experts; on CUDA at most 16"),
        ({"num_experts": 146}, 73, "at most 72"),
        ({"num_experts": 1024}, 1, None),
        ({"num_experts": 1025}, 1, "1025 experts on 1 ranks; on CUDA at most 1024"),
        ({"num_experts": 700}, 70, "700 experts on 70 ranks; on CUDA at most 647"),
    ],
)
def test_layers(change: dict[str, object], ranks: int, reason: str | None) -> None:
    found = cuda_limits.layer_obstacle(dataclasses.replace(SHAPE, **change), ranks)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found), found


def test_fused_dispatch_wants_weights_that_stay_and_one_activation() -> None:
    cuts = [LocalExpert(mlp(8, 16), find_recipe(mlp(8, 16), 8))]
    assert cuda_limits.fused_obstacle(cuts, torch.float32) is None
    assert "autocast" in str(cuda_limits.fused_obstacle(cuts, torch.bfloat16))
    relu = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    cuts.append(LocalExpert(relu, find_recipe(relu, 8)))
    assert "not one GEMM" in str(cuda_limits.fused_obstacle(cuts, torch.float32))


def test_planner_holds_what_the_limit_allows() -> None:
    # plan_device.cuh: Shared, C and one row more; exchange.cu: the dynamic part of shared memory.
    shared = 4 * (2 * 32 + 3 * 1024 + 8 * 1024 + 4)
    assert shared + 4 * cuda_limits.MAX_COUNT_WORDS <= 232_448 - 2048


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ({}, None),
        ({"tile_m": 128, "tile_n": 256, "num_consumer_ctas": 8}, None),
        ({"tile_m": 16}, "tile_m: got 16; wanted 128 on CUDA, or auto"),
        ({"tile_n": 64}, "tile_n: got 64; wanted 128 or 256 on CUDA, or auto"),
        ({"max_consumer_ctas": 8}, "max_consumer_ctas: got 8; wanted at most 7"),
        ({"num_dispatch_ctas": 8}, "num_dispatch_ctas: got 8; wanted at most 7"),
    ],
)
def test_settings(block: dict[str, int], fault: str | None) -> None:
    sms = 8 if fault and "7" in fault else 132
    config = TileOverlapConfig(**block)
    if fault is None:
        cuda_limits.check_config(config, sms)
        return
    with pytest.raises(ConfigError, match=fault):
        cuda_limits.check_config(config, sms)


def test_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, reason in (((9, 0), None), ((10, 0), "compute capability 10.0; .* for 9.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=found: found)
        said = cuda_limits.device_obstacle(torch.device("cuda", 0))
        assert (said is None) is (reason is None)


def test_parameters_on_two_devices() -> None:
    check_device({torch.device("cpu")})
    for devices in ({torch.device("cpu"), torch.device("meta")}, {torch.device("meta")}):
        with pytest.raises(UnknownExpert, match=r"on .*meta; wanted all on"):
            check_device(devices)


def test_backend_of_another_device() -> None:
    with pytest.raises(ConfigError, match='got "cpu" for layers whose parameters are on cuda'):
        prepare_backend("cuda", TileOverlapConfig(backend="cpu"), alone=True)
    assert Runtime(None, TileOverlapConfig(), "cuda").device == "cuda"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outcome": 4, "wait": 1, "peer": 2, "seen": 6}, "counts of rank 2 .*call 7, seen 6"),
        ({"outcome": 4, "wait": 2, "band": 5, "seen": 1, "wanted": 4}, "band 5 .* 1 of 4 tiles"),
        ({"outcome": 4, "wait": 3, "peer": 1, "seen": 0, "wanted": 9}, "rows of rank 1 .* 0 of 9"),
        ({"outcome": 4, "wait": 4, "band": 6, "seen": 2, "wanted": 9}, "slot 6 .* 2 of 9 rows"),
        ({"outcome": 6}, "raised an exception at about call 7"),
        ({"outcome": 5, "seen": 900, "wanted": 800}, "plan of 900 rows .* hold 800"),
    ],
)
def test_failures_in_words(fields: dict[str, int], words: str) -> None:
    said = describe(cuda_abi.ErrorRecord(rank=3, epoch=7, **fields))
    assert said.startswith("rank 3 ")
    assert re.search(words, said), said


class Fused(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(x).chunk(2, dim=-1)
        return self.down(first * nn.functional.gelu(second))


@pytest.mark.parametrize(
    ("expert", "activation"),
    [
        (mlp(8, 16), "gelu"),
        (SwiGLU(8, 16), "silu"),
        (Fused(8, 16), "gelu"),
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), "relu"),
        (nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8)), None),
        (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), None),
        (nn.Linear(8, 8), None),
    ],
)
def test_fronts_that_are_one_gemm(expert: nn.Module, activation: str | None) -> None:
    recipe: Recipe = find_recipe(expert, 8)
    cut = LocalExpert(expert, recipe)
    gemm = cut.front_gemm
    if activation is None:
        assert gemm is None
        assert cuda_limits.choose_dispatch([cut], torch.float32, "auto") == "nccl"
        with pytest.raises(ConfigError, match="not one GEMM"):
            cuda_limits.choose_dispatch([cut], torch.float32, "fused")
        return
    assert gemm is not None
    assert gemm.activation == activation
    act = {"gelu": nn.functional.gelu, "silu": nn.functional.silu, "relu": torch.relu}[activation]
    x = torch.randn(5, 8)
    assert cuda_limits.choose_dispatch([cut, cut], torch.float32, "auto") == "fused"
    assert cuda_limits.choose_dispatch([cut], torch.float32, "nccl") == "nccl"
    parts = [
        nn.functional.linear(x, weight, bias)
        for weight, bias in zip(gemm.weights, gemm.biases, strict=True)
    ]
    got = act(parts[0]) * parts[1] if len(parts) == 2 else act(parts[0])
    assert torch.allclose(got, cut.front(x), atol=1e-6)
