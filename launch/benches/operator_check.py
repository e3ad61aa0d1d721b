"""Whether the operator's results are right: an fp32 product of a sample, then bits.

Shape letters: T tokens of a rank, K top-k, E_l experts of a rank, W ranks, N output width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benches.calls import Operator, Routed, Variant
from benches.ranks import World
from ds_tilemoe.combine_plan import build_plan

SAMPLED = 64  # tokens a rank
# Of ||out - ref|| / ||ref|| of a token: two roundings to the dtype (the row, the sum). fp32: sums
# of K products in another order.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}


def worst_error(world: World, op: Operator, routed: Routed) -> float:
    """Largest ||y - ref|| / ||ref|| of a sample of all ranks' tokens, of the last call.

    ref is made in fp32 from the rows that GEMM 2 has read on the experts' ranks, which are looked
    up by the reference planner's layout. A collective.
    """
    tokens = np.linspace(0, len(routed.ids) - 1, min(SAMPLED, len(routed.ids)), dtype=np.int64)
    wanted = world.gather((routed.ids[tokens], routed.positions[tokens]))
    ids = np.stack([ids for ids, _ in wanted])  # [W, S, K]; every rank has as many tokens
    positions = np.stack([places for _, places in wanted])
    local = op.weights.shape[0]
    rows = build_plan(op.plan_params, routed.counts).run_row.reshape(local, world.ranks)
    products = torch.zeros(*ids.shape, op.weights.shape[1], device=world.device)
    for expert in range(local):
        owner, token, k = (ids == world.rank * local + expert).nonzero()
        if not owner.size:
            continue
        places = torch.from_numpy(rows[expert, owner] + positions[owner, token, k])
        read = op.rows[places.to(world.device)].float()
        made = read @ op.weights[expert].float().t()
        products[owner, token, k] = made
    if world.group is not None:
        dist.all_reduce(products, group=world.group)
    gates = torch.from_numpy(routed.weights[tokens]).to(world.device)
    reference = (products[world.rank] * gates.unsqueeze(2)).sum(dim=1)
    got = op.y[torch.from_numpy(tokens).to(world.device)].float()
    error = ((got - reference).norm(dim=1) / reference.norm(dim=1).clamp_min(1e-30)).max()
    return float(world.reduce(np.array([_finite(float(error))]))[0])


def check_result(world: World, op: Operator, routed: Routed, dtype: torch.dtype) -> float:
    """:func:`worst_error`, within the tolerance of ``dtype``.

    Raises:
        BenchError: it is not; on every rank.
    """
    error, limit = worst_error(world, op, routed), TOLERANCE[dtype]
    if error > limit:
        text = f"a token is off by {error:.2e} of its norm, wanted at most {limit:.0e}: not timed"
        world.agree(f"sequential: {text}")
    return error


def check_variants(world: World, op: Operator, variants: Sequence[Variant], wanted: Tensor) -> None:
    """Every variant gives ``wanted``'s bits. A collective.

    Before each, a call with other routes leaves other rows wherever rows are kept, so that one that
    came too late or never shows.

    Raises:
        BenchError: one does not; on every rank, with the variant and the number of elements.
    """
    for variant in variants:
        op.enqueue(Variant("none", 0), 1)
        op.enqueue(variant, 0)
        op.finish()
        different = int((bits(op.y) != bits(wanted)).sum())
        text = f"{variant.mover} at {variant.ctas} CTAs: {different} of {wanted.numel()} elements"
        world.agree(f"{text} differ from sequential's: not timed" if different else "")


def check_peer(world: World, name: str, got: Tensor, wanted: Tensor) -> None:
    """A peer does the same work: another order of sums, the same roundings.

    Raises:
        BenchError: it does not; on every rank.
    """
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))
    limit = 2 * TOLERANCE[wanted.dtype]
    problem = f"{name} is off by {error:.2e} of the norm, wanted at most {limit:.0e}: not timed"
    world.agree("" if _finite(error) <= limit else problem)


def dense_rows(world: World, op: Operator, routed: Routed) -> Tensor:
    """GEMM 2's rows without pad rows: [M, K] in order of (local expert, owner, position)."""
    local = op.weights.shape[0]
    first = build_plan(op.plan_params, routed.counts).run_row.reshape(local, world.ranks)
    own = slice(world.rank * local, (world.rank + 1) * local)
    counts = routed.counts[:, own].T  # [E_l, W]
    places = [
        np.arange(first[e, owner], first[e, owner] + counts[e, owner])
        for e in range(local)
        for owner in range(world.ranks)
    ]
    return op.rows[torch.from_numpy(np.concatenate(places)).to(world.device)]


def bits(values: Tensor) -> Tensor:
    """As integers of the same size, so that NaN equals itself."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def _finite(error: float) -> float:
    """NaN, which compares with nothing, as an error beyond all."""
    return error if np.isfinite(error) else 1e9
