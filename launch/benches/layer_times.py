"""The layers of ``bench.py layer`` as calls, and their times: eager and as CUDA graphs, in turn."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        steady: us a call in a row of calls. alone: us of the device, one call; on a GPU, of what
            does not wait for it. [rounds] each, of the slowest rank; NaN where a round has none.
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


class Call(Protocol):
    """What is timed: ``forward`` on the input that was loaded last."""

    forward: Callable[[Tensor], Tensor]

    def load(self, x: Tensor) -> None: ...

    def __call__(self) -> Tensor: ...


def kind_of(mode: str) -> type[Eager] | type[Graph]:
    """How a mode calls."""
    return Graph if mode == "graph" else Eager


def make_calls(args: argparse.Namespace, layers: Layers, x: Tensor) -> dict[str, Call]:
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
    calls: dict[str, Call] = {
        f"{name}_{mode}": kind_of(mode)(forward, x)
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
    # The peers wait for the device by themselves.
    slow = dict.fromkeys(PEERS[args.peers], args.peer_rounds)
    # As after each step of a model: the controllers see the calls, replays among them.
    return time_calls(
        world, calls, inputs, args.rounds, slow, lambda: ds_tilemoe.check(layers.swapped)
    )


def time_calls(
    world: World,
    calls: Mapping[str, Call],
    inputs: Sequence[Tensor],
    rounds: int,
    slow: Mapping[str, int],
    between: Callable[[], None],
) -> Times:
    """Calls in turn, in an order that all ranks share. A collective.

    Args:
        rounds: how many.
        slow: those that take part in some rounds only -> in how many. They have no time alone.
        between: called behind each round.
    """
    timers = {name: Timer(world, call) for name, call in calls.items()}
    names = list(calls)
    samples = np.full((2, rounds, len(names)), np.nan)
    for index, order in shuffled(len(names), rounds, ORDER_SEED):
        for name, i in ((names[i], i) for i in order):
            wanted = slow.get(name, rounds)
            if index >= 0 and index * wanted % rounds >= wanted:
                continue
            calls[name].load(inputs[index % len(inputs)])
            steady, alone = timers[name].steady(), np.nan
            if world.on_gpu and name not in slow:
                alone = timers[name].alone()
            if index >= 0:
                samples[:, index, i] = steady, alone
        between()
    steady_us, alone_us = world.reduce(samples)
    return Times(
        rounds,
        dict(zip(names, steady_us.T, strict=True)),
        dict(zip(names, alone_us.T, strict=True)),
        {name: timer.host_us for name, timer in timers.items()},
        {name: timer.calls for name, timer in timers.items()},
    )
