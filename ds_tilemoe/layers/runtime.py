"""What swapped layers share: one backend for each expert-parallel group, one session an apply()."""

from __future__ import annotations

import contextlib
import logging
import uuid
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
from ds_tilemoe.errors import BuildError, ConfigError, DeadlineError
from ds_tilemoe.layers.agreement import DEVICE, Decision, Message, Offer, agree, collective, meet
from ds_tilemoe.layers.device_op import make_backend, prepare_backend
from ds_tilemoe.routing import Routing, route
from ds_tilemoe.stats import LayerStats
from ds_tilemoe.symmetric_heap import host_identity, in_step

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
        obstacle: why its op could not be built in apply(). It is not tried again in a forward.
        earlier: of the same group, device and settings. Its backend goes on in this one if all
            ranks have it: one whose settings have changed has not.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: TileOverlapConfig,
        device: str = "cpu",
        obstacle: Exception | None = None,
        earlier: Runtime | None = None,
    ):
        self.group = group
        self.config = config
        self.device = device
        self.backend: Backend | None = None
        self._identity = ""  # of the backend, the same on all ranks that have met with it
        # One that has not come to a backend hands on what it would have gone on with.
        if earlier is not None and earlier.backend is None:
            earlier = earlier._earlier
        self._earlier = earlier
        self._sinks: dict[str, LayerStats] = {}
        self._calls = 0
        setting = config.max_tokens_per_rank
        self.max_tokens: int | None = None if setting == "auto" else setting
        self._is_open = False  # the backend has made a heap for these layers
        self.met = False  # a pre-flight of a forward has taken place
        self.is_prepared = False  # the backend is made, with what it runs with
        self._shapes: dict[LayerShape, None] = {}  # agreed on; a set that keeps the order
        self._obstacle = obstacle

    @property
    def is_open(self) -> bool:
        """Whether there is a heap for the layers; a runtime with the same backend may lose it."""
        return self._is_open and self.backend is not None and self.backend.has_heap

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return 1 if self.group is None else dist.get_world_size(self.group)

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
        left: Sequence[str] = (),
    ) -> list[Decision]:
        """Decide about the offered layers and make the heap for them. A collective.

        Args:
            offers: of this rank, in model order.
            grad, tokens, dtype: of a forward, or None outside of one.
            strict: takes the place of the setting.
            together: every rank of the job is here, and not this group alone; see :meth:`meeting`.
                Else the heap may not grow.
            left: see :class:`Message`.

        Raises:
            CapacityError, and what :func:`agree` raises: on every rank alike.
            DeadlineError: a peer did not come.
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
                left=tuple(left),
                backend=self._identity,
                inherits=self.backend is not None and self._earlier is not None,
            ),
            self.meeting(together),
        )
        decisions = agree(messages)
        self._agree_on_backend(messages)
        self.met = self.met or grad is not None
        agreed = [decision for decision in decisions if isinstance(decision, LayerShape)]
        shapes = self._shapes | dict.fromkeys(agreed)
        # By what all ranks have just agreed on, and not by what this one knows besides.
        if grad is True or not agreed:
            self._shapes = shapes
            return decisions
        if self.max_tokens is None and tokens is not None:
            most = max(message.tokens or 0 for message in messages)
            self.max_tokens = max(LEAST_TOKENS, 1 << (most - 1).bit_length())
        if self.max_tokens is not None:
            names = ", ".join(shape.name for shape in agreed)
            with collective(names, "the making of the heap", grad):
                assert self.backend is not None
                # A group that is the whole job is always together.
                is_all = together or not self._is_part_of_job
                self.backend.ensure(list(shapes), self.max_tokens, together=is_all)
            self._is_open = True
        self._shapes = shapes
        return decisions

    def hear(self, failure: str, layers: str) -> str:
        """What a rank of the group has failed by, the first one; "" if none has. A collective.

        Args:
            failure: of this rank.
            layers: names, for the message.

        Raises:
            DifferentCalls: its ranks are not all in apply().
            DeadlineError: a peer did not come.
        """
        meeting = self.meeting(together=True)
        told = meet(failure, meeting, layers, "apply()", None, call="the end of apply()")
        return next(filter(None, told), "")

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
            self.collect(quickly=True)

    def collect(self, quickly: bool = False) -> None:
        """Count the calls that have ended on the GPU, in the stats of their layers. Never waits.

        Args:
            quickly: see ``RecordRing.poll_quickly``.
        """
        if self.device != "cuda" or self.backend is None:
            return
        for record in self.backend.poll_records(quickly):
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
        elif cause := self.backend.failure():
            raise DeadlineError(
                f"the expert-parallel group has failed: {cause}; fix: call ds_tilemoe.apply on all"
                " ranks, which makes a new heap"
            )

    def settings(self) -> dict[str, Any]:
        """The block in force, with what "auto" stands for as far as that is known; empty before the
        backend is made."""
        if self.backend is None:
            return {}
        chosen = self.config.model_dump() | self.backend.chosen
        if self.max_tokens is not None:  # else it is for the first call to say
            chosen["max_tokens_per_rank"] = self.max_tokens
        return chosen

    def _prepare(
        self, offers: Sequence[Offer], in_forward: bool
    ) -> tuple[Sequence[Offer], str | None]:
        """Make the backend before the exchange, so that a rank that cannot says so in it: by its
        offers, or by a fault."""
        if all(isinstance(offer.outcome, str) for offer in offers):
            return offers, None
        try:
            if self._obstacle:
                raise self._obstacle
            alone = self.group is None
            prepare_backend(self.device, self.config, alone=alone, in_forward=in_forward)
            if self.backend is None and self._earlier is not None and self._earlier.backend:
                self.backend, self._identity = self._earlier.backend, self._earlier._identity
                self._sinks = self._earlier._sinks  # whoever collects, collects for both
            elif self.backend is None:
                self._earlier = None
                self._make_backend()
            self.is_prepared = True
        except ConfigError as error:  # the block's fault, which all ranks raise as such
            return [
                offer
                if isinstance(offer.outcome, str)
                else Offer(offer.layer, str(error), unmet=True)
                for offer in offers
            ], None
        except BuildError as error:
            if self.config.backend != "auto":
                return offers, str(error)
            reason = f"the {self.device.upper()} backend could not be built: {error}"
            return [Offer(offer.layer, reason) for offer in offers], None
        except Exception as error:
            what = f"the {self.device.upper()} backend cannot be made"
            return offers, f"{what}: {type(error).__name__}: {error}"
        return offers, None

    def _make_backend(self) -> None:
        self.backend = make_backend(self.group, self.config, self.device)
        self._identity, self._sinks = uuid.uuid4().hex, {}

    def _agree_on_backend(self, messages: Sequence[Message]) -> None:
        """A backend from before goes on only if it is that of every rank of the group; else the
        ranks that have one make another. Behind it all know theirs by one name."""
        if self.group is not None:
            ranks = dist.get_process_group_ranks(self.group)
            messages = [message for message in messages if message.rank in ranks]
        names = [message.backend for message in messages]
        if len(set(names)) > 1:
            if any(message.inherits for message in messages):
                is_mine = self.backend is not None and self._earlier is not None
                work = self._make_backend if is_mine else lambda: None
                in_step(work, self.group, "the parts of a backend")
            self._identity = uuid.uuid5(uuid.NAMESPACE_OID, " ".join(names)).hex
        if self.backend is not None:
            self._earlier = None

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
            (DEVICE, self.device),
        )
        return tuple((name, getattr(self.config, name)) for name in PROTOCOL) + versions

    def _exchange(self, message: Message, meeting: dist.ProcessGroup | None) -> list[Message]:
        names = ", ".join(offer.layer for offer in message.offers)
        what = "the pre-flight"
        return meet(message, meeting, names, what, message.grad, call=what)


class Session:
    """One ``apply()``: its settings and a Runtime per expert-parallel group and kind of device.

    Copies share it.

    Attributes:
        config: the settings.
        measuring: inside ``measure_combine_alone()``.
        obstacles: why the op of a kind of device could not be built, for runtimes to come.
    """

    def __init__(self, config: TileOverlapConfig):
        self.config = config
        self.measuring = False
        self.obstacles: dict[str, Exception] = {}
        self._runtimes: dict[tuple[int | None, str], Runtime] = {}
        self._earlier: dict[tuple[int | None, str], Runtime] = {}
        self._said: set[str] = set()

    def follow(self, before: Session) -> None:
        """Go on with what layers of ``before`` have, where that has the same settings."""
        self.measuring = self.measuring or before.measuring
        if before.config == self.config:
            self._earlier = before._runtimes | self._earlier
            self._said |= before._said

    def runtime(self, group: dist.ProcessGroup | None, device: str = "cpu") -> Runtime:
        """The runtime of ``group``, None for a group of one, on "cpu" or "cuda"."""
        key = (None if group is None else id(group), device)
        found = self._runtimes.get(key)
        if found is None:
            obstacle = self.obstacles.get(device)
            earlier = self._earlier.pop(key, None)
            found = Runtime(group, self.config, device, obstacle, earlier)
            self._runtimes[key] = found
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
