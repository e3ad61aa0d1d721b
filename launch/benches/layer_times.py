"""The layers of ``bench.py layer`` as calls, and their times: eager and as CUDA graphs, in turn."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import ds_tilemoe
from benches import layer_check
from benches.clock import Timer
from benches.layer_models import Layers
from benches.ranks import World, shuffled

ORDER_SEED = 4242
PEERS = {
    "none": (),
    "deepspeed": ("deepspeed", "deepspeed_nodrop"),
    "torch": ("torch",),
    "all": ("deepspeed", "deepspeed_nodrop", "torch"),
}


@dataclass(frozen=True)
class Times:
    """What was timed, by the name of its call.

    Attributes:
        rounds: how many.
        steady: us a call in a row of calls. alone: us of the device, one call; on a GPU, of ours.
            [rounds] each, of the slowest rank; NaN where a round has none.
        host_us: until the host has enqueued a call.
        calls: in a row.
    """

    rounds: int
    steady: dict[str, np.ndarray]
    alone: dict[str, np.ndarray]
    host_us: dict[str, float]
    calls: dict[str, int]

    def of(self, name: str, alone: bool = False) -> np.ndarray:
        """[rounds]; all NaN for what was not timed."""
        found = (self.alone if alone else self.steady).get(name)
        return np.full(self.rounds, np.nan) if found is None else found


class Graph:
    """A layer's forward as a CUDA graph, on one input buffer."""

    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.forward = forward
        self.x = x.clone()
        side = _side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                forward(self.x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # What NCCL's watchdog does meanwhile on its thread, and reading the times of earlier calls
        # on this one, is no part of the graph and may not end the capture.
        with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
            self.y = forward(self.x)

    def load(self, x: Tensor) -> None:
        self.x.copy_(x)

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.y


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    """One for all: torch hands out 32 in turn, and the capture's own may not be among them."""
    return torch.cuda.Stream()


class Eager:
    """A forward on the input that was loaded last."""

    def __init__(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self.forward, self.x = forward, x

    def load(self, x: Tensor) -> None:
        self.x = x

    def __call__(self) -> Tensor:
        return self.forward(self.x)


def make_calls(args: argparse.Namespace, layers: Layers, x: Tensor) -> dict[str, Eager | Graph]:
    """Everything that is timed, by the name of its field; ours with the mode behind it."""
    swapped, plain, alone = layers.swapped, layers.plain, layers.alone

    def sequential(rows: Tensor) -> Tensor:
        with ds_tilemoe.measure_combine_alone(alone):
            return alone["nodrop"](rows)[0]

    ours = {
        "ours": lambda rows: swapped["nodrop"](rows)[0],
        "ours_drop": lambda rows: swapped["drop"](rows)[0],
        "sequential": sequential,
    }
    calls: dict[str, Eager | Graph] = {
        f"{name}_{mode}": (Graph if mode == "graph" else Eager)(forward, x)
        for mode in args.mode
        for name, forward in ours.items()
        # On a GPU an eager sequential forward waits for the device, to read its times.
        if not (name == "sequential" and mode == "eager" and x.device.type == "cuda")
    }
    others = {
        "deepspeed": lambda rows: plain["drop"](rows)[0],
        "deepspeed_nodrop": lambda rows: plain["nodrop"](rows)[0],
        "torch": layers.torch,
    }
    return calls | {name: Eager(others[name], x) for name in PEERS[args.peers]}


def time_layers(
    args: argparse.Namespace, world: World, layers: Layers, inputs: list[Tensor]
) -> Times:
    """All calls once a round, the peers in some of the rounds."""
    calls = make_calls(args, layers, inputs[0])
    for replay in (call for call in calls.values() if isinstance(call, Graph)):
        layer_check.check_replays(world, replay, inputs[:2])
    timers = {name: Timer(world, call) for name, call in calls.items()}
    names, peers = list(calls), PEERS[args.peers]
    samples = np.full((2, args.rounds, len(names)), np.nan)
    for index, order in shuffled(len(names), args.rounds, ORDER_SEED):
        with_peers = index < 0 or index * args.peer_rounds % args.rounds < args.peer_rounds
        for i in order:
            if names[i] in peers and not with_peers:
                continue
            calls[names[i]].load(inputs[index % len(inputs)])
            steady, alone = timers[names[i]].steady(), np.nan
            if world.on_gpu and names[i] not in peers:  # those wait for the device by themselves
                alone = timers[names[i]].alone()
            if index >= 0:
                samples[:, index, i] = steady, alone
        # As after each step of a model: the controllers see the calls, replays among them.
        ds_tilemoe.check(layers.swapped)
    steady_us, alone_us = world.reduce(samples)
    return Times(
        args.rounds,
        dict(zip(names, steady_us.T, strict=True)),
        dict(zip(names, alone_us.T, strict=True)),
        {name: timer.host_us for name, timer in timers.items()},
        {name: timer.calls for name, timer in timers.items()},
    )
