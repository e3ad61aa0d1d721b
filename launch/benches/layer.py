"""``bench.py layer``: whole MoE layers, from tokens to output, as users run them.

One set of matrices in all: the swapped layer with and without dropping (eager and as a CUDA
graph), the same layers unswapped (``deepspeed.moe``, capacity 1.25), and a plain torch dropless
layer. They run in turn, in a random order that all ranks share, on fresh inputs whose gate decides
as the routing says. NAME_us is a call's share of a row of calls, as a model makes them: of host
and device whichever is slower. NAME_device_us is one call of the device, all ranks together and
launches done before; ours_host_us is how long the host takes for them. Ratios are of NAME_us, pair
by pair. Nothing is timed before the swapped layer's output is near the unswapped one's, the same
bits each time, and the same bits as a graph; nor beside other processes on the GPUs.

Other systems' layers are timed behind, in turn with ours, where they are installed: NAME_us with
routes made before, NAME_routed_us with a plain torch router. --timeline draws one call.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ds_tilemoe
from benches import layer_check, layer_others, layer_parts, layer_timeline
from benches.calls import hot_ratio
from benches.gpus import need_alone
from benches.layer_models import EXPERT_KINDS, Layers, LayerShape, make_ids, make_input, make_routed
from benches.layer_times import PEERS, time_layers
from benches.operator import DTYPES
from benches.ranks import World, command, join
from benches.records import (
    FEWEST_ROUNDS,
    BenchError,
    at_least,
    microseconds,
    number,
    ratio,
    sizes,
    table,
)
from ds_tilemoe.router_rules import uncovered
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
FRESH = 4  # inputs


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
    add("--block", default="{}", metavar="JSON", help='of "tile_overlap", for the swapped layer')
    add("--rounds", type=at_least(FEWEST_ROUNDS), default=100, help=f"{FEWEST_ROUNDS} or more")
    add("--peer-rounds", type=at_least(10), default=30, help="of them, with the slow peers")
    add("--dtype", choices=list(DTYPES), help="bfloat16; float32 on a CPU")
    add("--seed", type=at_least(0), default=0)
    add("--quick", action="store_true", help="50 rounds; first shape and kind if none is named")
    add("--timeline", type=Path, metavar="FILE", help="draw a call of the first case and mode")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every shape, kind of expert and routing; prints a table at the end.

    Yields:
        A record a mode.

    Raises:
        BenchError: the ranks or sizes do not fit together, or a check failed.
    """
    world = join()
    block = _defaults(args, world)
    need_alone(world)
    for shape, name in itertools.product(args.shape, args.routing):
        _ids(world, shape, name, args.seed)  # said before minutes of work, not after
    machine = layer_parts.machine(world, DTYPES[args.dtype])
    rows = []
    cases = list(itertools.product(args.shape, args.expert_kind))
    with world.progress(len(cases) * len(args.routing), "layer") as bar, torch.no_grad():
        for shape, kind in cases:
            layers = Layers(world, shape, kind, DTYPES[args.dtype])
            for name in args.routing:
                bar.set_postfix_str(f"{','.join(map(str, shape))} {kind} {name}")
                for record in _case(args, world, shape, kind, name, layers, block, machine):
                    rows.append(record)
                    yield record
                bar.update()
            for module in (layers.swapped, layers.observed, layers.alone):
                ds_tilemoe.restore(module)
            del layers
            gc.collect()
    world.say(table([{column: row[column] for column in COLUMNS} for row in rows]))
    failed = {(name, row["peers_absent"].get(name)) for row in rows for name in args.others}
    for name, why in sorted(pair for pair in failed if pair[1]):
        world.say(f"*** {name} WAS NOT TIMED: {why}")


COLUMNS = (
    *("tokens", "hidden", "ffn", "experts", "topk", "expert_kind", "routing", "mode"),
    *("ours_us", "ours_device_us", "ours_host_us", "ours_drop_us"),
    *("sequential_us", "of_sequential", "bound_us", "weights_us"),
    *("deepspeed_us", "deepspeed_nodrop_us", "torch_us"),
    *("flashinfer_us", "flashinfer_routed_us"),
    *("deepspeed_over_ours", "torch_over_ours", "max_rel_err"),
)


def _defaults(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """What is not given, as this machine can have it; returns the tile_overlap block."""
    shapes = DECODE if args.decode else SHAPES if world.on_gpu else CPU_SHAPES
    if args.decode and args.shape:
        raise BenchError("--decode and --shape: got both, wanted one")
    first = slice(0, 1 if args.quick else None)
    args.shape = [LayerShape(*s) for s in args.shape or (shapes if args.decode else shapes[first])]
    args.expert_kind = args.expert_kind or list(EXPERT_KINDS)[first]
    args.routing = args.routing or (["balanced", "uniform"] if args.decode else ["uniform"])
    args.mode = args.mode or (["eager", "graph"] if world.on_gpu else ["eager"])
    if "graph" in args.mode and not world.on_gpu:
        raise BenchError("--mode: got graph without a GPU, wanted eager")
    args.dtype = args.dtype or ("bfloat16" if world.on_gpu else "float32")
    if args.quick:
        args.rounds, args.peer_rounds = FEWEST_ROUNDS, 10
    args.peer_rounds = min(args.peer_rounds, args.rounds)
    args.others = layer_others.choose(args.others)
    if args.timeline is not None:
        layer_timeline.need(args.timeline)
    for shape in args.shape:
        if shape.experts % world.ranks:
            fits = max(n for n in range(1, 9) if shape.experts % n == 0)
            raise BenchError(
                f"shape {','.join(map(str, shape))}: got {shape.experts} experts on {world.ranks}"
                f" ranks, wanted a number of ranks that divides them: {command('layer', fits)}"
            )
    try:
        block = json.loads(args.block)
    except json.JSONDecodeError as error:
        raise BenchError(f"--block: got {args.block!r}, wanted JSON: {error}") from None
    if not isinstance(block, dict):
        raise BenchError(f"--block: got {args.block!r}, wanted a JSON object")
    return {"strict": True, **block}


def _need_swapped(world: World, layers: Any, text: str) -> None:
    """Else DeepSpeed's own layers would be timed as ours; ``text`` is what --block says."""
    left = [
        rule for rule, moe in layers.items() if getattr(moe.deepspeed_moe, "_tile", None) is None
    ]
    wanted = "a block that swaps the layers (enabled, and layers that match their names)"
    world.agree(f"--block: got {text!r}, wanted {wanted}: not swapped: {left}" if left else "")


def _ids(world: World, shape: LayerShape, name: str, seed: int) -> np.ndarray:
    try:
        return make_ids(name, world, shape, seed)
    except ValueError as error:
        text = f"shape {','.join(map(str, shape))}: {error}"
        if (ROUTINGS[name] or 1) > world.ranks:
            text += f"; start it on more ranks: {command('layer', 4)}"
        raise BenchError(text) from None


def _case(
    args: argparse.Namespace,
    world: World,
    shape: LayerShape,
    kind: str,
    routing: str,
    layers: Layers,
    block: dict[str, Any],
    machine: dict[str, float | None],
) -> Iterator[dict[str, Any]]:
    """One shape, kind and routing."""
    dtype = DTYPES[args.dtype]
    all_ids = [_ids(world, shape, routing, args.seed + i) for i in range(FRESH)]
    routed = make_routed(world, all_ids[0], shape.experts)
    inputs = [
        make_input(world, layers.gate, ids, dtype, args.seed + i) for i, ids in enumerate(all_ids)
    ]
    swapped, plain = layers.swapped, layers.plain
    block = {"max_tokens_per_rank": shape.tokens, **block}
    ds_tilemoe.apply(swapped, block)
    _need_swapped(world, swapped, args.block)
    error = layer_check.check(world, swapped, plain, layers.torch, inputs[:2])
    bound = layer_parts.bound(world, shape, layers, inputs[0], routed, machine)
    # A sequential layer has no split to learn, and its copy is the fastest there is.
    ctas = bound["bound_combine_copy_ctas"]
    fastest = {"num_consumer_ctas": ctas} if ctas else {}
    ds_tilemoe.apply(layers.alone, {"adaptive": {"enabled": False}, **fastest, **block})
    layer_check.check_sequential(world, layers.alone, swapped, inputs[0])
    times = time_layers(args, world, layers, inputs)
    settings = _settings(swapped["nodrop"])
    busy = None
    if "deepspeed" in PEERS[args.peers]:
        busy = layer_parts.busy_us(world, lambda: plain["drop"](inputs[0]))
    parts = layer_parts.of_stats(world, layers.observed, inputs, block)
    for module in (swapped, layers.alone, layers.observed):
        ds_tilemoe.check(module)
    # Last, as one that breaks the GPU's context takes what is not written yet.
    others = layer_others.time_others(args, world, shape, layers, inputs)
    same = {
        **world.fields(),
        "dtype": args.dtype,
        "routing": routing,
        "hot_ratio": round(hot_ratio(routed.counts), 3),
        "seed": args.seed,
        "topk": shape.topk,
        "gemm_m": shape.tokens * shape.topk,
        "gemm_n": shape.hidden,
        "gemm_k": shape.ffn,
        "local_experts": shape.experts // world.ranks,
        "tokens": shape.tokens,
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "experts": shape.experts,
        "expert_kind": kind,
    }
    deepspeed, torch_us = times.of("deepspeed"), times.of("torch")
    for mode in args.mode:
        name = f"ours_{mode}"
        ours, ours_drop = times.of(name), times.of(f"ours_drop_{mode}")
        sequential = times.of(f"sequential_{mode}")
        yield {
            **same,
            "mode": mode,
            "router": _router(world, swapped["nodrop"], settings),
            "settings": settings,
            "rounds": args.rounds,
            "peer_rounds": args.peer_rounds,
            "calls_in_a_row": times.calls[name],
            **microseconds("ours", ours),
            **microseconds("ours_device", times.of(name, alone=True)),
            "ours_host_us": number(times.host_us[name]) if world.on_gpu else None,
            **microseconds("ours_drop", ours_drop),
            **microseconds("ours_drop_device", times.of(f"ours_drop_{mode}", alone=True)),
            **microseconds("sequential", sequential),
            **microseconds("sequential_device", times.of(f"sequential_{mode}", alone=True)),
            **microseconds("deepspeed", deepspeed),
            **microseconds("deepspeed_nodrop", times.of("deepspeed_nodrop")),
            **microseconds("torch", torch_us),
            # Pair by pair, with the same rules of dropping on both sides.
            **ratio("deepspeed_over_ours", deepspeed, ours_drop),
            **ratio("deepspeed_nodrop_over_ours", times.of("deepspeed_nodrop"), ours),
            **ratio("torch_over_ours", torch_us, ours),
            **ratio("of_sequential", ours, sequential),
            **bound,
            **machine,
            **layer_parts.idle_fields(deepspeed, busy),
            "parts": parts,
            "max_rel_err": error,
            "peers": args.peers,
            **others.fields(mode),
        }
    if args.timeline is not None:
        title = f"{','.join(map(str, shape))} {kind} {routing}"
        layer_timeline.make(
            args.timeline, world, layers.observed, inputs[0], args.mode[0], block, title
        )
        args.timeline = None  # of the first case only


def _settings(layer: Any) -> dict[str, Any]:
    """The block in force in this layer, with the values that "auto" stands for."""
    stats = layer.deepspeed_moe._tile.stats
    return stats.settings | (stats.choice.settings() if stats.choice else {})


def _router(world: World, layer: Any, settings: dict[str, Any]) -> str:
    """Whose router made the routes."""
    is_fused = world.on_gpu and settings["router"] != "deepspeed"
    return "fused" if is_fused and not uncovered(layer.deepspeed_moe.gate) else "deepspeed"
