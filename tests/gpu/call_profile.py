"""The kernels of a layer's call on one GPU, replayed as a CUDA graph: when each begins and ends.

    python3 tests/gpu/call_profile.py 1,4096,1536,32,8,gelu 64,4096,1536,32,8,swiglu

A line a case (tokens, hidden, ffn, experts, k, kind of expert): us of a replay in a row of them,
then each kernel with its begin and end, us from the first one's begin, medians of the profiler. A
kernel that is launched early begins before the one in front of it ends, and waits. Weights and
routes are the same in each replay: of what the L2 does not hold little is left for the next.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))

import ds_tilemoe
from benches.layer_models import EXPERT_KINDS, Layers, LayerShape
from benches.layer_times import Graph
from benches.ranks import World, join

REPLAYS = 40  # in a row
ROWS = 15
PROFILED, WARM = 20, 4  # replays; of them, not counted
# Part of a kernel's name -> what it is.
NAMES = {
    "widen": "widen",
    "one_kernel": "router",
    "choose_kernel": "choose",
    "place_kernel": "place",
    "exchange_kernel": "exchange and plan",
    "producer_kernel": "GEMM",
    "scale_kernel": "scale",
}


class Kernel(NamedTuple):
    """us since the profiler began."""

    begin: float
    end: float
    name: str


def case(text: str) -> tuple[LayerShape, str]:
    """Of an argument."""
    *sizes, kind = text.split(",")
    if len(sizes) != len(LayerShape._fields) or kind not in EXPERT_KINDS:
        wanted = ",".join(LayerShape._fields)
        raise argparse.ArgumentTypeError(f"got {text}; wanted {wanted} and {list(EXPERT_KINDS)}")
    return LayerShape(*map(int, sizes)), kind


def kernels_of(graph: Graph) -> list[Kernel]:
    """Of ``PROFILED`` replays, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            graph()
        torch.cuda.synchronize()
    found = [
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found)


def row_us(graph: Graph) -> float:
    """A replay in a row of them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / REPLAYS


def measure(world: World, shape: LayerShape, kind: str, block: dict[str, object]) -> str:
    """The line of a case."""
    layers = Layers(world, shape, kind, torch.bfloat16)
    ds_tilemoe.apply(layers.swapped, {"strict": True, **block})
    moe = layers.swapped["nodrop"]
    generator = torch.Generator(world.device).manual_seed(0)
    x = torch.randn(
        shape.tokens, shape.hidden, device=world.device, dtype=torch.bfloat16, generator=generator
    )
    for _ in range(5):
        wanted = moe(x)[0].clone()
    graph = Graph(lambda rows: moe(rows)[0], x)
    rows = [row_us(graph) for _ in range(1 + ROWS)][1:]
    kernels = kernels_of(graph)
    ds_tilemoe.check(layers.swapped)
    if not torch.equal(graph(), wanted):
        raise SystemExit(f"{shape}: a replay differs from the eager call")
    number, left = divmod(len(kernels), PROFILED)
    if left:
        raise SystemExit(f"{len(kernels)} kernels in {PROFILED} replays")
    calls = [kernels[i : i + number] for i in range(0, len(kernels), number)][WARM:]
    parts = []
    for i, kernel in enumerate(calls[0]):
        name = next((short for part, short in NAMES.items() if part in kernel.name), kernel.name)
        begin, end = (
            statistics.median(call[i][at] - call[0].begin for call in calls) for at in (0, 1)
        )
        parts.append(f"{name[:24]} {begin:.1f}-{end:.1f}")
    ds_tilemoe.restore(layers.swapped)
    sizes = ",".join(map(str, shape))
    return f"{sizes} {kind}: {statistics.median(rows):.1f} us | " + " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cases", nargs="+", type=case, metavar="T,H,F,E,K,KIND")
    parser.add_argument("--router-logits", default="auto")
    args = parser.parse_args()
    world = join()
    with torch.no_grad():
        for shape, kind in args.cases:
            print(measure(world, shape, kind, {"router_logits": args.router_logits}), flush=True)


if __name__ == "__main__":
    main()
