"""What a rank settles with its launcher, DeepSpeed and the other ranks before the work starts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from typing import NoReturn, TextIO

from demo.launcher import end_with_launcher
from ds_tilemoe.testing_launch import free_port

FAILED, BAD_INPUT = 1, 2  # exit codes
# A launcher ends all ranks when one has failed. The others give rank 0 this long to say why.
GRACE_S = 10.0


def rank() -> int:
    """This process's rank in the world; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def complain(message: str) -> None:
    """An error message of this program, on stderr."""
    with contextlib.suppress(OSError):  # nobody can be told; the exit code tells
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr, flush=True)


def tell(text: str, file: TextIO | None = None) -> bool:
    """Write ``text`` and all that stdout holds; False where that failed, which is said, but for a
    reader that has gone.

    Args:
        file: stdout, where ``sys.stdout`` is another one; its buffer is then empty.
    """
    file = sys.stdout if file is None else file
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        # What is left in the buffer would fail again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if not isinstance(error, BrokenPipeError):
            fix = "make room there or send it elsewhere"
            complain(f"stdout: got {error.strerror}; wanted a place for the results; fix: {fix}")
        return False
    return True


def leave(message: str, code: int = BAD_INPUT) -> NoReturn:
    """End this rank with a message that the user sees once, from rank 0 where it fails too."""
    if rank() != 0:
        time.sleep(GRACE_S)
        message = f"rank {rank()}: {message}"
    complain(message)
    tell("")
    os._exit(code)  # an orderly exit with a live process group now and then aborts in a destructor


def prepare_environment() -> None:
    """Settle what must be set before torch is imported.

    Without a launcher the process becomes the only rank, on a port that nobody uses, nor is given
    before DeepSpeed takes it. Ranks share the cores of the host: more threads than cores would make
    the waits of the CPU backend slow.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(free_port())
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_here())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def ranks_here() -> int:
    """Ranks on this host, as torchrun or the deepspeed launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def choose_accelerator(backend: str) -> None:
    """Set DS_ACCELERATOR, which DeepSpeed reads once, when it is imported.

    Args:
        backend: the ``backend`` field of the tile_overlap block.
    """
    if "DS_ACCELERATOR" in os.environ:
        return
    if backend == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus >= ranks_here():
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    if rank() == 0:
        few = f"{ranks_here()} rank(s) on this host and {gpus} GPU(s)"
        print(f"warning: {few}: using the CPU backend", file=sys.stderr, flush=True)


def end(code: int) -> NoReturn:
    """End this rank, without tearing Python down.

    DeepSpeed's tables keep process groups to the end, and now and then one of gloo's threads wants
    Python while that goes away, which aborts the process after all is done.
    """
    atexit._run_exitfuncs()
    if not tell(""):
        code = code or FAILED
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def begin() -> None:
    """What a program does first: it sees to its streams and to what started it."""
    open_closed_streams()
    end_with_launcher()


def open_closed_streams() -> None:
    """Give a stream that was closed at the start a descriptor, which no later file may get.

    Reading stdin and writing stdout then fail as those of a closed one do, with an OSError. Nobody
    hears what is said on stderr, and that is no failure.
    """
    streams = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    for number, (name, mode) in enumerate(streams):  # each gets the lowest that is free
        if getattr(sys, name) is not None:
            continue
        flags = os.O_RDONLY if name == "stdout" else os.O_WRONLY
        descriptor = os.open(os.devnull, flags)
        os.set_inheritable(descriptor, descriptor == number)
        stream = open(descriptor, mode, errors="backslashreplace")  # noqa: SIM115  (for good)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def quieten() -> None:
    """Only warnings of DeepSpeed, from rank 0, on stderr: stdout is for results."""
    from deepspeed.utils.logging import logger

    logger.setLevel(logging.WARNING if rank() == 0 else logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def join_world() -> None:
    """``deepspeed.init_distributed`` without DeepSpeed's own shared-memory op.

    That op takes half a minute to compile, leaves 66 MiB a rank in /dev/shm and speeds up only an
    all_reduce that is not used here.
    """
    import deepspeed
    import deepspeed.ops
    import torch.distributed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if deepspeed.get_accelerator().device_name() != "cpu":
        # Before NCCL first sends something, which is from the current device.
        deepspeed.get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        deepspeed.init_distributed(verbose=False)
    except torch.distributed.DistError as error:
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        fix = f"deepspeed --master_port {int(port) + 1} ..."
        if "EADDRINUSE" in str(error):
            leave(
                f"port {port} of {address}: got one that another process has; wanted one where the"
                f" ranks can meet; fix: {fix}"
            )
        leave(
            f"port {port} of {address}: got {error}; wanted ranks that meet there; fix: if another"
            f" job has it, {fix}"
        )
