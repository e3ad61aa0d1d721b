"""What lies around a layer's experts and may keep it as it is: hooks, parallelism, gate, device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts as DeepSpeedExperts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ds_tilemoe.backends.cuda_limits import device_obstacle
from ds_tilemoe.layers.attributes import HOOKS_OF_ALL, hooks_of
from ds_tilemoe.layers.recognise import UnknownExpert


def hooks_around(experts: nn.Module) -> str:
    """Names of hooks that run where DeepSpeed calls its Experts module; "" if there is none."""
    of_all = [hook for hooks in HOOKS_OF_ALL for hook in hooks.values()]
    names = [getattr(hook, "__qualname__", "global") for hook in of_all]
    return ", ".join(filter(None, [*names, hooks_of(experts)]))


def check_host(layer: MOELayer, expert_tp: bool) -> None:
    """Refuse what lies around the experts: parallelism, gate, device.

    Raises:
        UnknownExpert: with the reason.
    """
    if "forward" in vars(layer):
        raise UnknownExpert("it has a forward of its own, which runs instead of any of its class")
    if layer.use_tutel:
        raise UnknownExpert("it uses Tutel")
    if bwc_tensor_model_parallel_world_size(groups.mpu) > 1:
        raise UnknownExpert("its model is tensor-parallel")
    if groups._get_expert_model_parallel_world_size() > 1 or (expert_tp and groups.mpu is not None):
        raise UnknownExpert("its experts are tensor-parallel")
    if type(layer.gate) is not TopKGate:
        raise UnknownExpert(f"its gate is a {type(layer.gate).__name__}, not DeepSpeed's TopKGate")
    experts = layer.experts
    if type(experts) is not DeepSpeedExperts:
        raise UnknownExpert(f"its experts are a {type(experts).__name__}, not DeepSpeed's Experts")
    if hooks := hooks_around(experts):
        raise UnknownExpert(f"its Experts module has forward hooks ({hooks}), which would not run")
    if "forward" in vars(experts):
        raise UnknownExpert("its Experts module has a forward of its own, which would not run")
    check_device({parameter.device for parameter in layer.parameters()})
    if len(experts.deepspeed_experts) != layer.num_local_experts:
        raise UnknownExpert(
            f"it has {len(experts.deepspeed_experts)} experts on this rank, its num_local_experts"
            f" is {layer.num_local_experts}"
        )
    total = layer.num_local_experts * layer.ep_size
    if layer.gate.wg.out_features != total:
        raise UnknownExpert(
            f"its gate has {layer.gate.wg.out_features} outputs for {total} experts"
        )
    if layer.ep_group is not None and dist.get_world_size(layer.ep_group) != layer.ep_size:
        raise UnknownExpert(
            f"ep_size is {layer.ep_size}, its group has {dist.get_world_size(layer.ep_group)} ranks"
        )


def check_device(devices: set[torch.device]) -> None:
    """Refuse parameters where no backend runs.

    Raises:
        UnknownExpert: with the reason.
    """
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        names = ", ".join(sorted(map(str, devices)))
        raise UnknownExpert(f"its parameters are on {names}; wanted all on the CPU or on one GPU")
    (device,) = devices
    if device.type == "cpu":
        return
    if device.index != torch.cuda.current_device():
        raise UnknownExpert(
            f"its parameters are on {device}, and this process's current device is"
            f" cuda:{torch.cuda.current_device()}; call torch.cuda.set_device({device.index})"
        )
    if reason := device_obstacle(device):
        raise UnknownExpert(reason)
