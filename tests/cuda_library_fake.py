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
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ds_tilemoe import op_builder, reference, router_rules
from ds_tilemoe.backends import (
    cuda,
    cuda_abi,
    cuda_blocks,
    cuda_copy,
    cuda_functions,
    cuda_heap,
    cuda_plan,
    cuda_router,
    cuda_split,
)
from ds_tilemoe.calibration import typical
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.layers import layer_state
from ds_tilemoe.plan_abi import BAND_DTYPE, CALL_RECORD_DTYPE, CALL_RECORDS, Layout, PlanParams
from ds_tilemoe.symmetric_heap import gather

DTYPES = {0: torch.bfloat16, 1: torch.float16}
ACTIVATIONS = {0: lambda x: x, 1: F.gelu, 2: F.silu, 3: F.relu}
COUNT_ROW, RECV = 64, 4096  # bytes of a count row without counts; offset of the receive room
SMS = 132
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "unique")


def memory(address: int, dtype: Any, *shape: int) -> Any:
    """What lies at an address, as numpy or torch sees it; writable."""
    is_torch = isinstance(dtype, torch.dtype)
    size = (dtype if is_torch else np.dtype(dtype)).itemsize * int(np.prod(shape))
    if size == 0:
        return (torch.empty if is_torch else np.empty)(shape, dtype=dtype)
    assert address
    raw = (ctypes.c_uint8 * size).from_address(address)
    if is_torch:
        return torch.frombuffer(raw, dtype=dtype).view(shape)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def mapped(tensor_map: Any, box_rows: int, dtype: int) -> Tensor:
    """The matrix of a map; asserts that it was made for this box and type."""
    base, made_for, rows, cols, box = list(tensor_map.words)[:5]
    assert (made_for, box) == (dtype, box_rows)
    return memory(base, DTYPES[dtype], rows, cols)


class Failed(NamedTuple):
    """What a rank says at the next place where all meet, instead of its share."""

    outcome: int
    seen: int = 0


class FakeLibrary:
    """The library of one rank.

    Attributes:
        group: of the ranks that the kernels talk to; None for one rank.
        log: the launches.
        failed: what made the group fail.
        unheard: the call of State::unheard.
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
        self.unheard = 0
        self.raises = ""
        self.params: PlanParams | None = None
        self.plan: Any = None
        self.inside = 0
        self.iteration = (1, 2, 3, 4, 5, 6, 7, 8)
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

    def tilemoe_router_load(self) -> int:
        return 0

    def tilemoe_split_launch(self, weights: int, parts: int, count: int, stream: int) -> int:
        raise AssertionError("the fake has no bf16x3: torch.mm makes no fp32 of bf16 on a CPU")

    def tilemoe_block_offsets(self, shape: Any, offsets: Any) -> None:
        self.failed, self.epoch, self.unheard = None, 0, 0  # a new heap
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

    def tilemoe_make_tensor_map(
        self, target: int, base: int, dtype: int, rows: int, cols: int, box_rows: int
    ) -> int:
        assert target % 64 == base % 16 == cols % 8 == 0
        memory(target, np.uint64, 5)[:] = (base, dtype, rows, cols, box_rows)
        return 0

    def tilemoe_set_counters(self, params: Any, front: int) -> None:
        state = params.ship.view.state
        assert state
        params.epoch = params.band_count = state
        params.band_flags = None if front else state + 128

    def tilemoe_producer_b_box_rows(self, kind: Any) -> int:
        return kind.tile_n // 2 if kind.gated else kind.tile_n

    def tilemoe_producer_group_bands(self, kind: Any, n: int, grid: int) -> int:
        assert 1 <= grid <= SMS
        return 4

    def tilemoe_places_scratch_bytes(self, tokens: int, topk: int, experts: int) -> int:
        return 64

    def tilemoe_router_scratch_bytes(self, tokens: int, topk: int, experts: int) -> int:
        return 64

    def tilemoe_places_launch(self, p: Any, stream: int) -> int:
        self.log.append("places")
        self._places(p)
        return 0

    def _places(self, p: Any) -> None:
        ids = torch.from_numpy(memory(p.expert_ids, np.int32, p.tokens, p.topk))
        kept = (ids >= 0).numpy()
        memory(p.positions, np.int32, p.tokens, p.topk)[kept] = reference.places_in_runs(
            ids
        ).numpy()[kept]
        memory(p.counts, np.int32, p.experts)[:] = reference.counts(ids, p.experts).numpy()
        order = torch.where(ids < 0, p.experts, ids).flatten().sort(stable=True).indices
        memory(p.sources, np.int32, p.tokens * p.topk)[:] = (order // p.topk).numpy()

    def tilemoe_router_launch(self, p: Any, stream: int) -> int:
        self.log.append("router")
        places = p.places
        assert p.logit_parts == 1
        logits = memory(p.logits, torch.float32, places.tokens, places.experts)
        rule = router_rules.Rule(router_rules.Drop(p.drop), p.capacity)
        routing = router_rules.route_reference(logits, places.topk, rule)
        shape = (places.tokens, places.topk)
        memory(p.expert_ids, np.int32, *shape)[:] = routing.expert_ids.numpy()
        memory(p.weights, np.float32, *shape)[:] = routing.weights.numpy()
        memory(p.l_aux, np.float32, 1)[:] = float(routing.l_aux)
        memory(p.exp_counts, np.int64, places.experts)[:] = routing.exp_counts.numpy()
        if p.start_ns:
            memory(p.start_ns, np.uint64, 1)[:] = 7
        self._places(places)
        return 0

    def tilemoe_exchange_launch(self, p: Any, stream: int) -> int:
        self.log.append("exchange")
        self.epoch += 1
        self.exchange = p
        plan, view = p.plan, p.view
        memory(view.state, np.uint64, 1)[0] = self.epoch
        experts = view.world * plan.params.local_experts
        assert p.counts == plan.counts
        assert plan.front_bands
        assert view.half_bytes >= self.tilemoe_half_bytes(plan.capacity.bands)
        own = memory(p.own_counts, np.int32, experts).copy()
        mine: Any = (p.status, p.layer, p.tokens, own)
        if self.unheard:
            mine = Failed(cuda_abi.Outcome.OUT_OF_STEP, self.unheard)
        said = self._meet(mine) or []
        for source, (status, *_) in enumerate(said):
            row = view.offsets.counts + (self.epoch % 2 * view.world + source) * COUNT_ROW
            memory(self._block(view) + row + 24, np.int32, 1)[:] = status
        self.outcome = self._judge(p, said)
        counts = memory(p.counts, np.int32, view.world, experts)
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
            self.unheard = self.epoch
            self._tell(p.view, outcome, *what)
        return outcome

    def _find_fault(self, view: Any, said: Any, most: int) -> tuple[int, ...]:
        bad = [peer for peer, (status, *_) in enumerate(said) if status]
        if bad:
            changed = sum(status == 2 for status, *_ in said)
            return cuda_abi.Outcome.RANK_FAILURE, bad[0], changed, view.world
        for peer, (_, layer, _, _) in enumerate(said):
            if layer != said[0][1]:
                return cuda_abi.Outcome.LAYER_MISMATCH, peer, layer, said[0][1]
        for peer, (_, _, tokens, _) in enumerate(said):
            if tokens > most:
                return cuda_abi.Outcome.CAPACITY, peer, tokens, most
        return (cuda_abi.Outcome.OK,)

    def tilemoe_fail_group(self, view: Any, record: Any, stream: int) -> int:
        self.log.append("fail")
        self._meet(Failed(record.outcome, record.seen))
        return 0

    def _meet(self, value: Any) -> list[Any] | None:
        """What every rank says at the next place where they meet; None if one has failed there."""
        if self.failed:
            return None
        said = gather(value, self.group)
        for rank, theirs in enumerate(said):
            if isinstance(theirs, Failed):
                self.failed = (theirs.outcome, rank, theirs.seen, 0)
                return None
        return said

    def tilemoe_producer_launch(self, p: Any, kind: Any, grid: int, stream: int) -> int:
        self.log.append("dispatch and front" if p.dispatch.view.state else "front")
        self.front = p
        self.front_tile_n = kind.tile_n
        assert not p.ship.view.state, "GEMM 1 would count its tiles as those of GEMM 2"
        assert not p.band_flags
        if p.dispatch.view.state and not self.outcome:
            self._dispatch(p.dispatch)
        self._gemm(p, kind)
        return 0

    def _dispatch(self, p: Any) -> None:
        """Rows into the layouts of their experts' ranks."""
        world, experts = p.view.world, p.view.world * p.local_experts
        assert p.num_dispatch_ctas == (cuda_plan.AUTO_DISPATCH_CTAS if world > 1 else 0)
        recv_row = memory(p.recv_row, np.int64, experts + 1)
        dispatch_row = memory(p.dispatch_row, np.int64, experts)
        sent: list[list[Any]] = [[] for _ in range(world)]
        sources = memory(p.sources, np.int32, int(recv_row[-1]))
        for expert in range(experts):
            run = sources[recv_row[expert] : recv_row[expert + 1]]
            for i, token in enumerate(run):
                row = memory(p.x + int(token) * p.row_bytes, np.uint8, p.row_bytes).copy()
                sent[expert // p.local_experts].append((int(dispatch_row[expert]) + i, row))
        room = self._block(p.view) + p.view.offsets.dispatch
        for pieces in self._meet(sent) or []:
            for at, row in pieces[p.view.rank]:
                memory(room + at * p.row_bytes, np.uint8, p.row_bytes)[:] = row

    def _block(self, view: Any) -> int:
        return int(memory(view.blocks, np.int64, view.world)[view.rank])

    def tilemoe_copy_engine_make(
        self, view: Any, counts: int, most: int, least_bytes: int, engine: Any
    ) -> int:
        assert view.blocks
        assert view.state
        assert counts % view.world == 0
        assert (most, least_bytes) == (cuda_copy.MOST_COPIES, cuda_copy.LEAST_BYTES)
        self.log.append("engine made")
        engine._obj.value = 1000 + len(self.log)
        self.engines.add(engine._obj.value)
        return 0

    def tilemoe_copy_engine_free(self, engine: Any) -> None:
        self.engines.remove(engine.value)

    def tilemoe_copy_engine_fetch(self, engine: int, plan: Any, stream: int) -> int:
        self.log.append("fetch")
        assert engine in self.engines
        assert plan.counts == self.exchange.plan.counts
        assert plan.params.rank == self.exchange.view.rank
        self.fetched = self.epoch
        return 0

    def tilemoe_consumer_launch(self, p: Any, ctas: int, stream: int) -> int:
        raise AssertionError("for the calibration only")

    def tilemoe_combine_launch(self, p: Any, stream: int) -> int:
        self.log.append(cuda_abi.Mover(p.mover).name)
        self.combine = p
        assert p.consumer_stream
        assert p.begin
        assert p.end
        assert p.sms == SMS
        assert p.num_consumer_ctas < SMS
        ship, scale = p.producer.ship, p.scale
        assert p.transport == cuda_abi.Transport.MAPPED or p.pes
        if p.mover == cuda_abi.Mover.COPY_ENGINE:
            assert p.copy_engine in self.engines
            assert p.transport == cuda_abi.Transport.MAPPED
            assert not (p.num_consumer_ctas or p.device_split)
            assert self.fetched == self.epoch, "the host would wait for ever"
            self.log.append("host waits")
        out = self._gemm(p.producer, p.kind)
        assert ship.rows == scale.rows == out.data_ptr()
        assert ship.row_bytes == out.shape[1] * 2
        assert ship.n_tiles == -(-out.shape[1] // p.kind.tile_n)
        y = memory(scale.y, DTYPES[scale.dtype], scale.tokens, scale.n)
        if self.fail_combine:
            self.failed = (cuda_abi.Outcome.DEADLINE, 0, 3, 7, cuda_abi.Wait.ARRIVALS)
        recv = out if self.outcome else self._ship(ship.view, out)
        self._record(scale)
        if self.outcome or self.failed:
            y.fill_(float("nan"))
            if self.failed:
                self._tell(ship.view, *self.failed)
            return 0
        self._scale(scale, out, recv, y)
        return 0

    def _record(self, scale: Any) -> None:
        ring = memory(scale.records, CALL_RECORD_DTYPE, CALL_RECORDS)
        slot = ring[self.epoch % CALL_RECORDS]
        sizes, exchange = self.plan.sizes, self.exchange
        slot["iteration"] = (*self.iteration, self.epoch)
        slot["iteration"]["segments"] = sizes.segments
        slot["times"] = (-1, 10, 20, 30, 40, 50, 60, self.scale_end)
        slot["layer"], slot["tokens"], slot["rows"] = exchange.layer, scale.tokens, sizes.valid_rows
        slot["remote_rows"] = sum(int(s["rows"]) for s in self.plan.segments)
        word = exchange.wanted_ctas
        slot["consumer_ctas"] = memory(word, np.int32, 1)[0] if word else exchange.consumer_ctas
        slot["epoch"] = self.epoch

    def _gemm(self, p: Any, kind: Any) -> Tensor:
        a = mapped(p.a, cuda_abi.TILE_M, kind.dtype)
        d = mapped(p.d, cuda_abi.STORE_ROWS, kind.dtype)
        assert a.shape[1] == p.k
        assert d.shape[1] == p.n
        matrices = 2 if kind.gated else 1
        box = self.tilemoe_producer_b_box_rows(kind)
        size = ctypes.sizeof(cuda_abi.TensorMap)

        def product(rows: Tensor, index: int) -> Tensor:
            made = cuda_abi.TensorMap.from_address(p.b + index * size)
            result = rows.float() @ mapped(made, box, kind.dtype).float().t()
            if p.bias:
                bias = int(memory(p.bias, np.int64, matrices * p.experts)[index])
                result += memory(bias, DTYPES[kind.dtype], p.n).float()
            return result

        for band in memory(p.bands, BAND_DTYPE, self.plan.sizes.bands):
            at = slice(int(band["row"]), int(band["row"]) + int(band["rows"]))
            value = ACTIVATIONS[p.activation](product(a[at], int(band["expert"])))
            if kind.gated:
                value = value * product(a[at], int(band["expert"]) + p.experts)
            d[at] = value.to(d.dtype)
        return d

    def _ship(self, view: Any, out: Tensor) -> Tensor:
        """Rows to their owners; this rank's receive room."""
        address = self._block(view) + view.offsets.recv
        count = int(self.plan.recv_row[-1])
        recv = memory(address, out.dtype, count, out.shape[1])
        sent: list[list[Any]] = [[] for _ in range(view.world)]
        for segment in self.plan.segments:
            begin, rows = int(segment["src_row"]), int(segment["rows"])
            sent[segment["owner"]].append((int(segment["dst_row"]), out[begin : begin + rows]))
        for pieces in self._meet(sent) or []:
            for row, values in pieces[view.rank]:
                recv[row : row + len(values)] = values
        return recv

    def _scale(self, p: Any, out: Tensor, recv: Tensor, y: Tensor) -> None:
        ids = memory(p.expert_ids, np.int32, p.tokens, p.topk)
        positions = memory(p.positions, np.int32, p.tokens, p.topk)
        weights = memory(p.weights, np.float32, p.tokens, p.topk)
        first = p.view.rank * p.local_experts
        for t in range(p.tokens):
            total = torch.zeros(p.n)
            for k in range(p.topk):
                expert = int(ids[t, k])
                if expert < 0:
                    continue
                if first <= expert < first + p.local_experts:
                    row = out[self.plan.run_row[expert - first, p.view.rank] + positions[t, k]]
                else:
                    row = recv[self.plan.recv_row[expert] + positions[t, k]]
                total += float(weights[t, k]) * row.float()
            y[t] = total.to(y.dtype)

    def _tell(
        self, view: Any, outcome: int, peer: int, seen: int, wanted: int, wait: int = 0
    ) -> int:
        host = outcome in (cuda_abi.Outcome.HOST_FAILURE, cuda_abi.Outcome.OUT_OF_STEP)
        record = cuda_abi.ErrorRecord(outcome, wait, peer if host else view.rank, peer)
        record.seen, record.wanted, record.epoch = seen, wanted, self.epoch
        size = ctypes.sizeof(record)
        told = cuda_abi.ErrorRecord.from_address(view.host_error)
        if not told.outcome:
            ctypes.memmove(view.host_error, ctypes.addressof(record), size)
        block = self._block(view)
        if self.failed and not memory(block, np.uint32, 2)[1]:
            ctypes.memmove(block + 8, ctypes.addressof(record), size)
            memory(block, np.uint32, 2)[:] = 1
        return outcome


class FakeLink:
    """Of the transport: symmetric memory that only its own rank can reach."""

    def __init__(self) -> None:
        self.freed = 0
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.sizes = gather(nbytes, dist.group.WORLD)
        assert len(set(self.sizes)) == 1, "NVSHMEM wants one size on all ranks of the world"
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def free(self, block: Tensor) -> None:
        self.freed += 1

    def peer_pointer(self, block: Tensor, rank: int) -> int:
        return block.data_ptr() if rank == dist.get_rank() else 1


class NoWaits(TorchFunctionMode):
    """Refuses what would wait for a device; not inside the library."""

    def __init__(self, library: FakeLibrary) -> None:
        super().__init__()
        self._library = library

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = getattr(function, "__name__", "")
        assert self._library.inside or name not in WAITS, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the current stream is captured in a graph."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


class Stream:
    cuda_stream = 1

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._library.log.append("waits")


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
