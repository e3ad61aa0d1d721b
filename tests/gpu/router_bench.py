"""Times of the fused router on one GPU: what follows the logits, and the places alone.

Each call is captured in a graph of CALLS calls, so that no launch waits for the host: `router` and
`places` are the median over runs of a graph's time by events, over its calls. `gate` is
DeepSpeed's gate on the same logits with all that the host does in between, and `eager` the router
called alike.

Then the whole router, from bf16 tokens on, with DeepSpeed's fp32 logits and with ``bf16x3``, and
the errors of both against the exact logits, whose standard deviation is 1.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from test_router_gpu import make_router, tokens_and_gate
from test_router_rules import Case, difference

from ds_tilemoe.router_rules import find_ties, rule_of
from ds_tilemoe.routing import route

SHAPES = [(8192, 64, 2), (4096, 128, 8), (4096, 256, 8), (64, 128, 8), (16, 128, 8), (1, 128, 8)]
# Tokens, hidden, experts, k.
LOGITS = [
    (8192, 8192, 64, 2),
    (8192, 1024, 64, 2),
    (8192, 512, 64, 2),
    (4096, 4096, 128, 8),
    (4096, 7168, 256, 8),
    (4096, 1024, 64, 2),
    (4096, 4096, 64, 2),
    (512, 4096, 128, 8),
    (256, 4096, 128, 8),
]
RUNS, CALLS = 100, 20


def graph_us(call: Callable[[], object]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of one call."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    times.sort()
    return statistics.median(times), times[RUNS // 10], times[-RUNS // 10]


def eager_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def main() -> None:
    router = make_router()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"us, median of {RUNS}")
    print(f"{'T, E, k':>16} {'drop':>5} {'router (p10-p90)':>22} {'places':>7} {'eager':>7} gate")
    for tokens, experts, k in SHAPES:
        for drop in (False, True):
            case = Case(tokens, experts, k, drop, factor=1.0, min_capacity=1)
            logits, gate = case.logits("cuda"), case.gate("cuda")
            rule = rule_of(gate, tokens)
            theirs, ours = route(gate, logits), router.route(gate, logits)
            wrong = difference(theirs, ours, k, logits, find_ties(logits, k, rule))
            if wrong:
                raise SystemExit(f"{case}: not timed, it differs from DeepSpeed's gate: {wrong}")
            median, low, high = graph_us(
                lambda logits=logits, k=k, rule=rule: router.decide(
                    logits, k, rule.drop, rule.capacity
                )
            )
            places, *_ = graph_us(
                lambda ids=ours.expert_ids, experts=experts: router.places(ids, experts)
            )
            eager = eager_us(lambda gate=gate, logits=logits: router.route(gate, logits))
            gate_us = eager_us(lambda gate=gate, logits=logits: route(gate, logits))
            shape = f"{tokens}, {experts}, {k}"
            times = f"{median:.1f} ({low:.1f}-{high:.1f})"
            print(f"{shape:>16} {drop!s:>5} {times:>22} {places:7.1f} {eager:7.1f} {gate_us:.0f}")

    compare_logits()


def compare_logits() -> None:
    routers = {"fp32": make_router(), "bf16x3": make_router(bf16x3=True)}
    print(f"{'T, H, E, k':>22} us and largest (root mean square) error of a logit")
    for tokens, hidden, experts, k in LOGITS:
        x, gate = tokens_and_gate(tokens, hidden, experts, k)
        weight = gate.wg.weight
        made = {
            "fp32": torch.nn.functional.linear(x.float(), weight),
            "bf16x3": routers["bf16x3"]._split_logits(x, weight, None).sum(0).flip(1).sum(1),
        }
        exact = x.double() @ weight.double().t()
        shape = f"{tokens}, {hidden}, {experts}, {k}"
        line = f"{shape:>22}"
        for name, router in routers.items():
            median, *_ = graph_us(lambda router=router, gate=gate, x=x: router.route(gate, x))
            error = made[name].double() - exact
            most, rms = error.abs().max().item(), error.pow(2).mean().sqrt().item()
            line += f"   {name} {median:.1f}, {most:.1e} ({rms:.1e})"
        print(line)


if __name__ == "__main__":
    main()
