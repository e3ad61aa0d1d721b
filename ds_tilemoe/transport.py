"""NVSHMEM in this process: device memory that every rank of the world can reach.

NVSHMEM starts once a process, over the whole world, so its PE numbers are the world's ranks and a
smaller group uses those of its members. nvshmem4py owns the host library; our kernels' library has
device state of its own and is attached to it (csrc/transport). The symmetric heap is ours alone:
what others allocate there after the start is not seen, and NVSHMEM may end the process for lack of
it. Nothing ends by itself: a collective that a garbage collector or an exit handler starts on one
rank hangs there.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import socket

import torch
import torch.distributed as dist

from ds_tilemoe import transport_room
from ds_tilemoe.errors import BuildError, CapacityError, TileMoEError
from ds_tilemoe.symmetric_heap import gather, in_step

# Set before NVSHMEM starts, unless the user has set them.
ENVIRONMENT = {
    # A program that uses NVLink multicast can put the GPUs of a shared host out of service.
    "NVSHMEM_DISABLE_NVLS": "1",
    # We use none of its collectives on streams, for which it would make NCCL communicators.
    "NVSHMEM_DISABLE_NCCL": "1",
}
ENVIRONMENT_ON_ONE_HOST = {"NVSHMEM_REMOTE_TRANSPORT": "none"}  # no search for network devices

_ADVICE = (
    "; wanted nvshmem4py, and one NVSHMEM in the process; fix: pip install"
    ' "ds_tilemoe[cuda]", and start no other NVSHMEM before'
)

_BLOCKS = "blocks of NVSHMEM"

_running: Transport | None = None


class Transport:
    """The running NVSHMEM of this process; :func:`start` makes it.

    Attributes:
        rank: this process in the world, and its PE.
        world: ranks of the world.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        device: torch.device,
        rank: int,
        world: int,
        settings: transport_room.Settings,
    ) -> None:
        self.rank = rank
        self.world = world
        self._library = library
        self._device = device
        self._settings = settings
        self._room = None if settings.fixed_by else self._measure()
        self._blocks: set[int] = set()  # addresses

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Symmetric memory, not zeroed. A collective of the world; no stream may wait on a flag.

        The tensor does not own it: it lives until :meth:`free` or :meth:`close`.

        Args:
            nbytes: at least 1; equal on every rank.

        Returns:
            [nbytes] uint8 on this process's device.

        Raises:
            CapacityError: a rank has too little memory, or NVSHMEM may not take as much; on every
                rank, and nothing is allocated.
            TileMoEError: the ranks ask for different sizes; on every rank.
        """
        # Beforehand, because NVSHMEM does not survive an allocation that fails where it grows.
        room, settings = self._room, self._settings
        wanted, available = (0, nbytes) if room is None else (room.growth(nbytes), room.available)
        free = in_step(lambda: self._free(wanted), dist.group.WORLD, _BLOCKS)
        asked = gather((nbytes, available, free, wanted), dist.group.WORLD)
        sizes = [size for size, *_ in asked]
        if min(sizes) != max(sizes) or nbytes < 1:
            raise TileMoEError(
                f"symmetric memory: got sizes {sizes} from the ranks; wanted one size above 0; fix:"
                " call allocate in one order with one size on every rank"
            )
        least = min(available for _, available, *_ in asked)
        if room is not None and least < nbytes:
            raise CapacityError(
                f"symmetric memory: needed {nbytes} bytes, available {least}, as NVSHMEM's heap"
                f" stays below {transport_room.LIMIT}, here {settings.limit}; set that to"
                f" {room.limit_for(nbytes)} on all ranks, or set a smaller max_tokens_per_rank"
            )
        for rank, (_, _, free, wanted) in enumerate(asked):
            if free < wanted:
                raise CapacityError(
                    f"symmetric memory: needed {nbytes} bytes, {wanted} with NVSHMEM's rounding,"
                    f" available {free} on rank {rank}; set a smaller max_tokens_per_rank"
                )
        block = in_step(lambda: self._malloc(nbytes), dist.group.WORLD, _BLOCKS)
        address = block.data_ptr()
        if room is not None:
            room.take(address, nbytes)
        self._blocks.add(address)
        return block

    def _malloc(self, nbytes: int) -> torch.Tensor:
        import nvshmem.bindings

        address = nvshmem.bindings.malloc(nbytes)
        if not address:
            raise CapacityError(
                f"symmetric memory: NVSHMEM has no room for {nbytes} bytes; raise"
                f" {transport_room.FIXED_SIZE}, here {self._settings.fixed_size}, as its heap does"
                f" not grow ({self._settings.fixed_by}), or set a smaller max_tokens_per_rank"
            )
        return _as_tensor(address, nbytes, self._device)

    def free(self, memory: torch.Tensor) -> None:
        """Gives back what :meth:`allocate` returned. A collective of the world."""
        import nvshmem.bindings

        address = memory.data_ptr()
        self._blocks.remove(address)
        nvshmem.bindings.free(address)
        if self._room is not None:
            self._room.release(address)

    def peer_pointer(self, memory: torch.Tensor, rank: int) -> int | None:
        """Address at which ``rank``'s copy of symmetric ``memory`` is mapped here, or None."""
        return self._library.tilemoe_transport_peer_pointer(memory.data_ptr(), rank)

    def _measure(self) -> transport_room.Room:
        """Room of a heap that holds NVSHMEM's own blocks alone. A collective of the world."""
        import nvshmem.bindings

        first = nvshmem.bindings.malloc(transport_room.ALIGNMENT)
        nvshmem.bindings.free(first)

        def is_inside(address: int) -> bool:
            return self._library.tilemoe_transport_peer_pointer(address, self.rank) is not None

        base = bisect.bisect_left(range(first), True, key=is_inside)  # nothing else tells it
        return transport_room.Room(base, first, self._settings)

    def _free(self, wanted: int) -> int:
        """Bytes of device memory that are free, or that torch can let go of for ``wanted``."""
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < wanted:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._device)
        return free

    def close(self) -> None:
        """Frees all memory and ends NVSHMEM. A collective of the world; no kernel may be at it."""
        import nvshmem.bindings
        import nvshmem.core

        global _running
        torch.cuda.synchronize(self._device)
        for address in sorted(self._blocks):  # one order on all ranks: offsets are symmetric
            nvshmem.bindings.free(address)
        self._blocks.clear()
        self._library.tilemoe_transport_detach()
        nvshmem.core.finalize()
        _running = None


def start(library: ctypes.CDLL) -> Transport:
    """The transport of this process, started if need be. A collective of the world.

    torch.distributed must run, and the current CUDA device be this process's own.

    Args:
        library: of ``CUDATileMoEBuilder().load()``.

    Raises:
        BuildError: nvshmem4py is missing, another NVSHMEM is in the way, or a setting of NVSHMEM is
            one that it or we refuse; on every rank.
        TileMoEError: its memory cannot be measured; on every rank.
    """
    global _running
    if _running is None:
        _running = _start(library)
    return _running


def _start(library: ctypes.CDLL) -> Transport:
    problem, refusal, uid = "", "", None
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        import nvshmem.core
        from cuda.core import Device

        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        nvshmem_device = Device(device.index)
        found = nvshmem_device.properties
        has_vmm = bool(  # as NVSHMEM asks the GPU
            found.virtual_memory_management_supported
            and found.gpu_direct_rdma_with_cuda_vmm_supported
        )
        nvshmem_device.set_current()
    except Exception as error:  # whatever it is, the peers must hear of it or they wait for ever
        problem = f"nvshmem4py or CUDA does not start ({type(error).__name__}: {error})"
    else:
        try:
            heap_settings = transport_room.read_settings(os.environ, has_vmm)
        except ValueError as error:
            refusal = str(error)
    seen = gather((problem, refusal, socket.gethostname()), dist.group.WORLD)
    _raise_first([text for text, *_ in seen])
    _raise_first([text for _, text, _ in seen], advice="")
    settings = dict(ENVIRONMENT)
    if len({host for *_, host in seen}) == 1:
        settings |= ENVIRONMENT_ON_ONE_HOST
    for name, value in settings.items():
        os.environ.setdefault(name, value)

    if rank == 0:
        try:
            uid = nvshmem.core.get_unique_id()
        except Exception as error:
            problem = f"NVSHMEM makes no unique id ({type(error).__name__}: {error})"
    offer = [(problem, uid)]
    dist.broadcast_object_list(offer, src=0)
    problem, uid = offer[0]
    _raise_first([problem])

    try:
        nvshmem.core.init(
            device=nvshmem_device, uid=uid, rank=rank, nranks=world, initializer_method="uid"
        )
        problem = _attach(library, rank, world)
    except Exception as error:
        problem = f"NVSHMEM does not start ({type(error).__name__}: {error})"
    _raise_first(gather(problem, dist.group.WORLD))
    return in_step(
        lambda: Transport(library, device, rank, world, heap_settings), dist.group.WORLD, _BLOCKS
    )


def _attach(library: ctypes.CDLL, rank: int, world: int) -> str:
    """Gives our library its device state; returns what is wrong, or ""."""
    library.tilemoe_transport_peer_pointer.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.tilemoe_transport_peer_pointer.restype = ctypes.c_void_p
    library.tilemoe_transport_detach.restype = None
    pe, pes = ctypes.c_int32(-1), ctypes.c_int32(-1)
    status = library.tilemoe_transport_attach(ctypes.byref(pe), ctypes.byref(pes))
    if status == 1:
        return "nvshmem4py and our library are bound to two copies of NVSHMEM's host library"
    if status != 0:
        return "NVSHMEM does not take our library; it has printed why"
    if (pe.value, pes.value) != (rank, world):
        return f"NVSHMEM, started by others, calls this process PE {pe.value} of {pes.value}"
    return ""


def _raise_first(problems: list[str], advice: str = _ADVICE) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise BuildError(f"rank {rank}: {problem}{advice}")


class _Memory:
    """A piece of device memory, as torch.as_tensor reads it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _as_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Memory(address, nbytes), device=device)
