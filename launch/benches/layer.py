"""``bench.py layer``: whole MoE layers, from tokens to output, as users run them.

One set of matrices in all: the swapped layer with and without dropping (eager and as a CUDA
graph), the same layers unswapped (``deepspeed.moe``, capacity 1.25), and a plain torch dropless
layer. They run in turn, in a random order that all ranks share, on fresh inputs whose gate decides
as the routing says. NAME_us is a call's share of a row of calls, as a model makes them: of host
and device whichever is slower. NAME_device_us is one call of the device, all ranks together and
launches done before; ours_host_us is how long the host takes for them. Ratios are of NAME_us, pair
by pair. bound_us, its parts, weights_us and hot_ratio are of one routing, that of input number
bound_input; times are of all inputs in turn. Nothing is timed before the swapped layer's output is
near the unswapped one's, the same bits each time, and the same bits as a graph; nor beside other
processes on the GPUs.

Other systems' layers are timed behind, in turn with ours, where they are installed: NAME_us with
routes made before, NAME_routed_us with a plain torch router. --timeline draws one call.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import ds_tilemoe
from benches import layer_check, layer_others, layer_parts, layer_timeline
from benches.calls import hot_ratio
from benches.gpus import need_alone
from benches.layer_models import Layers, LayerShape, make_ids, make_input, make_routed
from benches.layer_options import add_arguments as add_arguments
from benches.layer_options import check as check
from benches.layer_options import settle
from benches.layer_times import PEERS, time_layers
from benches.operator import DTYPES
from benches.ranks import World, command, join
from benches.records import microseconds, number, ratio, table
from demo.options import InputError, refusal, wrong
from ds_tilemoe.router_rules import uncovered
from ds_tilemoe.routings import ROUTINGS

FRESH = 4  # inputs


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every shape, kind of expert and routing; prints a table at the end.

    Yields:
        A record a mode.

    Raises:
        InputError: the ranks, sizes and flags do not fit together.
        BenchError: a check failed.
    """
    world = join()
    settle(args, world)
    block = {"strict": True, **args.block}
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


def _need_swapped(world: World, layers: Any, block: dict[str, Any]) -> None:
    """Else DeepSpeed's own layers would be timed as ours; ``block`` is what --block says."""
    left = [
        rule for rule, moe in layers.items() if getattr(moe.deepspeed_moe, "_tile", None) is None
    ]
    got, wanted = f"{json.dumps(block)!r}, not swapped: {left}", "a block that swaps the layers"
    problem = refusal(got, wanted, "let layers match their names, or leave it out")
    world.agree(f"--block: {problem}" if left else "", InputError)


def _ids(world: World, shape: LayerShape, name: str, seed: int) -> np.ndarray:
    try:
        return make_ids(name, world, shape, seed)
    except ValueError as error:
        fix = "change one of them"
        if (ROUTINGS[name] or 1) > world.ranks:
            fix = f"start it on more ranks: {command('layer', 4)}"
        case, got = f"--shape {','.join(map(str, shape))} --routing {name}", "what cannot be"
        wanted = "sizes and a routing that go together"
        raise wrong(case, f"{got} ({error})", wanted, fix) from None


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
    bound = layer_parts.bound(world, shape, layers, inputs[0], routed, machine, block)
    ds_tilemoe.apply(layers.alone, sequential_block(block, bound["bound_combine_copy_ctas"]))
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
        "inputs": FRESH,
        "bound_input": 0,
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


def sequential_block(block: dict[str, Any], ctas: int | None) -> dict[str, Any]:
    """A layer's block without overlap: no split to learn, and the copy is the fastest there is.

    Args:
        block: with overlap.
        ctas: of the fastest copy, whatever the block's bounds for the overlapped one; None on a
            CPU.
    """
    found = {**block, "adaptive": {"enabled": False}, "mover": "sm"}
    if ctas is None:
        return found
    bounds = ("min_consumer_ctas", "max_consumer_ctas")
    return {name: value for name, value in found.items() if name not in bounds} | {
        "num_consumer_ctas": ctas
    }


def _settings(layer: Any) -> dict[str, Any]:
    """The block in force in this layer, with the values that "auto" stands for."""
    stats = layer.deepspeed_moe._tile.stats
    return stats.settings | (stats.choice.settings() if stats.choice else {})


def _router(world: World, layer: Any, settings: dict[str, Any]) -> str:
    """Whose router made the routes."""
    is_fused = world.on_gpu and settings["router"] != "deepspeed"
    return "fused" if is_fused and not uncovered(layer.deepspeed_moe.gate) else "deepspeed"
