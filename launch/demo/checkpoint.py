"""Weights of the demo model: safetensors with global expert numbers, or seeded random ones.

A file names the experts of a layer 0 to E - 1, whatever the number of ranks; each rank takes its
own, so the same file is right at every ep_size.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from demo.model import ByteMoE
from demo.options import wrong
from demo.outputs import whole_file

FIX = "train it for these sizes: launch/train_demo.py"
EXPERT = re.compile(r"(?<=\.deepspeed_experts\.)\d+(?=\.)")


def load(model: ByteMoE, path: str | Path) -> None:
    """Fill ``model`` in place from a file written by :func:`save`.

    Call it after ``deepspeed.initialize``, which makes the expert-parallel groups.

    Raises:
        InputError: the file is missing, is no whole safetensors file, lacks a tensor or holds one
            of another shape.
    """
    if not Path(path).is_file():
        wanted, fix = "a checkpoint", "launch/train_demo.py writes the demo's"
        raise wrong("checkpoint", f"no file {str(path)!r}", wanted, fix)
    try:
        _fill(model, path)
    except SafetensorError as error:
        got, wanted = f"what cannot be read ({error})", "a whole safetensors file"
        raise wrong(f"checkpoint {path}", got, wanted, "get or train it again") from error


def _fill(model: ByteMoE, path: str | Path) -> None:
    with safe_open(path, framework="pt") as file, torch.no_grad():
        stored = set(file.keys())
        for name, parameter in _global_parameters(model):
            if name not in stored:
                raise wrong(f"checkpoint {path}", f"no tensor {name}", "all of the model's", FIX)
            value = file.get_tensor(name)
            if value.shape != parameter.shape:
                got, wanted = f"{name} of {list(value.shape)}", f"{list(parameter.shape)}"
                raise wrong(f"checkpoint {path}", got, wanted, FIX)
            parameter.copy_(value)


def metadata(path: str | Path) -> dict[str, str]:
    """What :func:`save` recorded beside the tensors."""
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def randomise(model: ByteMoE, seed: int) -> None:
    """Fill ``model`` in place with normal random weights, the same at every ep_size.

    Each tensor has a generator of its own, seeded by its global name.
    """
    with torch.no_grad():
        for name, parameter in _global_parameters(model):
            if parameter.dim() < 2:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            std = parameter.shape[1] ** -0.5
            if "embedding" in name or ".gate." in name:
                std = 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def save(model: ByteMoE, path: str | Path, record: dict[str, str]) -> None:
    """Write the whole model as fp16 from rank 0. A collective of the world.

    Args:
        model: on every rank, with its own experts.
        path: the file; written by rank 0.
        record: strings to keep beside the tensors.

    Raises:
        OutputError: on rank 0, which cannot write it.
    """
    mine = {name: value.detach().half().cpu() for name, value in _global_parameters(model)}
    parts: list[dict[str, torch.Tensor] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    if dist.get_rank() == 0:
        whole = {name: value.contiguous() for part in parts for name, value in part.items()}
        with whole_file("--out", Path(path)) as beside:
            try:
                save_file(dict(sorted(whole.items())), beside, metadata=record)
            except SafetensorError as error:  # its word for any failure to write
                raise OSError(str(error)) from error


def _global_parameters(model: ByteMoE) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's parameters under their global names."""
    first = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            rank = groups._get_expert_parallel_rank(module.expert_group_name)
            first[name] = rank * module.num_local_experts
    named = []
    for name, parameter in model.named_parameters():
        layer = next((first[prefix] for prefix in first if name.startswith(prefix + ".")), 0)
        named.append((EXPERT.sub(lambda m, o=layer: str(o + int(m[0])), name), parameter))
    return named
