"""The MoE layers of ``bench.py layer``: one set of matrices in all of them, and inputs whose gate
decides as the routing says.

Shape letters: T tokens of a rank, K top-k, E experts of the group, E_l of a rank, W ranks,
H hidden, F ffn.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from benches.calls import Routed, positions_of, random_rows
from benches.peers import TorchMoE
from benches.ranks import World
from benches.records import BenchError
from ds_tilemoe.routings import routing_counts, routing_ids

CAPACITY = 1.25
# A chosen expert's logit is about this much above the others, which are normal with deviation 1.
CHOSEN = 16.0


class LayerShape(NamedTuple):
    """T tokens a rank, H, F, E experts of the group, K."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), with Mixtral's names."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def _gelu_expert(hidden: int, ffn: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(hidden, ffn, bias=False), nn.GELU(), nn.Linear(ffn, hidden, bias=False)
    )


# Kind -> (expert, paths of its matrices: (gate,) up, down; activation of the first)
EXPERT_KINDS: dict[str, tuple[Any, tuple[str, ...], Any]] = {
    "gelu": (_gelu_expert, ("0", "2"), F.gelu),
    "swiglu": (SwiGLU, ("w1", "w3", "w2"), F.silu),
}


class Layers:
    """Layers of one shape that share all parameters.

    Attributes:
        gate: [E, H], orthonormal rows but for rounding.
        ups: [E_l, F, H] each, (up,) or (gate, up); ``activation`` is of the first.
        down: [E_l, H, F].
        swapped: {"nodrop": MoE, "drop": MoE}, for ``ds_tilemoe.apply``.
        observed: {"nodrop": MoE}, to be swapped with ``stats``, which cost time.
        alone: {"nodrop": MoE}, to be swapped and timed inside ``measure_combine_alone``: a
            controller that sees such calls learns what is wrong for the others.
        plain: the same two as ``swapped``, for DeepSpeed's own path.
        torch: the dropless layer of ``peers``.
    """

    def __init__(self, world: World, shape: LayerShape, kind: str, dtype: torch.dtype) -> None:
        local, left = divmod(shape.experts, world.ranks)
        if left:
            raise BenchError(f"got {shape.experts} experts on {world.ranks} ranks")
        expert, paths, self.activation = EXPERT_KINDS[kind]
        generator = torch.Generator().manual_seed(1)
        orthonormal = torch.linalg.qr(torch.randn(shape.hidden, shape.experts, generator=generator))
        self.gate = orthonormal.Q.t().contiguous().to(world.device, dtype)
        *ups, down = (
            random_rows(
                (local, *((shape.hidden, shape.ffn) if last else (shape.ffn, shape.hidden))),
                (shape.ffn if last else shape.hidden) ** -0.5,
                dtype,
                100 * world.rank + i,
                world.device,
            )
            for i, last in enumerate(path == paths[-1] for path in paths)
        )
        self.ups, self.down = tuple(ups), down
        with torch.device("meta"):
            template = expert(shape.hidden, shape.ffn)
            experts = nn.ModuleList([expert(shape.hidden, shape.ffn) for _ in range(local)])
        for e, module in enumerate(experts):
            for path, matrix in zip(paths, (*ups, down), strict=True):
                weight = nn.Parameter(matrix[e], requires_grad=False)
                module.get_submodule(path).weight = weight

        def modules(*rules: str) -> nn.ModuleDict:
            made = {rule: self._moe(world, shape, template, experts, rule) for rule in rules}
            return nn.ModuleDict(made).eval()

        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed tells of its groups
            self.swapped, self.plain = modules("nodrop", "drop"), modules("nodrop", "drop")
            self.observed, self.alone = modules("nodrop"), modules("nodrop")
        self.torch = TorchMoE(
            world.group, self.gate, self.ups, self.down, self.activation, shape.topk
        )

    def _moe(
        self,
        world: World,
        shape: LayerShape,
        template: nn.Module,
        experts: nn.ModuleList,
        rule: str,
    ) -> MoE:
        moe = MoE(
            shape.hidden,
            template,
            num_experts=shape.experts,
            ep_size=world.ranks,
            k=shape.topk,
            eval_capacity_factor=CAPACITY,
            drop_tokens=rule == "drop",
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        moe.set_deepspeed_parallelism()
        moe.deepspeed_moe.experts.deepspeed_experts = experts
        moe.deepspeed_moe.gate.wg.weight = nn.Parameter(self.gate, requires_grad=False)
        return moe


def make_ids(name: str, world: World, shape: LayerShape, seed: int) -> np.ndarray:
    """Expert ids [T, K] of this rank for one of ``ds_tilemoe.routings.ROUTINGS``.

    Raises:
        ValueError: these sizes cannot have it.
    """
    local = shape.experts // world.ranks
    rows = shape.tokens * shape.topk
    if name == "balanced" and rows % shape.experts:
        # Fewer rows than experts: all ranks' routes in turn over ranks, then over their experts.
        route = world.rank * rows + np.arange(rows)
        expert = np.random.default_rng(seed).permutation(local)[route // world.ranks % local]
        ids = (route + seed) % world.ranks * local + expert
        return ids.reshape(shape.tokens, shape.topk).astype(np.int32)
    counts = routing_counts(
        name,
        world=world.ranks,
        local_experts=local,
        tokens=shape.tokens,
        topk=shape.topk,
        seed=seed,
    )
    own_seed = seed * world.ranks + world.rank
    return routing_ids(counts[world.rank], topk=shape.topk, seed=own_seed)


def make_routed(world: World, ids: np.ndarray, experts: int) -> Routed:
    """Ids as the operator takes them, with C. A collective."""
    own = np.bincount(ids.ravel(), minlength=experts).astype(np.int32)
    counts = np.stack(world.gather(own))
    weights = np.full(ids.shape, 1.0 / ids.shape[1], np.float32)
    return Routed(counts, ids, positions_of(ids), weights)


def make_input(
    world: World, gate: Tensor, ids: np.ndarray, dtype: torch.dtype, seed: int
) -> Tensor:
    """Tokens [T, H] that the gate sends to ``ids``: noise plus the rows of the wanted experts.

    Raises:
        BenchError: the gate decides otherwise; on every rank.
    """
    own_seed = seed * world.ranks + world.rank
    chosen = torch.from_numpy(ids.astype(np.int64)).to(world.device)
    generator = torch.Generator(world.device).manual_seed(own_seed)
    x = torch.randn(len(ids), gate.shape[1], generator=generator, device=world.device)
    for k in range(chosen.shape[1]):
        x.add_(gate[chosen[:, k]], alpha=CHOSEN)
    x = x.to(dtype)
    decided = F.linear(x.float(), gate.float()).topk(chosen.shape[1], dim=1).indices
    wrong = int((decided.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1).sum())
    world.agree(f"the gate sends {wrong} of {len(ids)} tokens elsewhere" if wrong else "")
    return x
