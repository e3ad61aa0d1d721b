"""Train the demo model of ``launch/infer.py`` on the standard library's documentation, on CPU.

    python launch/train_demo.py                     # a few minutes on two cores
    deepspeed --num_gpus 2 launch/train_demo.py     # any rank count that divides the experts

Writes launch/demo/model.safetensors (fp16, under 4 MB) and prints the byte perplexity of
launch/demo/heldout.txt beside that of a Kneser-Ney byte trigram model fitted to the same training
text.

Exit codes: 0; 1, and no file, if the trigram model wins, the perplexity is not a number or the run
fails; 2 for an input that is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from demo.options import InputError, Parser, above_zero, at_least, wrong
from demo.outputs import OutputError, make_folders, need_writable
from demo.process import (
    FAILED,
    begin,
    end,
    join_world,
    leave,
    prepare_environment,
    quieten,
    rank,
    tell,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

DEMO = Path(__file__).parent / "demo"
CONTEXT = 256
L_AUX_WEIGHT = 0.01
# Both keep logits small: their rounding errors grow with them, and at 20 they reach the 1e-5 that
# infer.py --compare allows in fp32. The first holds down what never follows, the second what always
# does; together they cost a few percent of perplexity.
LOGIT_WEIGHT = 4e-3  # on the mean square of the logits
LABEL_SMOOTHING = 0.05


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=at_least(1), default=800, help="optimizer steps")
    sequences = "sequences a step over all ranks"
    parser.add_argument("--batch", type=at_least(1), default=16, help=sequences)
    parser.add_argument("--lr", type=above_zero, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--out", type=Path, default=DEMO / "model.safetensors", help="the file")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        if left := args.batch % world:
            wanted, fix = f"a multiple of the {world} ranks", f"--batch {args.batch - left + world}"
            raise wrong("--batch", args.batch, wanted, fix)
        need_writable(written(args))
    except InputError as error:
        parser.error(str(error))
    return args


def written(args: argparse.Namespace) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Option -> file to write and its endings, as ``demo.outputs`` wants them."""
    return {"--out": (args.out, (".safetensors",))}


def main() -> int:
    args = arguments()
    started = time.perf_counter()
    os.environ["DS_ACCELERATOR"] = "cpu"
    prepare_environment()
    # DeepSpeed and its dependencies print and log on stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        return run(args, started)


def run(args: argparse.Namespace, started: float) -> int:
    """Everything after the command line is read; returns the exit code.

    Args:
        started: when, as ``time.perf_counter`` gives it, in seconds.
    """
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from demo import checkpoint
    from demo.corpus import training_text
    from demo.model import ByteMoE
    from demo.model_config import ModelConfig, ep_size_of

    quieten()
    join_world()
    world = dist.get_world_size()
    if rank() == 0:
        try:
            make_folders(written(args))
        except InputError as error:
            leave(str(error))
    config = ModelConfig.load(DEMO / "config.json")
    model = ByteMoE(config, ep_size_of(world, config.num_experts))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        config={"train_batch_size": args.batch, "gradient_clipping": 1.0},
    )
    checkpoint.randomise(model, args.seed)
    try:
        text = training_text()
    except RuntimeError as error:
        leave(str(error), FAILED)
    train(engine, text, args)
    try:
        lost = judge(engine, text, args.out)
    except OutputError as error:
        leave(str(error), FAILED)
    if rank() == 0:
        took = f"{time.perf_counter() - started:.0f} s in all"
        lost |= not tell(f"{args.steps} steps on {world} rank(s): {took}\n", sys.__stdout__)
    dist.barrier()  # the launcher ends all ranks when one has failed; rank 0 speaks first
    dist.destroy_process_group()
    return int(lost)


def train(engine: DeepSpeedEngine, text: bytes, args: argparse.Namespace) -> None:
    """Random windows of ``text``, the same whatever the number of ranks."""
    import torch
    from tqdm import tqdm

    world = int(os.environ["WORLD_SIZE"])
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(args.seed)
    bar = tqdm(range(args.steps), desc="training", disable=rank() != 0, mininterval=1.0)
    for step in bar:
        for group in engine.optimizer.param_groups:
            group["lr"] = args.lr * schedule(step, args.steps)
        starts = torch.randint(len(data) - CONTEXT, (args.batch,), generator=generator)
        tokens = data[starts[rank() :: world, None] + torch.arange(CONTEXT + 1)].long()
        logits, l_aux = engine(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=LABEL_SMOOTHING
        )
        engine.backward(loss + L_AUX_WEIGHT * l_aux + LOGIT_WEIGHT * logits.square().mean())
        engine.step()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", balance=f"{l_aux.item():.2f}")


def judge(engine: DeepSpeedEngine, text: bytes, out: Path) -> bool:
    """Compare with the trigram model and write the checkpoint; True, and no file, unless it wins.

    True also if stdout does not take the result.
    """
    import torch
    from deepspeed import comm as dist

    from demo import checkpoint
    from demo.corpus import digest
    from demo.generation import perplexity
    from demo.trigram import Trigram

    heldout = (DEMO / "heldout.txt").read_bytes()
    model = engine.module.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # what will be read back
    ours, trigram = perplexity(engine, heldout), Trigram(text).perplexity(heldout)
    record = {
        "training_text": digest(text),
        "python": platform.python_version(),
        "heldout_perplexity": f"{ours:.4f}",
        "trigram_perplexity": f"{trigram:.4f}",
    }
    lost = not ours < trigram  # also if it is not a number
    if not lost:
        checkpoint.save(model, out, record)
    if rank() == 0:
        outcome = "the model does not win: nothing written"
        if not lost:
            outcome = f"wrote {out}: {out.stat().st_size} bytes, weights in fp16"
        lost |= not tell(
            f"training text: {len(text)} bytes of documentation, {record['training_text']}\n"
            f"held-out text: {len(heldout)} bytes\n"
            f"byte perplexity of the held-out text: trigram {trigram:.3f}, model {ours:.3f}\n"
            f"{outcome}\n",
            sys.__stdout__,
        )
    dist.barrier()
    return lost


def schedule(step: int, steps: int) -> float:
    """Share of the highest learning rate: up in the first 5 %, then straight down to zero."""
    return min((step + 1) / (0.05 * steps), (steps - step) / (0.95 * steps))


if __name__ == "__main__":
    begin()
    end(main())
