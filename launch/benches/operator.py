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
from benches.records import FEWEST_ROUNDS, median, table
from demo.options import at_least, refusal, sizes, wrong
from ds_tilemoe.config_block import MAX_CPU_CONSUMERS, MAX_CPU_TILE, MAX_CUDA_CTAS
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
MOVERS = ("sm", "none", "copy_engine")
GPU_TILES = (128, 256)  # columns
GPU_WIDTH = 8  # columns of N and K that a GPU loads at once
ROUNDS = 100
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
    add("--mover", action="append", choices=MOVERS, help="repeatable; sm and none unless given")
    threads = f"on a CPU its threads, 1 to {MAX_CPU_CONSUMERS}"
    splits = sizes("...", highest=MAX_CUDA_CTAS)
    add("--split", type=splits, metavar="C,C,...", help=f"CTAs of the consumer; {threads}")
    tiles = sizes("...", highest=MAX_CPU_TILE)
    add("--tile-n", type=tiles, metavar="N,N", help="columns of a tile; 128 only if N small")
    add("--bands-per-segment", type=sizes("..."), default=(1,), metavar="B,B,...")
    waves = "a number, all or auto; repeatable"
    add("--local-tail-waves", action="append", type=tail_waves, metavar="WAVES", help=waves)
    rounds = f"{FEWEST_ROUNDS} or more; else {ROUNDS}"
    add("--rounds", type=at_least(FEWEST_ROUNDS), help=rounds)
    add("--dtype", choices=list(DTYPES), help="bfloat16; float32 on a CPU")
    add("--seed", type=at_least(0), default=0)
    add(
        "--quick",
        action="store_true",
        help="of what is not named: 50 rounds, one shape, balanced, splits 4, 8 (on a CPU 1, 2)",
    )


def tail_waves(text: str) -> str | int:
    """An argparse type: "auto", "all" or a number of waves."""
    if text in ("auto", "all"):
        return text
    try:
        return at_least(0)(text)
    except argparse.ArgumentTypeError:
        wanted = "auto, all or an integer from 0 on"
        raise argparse.ArgumentTypeError(refusal(repr(text), wanted, "e.g. auto")) from None


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times every shape, routing, layout, tile, segment size and tail.

    Yields:
        A record a variant.

    Raises:
        InputError: the ranks, sizes and flags do not fit together.
        BenchError: a check failed.
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
    args.rounds = args.rounds or (FEWEST_ROUNDS if args.quick else ROUNDS)
    args.routing, args.layout, args.mover, args.local_tail_waves = (
        list(dict.fromkeys(named))
        for named in (
            args.routing,
            args.layout or ["compact"],
            args.mover or ["sm", "none"],
            args.local_tail_waves or ["auto"],
        )
    )
    args.dtype = args.dtype or ("bfloat16" if world.on_gpu else "float32")
    if args.split and world.on_gpu and "sm" not in args.mover:  # on a CPU copies are timed by it
        got, fix = f"one beside --mover {' '.join(args.mover)}", "add --mover sm, or leave it out"
        raise wrong("--split", got, "a mover that has consumers", fix)
    if not args.split:
        args.split = (QUICK_SPLITS if args.quick else SPLITS) if world.on_gpu else CPU_SPLITS
    _need_fitting(args, world)


def _need_fitting(args: argparse.Namespace, world: World) -> None:
    """What this machine cannot do is refused by name."""
    most = world.most_consumers
    if max(args.split) > most:
        kind = "SMs of this GPU" if world.on_gpu else "consumer threads on a CPU"
        raise wrong("--split", max(args.split), f"1 to {most} {kind}", "leave it out")
    if "copy_engine" in args.mover and not (world.on_gpu and world.ranks > 1):
        wanted = "sm or none on a CPU or on one rank"
        raise wrong("--mover", "copy_engine", wanted, command("operator", 4))
    if not world.on_gpu:
        return
    if args.dtype == "float32":
        raise wrong("--dtype", "float32", "bfloat16 or float16 on a GPU", "--dtype bfloat16")
    for tile_n in args.tile_n or ():
        if tile_n not in GPU_TILES:
            raise wrong("--tile-n", tile_n, "128 or 256 on a GPU", "--tile-n 128,256")
    for shape in args.shape:
        if shape.n % GPU_WIDTH or shape.k % GPU_WIDTH:
            wanted, fix = f"multiples of {GPU_WIDTH} on a GPU", "round them up"
            raise wrong("--shape", f"N {shape.n} and K {shape.k}", wanted, fix)


def _routing(world: World, shape: OperatorShape, name: str, seed: int) -> Routed:
    try:
        return make_routing(name, world, shape, seed)
    except ValueError as error:
        case = f"--shape {','.join(map(str, shape))} --routing {name}"
        fix = "change one of them"
        if (ROUTINGS[name] or 1) > world.ranks:
            fix = f"start it on more ranks: {command('operator', 4)}"
        got = f"what cannot be ({error})"
        raise wrong(case, got, "sizes and a routing that go together", fix) from None


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
