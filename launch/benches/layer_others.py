"""Other systems' expert-parallel layers beside ours, where they are installed.

Each is built from our matrices, compared with our output and timed in a pass of its own behind
ours, in turn with our layer. What one of them raises, on any rank, is said aloud and written into
the record (``peers_absent``), and costs none of our numbers. Two faults end the run, and take the
records of their case with them, which hold ours and theirs: one that breaks the GPU's context, and
one that a single rank has while calls are timed, as the others then wait for it until NCCL's
timeout. A number from a peer that was used wrongly is worse than none, so one without an adapter
here is not called.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

import ds_tilemoe
from benches import layer_check
from benches.layer_models import Layers, LayerShape
from benches.layer_times import Call, Times, kind_of, time_calls
from benches.operator_check import check_peer
from benches.ranks import World
from benches.records import BenchError, microseconds, ratio
from demo.options import wrong

OTHERS = ("tutel", "deep_ep", "flashinfer")
ADAPTERS = {"flashinfer": ("benches.peer_flashinfer", "FlashInferMoE")}
# What is timed of each: with routes that were made before, and with a plain torch router.
VARIANTS = ("", "_routed")

T = TypeVar("T")


class Peer(Protocol):
    """What an adapter's class has; it is made as ``peers.TorchMoE`` is, and with ``tokens``, the
    most of a call. Making and closing it are collectives."""

    version: str

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights of [T, H], as :meth:`experts` wants them, by plain torch."""

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""

    def close(self) -> None: ...


def choose(wanted: Sequence[str] | None) -> list[str]:
    """Who is to be timed.

    Args:
        wanted: names; None = all that are installed and have an adapter.

    Raises:
        InputError: one is named that cannot be timed here.
    """
    if wanted is None:
        return [name for name in ADAPTERS if importlib.util.find_spec(name)]
    for name in wanted:
        if why := _missing(name):
            raise wrong("--others", f"{name}, which is {why}", "one that is", "leave it out")
    return list(dict.fromkeys(wanted))


def _missing(name: str) -> str:
    """Why nobody can time it here; "" if one can."""
    is_installed = importlib.util.find_spec(name) is not None
    if name in ADAPTERS:
        return "" if is_installed else "not installed"
    return f"{'' if is_installed else 'not '}installed, and this bench has no adapter for it"


@dataclass
class Found:
    """What was timed.

    Attributes:
        times: of each that was, with ours in turn. versions: of them.
        absent: why each of the others of ``OTHERS`` was not.
    """

    times: dict[str, Times] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def fields(self, mode: str) -> dict[str, Any]:
        """Of a record; null for what was not timed. ``_over_ours``: pair by pair, with our router
        on our side in either variant."""
        made: dict[str, Any] = {}
        for name in ADAPTERS:
            times = self.times.get(name, Times(1, {}, {}, {}, {}))
            ours = times.of(f"ours_{mode}")
            for title in (name + variant for variant in VARIANTS):
                steady = times.of(f"{title}_{mode}")
                made |= microseconds(title, steady)
                made |= microseconds(f"{title}_device", times.of(f"{title}_{mode}", alone=True))
                made |= ratio(f"{title}_over_ours", steady, ours)
        return made | {"peers_absent": self.absent, "peers_versions": self.versions}


def time_others(
    args: argparse.Namespace,
    world: World,
    shape: LayerShape,
    layers: Layers,
    inputs: Sequence[Tensor],
) -> Found:
    """Everyone of ``args.others``. A collective; raises for none of them."""
    left = {name: _missing(name) or "not wanted (--others)" for name in OTHERS}
    found = Found(absent={name: why for name, why in left.items() if name not in args.others})
    for name in args.others:
        try:
            found.times[name], found.versions[name] = _time_one(
                args, world, name, shape, layers, inputs
            )
        except BenchError as error:
            found.absent[name] = str(error)
            world.say(f"\n*** {name} WAS NOT TIMED: {error}\n")
    return found


def _time_one(
    args: argparse.Namespace,
    world: World,
    name: str,
    shape: LayerShape,
    layers: Layers,
    inputs: Sequence[Tensor],
) -> tuple[Times, str]:
    """Raises BenchError on every rank for whatever goes wrong on one."""
    module, kind = ADAPTERS[name]
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
        make = together(world, lambda: getattr(importlib.import_module(module), kind))
        peer: Peer = together(world, lambda: _make(make, world, shape, layers))
    try:
        times = _check_and_time(args, world, name, peer, layers, inputs)
    except BenchError:
        with contextlib.suppress(Exception):  # what came first is told
            peer.close()
        raise
    gc.collect()  # its graphs, which go before what they write to
    world.together()  # nobody's memory goes while others may write to it
    together(world, peer.close)
    return times, peer.version


def _check_and_time(
    args: argparse.Namespace,
    world: World,
    name: str,
    peer: Peer,
    layers: Layers,
    inputs: Sequence[Tensor],
) -> Times:
    def ours(x: Tensor) -> Tensor:
        return layers.swapped["nodrop"](x)[0]

    for x in inputs[:2]:
        got = together(world, lambda x=x: _waited(world, peer.experts(x, *peer.route(x))))
        check_peer(world, name, got, ours(x))
    calls: dict[str, Call] = {}
    for mode in args.mode:
        calls[f"ours_{mode}"] = kind_of(mode)(ours, inputs[0])
        for variant in VARIANTS:
            call = together(world, lambda m=mode, v=variant: _call(m, v, peer, inputs[0]))
            calls[f"{name}{variant}_{mode}"] = call
            if mode == "graph":
                layer_check.check_replays(world, call, inputs[:2])
    settle = functools.partial(ds_tilemoe.check, layers.swapped)
    return together(world, lambda: time_calls(world, calls, inputs, args.peer_rounds, {}, settle))


def _make(make: Callable[..., Peer], world: World, shape: LayerShape, layers: Layers) -> Peer:
    return make(
        world.group,
        layers.gate,
        layers.ups,
        layers.down,
        layers.activation,
        shape.topk,
        tokens=shape.tokens,
    )


def _waited(world: World, y: Tensor) -> Tensor:
    world.synchronize()
    return y


def _call(mode: str, variant: str, peer: Peer, x: Tensor) -> Call:
    if variant:
        return kind_of(mode)(lambda rows: peer.experts(rows, *peer.route(rows)), x)
    return Given(kind_of(mode), peer, x)


class Given:
    """A peer's experts as a call whose routes are made when the input is loaded, and not timed.

    Args:
        kind: of the call.
    """

    def __init__(self, kind: Callable[..., Any], peer: Peer, x: Tensor) -> None:
        self._peer = peer
        self._routes = peer.route(x)
        self._call = kind(lambda rows: peer.experts(rows, *self._routes), x)
        self.forward = self._call.forward

    def load(self, x: Tensor) -> None:
        for kept, new in zip(self._routes, self._peer.route(x), strict=True):
            kept.copy_(new)
        self._call.load(x)

    def __call__(self) -> Tensor:
        return self._call()


class _Outcome(NamedTuple):
    value: Any
    problem: str


def together(world: World, what: Callable[[], T]) -> T:
    """``what``'s value. A collective.

    Raises:
        BenchError: a rank's ``what`` has raised; on every rank, with the first one's words.
    """
    outcome = _tried(what)
    world.agree(outcome.problem)
    return outcome.value


def _tried(what: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(what(), "")
    except BenchError as error:
        return _Outcome(None, str(error))
    except (Exception, SystemExit) as error:  # strangers': whatever they raise
        return _Outcome(None, f"{type(error).__name__}: {error}")
