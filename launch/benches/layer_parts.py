"""What bounds a layer: its parts measured alone in the same run, with all GPUs busy. And where its
time goes, by its own stats.

Shape letters as in ``layer_models``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import ds_tilemoe
from benches.calls import Operator, OperatorShape, Routed, Settings, Variant
from benches.clock import slowest_us
from benches.layer_models import Layers, LayerShape
from benches.operator_measure import least
from benches.peers import grouped_mm
from benches.ranks import WARM_UP, World
from benches.records import median, number
from ds_tilemoe.backends.cuda_router import BF16X3_TOKENS

ROUNDS = 20
COPY_CTAS = (8, 10, 12, 16, 24, 32)  # the link is full at about 8
REFERENCE = OperatorShape(16384, 8192, 2048, 16, 1)  # of tflops_ref
BYTES = 2 << 30  # that bandwidths are measured with
CALL = "the call"  # in the profile
STATS_CALLS = 20


def machine(world: World, dtype: torch.dtype) -> dict[str, float | None]:
    """tflops_ref, copy_gbs (read and written) and read_gbs of the slowest GPU, all GPUs busy; null
    on a CPU."""
    names = ("tflops_ref", "copy_gbs", "read_gbs")
    if not world.on_gpu:
        return dict.fromkeys(names)
    source = torch.zeros(BYTES // 4, dtype=torch.float32, device=world.device)
    target = torch.empty_like(source)
    copy = slowest_us(world, lambda: target.copy_(source), ROUNDS)
    read = slowest_us(world, lambda: source.sum(), ROUNDS)
    found = (_tflops(world, dtype), 2 * BYTES / copy / 1e3, BYTES / read / 1e3)
    return dict(zip(names, (number(value, 1) for value in found), strict=True))


def _tflops(world: World, dtype: torch.dtype) -> float:
    m, n, k, experts, _ = REFERENCE
    rows = torch.randn(m, k, dtype=dtype, device=world.device)
    weights = torch.randn(experts, n, k, dtype=dtype, device=world.device)
    counts = torch.full((experts,), m // experts, device=world.device)
    us = slowest_us(world, lambda: grouped_mm(rows, weights, counts), ROUNDS)
    return 2.0 * m * n * k / us / 1e6


def bound(
    world: World,
    shape: LayerShape,
    layers: Layers,
    x: Tensor,
    routed: Routed,
    machine: dict[str, float | None],
    block: dict[str, Any],
) -> dict[str, float | int | None]:
    """bound_us and its parts, of one routing. A collective.

    bound = max(dispatch copy, GEMM 1) + max(GEMM 2, combine copy) + (2TH + 4TE + 2(K+1)TH bytes) /
    copy bandwidth + fp32 logits where they are DeepSpeed's. weights_us is the floor of few tokens:
    the weights of the experts that are hit on the hottest rank, read once.

    Args:
        machine: what :func:`machine` gave.
        block: that swaps the layers.

    Raises:
        BenchError: a part could not be timed, on any rank.
    """
    names = (
        "bound_us",
        "bound_dispatch_copy_us",
        "bound_gemm1_us",
        "bound_gemm2_us",
        "bound_combine_copy_us",
        "bound_memory_us",
        "bound_logits_us",
        "weights_us",
    )
    ctas_name = "bound_combine_copy_ctas"
    if not world.on_gpu:
        return dict.fromkeys((*names, ctas_name))
    size = x.element_size()
    down = OperatorShape(
        shape.tokens * shape.topk,
        shape.hidden,
        shape.ffn,
        shape.experts // world.ranks,
        shape.topk,
    )
    settings = Settings("compact", "auto", 1, "auto")
    both = [routed, turned_round(routed)]
    from benches.operator_cuda import CudaOperator, Front

    front = Front(layers.activation.__name__, layers.ups)
    op = CudaOperator(world, down, x.dtype, settings, both, layers.down, front)
    gemm1, gemm2, combine_copy, copy_ctas = _split_us(world, op, 0)
    _, _, dispatch_copy, _ = _split_us(world, op, 1)
    gate = layers.gate
    logits = 0.0
    if has_fp32_logits(block, shape.tokens):
        logits = slowest_us(world, lambda: F.linear(x.float(), gate.float()), ROUNDS)
    copy_gbs, read_gbs = (machine[name] or np.nan for name in ("copy_gbs", "read_gbs"))
    moved = size * shape.tokens * shape.hidden * (shape.topk + 2) + 4 * shape.tokens * shape.experts
    memory = moved / copy_gbs / 1e3
    hit = (routed.counts.sum(axis=0) > 0).reshape(world.ranks, -1).sum(axis=1).max()
    per_expert = (len(layers.ups) + 1) * shape.hidden * shape.ffn * size
    values = (
        max(dispatch_copy, gemm1) + max(gemm2, combine_copy) + memory + logits,
        dispatch_copy,
        gemm1,
        gemm2,
        combine_copy,
        memory,
        logits,
        hit * per_expert / read_gbs / 1e3,
    )
    found = {name: number(value) for name, value in zip(names, values, strict=True)}
    return found | {ctas_name: copy_ctas}


def has_fp32_logits(block: dict[str, Any], tokens: int) -> bool:
    """Whether layers that ``block`` swaps make so many tokens' logits as DeepSpeed does."""
    return block.get("router_logits") != "bf16x3" or tokens < BF16X3_TOKENS


def _split_us(world: World, op: Operator, routing: int) -> tuple[float, float, float, int]:
    """GEMM 1, GEMM 2 and copy, each alone; the copy at its best number of CTAs, which is last."""
    parts = []
    for ctas in COPY_CTAS:
        reads = [op.enqueue(Variant("split", ctas), routing) for _ in range(WARM_UP + ROUNDS // 2)]
        op.finish()
        samples = [read() for read in reads[WARM_UP:]]
        times = world.reduce(np.array([[s.front, s.gemm, s.copy] for s in samples]))
        parts.append([median(column) for column in times.T])
    front, gemm, copy = least(parts)
    best = int(np.nanargmin([us for _, _, us in parts]))
    return front, gemm, copy, COPY_CTAS[best]


def turned_round(routed: Routed) -> Routed:
    """Counts whose combine moves what ``routed``'s dispatch moves, between the same ranks."""
    ranks, experts = routed.counts.shape
    counts = routed.counts.reshape(ranks, ranks, experts // ranks)  # [owner, expert's rank, E_l]
    turned = np.ascontiguousarray(counts.transpose(1, 0, 2)).reshape(ranks, experts)
    nothing = np.empty((0, routed.ids.shape[1]), np.int32)
    return Routed(turned, nothing, nothing, nothing.astype(np.float32))


def busy_us(world: World, call: Callable[[], Any]) -> float | None:
    """How long kernels run in one call, those that run at once counted once; of the busiest rank.
    What the call takes beyond that is the host's. None on a CPU. A collective."""
    if not world.on_gpu:
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    kinds = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=kinds, acc_events=True) as recorded:
        world.meet()
        world.synchronize()
        with record_function(CALL):
            call()
        world.synchronize()
    events = recorded.events()
    began = min(event.time_range.start for event in events if event.name == CALL)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and event.name != CALL
        and event.time_range.start >= began
    ]
    return float(world.reduce(np.array([covered(spans)]))[0])


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def idle_fields(deepspeed: np.ndarray, busy: float | None) -> dict[str, float | None]:
    """deepspeed.moe's idle gaps: what its time has beyond the kernels'."""
    if busy is None:
        return {"deepspeed_busy_us": None, "deepspeed_idle_us": None}
    idle = max(0.0, median(deepspeed) - busy)
    return {"deepspeed_busy_us": round(busy, 1), "deepspeed_idle_us": round(idle, 1)}


def of_stats(
    world: World, observed: Any, inputs: Sequence[Tensor], block: dict[str, Any]
) -> dict[str, float]:
    """Where the dropless layer's time goes, by its own stats: means over calls, the slowest rank's.

    Apart from what is timed, since stats cost time.
    """
    ds_tilemoe.apply(observed, {**block, "stats": True})
    for x in inputs:
        observed["nodrop"](x)
    ds_tilemoe.check(observed)  # none of these calls is left to be counted later
    ds_tilemoe.stats.reset()
    for call in range(STATS_CALLS):
        observed["nodrop"](inputs[call % len(inputs)])
    ds_tilemoe.check(observed)
    (mine,) = ds_tilemoe.stats.layers()  # of layers that were called since
    times = {
        name: value for name, value in mine.items() if name.endswith("_us") and value is not None
    }
    slowest = world.reduce(np.array(list(times.values()), dtype=np.float64))
    return {name: round(float(us), 2) for name, us in zip(times, slowest, strict=True)}
