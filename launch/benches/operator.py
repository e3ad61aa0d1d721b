"""``bench.py operator``: GEMM 2, the return of its rows and the weighted sum, on given routings.

Variants run in turn, in a random order that all ranks share, on fresh routings: the consumer at
each split, no consumer, the same kernels one after another (``sequential``), and those with a clock
between (GEMM alone, copy alone, scale). A's rows are written anew before each call, as GEMM 1 would
leave the L2. Nothing is timed before the result of every variant is bit-equal to sequential's and
that is near an fp32 product.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benches.calls import (
    Operator,
    OperatorShape,
    Routed,
    Settings,
    hot_ratio,
    make_routing,
    random_rows,
)
from benches.gpus import need_alone
from benches.operator_measure import Measured
from benches.ranks import World, command, join
from benches.records import FEWEST_ROUNDS, BenchError, at_least, median, sizes, table
from ds_tilemoe.config_block import MAX_CPU_CONSUMERS
from ds_tilemoe.routings import ROUTINGS

NAMES = "M,N,K,LOCAL_EXPERTS,TOPK"
SHAPES = (
    (16384, 8192, 2048, 16, 2),
    (32768, 8192, 2048, 16, 2),
    (32768, 4096, 1536, 32, 8),
    (16384, 1024, 4096, 16, 2),
    (16384, 512, 2048, 16, 2),
    (16384, 8192, 2048, 4, 2),
    (16384, 8192, 2048, 8, 2),
    (16384, 8192, 2048, 32, 2),
    (16384, 8192, 2048, 64, 2),
)
SPLITS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24)
QUICK_SPLITS = (4, 8)
CPU_SHAPES = ((512, 128, 64, 4, 2),)
CPU_SPLITS = (1, 2)
DEFAULT_ROUTINGS = ("balanced", "moderate_skew", "stress_skew")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FRESH = 8  # routings
NARROW = 1024  # up to this N a tile of 128 columns may be the faster one
WEIGHT_SEED = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``operator``."""
    add = parser.add_argument
    several = {"action": "extend", "nargs": "+"}
    add("--shape", **several, type=sizes(NAMES), metavar=NAMES, help="several; M = rows")
    add("--routing", action="append", choices=list(ROUTINGS), help="repeatable")
    add("--layout", action="append", choices=["compact", "aligned"], help="repeatable")
    movers = ["sm", "none", "copy_engine"]
    add("--mover", action="append", choices=movers, help="repeatable; sm and none unless given")
    threads = f"on a CPU its threads, 1 to {MAX_CPU_CONSUMERS}"
    add("--split", type=sizes("..."), metavar="C,C,...", help=f"CTAs of the consumer; {threads}")
    add("--tile-n", type=sizes("..."), metavar="N,N", help="columns of a tile; 128 only if N small")
    add("--bands-per-segment", type=sizes("..."), default=(1,), metavar="B,B,...")
    add("--local-tail-waves", action="append", help="a number, all or auto; repeatable")
    add("--rounds", type=at_least(FEWEST_ROUNDS), default=100, help=f"{FEWEST_ROUNDS} or more")
    add("--dtype", choices=list(DTYPES), help="bfloat16; float32 on a CPU")
    add("--seed", type=at_least(0), default=0)
    add(
        "--quick",
        action="store_true",
        help="50 rounds; what is not named: one shape, balanced, splits 4, 8 (on a CPU 1, 2)",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every shape, routing, layout, tile, segment size and tail.

    Yields:
        A record a variant.

    Raises:
        BenchError: the ranks or sizes do not fit together, or a check failed.
    """
    world = join()
    _defaults(args, world)
    need_alone(world)
    cases = list(itertools.product(args.shape, args.routing))
    for shape, name in cases:  # said before minutes of work, not after
        _routing(world, shape, name, args.seed)
    rows = []
    with world.progress(len(cases), "operator") as bar:
        for shape, name in cases:
            bar.set_postfix_str(f"{','.join(map(str, shape))} {name}")
            for record in _case(args, world, shape, name):
                rows.append(record)
                yield record
            bar.update()
    world.say(table([{column: row[column] for column in COLUMNS} for row in rows]))


COLUMNS = (
    *("gemm_m", "gemm_n", "gemm_k", "local_experts", "topk", "routing", "layout", "tile_n"),
    *("mover", "num_consumer_ctas", "gemm_alone_us", "copy_alone_us", "scale_us"),
    *("sequential_us", "overlapped_us", "of_sequential", "of_bound", "overlap_ratio"),
    *("hidden_share", "exposed_us", "torch_sequential_us"),
)


def _defaults(args: argparse.Namespace, world: World) -> None:
    """What is not given, as this machine can have it."""
    args.shape = [OperatorShape(*shape) for shape in args.shape or ()]
    if not args.shape:
        shapes = SHAPES if world.on_gpu else CPU_SHAPES
        args.shape = [OperatorShape(*shape) for shape in (shapes[:1] if args.quick else shapes)]
    if not args.routing:
        names = DEFAULT_ROUTINGS[:1] if args.quick else DEFAULT_ROUTINGS
        args.routing = [name for name in names if (ROUTINGS[name] or 0) <= world.ranks]
        if left := set(names) - set(args.routing):
            world.say(f"{world.ranks} rank(s): not timed: {', '.join(sorted(left))}")
    if not args.split:
        args.split = (QUICK_SPLITS if args.quick else SPLITS) if world.on_gpu else CPU_SPLITS
    if not world.on_gpu and max(args.split) > MAX_CPU_CONSUMERS:
        raise BenchError(
            f"--split: got {max(args.split)}, wanted 1 to {MAX_CPU_CONSUMERS} consumer threads on"
            " a CPU"
        )
    args.rounds = FEWEST_ROUNDS if args.quick else args.rounds
    args.layout = args.layout or ["compact"]
    args.mover = args.mover or ["sm", "none"]
    if "copy_engine" in args.mover and not (world.on_gpu and world.ranks > 1):
        raise BenchError("--mover: got copy_engine, wanted sm or none on a CPU or on one rank")
    waves = args.local_tail_waves or ["auto"]
    args.local_tail_waves = [int(word) if word.isdigit() else word for word in waves]
    args.dtype = args.dtype or ("bfloat16" if world.on_gpu else "float32")
    if world.on_gpu and args.dtype == "float32":
        raise BenchError("--dtype: got float32, wanted bfloat16 or float16 on a GPU")


def _routing(world: World, shape: OperatorShape, name: str, seed: int) -> Routed:
    try:
        return make_routing(name, world, shape, seed)
    except ValueError as error:
        text = f"shape {','.join(map(str, shape))}: {error}"
        least = ROUTINGS[name] or 1
        if least > world.ranks:
            text += f"; start it on more ranks: {command('operator', 4)}"
        raise BenchError(text) from None


def _case(
    args: argparse.Namespace, world: World, shape: OperatorShape, name: str
) -> Iterator[dict[str, Any]]:
    """One shape and routing: all settings, whose fastest parts make the bound."""
    dtype = DTYPES[args.dtype]
    routings = [_routing(world, shape, name, args.seed + i) for i in range(FRESH)]
    weights = random_rows(
        (shape.local_experts, shape.n, shape.k),
        shape.k**-0.5,
        dtype,
        WEIGHT_SEED + world.rank,
        world.device,
    )
    measured = []
    for settings in _settings(args, world, shape):
        op = make_operator(world, shape, dtype, settings, routings, weights)
        measured.append((settings, Measured(args, world, op, routings)))
    gemm = min((parts.gemm for _, parts in measured), key=median)
    copy = min((parts.copy for _, parts in measured), key=median)
    same = {
        **world.fields(),
        "dtype": args.dtype,
        "routing": name,
        "hot_ratio": round(hot_ratio(routings[0].counts), 3),
        "seed": args.seed,
        "topk": shape.topk,
        "gemm_m": shape.m,
        "gemm_n": shape.n,
        "gemm_k": shape.k,
        "local_experts": shape.local_experts,
    }
    for settings, parts in measured:
        for variant in parts.timed:
            yield same | settings._asdict() | parts.record(variant, gemm, copy)


def _settings(args: argparse.Namespace, world: World, shape: OperatorShape) -> list[Settings]:
    tiles: Sequence[str | int] = args.tile_n or ("auto",)
    if args.tile_n is None and world.on_gpu:
        tiles = (256, 128) if shape.n <= NARROW else (256,)
    return [
        Settings(*values)
        for values in itertools.product(
            args.layout, tiles, args.bands_per_segment, args.local_tail_waves
        )
    ]


def make_operator(
    world: World,
    shape: OperatorShape,
    dtype: torch.dtype,
    settings: Settings,
    routings: Sequence[Routed],
    weights: torch.Tensor,
) -> Operator:
    """The operator on this world's device; a collective."""
    if world.on_gpu:
        from benches.operator_cuda import CudaOperator

        return CudaOperator(world, shape, dtype, settings, routings, weights)
    from benches.operator_cpu import CpuOperator

    return CpuOperator(world, shape, dtype, settings, routings, weights)
