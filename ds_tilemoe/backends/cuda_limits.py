"""What the CUDA kernels can run, said before anything is built. Local."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Expert, FrontGemm, LayerShape
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.router_rules import MAX_EXPERTS, MAX_TOPK

COMPUTE_CAPABILITY = (9, 0)
# Words of C, and of one row more, that the planner kernel holds in shared memory.
MAX_COUNT_WORDS = 46_000


def layer_obstacle(shape: LayerShape, group_ranks: int) -> str | None:
    """Why the kernels cannot run a layer; None if they can.

    Args:
        shape: the layer.
        group_ranks: ranks of its expert-parallel group.
    """
    if shape.dtype not in abi.DTYPES:
        name = str(shape.dtype).removeprefix("torch.")
        return f"its experts give {name}; on CUDA only bfloat16 and float16 are supported"
    for what in ("hidden", "ffn", "out"):
        width = getattr(shape, what)
        if width % 8:
            return f"its {what} width is {width}; on CUDA it has to be a multiple of 8"
    if group_ranks > abi.MAX_WORLD:
        return f"its group has {group_ranks} ranks; on CUDA at most {abi.MAX_WORLD} are supported"
    if shape.topk > MAX_TOPK:
        return f"its gate chooses {shape.topk} experts; on CUDA at most {MAX_TOPK} are supported"
    most = min(MAX_EXPERTS, MAX_COUNT_WORDS // (group_ranks + 1))
    if shape.num_experts > most:
        return (
            f"it has {shape.num_experts} experts on {group_ranks} ranks; on CUDA at most {most} are"
            " supported"
        )
    return None


def fused_obstacle(experts: Sequence[Expert], dtype: torch.dtype | None) -> str | None:
    """Why rows cannot go to these experts by GEMM 1's kernel; None if they can.

    Args:
        experts: of this rank.
        dtype: of the rows.
    """
    if common_front(experts) is None:
        return "its experts' front is not one GEMM with GELU, SiLU or ReLU"
    if any(expert.down_weight.dtype != dtype for expert in experts):
        return "autocast makes new weights in every call"
    return None


def choose_dispatch(experts: Sequence[Expert], dtype: torch.dtype | None, wanted: str) -> str:
    """How rows go to these experts, "fused" or "nccl".

    Args:
        experts: of this rank.
        dtype: of the rows.
        wanted: the setting.

    Raises:
        ConfigError: "fused" is wanted and cannot be.
    """
    reason = fused_obstacle(experts, dtype)
    if wanted == "fused" and reason:
        raise ConfigError(
            f'tile_overlap.dispatch: got "fused", and {reason}; wanted "auto" or "nccl"; fix: '
            "change it"
        )
    return "nccl" if reason else "fused" if wanted == "auto" else wanted


def common_front(experts: Sequence[Expert]) -> list[FrontGemm] | None:
    """The fronts of all experts if one GEMM with one activation makes them."""
    fronts = [expert.front_gemm for expert in experts]
    known = [front for front in fronts if front is not None]
    if len(known) < len(fronts) or len({(f.activation, len(f.weights)) for f in known}) != 1:
        return None
    return known


def router_fault(config: TileOverlapConfig, why_not: str, dtype: torch.dtype) -> str:
    """What to say of a router that is asked for and cannot be had; "" if none is.

    Args:
        why_not: why the fused router does not cover the gate, or "".
        dtype: of the tokens.
    """
    wanted, fix = "a gate that the fused router covers", "change the gate"
    if config.router == "fused" and why_not:
        return (
            f'tile_overlap.router: got "fused", and {why_not}; wanted {wanted}; fix: write "auto",'
            f" or {fix}"
        )
    if config.router_logits != "bf16x3":
        return ""
    if not why_not and dtype != torch.bfloat16:
        why_not, wanted = f"the tokens are {str(dtype).removeprefix('torch.')}", "bfloat16 tokens"
        fix = "cast the model to bfloat16"
    return why_not and (
        f'tile_overlap.router_logits: got "bf16x3", and {why_not}; wanted {wanted}; fix: write'
        f' "auto", or {fix}'
    )


def device_obstacle(device: torch.device) -> str | None:
    """Why a GPU cannot run the kernels; None if it can."""
    found = torch.cuda.get_device_capability(device)
    if found != COMPUTE_CAPABILITY:
        seen, wanted = (".".join(map(str, version)) for version in (found, COMPUTE_CAPABILITY))
        return f"its GPU has compute capability {seen}; the CUDA kernels are for {wanted}"
    return None


def check_config(config: TileOverlapConfig, sms: int) -> None:
    """Refuse settings that this GPU or the kernels cannot meet.

    Raises:
        ConfigError: names the key, the value and what is wanted.
    """
    faults = []
    wanted: dict[str, tuple[int, ...]] = {"tile_m": (abi.TILE_M,), "tile_n": abi.TILE_NS}
    for name, values in wanted.items():
        value = getattr(config, name)
        if value != "auto" and value not in values:
            text = " or ".join(map(str, values))
            faults.append(f"tile_overlap.{name}: got {value}; wanted {text} on CUDA, or auto")
    counts = ("num_consumer_ctas", "min_consumer_ctas", "max_consumer_ctas", "num_dispatch_ctas")
    for name in counts:
        value = getattr(config, name)
        if value != "auto" and value >= sms:
            faults.append(
                f"tile_overlap.{name}: got {value}; wanted at most {sms - 1}, one less than this"
                " GPU has SMs"
            )
    if faults:
        raise ConfigError("\n".join(f"{fault}; fix: change it" for fault in faults))
