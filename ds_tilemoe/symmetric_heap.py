"""The symmetric heap: one shared region a process group, one block a rank. The only allocator.

The region never has a name that outlives its creation: rank 0 makes an unlinked file of mode 0600
on /dev/shm and its peers open it through rank 0's file descriptor. So two jobs cannot collide,
nobody can guess anything, and the kernel frees the memory when the last process ends, however it
ends.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_tilemoe.errors import CapacityError, TileMoEError

Made = TypeVar("Made")

SHM_DIR = "/dev/shm"
_DEFAULT_GROUP_TIMEOUT_S = 1800.0  # torch's own default for gloo


@dataclass(frozen=True)
class HeapShape:
    """What a heap must hold; equal on every rank.

    Attributes:
        world: ranks of the group.
        max_experts: E of the layer with most experts.
        dispatch_bytes: room on each rank for the rows that peers send to its experts.
        recv_bytes: room on each rank for the rows that its peers send back.
        max_tokens: tokens a rank that the two rooms were computed for.
    """

    world: int
    max_experts: int
    dispatch_bytes: int
    recv_bytes: int
    max_tokens: int

    def holds(self, other: HeapShape) -> bool:
        """Whether a heap of this shape is large enough for ``other``."""
        return self.world == other.world and all(
            getattr(self, name) >= getattr(other, name)
            for name in ("max_experts", "dispatch_bytes", "recv_bytes", "max_tokens")
        )

    def union(self, other: HeapShape) -> HeapShape:
        """The smallest shape that holds both."""
        return HeapShape(
            self.world,
            max(self.max_experts, other.max_experts),
            max(self.dispatch_bytes, other.dispatch_bytes),
            max(self.recv_bytes, other.recv_bytes),
            max(self.max_tokens, other.max_tokens),
        )


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """``value`` of every rank of the group, in rank order; a group of None has one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def in_step(work: Callable[[], Made], group: dist.ProcessGroup | None, what: str) -> Made:
    """What ``work()`` gives, as soon as it is done on all ranks. A collective of the group.

    A rank that raised alone between two meetings would leave its peers waiting in the second.

    Args:
        work: local, or a collective that ends alike on all ranks.
        what: is made by it, in the plural, for messages.

    Raises:
        TileMoEError: what it raised on the first rank where it did; on every rank. CapacityError if
            memory ran out: of a GPU, or page-locked, which torch gives no type of its own.
    """
    problem: tuple[type[TileMoEError], str] | None = None
    try:
        result = work()
    except TileMoEError as error:
        problem = type(error), str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        problem = TileMoEError, f"{what} cannot be made: {text}"
        if isinstance(error, MemoryError) or "out of memory" in text.lower():
            fix = "set a smaller max_tokens_per_rank"
            problem = CapacityError, f"{what} do not fit ({text}); {fix}"
    for rank, theirs in enumerate(gather(problem, group)):
        if theirs is not None:
            kind, text = theirs
            raise kind(f"rank {rank}: {text}")
    return result


def group_timeout_s(group: dist.ProcessGroup | None, device_type: str) -> float:
    """The process group's own timeout: before a peer's first word in a call, slow is not dead."""
    if group is None:
        return _DEFAULT_GROUP_TIMEOUT_S
    try:
        return group._get_backend(torch.device(device_type)).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_GROUP_TIMEOUT_S


@dataclass
class SymmetricHeap:
    """A mapped region of ``world`` equal blocks, zeroed. Make one with :func:`open_heap`."""

    shape: HeapShape
    region: torch.Tensor = field(repr=False)  # uint8 [world * block bytes]; owns the mapping
    pids: list[int]  # of the ranks' processes, 0 where this process cannot see one
    identity: str  # random, equal on the ranks that share the region and on no other heap


def host_identity() -> str:
    """Equal on two ranks if and only if they can share a heap: one kernel, one pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def open_heap(shape: HeapShape, block_bytes: int, group: dist.ProcessGroup | None) -> SymmetricHeap:
    """Map a new heap on every rank of ``group``. A collective of the group.

    Raises:
        CapacityError: there is not enough shared memory, on every rank.
        TileMoEError: the region cannot be shared, on every rank.
    """
    nbytes = shape.world * block_bytes
    rank = 0 if shape.world == 1 else dist.get_rank(group)
    with contextlib.ExitStack() as stack:
        fd, offer = -1, None
        problem: Exception | None = None
        if rank == 0:
            try:
                fd = _unnamed_file(nbytes)
                stack.callback(os.close, fd)
                status = os.fstat(fd)
                offer = (fd, status.st_dev, status.st_ino, secrets.token_hex(16))
            except Exception as error:
                problem = error
        seen = gather((os.getpid(), offer, _explain(problem, nbytes, shape)), group)
        _raise_first([text for _, _, text in seen])
        pids = [pid for pid, _, _ in seen]
        try:
            if rank != 0:
                fd = _open_offered(pids[0], seen[0][1])
                stack.callback(os.close, fd)
            size = os.fstat(fd).st_size
            if size != nbytes:
                raise OSError(f"the region has {size} bytes, wanted {nbytes}")
            region = mmap.mmap(fd, nbytes)
        except Exception as error:
            problem = error
        # Rank 0 keeps its descriptor open until all have mapped the file.
        _raise_first(gather(_explain(problem, nbytes, shape), group))
    watched = [pid if _visible(pid) else 0 for pid in pids]
    return SymmetricHeap(shape, torch.frombuffer(region, dtype=torch.uint8), watched, seen[0][1][3])


def _unnamed_file(nbytes: int) -> int:
    fd = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Reserved before it is mapped: a full /dev/shm is an error here, not a SIGBUS later.
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_offered(pid: int, offer: tuple[int, int, int, str]) -> int:
    remote_fd, device, inode, _ = offer
    fd = os.open(f"/proc/{pid}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (device, inode):
        os.close(fd)
        raise OSError(f"process {pid} of this host is not rank 0 of the group")
    return fd


def _explain(error: Exception | None, nbytes: int, shape: HeapShape) -> tuple[type, str] | None:
    if error is None:
        return None
    too_large = isinstance(error, OverflowError | MemoryError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
    )
    if too_large:
        stat = os.statvfs(SHM_DIR)
        free = stat.f_bavail * stat.f_frsize
        return CapacityError, (
            f"the symmetric heap does not fit {SHM_DIR}: needed {nbytes} bytes for {shape.world} "
            f"ranks at {shape.max_tokens} tokens a rank, available {free}; enlarge it (docker: "
            "--shm-size) or set a smaller max_tokens_per_rank"
        )
    return TileMoEError, (
        f"the symmetric heap cannot be shared: {type(error).__name__}: {error}; the ranks of a "
        f"group must run as one user in one pid namespace of one host, with {SHM_DIR} a tmpfs"
    )


def _raise_first(problems: list[tuple[type, str] | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = problem
            raise kind(f"rank {rank} of the group: {text}")


def _visible(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
