"""The op of a kind of device: what the layers on it run with, built, loaded and made a backend."""

from __future__ import annotations

import importlib.util
import logging

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_tilemoe.backends.base import Backend
from ds_tilemoe.backends.cuda_limits import check_config
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import check_cpu_config
from ds_tilemoe.errors import BuildError, ConfigError
from ds_tilemoe.op_builder import CPUTileMoEBuilder
from ds_tilemoe.op_builder.jit import cache_root, damage, find_compiler

logger = logging.getLogger("ds_tilemoe")


def device_to_be(device: str, config: TileOverlapConfig) -> str:
    """Where a layer will run that has no process group yet, "cpu" or "cuda".

    ``deepspeed.initialize``, which makes the group, also moves the model to DeepSpeed's
    accelerator.

    Args:
        device: where it is now.
        config: this rank's settings.
    """
    if config.backend != "auto":
        return config.backend
    accelerator = get_accelerator()
    on_gpu = accelerator.device_name() == "cuda" and accelerator.is_available()
    return "cuda" if on_gpu else device


def prepare_backend(
    device: str, config: TileOverlapConfig, alone: bool, in_forward: bool = False
) -> None:
    """Build or load what the layers on ``device`` run with; local.

    Args:
        device: "cpu" or "cuda".
        config: this rank's settings.
        alone: the group is this rank, so that nothing between ranks is wanted.
        in_forward: peers may be in collectives that end after a while (NCCL's after 600 s), so
            what layers can do without is loaded where it is built, and not built.

    Raises:
        BuildError: it cannot be built or run here.
        ConfigError: a setting that this device cannot meet.
    """
    if config.backend not in ("auto", device):
        raise ConfigError(
            f'tile_overlap.backend: got "{config.backend}" for layers whose parameters are on'
            f' {device}; wanted "{device}" or "auto"; fix: change it, or move the model'
        )
    if device == "cpu":
        check_cpu_config(config)
        CPUTileMoEBuilder().load()
        return
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    check_config(config, torch.cuda.get_device_properties(0).multi_processor_count)
    if not alone and importlib.util.find_spec("nvshmem") is None:
        raise BuildError('got no nvshmem4py; wanted it; fix: pip install "ds_tilemoe[cuda]"')
    CUDATileMoEBuilder().load()
    try:
        # Of it, the look at the experts in each forward.
        if in_forward and not _is_built(CPUTileMoEBuilder()):
            raise BuildError(
                "its extension is not built; fix: call ds_tilemoe.apply after deepspeed.initialize,"
                " which builds it"
            )
        CPUTileMoEBuilder().load()
    except BuildError as error:
        logger.warning("looking at the experts in each forward takes longer: %s", error)


def _is_built(builder: CPUTileMoEBuilder) -> bool:
    """Whether to load the op would compile nothing.

    Raises:
        BuildError: the compiler, a part of what the op is known by, does not run.
    """
    compiler = find_compiler()
    if compiler is None:
        return False
    extension = builder._extension(compiler)
    return damage(cache_root() / extension.name / extension.key() / extension.library) is None


def make_backend(
    group: dist.ProcessGroup | None, config: TileOverlapConfig, device: str
) -> Backend:
    """The backend of one group; the only place that picks one."""
    if device == "cuda":
        from ds_tilemoe.backends.cuda import CudaBackend

        return CudaBackend(group, config)
    from ds_tilemoe.backends.cpu import CpuBackend

    return CpuBackend(group, config)
