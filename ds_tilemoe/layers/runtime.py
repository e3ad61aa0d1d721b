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

import ds_tilemoe
from ds_tilemoe.backends.base import Backend, LayerShape
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import check_cpu_config
from ds_tilemoe.errors import BuildError, ConfigError, DeadlineError, TileMoEError
from ds_tilemoe.layers.agreement import Decision, Message, Offer, agree
from ds_tilemoe.symmetric_heap import host_identity

logger = logging.getLogger("ds_tilemoe")

# Settings that change what ranks send each other; all ranks of a group must have the same.
PROTOCOL = ("backend", "layout", "tile_m", "dispatch", "transport", "max_tokens_per_rank")
LEAST_TOKENS = 1024

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
        self.max_tokens: int | None = None
        self._shapes: dict[LayerShape, None] = {}  # a set that keeps the order
        self.reset()

    def reset(self) -> None:
        """Back to before the first forward: the next one measures tokens and repairs the heap."""
        setting = self.config.max_tokens_per_rank
        self.max_tokens = None if setting == "auto" else setting
        self.is_open = False
        self.met = False

    def preflight(
        self,
        offers: Sequence[Offer],
        grad: bool | None = None,
        tokens: int | None = None,
        dtype: str | None = None,
        strict: bool | None = None,
    ) -> list[Decision]:
        """Decide about the offered layers and make the heap for them. A collective of the group.

        Raises:
            CapacityError, and what :func:`agree` raises: on every rank alike.
        """
        fault = None
        if grad is not True and self.backend is None:
            offers, fault = self._prepare(offers)
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
            )
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
            self._open()
        return decisions

    def check(self) -> None:
        """Raise DeadlineError if the heap in use has failed. Local."""
        cause = self.backend.failure() if self.is_open and self.backend is not None else ""
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

    def _prepare(self, offers: Sequence[Offer]) -> tuple[Sequence[Offer], str | None]:
        """Build the op before the exchange, so that a rank without a compiler can say so in it."""
        if all(isinstance(offer.outcome, str) for offer in offers):
            return offers, None
        try:
            prepare_backend(self.device, self.config, alone=self.group is None)
        except Exception as error:
            if self.config.backend != "auto" or not isinstance(error, BuildError):
                return offers, str(error)
            reason = f"the {self.device.upper()} backend could not be built: {error}"
            return [Offer(offer.layer, reason) for offer in offers], None
        return offers, None

    def _open(self) -> None:
        if self.backend is None:
            self.backend = make_backend(self.group, self.config, self.device)
        assert self.max_tokens is not None
        self.backend.ensure(list(self._shapes), self.max_tokens)
        self.is_open = True

    def _protocol(self) -> tuple[tuple[str, Any], ...]:
        versions = (
            ("the version of ds_tilemoe", ds_tilemoe.__version__),
            ("the version of torch", torch.__version__),
            ("the version of deepspeed", deepspeed.__version__),
            ("the host (boot id and pid namespace)", host_identity()),
            ("the device of the layers", self.device),
        )
        return tuple((name, getattr(self.config, name)) for name in PROTOCOL) + versions

    def _exchange(self, message: Message) -> list[Message]:
        if self.group is None:
            return [message]
        messages: list[Any] = [None] * dist.get_world_size(self.group)
        try:
            dist.all_gather_object(messages, message, group=self.group)
        except RuntimeError as error:
            mode = {True: "enabled", False: "disabled", None: "not asked"}[message.grad]
            raise TileMoEError(
                f"the pre-flight of {', '.join(offer.layer for offer in message.offers)} did not"
                f" end: {error}; every rank of the group must call ds_tilemoe.apply and"
                f" the layer, in the same grad mode (here: {mode})"
            ) from error
        return messages


def prepare_backend(device: str, config: TileOverlapConfig, alone: bool) -> None:
    """Build or load what the layers on ``device`` run with; local.

    Args:
        device: "cpu" or "cuda".
        config: this rank's settings.
        alone: the group is this rank, so that nothing between ranks is wanted.

    Raises:
        BuildError: it cannot be built or run here.
        ConfigError: a setting that this device cannot meet.
    """
    if config.backend not in ("auto", device):
        raise ConfigError(
            f'tile_overlap.backend: got "{config.backend}" for layers whose parameters are on'
            f' {device}; wanted "{device}" or "auto"; fix: change it, or move the model'
        )
    if device == "cpu":
        from ds_tilemoe.op_builder import CPUTileMoEBuilder

        check_cpu_config(config)
        CPUTileMoEBuilder().load()
        return
    from ds_tilemoe.backends.cuda_limits import check_config
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    check_config(config, torch.cuda.get_device_properties(0).multi_processor_count)
    if not alone and importlib.util.find_spec("nvshmem") is None:
        raise BuildError('got no nvshmem4py; wanted it; fix: pip install "ds_tilemoe[cuda]"')
    CUDATileMoEBuilder().load()


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
        if key not in self._runtimes:
            self._runtimes[key] = Runtime(group, self.config, device)
        return self._runtimes[key]

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
