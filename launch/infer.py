"""Run a DeepSpeed MoE language model on a text: perplexity, a continuation, and where time went.

    deepspeed --num_gpus 4 launch/infer.py
    deepspeed --num_gpus 4 launch/infer.py --deepspeed_config ds_configs/tile_overlap.json --compare
    torchrun --nproc_per_node 2 launch/infer.py --text my.txt --json
    cat my.txt | python launch/infer.py --text -

The text is cut into equal pieces of bytes, one a rank; what does not divide (fewer bytes than
ranks) is left out at its end. Every rank reads its piece and continues it greedily; the
continuation shown is rank 0's. Perplexity is over all bytes but the first of each piece.

The model is in bf16 on GPUs and in fp32 on the CPU, unless --dtype or the ds_config (its bf16 and
fp16 blocks, or data_types.param_dtype) says otherwise.

--compare runs DeepSpeed's own layers first. It fails if the swapped layers' results do not repeat
bit for bit, and:
  in fp32       where a logit differs by more than 1e-5, or the continuation at all;
  in bf16, fp16 where a layer's output or a logit differs by more than 2e-2 x the largest, in a
                further run that gives each swapped layer the input that DeepSpeed's own had. In the
                whole model, rounding sends tokens whose experts nearly tie another way, and both
                ways are right. Those are counted, a token in a layer as one; more than a fifth is a
                failure too.

Exit codes: 0; 1 if --compare finds a difference or the run fails; 2 for an input that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.model_config import ModelConfig, ModelConfigError, ep_size_of, unshared
from demo.options import InputError, Parser, at_least, wrong
from demo.outputs import make_folders
from demo.process import (
    FAILED,
    begin,
    choose_accelerator,
    complain,
    end,
    join_world,
    leave,
    prepare_environment,
    quieten,
    rank,
    tell,
)
from demo.settings import DEMO, DTYPES, Settings, checked, written
from ds_tilemoe.config import BLOCK
from ds_tilemoe.errors import ConfigError, TileMoEError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from demo.generation import Reading

RANDOM_SEED = 0
PROMPT_SHOWN = 60  # bytes of it, in front of the continuation


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--deepspeed_config", metavar="FILE", help="a DeepSpeed JSON or HJSON file")
    parser.add_argument(
        "--text",
        default=str(DEMO / "text.txt"),
        metavar="FILE",
        help="a file to read, or - for standard input",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(0),
        default=128,
        metavar="N",
        help="bytes to continue with",
    )
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="sizes of another model, as in launch/demo/config.json; its weights are random",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of the weights; else what the ds_config says, else bf16 on GPUs, fp32 on CPUs",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also run DeepSpeed's own layers; see above"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace of the layers"
    )
    # The two below are what launchers and deepspeed.add_config_arguments() bring.
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prepare_environment()
    try:
        settings = checked(args)
    except (ConfigError, InputError, ModelConfigError) as error:
        leave(str(error))
    choose_accelerator(settings.block.backend)
    # DeepSpeed and its dependencies print and log on stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed  # noqa: F401  (reads DS_ACCELERATOR)

        quieten()
        join_world()
        try:
            if rank() == 0:
                make_folders(written(args))
            return run(args, settings)
        except (ConfigError, InputError) as error:
            leave(str(error))
        except TileMoEError as error:
            leave(f"{type(error).__name__}: {error}", FAILED)


def read_text(source: str, ranks: int, limit: int) -> bytes:
    """The bytes to work on.

    Raises:
        InputError: the text cannot be read, is too short to share, or a piece exceeds ``limit``.
    """
    try:
        text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        got = f"{source!r} ({getattr(error, 'strerror', None) or error})"
        raise wrong("--text", got, "a file that can be read, or -", "name one") from error
    if len(text) < 2 * ranks:
        wanted = f"at least {2 * ranks}, two for each of {ranks} rank(s)"
        fix = "give a longer text or start fewer ranks"
        raise wrong("--text", f"{len(text)} bytes of {source!r}", wanted, fix)
    if len(text) // ranks > limit:
        got = f"{len(text) // ranks} bytes for each of {ranks} rank(s)"
        wanted = f"at most {max(limit, 0)}, for which the model has room with --max-new-tokens"
        fix = "shorten one of them, start more ranks, or raise max_positions with --model-config"
        raise wrong("--text", got, wanted, fix)
    return text


def shared_text(args: argparse.Namespace, sizes: ModelConfig) -> bytes:
    """The text, read by rank 0; where it is wrong, every rank ends with the same exit code."""
    from deepspeed import comm as dist

    parcel: list[bytes | str] = [""]
    if rank() == 0:
        limit = sizes.max_positions - max(0, args.max_new_tokens - 1)
        try:
            parcel = [read_text(args.text, dist.get_world_size(), limit)]
        except InputError as error:
            parcel = [str(error)]
    dist.broadcast_object_list(parcel, src=0)
    if isinstance(parcel[0], str):
        leave(parcel[0])
    return parcel[0]


def build_engine(settings: Settings, dtype: str, trained: bool) -> DeepSpeedEngine:
    """The demo model in a DeepSpeed engine, in eval mode, with its weights, in a key of DTYPES."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from demo import checkpoint
    from demo.model import ByteMoE

    ep_size = ep_size_of(dist.get_world_size(), settings.sizes.num_experts)
    try:
        model = ByteMoE(settings.sizes, ep_size).to(getattr(torch, DTYPES[dtype]))
    except (RuntimeError, MemoryError) as error:  # torch's words for memory that it does not get
        got, wanted = f"sizes for which there is no room ({error})", "a model that fits"
        raise wrong("--model-config", str(got).replace("\n", " "), wanted, "lower them") from error
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of every group it makes
            engine, *_ = deepspeed.initialize(model=model, config=settings.ds_config)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        got = f"what deepspeed.initialize refuses ({error})"
        raise wrong("--deepspeed_config", got, "what it takes", "change that key") from error
    if trained:
        checkpoint.load(model, DEMO / "model.safetensors")
    else:
        checkpoint.randomise(model, RANDOM_SEED)
    engine.eval()
    return engine


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Everything after the ranks have met; returns the exit code, the same on every rank."""
    import deepspeed
    from deepspeed import comm as dist

    import ds_tilemoe
    from demo import comparison, results
    from demo.generation import PREFILL_CHUNK, read_and_write

    sizes, block, ranks = settings.sizes, settings.block, dist.get_world_size()
    on_cpu = deepspeed.get_accelerator().device_name() == "cpu"
    dtype = settings.dtype or ("fp32" if on_cpu else "bf16")  # the CUDA backend has no fp32
    text = shared_text(args, sizes)
    share, left_out = divmod(len(text), ranks)
    piece = text[rank() * share : (rank() + 1) * share]
    engine = build_engine(settings, dtype, trained=args.model_config is None)
    weights = "trained" if args.model_config is None else f"random (seed {RANDOM_SEED})"
    if rank() == 0:
        print(
            f"{weights} weights in {dtype}; {share} bytes for each of {ranks} rank(s), {left_out}"
            " left out"
        )
        if note := unshared(ranks, sizes.num_experts):
            print(note)
    if args.trace is not None:
        block = block.model_copy(update={"stats": True})

    def go(label: str, piece: bytes, max_new_tokens: int, given: bytes | None = None) -> Reading:
        with results.progress(label, len(piece) + max(0, max_new_tokens - 1)) as advance:

            def after_forward(tokens: int) -> None:
                ds_tilemoe.check(engine)
                advance(tokens)

            dist.barrier()
            return read_and_write(engine, sizes, piece, max_new_tokens, after_forward, given)

    plain = replayed = again = None
    calls = comparison.LayerCalls(engine)
    if args.compare:
        go("unswapped, warm-up", piece, args.max_new_tokens)  # DeepSpeed's gate compiles itself
        with calls.record():
            plain = go("unswapped", piece, args.max_new_tokens)
    report = ds_tilemoe.apply(engine, block)
    if rank() == 0:
        print(report)
    if report.swapped:
        # The first call makes the heap, so it has to be the largest. The second run finds out what
        # the combine takes when nothing hides it. Neither is in the times.
        go("warm-up", piece[:PREFILL_CHUNK], 0)
        with ds_tilemoe.measure_combine_alone(engine):
            again = go("combine alone", piece, args.max_new_tokens)
        if plain is not None and dtype != "fp32":
            with calls.replay():
                replayed = go("replayed", piece, args.max_new_tokens, plain.written)
        ds_tilemoe.stats.reset()
    reading = go("reading", piece, args.max_new_tokens)

    mine = results.of_rank(reading, plain)
    mine |= {"layers": ds_tilemoe.stats.layers(), "trace": ds_tilemoe.stats.to_chrome_trace(rank())}
    if plain is not None:
        mine |= comparison.of_rank(plain, reading, again or reading, replayed, calls)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, mine)
    compared = comparison.of_world(everyone if args.compare else [])
    if args.compare and block.enabled and not report.swapped:
        compared["fault"] = (
            "no layer was swapped, so there was nothing to compare; the table says why"
        )
    fault, unwritten = compared["fault"], False
    if rank() == 0:
        if report.swapped:
            in_force = ds_tilemoe.stats.export_config()
        else:
            in_force = {BLOCK: block.model_dump()}
        record = results.of_world(everyone) | compared
        record |= {
            "dtype": dtype,
            "backend": in_force[BLOCK]["backend"] if report.swapped else "deepspeed",
            "weights": weights,
            "text_before": piece[-PROMPT_SHOWN:].decode("utf-8", errors="replace"),
            "swap": [asdict(layer) for layer in report.layers],
            "config": in_force | {"model": asdict(sizes)},
        }
        # A continuation is any bytes, and a terminal may not have their letters.
        sys.__stdout__.reconfigure(errors="replace")
        text = json.dumps(record, allow_nan=False) if args.json else results.show(record)
        unwritten = not tell(f"{text}\n", sys.__stdout__)
        if fault:
            complain(f"--compare: {fault}")
        if args.trace is not None:
            traces = [r["trace"] for r in everyone]
            unwritten |= results.save_trace(args.trace, traces, report.swapped)
    # Also: a rank that ends early with a failure would end rank 0 before it has spoken.
    dist.broadcast_object_list(shared := [unwritten], src=0)
    dist.destroy_process_group()
    return int(fault is not None or shared[0])


if __name__ == "__main__":
    begin()
    end(main())
