"""What the CUDA kernels can run, said before anything is built. Local."""

from __future__ import annotations

import torch

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import ConfigError

COMPUTE_CAPABILITY = (9, 0)
# Words of C, and of one row more, that the planner kernel holds in shared memory.
MAX_COUNT_WORDS = 47_000


def layer_obstacle(shape: LayerShape, group_ranks: int, world_ranks: int) -> str | None:
    """Why the kernels cannot run a layer; None if they can.

    Args:
        shape: the layer.
        group_ranks: ranks of its expert-parallel group.
        world_ranks: ranks of the job.
    """
    if shape.dtype not in abi.DTYPES:
        name = str(shape.dtype).removeprefix("torch.")
        return f"its experts give {name}; on CUDA only bfloat16 and float16 are supported"
    for what in ("hidden", "ffn", "out"):
        width = getattr(shape, what)
        if width % 8:
            return f"its {what} width is {width}; on CUDA it has to be a multiple of 8"
    if group_ranks not in (1, world_ranks):
        return (
            f"its expert-parallel group has {group_ranks} of {world_ranks} ranks; on CUDA only"
            " groups of one rank or of all are supported so far"
        )
    if group_ranks > abi.MAX_WORLD:
        return f"its group has {group_ranks} ranks; on CUDA at most {abi.MAX_WORLD} are supported"
    local = shape.num_experts // group_ranks
    if local > abi.MAX_LOCAL_EXPERTS or shape.num_experts * (group_ranks + 1) > MAX_COUNT_WORDS:
        return (
            f"it has {shape.num_experts} experts on {group_ranks} ranks; on CUDA at most"
            f" {abi.MAX_LOCAL_EXPERTS} a rank, and {MAX_COUNT_WORDS // (group_ranks + 1)} in all,"
            " are supported"
        )
    return None


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
    for name in ("num_consumer_ctas", "min_consumer_ctas", "max_consumer_ctas"):
        value = getattr(config, name)
        if value != "auto" and value >= sms:
            faults.append(
                f"tile_overlap.{name}: got {value}; wanted at most {sms - 1}, one less than this"
                " GPU has SMs"
            )
    if faults:
        raise ConfigError("\n".join(f"{fault}; fix: change it" for fault in faults))
