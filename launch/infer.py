"""Run a DeepSpeed MoE language model on a text: perplexity, a continuation, and where time went.

    deepspeed --num_gpus 4 launch/infer.py
    deepspeed --num_gpus 4 launch/infer.py --deepspeed_config ds_configs/tile_overlap.json --compare
    torchrun --nproc_per_node 2 launch/infer.py --text my.txt --json
    cat my.txt | python launch/infer.py --text -

The text is cut into equal pieces of bytes, one a rank; what does not divide (fewer bytes than
ranks) is left out at its end. Every rank reads its piece and continues it greedily; the
continuation shown is rank 0's. Perplexity is over all bytes but the first of each piece.

Exit codes: 0; 1 if --compare finds a difference or the run fails; 2 for an input that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.model_config import ModelConfig, ModelConfigError
from demo.process import (
    FAILED,
    Parser,
    choose_accelerator,
    end,
    end_with_launcher,
    join_world,
    leave,
    prepare_environment,
    quieten,
    rank,
)
from ds_tilemoe.config import BLOCK, TileOverlapConfig, load_config, split_config
from ds_tilemoe.config_block import NOT_BUILT
from ds_tilemoe.errors import ConfigError, TileMoEError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from demo.generation import Reading

DEMO = Path(__file__).parent / "demo"
RANDOM_SEED = 0


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", metavar="FILE", help="a DeepSpeed JSON or HJSON file")
    parser.add_argument(
        "--text",
        default=str(DEMO / "text.txt"),
        metavar="FILE",
        help="a file to read, or - for standard input (default: the demo text)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="bytes to continue with (default 128)",
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="sizes of another model, as in launch/demo/config.json; its weights are random",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also run DeepSpeed's own layers and compare"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the layers")
    # The two below are what launchers and deepspeed.add_config_arguments() bring.
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.max_new_tokens < 0:
        parser.error(f"--max-new-tokens is {args.max_new_tokens}; it must be 0 or more")
    if args.trace and not Path(args.trace).absolute().parent.is_dir():
        parser.error(f"--trace {args.trace}: there is no such folder")
    return args


def main() -> int:
    args = arguments()
    end_with_launcher()
    prepare_environment()
    try:
        settings = read_settings(args.model_config, args.deepspeed_config)
    except (ConfigError, ModelConfigError) as error:
        leave(str(error))
    accepted, reason = NOT_BUILT.get("backend", (("cuda",), ""))
    choose_accelerator(settings.block.backend, None if "cuda" in accepted else reason)
    # DeepSpeed and its dependencies print and log on stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401  (reads DS_ACCELERATOR)

        quieten()
        join_world()
        try:
            return run(args, settings)
        except TileMoEError as error:
            leave(f"{type(error).__name__}: {error}", FAILED)


@dataclass(frozen=True)
class Settings:
    """What the two configuration files say.

    Attributes:
        sizes: of the model.
        dtype: name of the torch dtype of weights and logits.
        ds_config: what DeepSpeed gets.
        block: what ds_tilemoe gets.
    """

    sizes: ModelConfig
    dtype: str
    ds_config: dict[str, Any]
    block: TileOverlapConfig


def read_settings(model_config: str | None, deepspeed_config: str | None) -> Settings:
    """Read and check both files; None stands for the demo's sizes and for all defaults.

    Raises:
        ModelConfigError: see :class:`ModelConfig`.
        ConfigError: as :func:`ds_tilemoe.config.split_config`, or a wrong bf16 or fp16 block.
    """
    sizes = ModelConfig.load(model_config or DEMO / "config.json")
    if deepspeed_config is None:
        ds_config, block = {}, load_config(None)
    else:
        ds_config, block = split_config(deepspeed_config)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & ds_config.keys():
        ds_config["train_micro_batch_size_per_gpu"] = 1  # initialize() insists on one
    # DeepSpeed's bf16 and fp16 blocks want an optimizer where there are MoE layers. A model that is
    # cast beforehand does not need them.
    dtypes = []
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        section = ds_config.pop(name, {})
        enabled = section.get("enabled", False) if isinstance(section, dict) else None
        if not isinstance(enabled, bool):
            raise ConfigError(
                f'{name}: got {json.dumps(section)}; wanted a block; fix: {{"enabled": true}}'
            )
        dtypes += [dtype] * enabled
    if len(dtypes) > 1:
        raise ConfigError("bf16 and fp16: got both enabled; wanted one; fix: remove one")
    return Settings(sizes, *(dtypes or ["float32"]), ds_config, block)


def read_text(source: str, ranks: int, limit: int) -> bytes:
    """The bytes to work on.

    Raises:
        ValueError: the text cannot be read, is too short to share, or a piece exceeds ``limit``.
    """
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read --text {source}: {error.strerror}") from error
    if len(text) < 2 * ranks:
        raise ValueError(
            f"--text {source} has {len(text)} bytes; {ranks} rank(s) need at least {2 * ranks}, two"
            " for each: give a longer text or start fewer ranks"
        )
    if len(text) // ranks > limit:
        raise ValueError(
            f"--text {source} gives each of {ranks} rank(s) {len(text) // ranks} bytes; with"
            f" --max-new-tokens the model has room for {max(limit, 0)}: shorten one of them, start"
            " more ranks, or raise max_positions with --model-config"
        )
    return text


def shared_text(args: argparse.Namespace, sizes: ModelConfig) -> bytes:
    """The text, read by rank 0; where it is wrong, every rank ends with the same exit code."""
    from deepspeed import comm as dist

    parcel: list[bytes | str] = [""]
    if rank() == 0:
        limit = sizes.max_positions - max(0, args.max_new_tokens - 1)
        try:
            parcel = [read_text(args.text, dist.get_world_size(), limit)]
        except ValueError as error:
            parcel = [str(error)]
    dist.broadcast_object_list(parcel, src=0)
    if isinstance(parcel[0], str):
        leave(parcel[0])
    return parcel[0]


def build_engine(settings: Settings, trained: bool) -> DeepSpeedEngine:
    """The demo model in a DeepSpeed engine, in eval mode, with its weights."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from demo import checkpoint
    from demo.model import ByteMoE

    ep_size = math.gcd(dist.get_world_size(), settings.sizes.num_experts)
    model = ByteMoE(settings.sizes, ep_size).to(getattr(torch, settings.dtype))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of every group it makes
            engine, *_ = deepspeed.initialize(model=model, config=settings.ds_config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        leave(f"deepspeed.initialize refuses the configuration: {error}")
    if trained:
        try:
            checkpoint.load(model, DEMO / "model.safetensors")
        except ValueError as error:
            leave(str(error))
    else:
        checkpoint.randomise(model, RANDOM_SEED)
    engine.eval()
    return engine


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Everything after the ranks have met; returns the exit code, the same on every rank."""
    from deepspeed import comm as dist

    import ds_tilemoe
    from demo import results
    from demo.generation import PREFILL_CHUNK, read_and_write

    sizes, block, ranks = settings.sizes, settings.block, dist.get_world_size()
    text = shared_text(args, sizes)
    share, left_out = divmod(len(text), ranks)
    piece = text[rank() * share : (rank() + 1) * share]
    engine = build_engine(settings, trained=args.model_config is None)
    weights = "trained" if args.model_config is None else f"random (seed {RANDOM_SEED})"
    if rank() == 0:
        print(f"{weights} weights; {share} bytes for each of {ranks} rank(s), {left_out} left out")
    if args.trace:
        block = block.model_copy(update={"stats": True})

    def go(label: str, piece: bytes, max_new_tokens: int) -> Reading:
        with results.progress(label, len(piece) + max(0, max_new_tokens - 1)) as advance:

            def after_forward(tokens: int) -> None:
                ds_tilemoe.check(engine)
                advance(tokens)

            dist.barrier()
            return read_and_write(engine, sizes, piece, max_new_tokens, after_forward)

    plain = go("unswapped", piece, args.max_new_tokens) if args.compare else None
    report = ds_tilemoe.apply(engine, block)
    if rank() == 0:
        print(report)
    if report.swapped:
        # The first call makes the heap, so it has to be the largest. The second run finds out what
        # the combine takes when nothing hides it. Neither is in the times.
        go("warm-up", piece[:PREFILL_CHUNK], 0)
        with ds_tilemoe.measure_combine_alone(engine):
            go("combine alone", piece, args.max_new_tokens)
        ds_tilemoe.stats.reset()
    reading = go("reading", piece, args.max_new_tokens)

    mine = results.of_rank(reading, plain, settings.dtype)
    mine |= {"layers": ds_tilemoe.stats.layers(), "trace": ds_tilemoe.stats.to_chrome_trace(rank())}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    fault = results.fault(everyone)
    if args.compare and block.enabled and not report.swapped:
        fault = "no layer was swapped, so there was nothing to compare; the table says why"
    if rank() == 0:
        if report.swapped:
            in_force = ds_tilemoe.stats.export_config()
        else:
            in_force = {BLOCK: block.model_dump()}
        record = results.of_world(everyone) | {
            "backend": in_force[BLOCK]["backend"] if report.swapped else "deepspeed",
            "fault": fault,
            "weights": weights,
            "swap": [asdict(layer) for layer in report.layers],
            "config": in_force | {"model": asdict(sizes)},
        }
        if args.trace:
            results.write_trace(args.trace, [r["trace"] for r in everyone])
        print(json.dumps(record) if args.json else results.show(record), file=sys.__stdout__)
        if fault:
            print(f"infer.py: error: --compare: {fault}")
        sys.__stdout__.flush()
    dist.barrier()  # a rank that ends early with a failure would end rank 0 before it has spoken
    dist.destroy_process_group()
    return int(fault is not None)


if __name__ == "__main__":
    end(main())
