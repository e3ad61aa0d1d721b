"""Small DeepSpeed MoE modules for tests, the same at every ep_size, and dense copies of them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

from ds_tilemoe import reference
from ds_tilemoe.routing import Routing, route

HIDDEN, FFN, EXPERTS = 64, 96, 8


class SwiGLU(nn.Module):
    """Mixtral's expert and its names."""

    def __init__(self, hidden, ffn):
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Megatron(nn.Module):
    """Megatron's ParallelMLP: the last bias is returned beside the output; DeepSpeed drops it."""

    def __init__(self, hidden, ffn):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, ffn)
        self.dense_4h_to_h = nn.Linear(ffn, hidden)
        self.activation_func = F.gelu

    def forward(self, x):
        inner = self.activation_func(self.dense_h_to_4h(x))
        return F.linear(inner, self.dense_4h_to_h.weight), self.dense_4h_to_h.bias


def mlp(hidden, ffn):
    return nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))


def plain(hidden, ffn):
    return nn.Linear(hidden, hidden)


KINDS = {"mlp": mlp, "swiglu": SwiGLU, "megatron": Megatron, "plain": plain}


def fill(module, seed):
    """Random numbers that depend on ``seed`` and on nothing else; biases too."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(1000 * seed + i)
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * parameter.shape[-1] ** -0.5)


def make_moe(
    ep_size=1, kind="mlp", hidden=HIDDEN, ffn=FFN, experts=EXPERTS, parallel=True, seed=0, **options
):
    """A MoE in eval mode without DeepSpeed's own randomness; expert e has the weights of seed e.

    ``parallel=False`` leaves its groups to deepspeed.initialize.
    """
    template = KINDS[kind](hidden, ffn) if isinstance(kind, str) else kind
    options = {"k": 2, "use_rts": False, "top2_2nd_expert_sampling": False, **options}
    moe = MoE(hidden, template, num_experts=experts, ep_size=ep_size, **options)
    if parallel and dist.is_initialized():
        moe.set_deepspeed_parallelism()
    fill(moe.deepspeed_moe.gate, 999 + seed)
    if moe.use_residual:
        fill(moe.mlp, 998 + seed)
        fill(moe.coefficient, 997 + seed)
    rank = dist.get_rank() % ep_size if dist.is_initialized() else 0
    for i, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
        fill(expert, rank * moe.num_local_experts + i)
    return moe.eval()


def dense_experts(moe):
    """All experts of the group, as on every rank."""
    copies = []
    for e in range(moe.num_experts):
        expert = copy.deepcopy(moe.deepspeed_moe.experts.deepspeed_experts[0]).float()
        fill(expert, e)
        copies.append(expert)
    return copies


def own_routing(moe, x) -> Routing:
    """This rank's own gate decisions."""
    with torch.no_grad():
        return route(moe.deepspeed_moe.gate, x.reshape(-1, x.shape[-1]))


def oracle(moe, x, routing=None, experts=None):
    """What this rank should get, in fp32, in the shape of x."""
    routing = routing or own_routing(moe, x)
    with torch.no_grad():
        flat = x.reshape(-1, x.shape[-1]).float()
        return reference.moe(flat, routing, experts or dense_experts(moe)).reshape(x.shape)


def tokens(*shape, seed=0, dtype=torch.float32):
    """Different on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


@torch.no_grad()
def run(module, *args):
    """Forward without grad."""
    return module(*args)


def assert_close(got, want, tolerance=1e-5):
    """Same shape, finite, and within ``tolerance`` of the largest wanted number (or of 1)."""
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.isfinite().all()
    if got.numel():
        limit = tolerance * max(1.0, want.float().abs().max().item())
        worst = (got.float() - want.float()).abs().max().item()
        assert worst <= limit, f"differs by {worst:.3g}, wanted at most {limit:.3g}"


def raised(function, *args):
    """The exception that ``function`` ends with; fails if it ends well."""
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("wanted an exception")


def same_everywhere(value):
    """Asserts that ``value`` is the same on all ranks, and returns it."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), values
    return value
