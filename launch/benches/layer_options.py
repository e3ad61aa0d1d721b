"""The options of ``bench.py layer``, and what of them cannot be."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benches import layer_others, layer_timeline
from benches.layer_models import EXPERT_KINDS, LayerShape
from benches.layer_times import PEERS
from benches.operator import DTYPES
from benches.ranks import World, command
from benches.records import FEWEST_ROUNDS
from demo.options import at_least, refusal, sizes, wrong
from ds_tilemoe.backends import base
from ds_tilemoe.backends.cuda_limits import layer_obstacle
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.errors import ConfigError
from ds_tilemoe.routings import ROUTINGS

NAMES = "TOKENS,HIDDEN,FFN,EXPERTS,TOPK"
SHAPES = (
    (8192, 8192, 2048, 64, 2),
    (8192, 1024, 4096, 64, 2),
    (8192, 512, 2048, 64, 2),
    (4096, 4096, 1536, 128, 8),
    (4096, 7168, 2048, 256, 8),
    (4096, 1024, 4096, 64, 2),
    (4096, 4096, 2048, 64, 2),
)
DECODE = tuple((tokens, 4096, 1536, 128, 8) for tokens in (1, 4, 16, 64))
CPU_SHAPES = ((64, 64, 96, 8, 2),)
ROUNDS, PEER_ROUNDS = 100, 30
FEWEST_PEER_ROUNDS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``layer``."""
    add = parser.add_argument
    several = {"action": "extend", "nargs": "+"}
    add("--shape", **several, type=sizes(NAMES), metavar=NAMES, help="several; a rank's T")
    add("--decode", action="store_true", help="1, 4, 16 and 64 tokens a rank instead")
    add("--expert-kind", action="append", choices=list(EXPERT_KINDS), help="repeatable; both")
    add("--routing", action="append", choices=list(ROUTINGS), help="repeatable")
    add("--mode", action="append", choices=["eager", "graph"], help="repeatable; both on a GPU")
    add("--peers", choices=list(PEERS), default="all", help="timed beside ours")
    add("--others", nargs="*", choices=layer_others.OTHERS, help="all installed; no name: none")
    what = 'of "tile_overlap", for the swapped layer'
    add("--block", type=block_of, default={}, metavar="JSON", help=what)
    rounds = f"{FEWEST_ROUNDS} or more; else {ROUNDS}"
    add("--rounds", type=at_least(FEWEST_ROUNDS), help=rounds)
    slow = f"of them, with the slow peers; {FEWEST_PEER_ROUNDS} or more; else {PEER_ROUNDS}"
    add("--peer-rounds", type=at_least(FEWEST_PEER_ROUNDS), help=slow)
    add("--dtype", choices=list(DTYPES), help="bfloat16; float32 on a CPU")
    add("--seed", type=at_least(0), default=0)
    quick = "of what is not named: 50 rounds, 10 with slow peers, the first shape and kind"
    add("--quick", action="store_true", help=quick)
    add("--timeline", type=Path, metavar="FILE", help="draw a call of the first case and mode")


def block_of(text: str) -> dict[str, Any]:
    """An argparse type: a block of settings that swaps layers, as JSON."""
    wanted = 'a JSON object of "tile_overlap", without that key'
    fix = """e.g. '{"mover": "none"}'"""
    try:
        block = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(refusal(f"{text!r} ({error})", wanted, fix)) from None
    if not isinstance(block, dict):
        raise argparse.ArgumentTypeError(refusal(repr(text), wanted, fix))
    try:
        config = TileOverlapConfig(**block)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not config.enabled:
        wanted = "a block that swaps the layers"
        raise argparse.ArgumentTypeError(refusal(repr(text), wanted, "take enabled out"))
    return block


def check(args: argparse.Namespace) -> None:
    """Refuse before the ranks meet what no machine could do; settle the numbers of rounds.

    Raises:
        InputError: names the flag.
    """
    if args.decode and args.shape:
        raise wrong("--decode and --shape", "both", "one of them", "leave one out")
    args.are_others_named = bool(args.others)
    args.others = layer_others.choose(args.others)
    if args.timeline is not None:
        layer_timeline.need_matplotlib()
    rounds = args.rounds or (FEWEST_ROUNDS if args.quick else ROUNDS)
    if args.peer_rounds and not (args.others or PEERS[args.peers]):
        got, fix = "a number beside --peers none, and no others", "leave it out"
        raise wrong("--peer-rounds", got, "peers that it is for", fix)
    if args.peer_rounds and args.peer_rounds > rounds:
        wanted = f"at most the number of rounds, {rounds}"
        raise wrong("--peer-rounds", args.peer_rounds, wanted, f"--rounds {args.peer_rounds}")
    args.peer_rounds = args.peer_rounds or (FEWEST_PEER_ROUNDS if args.quick else PEER_ROUNDS)
    args.rounds = rounds


def settle(args: argparse.Namespace, world: World) -> None:
    """What is not given, as this machine can have it."""
    shapes = DECODE if args.decode else SHAPES if world.on_gpu else CPU_SHAPES
    first = slice(0, 1 if args.quick else None)
    args.shape = [LayerShape(*s) for s in args.shape or (shapes if args.decode else shapes[first])]
    args.expert_kind, args.routing, args.mode = (
        list(dict.fromkeys(named))
        for named in (
            args.expert_kind or list(EXPERT_KINDS)[first],
            args.routing or (["balanced", "uniform"] if args.decode else ["uniform"]),
            args.mode or (["eager", "graph"] if world.on_gpu else ["eager"]),
        )
    )
    args.dtype = args.dtype or ("bfloat16" if world.on_gpu else "float32")
    if "graph" in args.mode and not world.on_gpu:
        raise wrong("--mode", "graph without a GPU", "eager", "--mode eager")
    if "graph" in args.mode:
        _need_capturable(world, args.block)
    if args.are_others_named and not world.on_gpu:
        got = f"{', '.join(args.others)} without a GPU"
        raise wrong("--others", got, "none of them on a CPU", "leave it out")
    if args.dtype == "float32" and world.on_gpu:
        raise wrong("--dtype", "float32", "bfloat16 or float16 on a GPU", "--dtype bfloat16")
    for shape in args.shape:
        _need_fitting(world, shape, DTYPES[args.dtype])


def _need_capturable(world: World, block: dict[str, Any]) -> None:
    """Raises InputError for a setting with which the backend refuses to be captured."""
    refused = {"dispatch": "nccl"} | ({"mover": "copy_engine"} if world.ranks > 1 else {})
    if named := {name: value for name, value in refused.items() if block.get(name) == value}:
        got = f"{json.dumps(named)!r} beside mode graph"
        wanted = "what a CUDA graph can have: no host waits for counts in it"
        raise wrong("--block", got, wanted, "--mode eager")


def _need_fitting(world: World, shape: LayerShape, dtype: torch.dtype) -> None:
    """Raises InputError for a shape that these ranks cannot have."""
    flag, experts = f"--shape {','.join(map(str, shape))}", shape.experts
    if experts % world.ranks:
        fits = max(n for n in range(1, 9) if experts % n == 0)
        got, wanted = f"{experts} experts on {world.ranks} ranks", "a number of ranks that divides"
        raise wrong(flag, got, f"{wanted} them", command("layer", fits))
    if shape.topk > experts:
        raise wrong(flag, f"TOPK {shape.topk}", f"1 to EXPERTS, {experts}", "lower it")
    if experts > shape.hidden:  # the gate's rows are orthonormal
        wanted = f"at most as many as HIDDEN, {shape.hidden}"
        raise wrong(flag, f"EXPERTS {experts}", wanted, "lower it or raise the other")
    if not world.on_gpu:
        return
    sizes_ = (experts, shape.topk, shape.hidden, shape.ffn, shape.hidden)
    layer = base.LayerShape("layer", *sizes_, dtype, "cuda")
    if why := layer_obstacle(layer, world.ranks):
        raise wrong(flag, f"a layer that no kernel is for ({why})", "one that is", "change it")
