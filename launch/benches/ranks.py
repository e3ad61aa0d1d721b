"""The ranks that run a bench together: how they meet, speak, sum up and keep time.

``bench.py`` has settled the environment (``demo.process``) before this module is imported.
"""

from __future__ import annotations

import contextlib
import functools
import random
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from benches.records import BenchError, cpu_name, gpu_driver
from demo.process import join_world, quieten
from ds_tilemoe.config_block import MAX_CPU_CONSUMERS

WARM_UP = 2  # rounds that are not counted
# Cycles of a GPU a microsecond, at most; the sleep is for the host, so longer does no harm.
CYCLES_A_US = 2000


@dataclass(frozen=True)
class World:
    """The ranks of this run.

    Attributes:
        rank, ranks: this one, and how many.
        device: where it computes.
        group: of all ranks; None for one rank.
    """

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def most_consumers(self) -> int:
        """Of a rank: threads on a CPU; on a GPU SMs, of which one is the producer's."""
        if not self.on_gpu:
            return MAX_CPU_CONSUMERS
        return torch.cuda.get_device_properties(self.device).multi_processor_count - 1

    def fields(self) -> dict[str, Any]:
        """What a record says of the machine."""
        gpu = torch.cuda.get_device_name(self.device) if self.on_gpu else None
        driver = gpu_driver() if self.on_gpu else None
        backend = "cuda" if self.on_gpu else "cpu"
        return {
            "gpu": gpu,
            "driver": driver,
            "cpu": cpu_name(),
            "ranks": self.ranks,
            "backend": backend,
        }

    # -- between ranks ------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""
        values: list[Any] = [value]
        if self.group is not None:
            values = [None] * self.ranks
            dist.all_gather_object(values, value)
        return values

    def agree(self, problem: str, error: type[Exception] = BenchError) -> None:
        """Raise the first rank's problem on all of them.

        Raises:
            BenchError: a rank's ``problem`` is not ""; or another ``error``.
        """
        for rank, text in enumerate(self.gather(problem)):
            if text:
                raise error(text if self.ranks == 1 else f"rank {rank}: {text}")

    def reduce(self, values: np.ndarray, how: str = "max") -> np.ndarray:
        """Over ranks, element by element: "max" (the slowest), "min" or "sum".

        NaN stands for what was not measured, and for all ranks where it is one rank's.
        """
        if self.group is None:
            return values
        beyond = -np.inf if how == "min" else np.inf
        numbers = torch.from_numpy(np.where(np.isnan(values), beyond, values)).to(self.device)
        dist.all_reduce(numbers, getattr(dist.ReduceOp, how.upper()))
        reduced = numbers.cpu().numpy()
        return np.where(np.isinf(reduced), np.nan, reduced)

    def meet(self) -> None:
        """Ranks leave together: on a GPU its kernels, in order of the stream; else the hosts."""
        if self.group is None:
            return
        if self.on_gpu:
            dist.all_reduce(self._nothing)
        else:
            dist.barrier()

    def together(self) -> None:
        """All hosts are here and all devices idle."""
        self.meet()
        self.synchronize()

    @functools.cached_property
    def _nothing(self) -> torch.Tensor:
        return torch.zeros(1, device=self.device)

    # -- time ---------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """The host waits for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def sleep(self, us: float) -> None:
        """Keep the stream busy while the host launches what is timed; nothing on a CPU."""
        if self.on_gpu:
            torch.cuda._sleep(int(us * CYCLES_A_US))

    def events(self, number: int) -> list[torch.cuda.Event]:
        """Clocks of a GPU, which exist: none is to be made while a kernel waits for a peer."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number)]
        for event in events:
            event.record()
        return events

    # -- words --------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """From rank 0, on stderr."""
        if self.rank == 0:
            tqdm.write(text, file=sys.stderr)

    def progress(self, total: int, what: str) -> tqdm:
        """A bar on rank 0, if stderr is a terminal."""
        hidden = self.rank != 0 or not sys.stderr.isatty()
        return tqdm(total=total, desc=what, disable=hidden, dynamic_ncols=True)


def join() -> World:
    """This process among the ranks that a launcher started, or alone."""
    # DeepSpeed and its dependencies print and log on stdout, which is for results.
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        quieten()
        join_world()
        name = deepspeed.get_accelerator().device_name()
    device = torch.device("cpu")
    if name == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    ranks = dist.get_world_size()
    return World(dist.get_rank(), ranks, device, dist.group.WORLD if ranks > 1 else None)


def command(bench: str, ranks: int | str) -> str:
    """How a shell starts ``bench`` on ``ranks`` ranks, with this process's other flags."""
    flags = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    flags = flags[1:] if flags[:1] == [bench] else []
    return shlex.join(["deepspeed", "--num_gpus", str(ranks), "launch/bench.py", bench, *flags])


def shuffled(items: int, rounds: int, seed: int) -> Iterator[tuple[int, list[int]]]:
    """Round number and an order of all items, the same on every rank; negative rounds warm up."""
    same = random.Random(seed)
    order = list(range(items))
    for index in range(-WARM_UP, rounds):
        same.shuffle(order)
        yield index, list(order)
