"""The C ABI of the CUDA library, played in Python on the CPU: what each launch means, in order.

So the backend's side (params, addresses, tensor maps, order of calls, failures) is tested where
there is no GPU. Between ranks the fake uses torch.distributed instead of a symmetric heap. It reads
all it knows from the params, as kernels do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cuda_fake_gemms import FakeGemms
from cuda_fake_host import FakeLink, NoWaits, Stream, capture
from cuda_fake_memory import COUNT_ROW, RECV, SMS, memory
from cuda_fake_router import FakeRouter
from torch import Tensor

from ds_tilemoe import op_builder
from ds_tilemoe.backends import (
    cuda,
    cuda_abi,
    cuda_blocks,
    cuda_functions,
    cuda_heap,
    cuda_router,
    cuda_split,
)
from ds_tilemoe.calibration import typical
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.layers import layer_state
from ds_tilemoe.plan_abi import Layout, PlanParams
from ds_tilemoe.symmetric_heap import gather

__all__ = ["FakeLibrary", "FakeLink", "NoWaits", "Stream", "capture", "install", "memory"]


class Failed(NamedTuple):
    """What a rank says at the next place where all meet, instead of its share."""

    outcome: int
    peer: int
    seen: int


class FakeLibrary(FakeRouter, FakeGemms):
    """The library of one rank.

    Attributes:
        group: of the ranks that the kernels talk to; None for one rank.
        log: the launches.
        failed: what made the group fail.
        unheard, unheard_peer: words of State.
        raises: the name of the next launch that raises.
        iteration: what calls leave behind, but for segments and epoch.
        engines: copy engines that have been made and not freed.
        fetched: the call whose counts are on their way to the copy engine's host.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.log: list[str] = []
        self.epoch = 0
        self.fail_combine = False
        self.failed: Any = None
        self.unheard, self.unheard_peer = 0, -1
        self.raises = ""
        self.params: PlanParams | None = None
        self.plan: Any = None
        self.inside = 0
        self.iteration = (1, 2, 3, 4, 5, 6, 7, 8)
        self.left: Any = None  # the record of the last call, on its way
        self.exchange: Any = None  # params of the last one, as are the next two
        self.front: Any = None
        self.front_tile_n = 0
        self.scale_end = 70  # ns of a call
        self.combine: Any = None
        self.engines: set[int] = set()
        self.fetched = 0
        for name in [*cuda_functions.PROTOTYPES, *cuda_router.PROTOTYPES]:
            setattr(self, name, self._entry(getattr(self, name)))

    def _entry(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if self.raises == function.__name__:
                self.raises = ""
                raise RuntimeError(f"{function.__name__} was told to")
            self.inside += 1
            try:
                return function(*arguments)
            finally:
                self.inside -= 1

        return call

    def tilemoe_load(self) -> int:
        return 0

    def tilemoe_block_offsets(self, shape: Any, offsets: Any) -> None:
        self.failed, self.epoch, self.unheard, self.unheard_peer = None, 0, 0, -1  # a new heap
        self.left = None
        rows = shape.max_slots * cuda_abi.TILE_M
        assert shape.dispatch_bytes % rows == 0
        offsets.counts, offsets.count_row_bytes = 128, COUNT_ROW
        offsets.recv = RECV
        offsets.dispatch = RECV + -(-shape.recv_bytes // 4096) * 4096
        offsets.block_bytes = offsets.dispatch + shape.dispatch_bytes

    def tilemoe_half_bytes(self, bands: int) -> int:
        return 1024 + 4 * bands

    def tilemoe_state_bytes(self, bands: int) -> int:
        return 128 + 2 * self.tilemoe_half_bytes(bands)

    def tilemoe_exchange_launch(self, p: Any, stream: int) -> int:
        self.log.append("exchange")
        FakeGemms.tilemoe_record_launch(self, p.view, p.records, stream)
        self.epoch += 1
        self.exchange = p
        plan, view = p.plan, p.view
        memory(view.state, np.uint64, 1)[0] = self.epoch
        experts = view.world * plan.params.local_experts
        assert plan.front_bands
        assert view.half_bytes >= self.tilemoe_half_bytes(plan.capacity.bands)
        own = memory(p.own_counts, np.int32, experts).copy()
        mine: Any = (p.status, p.layer, p.tokens, own)
        if self.unheard:
            mine = Failed(cuda_abi.Outcome.OUT_OF_STEP, self.unheard_peer, self.unheard)
        said = self._meet(mine) or []
        for source, (status, *_) in enumerate(said):
            row = view.offsets.counts + (self.epoch % 2 * view.world + source) * COUNT_ROW
            memory(self._block(view) + row + 24, np.int32, 1)[:] = status
        self.outcome = self._judge(p, said)
        counts = memory(plan.counts, np.int32, view.world, experts)
        counts[:] = 0 if self.outcome else np.stack([row for *_, row in said])
        numbers = {name: getattr(plan.params, name) for name, _ in plan.params._fields_}
        self.params = PlanParams(**{**numbers, "layout": Layout(numbers["layout"])})
        self.plan = made = build_plan(self.params, counts)
        for name in ("bands", "segments", "chunks", "rows"):
            assert getattr(made.sizes, name) <= getattr(plan.capacity, name), name
        arrays = ("expert_row", "run_row", "bands", "arrival_target", "recv_row", "dispatch_row")
        for name in arrays:
            array = getattr(made, name)
            memory(getattr(plan.view, name), array.dtype, *array.shape)[...] = array
        return 0

    def tilemoe_say_heard(self, view: Any, stream: int) -> int:
        self.unheard = 0
        return 0

    def _judge(self, p: Any, said: Any) -> int:
        """The outcome, which the host is told, unless it has raised it itself."""
        if self.failed:
            return self._tell(p.view, *self.failed)
        outcome, *what = self._find_fault(p.view, said, p.max_tokens)
        if outcome and p.status != 1 and (p.status or p.tokens <= p.max_tokens):
            self.unheard, self.unheard_peer = self.epoch, what[0]
            self._tell(p.view, outcome, *what)
        return outcome

    def _find_fault(self, view: Any, said: Any, most: int) -> tuple[int, ...]:
        statuses = [status for status, *_ in said]
        if 1 in statuses:
            return cuda_abi.Outcome.RANK_FAILURE, statuses.index(1), 0, view.world
        if 2 in statuses:
            changed = statuses.count(2)
            return cuda_abi.Outcome.RANK_FAILURE, statuses.index(2), changed, view.world
        for peer, (_, layer, _, _) in enumerate(said):
            if layer != said[0][1]:
                return cuda_abi.Outcome.LAYER_MISMATCH, peer, layer, said[0][1]
        for peer, (_, _, tokens, _) in enumerate(said):
            if tokens > most:
                return cuda_abi.Outcome.CAPACITY, peer, tokens, most
        return (cuda_abi.Outcome.OK,)

    def tilemoe_fail_group(self, view: Any, record: Any, stream: int) -> int:
        self.log.append("fail")
        self._meet(Failed(record.outcome, record.peer, record.seen))
        return 0

    def _meet(self, value: Any) -> list[Any] | None:
        """What every rank says at the next place where they meet; None if one has failed there."""
        if self.failed:
            return None
        said = gather(value, self.group)
        for rank, theirs in enumerate(said):
            if isinstance(theirs, Failed):
                self.failed = (theirs.outcome, theirs.peer, theirs.seen, 0, 0, rank)
                return None
        return said

    def _block(self, view: Any) -> int:
        return int(memory(view.blocks, np.int64, view.world)[view.rank])

    def _tell(
        self,
        view: Any,
        outcome: int,
        peer: int,
        seen: int,
        wanted: int,
        wait: int = 0,
        rank: int | None = None,
    ) -> int:
        record = cuda_abi.ErrorRecord(outcome, wait, view.rank if rank is None else rank, peer)
        record.seen, record.wanted, record.epoch = seen, wanted, self.epoch
        record.layer = self.exchange.layer
        size = ctypes.sizeof(record)
        told = cuda_abi.ErrorRecord.from_address(view.host_error)
        if not told.outcome:
            ctypes.memmove(view.host_error, ctypes.addressof(record), size)
        block = self._block(view)
        if self.failed and not memory(block, np.uint32, 2)[1]:
            ctypes.memmove(block + 8, ctypes.addressof(record), size)
            memory(block, np.uint32, 2)[:] = 1
        return outcome


def install(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup | None
) -> tuple[FakeLibrary, FakeLink]:
    """Puts the fake where the library, the GPU and the transport are looked for.

    Args:
        group: of the ranks that the kernels talk to.
    """
    library, link = FakeLibrary(group), FakeLink()
    builder = SimpleNamespace(load=lambda: library)
    stream = Stream(library)
    event = SimpleNamespace(cuda_event=2, record=lambda stream: None)

    def locked(nbytes: int) -> Tensor:
        assert not torch.cuda.is_current_stream_capturing()
        return torch.zeros(nbytes, dtype=torch.uint8)

    for place in (cuda, op_builder):
        monkeypatch.setattr(place, "CUDATileMoEBuilder", lambda: builder)
    monkeypatch.setattr(layer_state, "backend_of", lambda weight: "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuda_functions, "bind", lambda library: library)
    monkeypatch.setattr(cuda_blocks.transport, "start", lambda library: link)
    monkeypatch.setattr(cuda_split, "measured_machine", lambda heap, sms, folder: typical(sms))
    monkeypatch.setattr(cuda_heap, "page_locked", locked)
    monkeypatch.setattr(cuda_split, "page_locked", locked)
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    raw = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, raw, lambda index: stream.cuda_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: library.log.append("waits"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda text: contextlib.nullcontext())
    return library, link
