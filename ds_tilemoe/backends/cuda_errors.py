"""Failures that kernels tell the host, in words and as exceptions.

Shape letters: E experts of the group, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.errors import CapacityError, DeadlineError, RankFailure, TileMoEError
from ds_tilemoe.plan_abi import Int64Array

# Every rank has found the same at the count exchange, and the next call may go on.
_USABLE = (abi.Outcome.RANK_FAILURE, abi.Outcome.LAYER_MISMATCH, abi.Outcome.CAPACITY)

_CONDEMNED = (
    ". Ranks may be out of step, so the group has failed: ds_tilemoe.apply() on all ranks makes a"
    " new heap; ds_tilemoe.check(engine) after each step keeps the group usable where nothing was"
    " launched behind the call that failed"
)

NameOf = Callable[[int], str]  # fingerprint -> a layer's name


class Failures:
    """What the kernels of one heap have told this host, and what it has not raised yet.

    Args:
        address: of an ErrorRecord in page-locked memory, zeroed.
        world: ranks of the group.
        name_of: names a layer by its fingerprint.
        say_heard: tells the kernels that this host has heard of a failure that leaves the heap
            usable.

    Attributes:
        cause: what made the heap unusable; "" while it is usable.
        unread: what failed a call, leaves the heap usable and has not been raised.
    """

    def __init__(
        self,
        address: int,
        world: int,
        name_of: NameOf,
        say_heard: Callable[[], None],
    ) -> None:
        self._record = abi.ErrorRecord.from_address(address)
        self._world = world
        self._name_of, self.say_heard = name_of, say_heard
        self._heard: TileMoEError | None = None
        self._is_condemned = False
        self.unread: abi.ErrorRecord | None = None
        self.cause = ""

    def take(self) -> abi.ErrorRecord | None:
        """What a kernel has told, once. It is whole as soon as its outcome is there."""
        if self._record.outcome == abi.Outcome.OK:
            return None
        record = abi.ErrorRecord.from_buffer_copy(self._record)
        self._record.outcome = abi.Outcome.OK
        return record

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to hear and nothing to raise."""
        return not self._record.outcome and self._heard is None and not self.cause

    def hear(self) -> None:
        """Keep what has been told since the last look. Does not wait for the device."""
        self.tell(self.take())

    def tell(self, record: abi.ErrorRecord | None) -> None:
        """Keep one record, or none."""
        if record is None:
            return
        if record.outcome in _USABLE:
            if self._heard is None:
                self._heard, self.unread = self._refusal(record), record
        elif self._is_unread(record):
            self.condemn()  # whoever was late, the failure that is unread here is the first cause
        else:
            self.cause = self.cause or describe(record)

    def _is_unread(self, record: abi.ErrorRecord) -> bool:
        """Whether somebody heard too late of the call whose failure is unread here."""
        if record.outcome != abi.Outcome.OUT_OF_STEP or self.unread is None:
            return False
        return bool(record.seen == self.unread.epoch)

    def condemn(self) -> None:
        """The unread failure is one that the heap does not survive: its call is not the last."""
        assert self._heard is not None
        if self.cause:
            return
        self.cause = str(self._heard)
        self._heard = type(self._heard)(f"{self._heard}{_CONDEMNED}")
        self._is_condemned = True

    def raise_heard(self, where: str) -> None:
        """Raise what earlier calls have told: a failure that leaves the heap usable once, the cause
        of an unusable one each time. What has been condemned is raised once as it is.

        Args:
            where: begins the message of the latter.
        """
        self.hear()
        if self.cause and not self._is_condemned:
            raise DeadlineError(
                f"{where}: the expert-parallel group has failed: {self.cause}. "
                "ds_tilemoe.apply() on all ranks makes a new heap."
            )
        if self._heard is not None:
            if not self._is_condemned:
                self.say_heard()
            heard, self._heard, self.unread = self._heard, None, None
            self._is_condemned = False
            raise heard

    def _refusal(self, record: abi.ErrorRecord) -> TileMoEError:
        where = f"layer {self._name_of(record.layer)} (call {record.epoch})"
        peer = record.peer
        if record.outcome == abi.Outcome.CAPACITY:
            return too_many_tokens(where, peer, record.seen, record.wanted)
        if record.outcome == abi.Outcome.LAYER_MISMATCH:
            names = [self._name_of(fingerprint) for fingerprint in (record.wanted, record.seen)]
            return RankFailure(
                f"ranks run different layers in the same call ({record.epoch}): rank 0 {names[0]},"
                f" rank {peer} {names[1]}; layers of a group must run in one order, dtype and mode"
            )
        if record.seen:
            return RankFailure(
                f"{where}: rank {peer} of the group called it in another way than before (dtype"
                " of rows or weights, autocast, dropout, the gate or its k, or other experts), and"
                f" {self._world - record.seen} of {self._world} ranks did not; change it on all"
                " ranks in the same call"
            )
        return RankFailure(
            f"{where}: rank {peer} of the group failed in its routing, and has raised why"
        )


def describe(record: abi.ErrorRecord) -> str:
    """What made a heap unusable."""
    call = f"call {record.epoch}"
    if record.outcome == abi.Outcome.PLAN_OVERFLOW:
        return (
            f"rank {record.rank} got a plan of {record.seen} rows in {call}, its buffers hold"
            f" {record.wanted}"
        )
    if record.outcome == abi.Outcome.HOST_FAILURE:
        return f"rank {record.rank} of the group raised an exception at about {call}"
    if record.outcome == abi.Outcome.OUT_OF_STEP:
        return (
            f"rank {record.rank} of the group heard too late that call {record.seen} had failed"
            f" because of rank {record.peer}, at about {call}, so ranks may be out of step"
        )
    if record.outcome != abi.Outcome.DEADLINE:
        return f"rank {record.rank} ended {call} with outcome {record.outcome}"
    who = f"rank {record.rank} of the group waited too long"
    if record.wait == abi.Wait.COUNTS:
        return (
            f"{who} for the counts of rank {record.peer} ({call}, seen {record.seen}); all ranks"
            " must run the same layers equally often and agree on grad mode"
        )
    if record.wait == abi.Wait.BAND:
        return (
            f"{who} for its own band {record.band} ({call}: {record.seen} of {record.wanted} tiles)"
        )
    if record.wait == abi.Wait.DISPATCH:
        return (
            f"{who} for the tokens of its slot {record.band} in front of GEMM 1 ({call}:"
            f" {record.seen} of {record.wanted} rows came)"
        )
    return (
        f"{who} for rows of rank {record.peer} ({call}: {record.seen} of {record.wanted} rows came)"
    )


def too_many_tokens(where: str, rank: int, needed: int, available: int) -> CapacityError:
    """The same on the rank that has them and on its peers."""
    return CapacityError(
        f"{where}: rank {rank} of the group has too many tokens: needed {needed}, available"
        f" {available}; set max_tokens_per_rank to the longest call and apply() again"
    )


def overfull(counts: Int64Array, rows_in: int) -> str:
    """What a rank would say whose plan did not fit; "" if all do. Found alike on every rank.

    Args:
        counts: C [W, E].
        rows_in: most rows that a rank may be sent.
    """
    world = counts.shape[0]
    incoming = counts.reshape(world, world, -1).sum(axis=(0, 2))
    rank = int(incoming.argmax())
    if incoming[rank] <= rows_in:
        return ""
    return (
        f"rank {rank} of the group was to get {incoming[rank]} rows, its buffers hold {rows_in}, as"
        " many as any routing of these tokens can send: a defect of ds_tilemoe"
    )
