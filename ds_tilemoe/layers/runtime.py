"""What swapped layers share: one backend for each expert-parallel group, one session an apply()."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import ds_tilemoe
from ds_tilemoe.backends.base import Backend, LayerShape
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import check_cpu_config
from ds_tilemoe.errors import BuildError, ConfigError, DeadlineError, TileMoEError
from ds_tilemoe.layers.agreement import Decision, Message, Offer, agree
from ds_tilemoe.op_builder import CPUTileMoEBuilder
from ds_tilemoe.op_builder.jit import cache_root, find_compiler
from ds_tilemoe.routing import Routing, route
from ds_tilemoe.stats import LayerStats
from ds_tilemoe.symmetric_heap import host_identity

logger = logging.getLogger("ds_tilemoe")

# Settings that change what ranks send each other; all ranks of a group must have the same.
PROTOCOL = ("backend", "layout", "tile_m", "dispatch", "transport", "max_tokens_per_rank")
LEAST_TOKENS = 1024
CALLS_A_LOOK = 4  # at the records of calls that have ended

_times_said: Counter[str] = Counter()


class Runtime:
    """What the layers of one expert-parallel group share: the backend and what was agreed.

    Args:
        group: the group; None for a group of one, which needs no communication.
        config: this rank's settings.
        device: type of the device that the layers are on, "cpu" or "cuda", and name of the backend.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, config: TileOverlapConfig, device: str = "cpu"
    ):
        self.group = group
        self.config = config
        self.device = device
        self.backend: Backend | None = None
        self.met = False  # a pre-flight of a forward has taken place
        self.is_prepared = False  # what the backend runs with is loaded
        self.max_tokens: int | None = None
        self._shapes: dict[LayerShape, None] = {}  # a set that keeps the order
        self._sinks: dict[str, LayerStats] = {}
        self._calls = 0
        self.reset()

    def reset(self) -> None:
        """Back to before the first forward: the next one measures tokens and repairs the heap."""
        setting = self.config.max_tokens_per_rank
        self.max_tokens = None if setting == "auto" else setting
        self.is_open = False
        self.met = False
        self.is_prepared = False

    def meeting(self, together: bool) -> dist.ProcessGroup | None:
        """The ranks that decide: the group; on CUDA, where new memory takes every rank of the job,
        all of them, if they are ``together``."""
        return dist.group.WORLD if together and self._is_part_of_job else self.group

    def preflight(
        self,
        offers: Sequence[Offer],
        grad: bool | None = None,
        tokens: int | None = None,
        dtype: str | None = None,
        strict: bool | None = None,
        together: bool = True,
    ) -> list[Decision]:
        """Decide about the offered layers and make the heap for them. A collective.

        Args:
            offers: of this rank, in model order.
            grad, tokens, dtype: of a forward, or None outside of one.
            strict: takes the place of the setting.
            together: every rank of the job is here, and not this group alone; see :meth:`meeting`.
                Else the heap may not grow.

        Raises:
            CapacityError, and what :func:`agree` raises: on every rank alike.
        """
        fault = None
        if grad is not True and not self.is_prepared:
            offers, fault = self._prepare(offers, in_forward=grad is not None)
        messages = self._exchange(
            Message(
                offers=tuple(offers),
                protocol=self._protocol(),
                rank=dist.get_rank() if dist.is_initialized() else 0,
                strict=self.config.strict if strict is None else strict,
                grad=grad,
                tokens=tokens,
                dtype=dtype,
                fault=fault,
            ),
            self.meeting(together),
        )
        decisions = agree(messages)
        self.met = self.met or grad is not None
        self._shapes.update((d, None) for d in decisions if isinstance(d, LayerShape))
        if grad is True or not self._shapes:
            return decisions
        if self.max_tokens is None and tokens is not None:
            most = max(message.tokens or 0 for message in messages)
            self.max_tokens = max(LEAST_TOKENS, 1 << (most - 1).bit_length())
        if self.max_tokens is not None:
            self._open(together)
        return decisions

    def route(self, gate: Any, x: Tensor, used_token: Tensor | None) -> Routing:
        """Where the tokens go: by the backend's own router, or by DeepSpeed's gate."""
        if self.device == "cuda":
            assert self.backend is not None
            return self.backend.route(gate, x, used_token)
        return route(gate, x, used_token)

    def collect_sometimes(self, name: str, stats: LayerStats) -> None:
        """:meth:`collect`, behind one of a few calls, as a look costs; ``stats`` wants each.

        Args:
            name: of the layer that was called.
            stats: where its calls count from now on.
        """
        self._sinks[name] = stats
        self._calls += 1
        if self.config.stats or self._calls % CALLS_A_LOOK == 0:
            self.collect()

    def collect(self) -> None:
        """Count the calls that have ended on the GPU, in the stats of their layers. Never waits."""
        if self.device != "cuda" or self.backend is None:
            return
        for record in self.backend.poll_records():
            sink = self._sinks.get(self.backend.layer_name(record))
            if sink is not None:
                choice, reason = self.backend.explain(record)
                sink.add(
                    record.iteration, None, None, times=record.times, choice=choice, reason=reason
                )

    def check(self) -> None:
        """Raise what no forward has raised yet. On CUDA it waits for the device. Local.

        Raises:
            RankFailure, CapacityError: a call failed on another rank (CUDA), once.
            DeadlineError: the heap in use has failed.
        """
        if not self.is_open or self.backend is None:
            return
        if self.device == "cuda":
            self.backend.check()
            self.collect()
        cause = self.backend.failure()
        if cause:
            raise DeadlineError(
                f"the expert-parallel group has failed: {cause}; fix: call ds_tilemoe.apply on all"
                " ranks, which makes a new heap"
            )

    def settings(self) -> dict[str, Any]:
        """The block in force, with what "auto" stands for; empty before the heap is made."""
        if self.backend is None:
            return {}
        chosen = {**self.backend.chosen, "max_tokens_per_rank": self.max_tokens}
        return self.config.model_dump() | chosen

    def _prepare(
        self, offers: Sequence[Offer], in_forward: bool
    ) -> tuple[Sequence[Offer], str | None]:
        """Build the op before the exchange, so that a rank without a compiler can say so in it."""
        if all(isinstance(offer.outcome, str) for offer in offers):
            return offers, None
        try:
            alone = self.group is None
            prepare_backend(self.device, self.config, alone=alone, in_forward=in_forward)
            self.is_prepared = True
        except Exception as error:
            if isinstance(error, ConfigError):
                # The block's fault, which all ranks raise as such.
                return [
                    offer
                    if isinstance(offer.outcome, str)
                    else Offer(offer.layer, str(error), unmet=True)
                    for offer in offers
                ], None
            if self.config.backend != "auto" or not isinstance(error, BuildError):
                return offers, str(error)
            reason = f"the {self.device.upper()} backend could not be built: {error}"
            return [Offer(offer.layer, reason) for offer in offers], None
        return offers, None

    def _open(self, together: bool) -> None:
        if self.backend is None:
            self.backend = make_backend(self.group, self.config, self.device)
        assert self.max_tokens is not None
        if self._is_part_of_job:
            self.backend.ensure(list(self._shapes), self.max_tokens, together=together)
        else:
            self.backend.ensure(list(self._shapes), self.max_tokens)
        self.is_open = True

    @property
    def _is_part_of_job(self) -> bool:
        """Whether there are ranks outside of the group without which it gets no memory."""
        return (
            self.device == "cuda"
            and self.group is not None
            and dist.get_world_size(self.group) < dist.get_world_size()
        )

    def _protocol(self) -> tuple[tuple[str, Any], ...]:
        versions = (
            ("the version of ds_tilemoe", ds_tilemoe.__version__),
            ("the version of torch", torch.__version__),
            ("the version of deepspeed", deepspeed.__version__),
            ("the host (boot id and pid namespace)", host_identity()),
            ("the device of the layers", self.device),
        )
        return tuple((name, getattr(self.config, name)) for name in PROTOCOL) + versions

    def _exchange(self, message: Message, meeting: dist.ProcessGroup | None) -> list[Message]:
        if meeting is None:
            return [message]
        messages: list[Any] = [None] * dist.get_world_size(meeting)
        try:
            dist.all_gather_object(messages, message, group=meeting)
        except RuntimeError as error:
            mode = {True: "enabled", False: "disabled", None: "not asked"}[message.grad]
            raise TileMoEError(
                f"the pre-flight of {', '.join(offer.layer for offer in message.offers)} did not"
                f" end: {error}; every rank of the group must call ds_tilemoe.apply and"
                f" the layer, in the same grad mode (here: {mode})"
            ) from error
        return messages


def prepare_backend(
    device: str, config: TileOverlapConfig, alone: bool, in_forward: bool = False
) -> None:
    """Build or load what the layers on ``device`` run with; local.

    Args:
        device: "cpu" or "cuda".
        config: this rank's settings.
        alone: the group is this rank, so that nothing between ranks is wanted.
        in_forward: peers may be in collectives that end after a while (NCCL's after 600 s), so
            what layers can do without is loaded where it is built, and not built.

    Raises:
        BuildError: it cannot be built or run here.
        ConfigError: a setting that this device cannot meet.
    """
    if config.backend not in ("auto", device):
        raise ConfigError(
            f'tile_overlap.backend: got "{config.backend}" for layers whose parameters are on'
            f' {device}; wanted "{device}" or "auto"; fix: change it, or move the model'
        )
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    if device == "cpu":
        check_cpu_config(config)
        CPUTileMoEBuilder().load()
        return
    from ds_tilemoe.backends.cuda_limits import check_config

    check_config(config, torch.cuda.get_device_properties(0).multi_processor_count)
    if not alone and importlib.util.find_spec("nvshmem") is None:
        raise BuildError('got no nvshmem4py; wanted it; fix: pip install "ds_tilemoe[cuda]"')
    CUDATileMoEBuilder().load()
    try:
        # Of it, the look at the experts in each forward.
        if in_forward and not _is_built(CPUTileMoEBuilder()):
            raise BuildError(
                "its extension is not built; fix: call ds_tilemoe.apply after deepspeed.initialize,"
                " which builds it"
            )
        CPUTileMoEBuilder().load()
    except BuildError as error:
        logger.warning("looking at the experts in each forward takes longer: %s", error)


def _is_built(builder: CPUTileMoEBuilder) -> bool:
    """Whether to load the op would compile nothing.

    Raises:
        BuildError: the compiler, a part of what the op is known by, does not run.
    """
    compiler = find_compiler()
    if compiler is None:
        return False
    extension = builder._extension(compiler)
    return (cache_root() / extension.name / extension.key() / extension.library).exists()


def make_backend(
    group: dist.ProcessGroup | None, config: TileOverlapConfig, device: str
) -> Backend:
    """The backend of one group; the only place that picks one."""
    if device == "cuda":
        from ds_tilemoe.backends.cuda import CudaBackend

        return CudaBackend(group, config)
    from ds_tilemoe.backends.cpu import CpuBackend

    return CpuBackend(group, config)


class Session:
    """One ``apply()``: its settings and a Runtime per expert-parallel group and kind of device.

    Copies share it.
    """

    def __init__(self, config: TileOverlapConfig):
        self.config = config
        self.measuring = False  # inside measure_combine_alone()
        self._runtimes: dict[tuple[int | None, str], Runtime] = {}
        self._said: set[str] = set()

    def runtime(self, group: dist.ProcessGroup | None, device: str = "cpu") -> Runtime:
        """The runtime of ``group``, None for a group of one, on "cpu" or "cuda"."""
        key = (None if group is None else id(group), device)
        found = self._runtimes.get(key)
        if found is None:
            found = self._runtimes[key] = Runtime(group, self.config, device)
        return found

    def runtimes(self) -> list[Runtime]:
        return list(self._runtimes.values())

    def say_once(self, text: str, group: dist.ProcessGroup | None) -> None:
        """:func:`say`, once a session."""
        if text not in self._said:
            self._said.add(text)
            say(text, group)


def say(text: str, *groups: dist.ProcessGroup | None) -> None:
    """Warn on the first rank of one of ``groups``; other groups with the same text are silent."""
    if dist.is_initialized():
        if all(group is not None and dist.get_rank(group) for group in groups):
            return
        _times_said[text] += 1
        with contextlib.suppress(Exception):  # a warning is no reason to fail
            store = dist.distributed_c10d._get_default_store()
            if store.add(f"ds_tilemoe/{_times_said[text]}/{text}", 1) > 1:
                return
    logger.warning(text)
