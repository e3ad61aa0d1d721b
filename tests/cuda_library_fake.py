"""The C ABI of the CUDA library, played in Python on the CPU: what each launch means, in order.

So the backend's side (params, addresses, tensor maps, order of calls, failures) is tested where
there is no GPU. Between ranks the fake uses torch.distributed instead of a symmetric heap. It reads
all it knows from the params, as kernels do.
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_tilemoe.backends import cuda, cuda_abi, cuda_heap
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.plan_abi import BAND_DTYPE, Layout, PlanParams
from ds_tilemoe.symmetric_heap import gather

DTYPES = {0: torch.bfloat16, 1: torch.float16}
ACTIVATIONS = {0: lambda x: x, 1: F.gelu, 2: F.silu, 3: F.relu}
RECV = 4096  # offset of the receive room
SMS = 132


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


class FakeLibrary:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.epoch = 0
        self.fail_combine = False
        self.params: PlanParams | None = None
        self.plan: Any = None

    def tilemoe_load(self) -> int:
        return 0

    def tilemoe_block_offsets(self, shape: Any, offsets: Any) -> None:
        offsets.recv, offsets.block_bytes = RECV, RECV + shape.recv_bytes

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

    def tilemoe_exchange_launch(self, p: Any, stream: int) -> int:
        self.log.append("exchange")
        self.epoch += 1
        plan, view = p.plan, p.view
        experts = view.world * plan.params.local_experts
        assert p.counts == plan.counts
        assert view.half_bytes >= self.tilemoe_half_bytes(plan.capacity.bands)
        own = memory(p.own_counts, np.int32, experts).copy() if p.status == 0 else None
        group = None if view.world == 1 else dist.group.WORLD
        said = gather((p.status, p.layer, p.tokens, own), group)
        self.outcome = cuda_abi.Outcome.OK
        for peer, (status, layer, tokens, _) in enumerate(said):
            for outcome, bad, seen, wanted in (
                (cuda_abi.Outcome.RANK_FAILURE, status, 0, 0),
                (cuda_abi.Outcome.LAYER_MISMATCH, layer != said[0][1], layer, said[0][1]),
                (cuda_abi.Outcome.CAPACITY, tokens > p.max_tokens, tokens, p.max_tokens),
            ):
                if bad and self.outcome == cuda_abi.Outcome.OK:
                    self.outcome = outcome
                    self._tell(view, outcome, peer, seen, wanted)
        counts = memory(p.counts, np.int32, view.world, experts)
        counts[:] = 0 if self.outcome else np.stack([row for *_, row in said])
        numbers = {name: getattr(plan.params, name) for name, _ in plan.params._fields_}
        self.params = PlanParams(**{**numbers, "layout": Layout(numbers["layout"])})
        self.plan = made = build_plan(self.params, counts)
        for name in ("bands", "segments", "chunks", "rows"):
            assert getattr(made.sizes, name) <= getattr(plan.capacity, name), name
        for name in ("expert_row", "run_row", "bands", "arrival_target", "recv_row"):
            array = getattr(made, name)
            memory(getattr(plan.view, name), array.dtype, *array.shape)[...] = array
        return 0

    def tilemoe_producer_launch(self, p: Any, kind: Any, grid: int, stream: int) -> int:
        self.log.append("front")
        assert not p.ship.view.state, "GEMM 1 would count its tiles as those of GEMM 2"
        assert not p.band_flags
        self._gemm(p, kind)
        return 0

    def tilemoe_combine_launch(self, p: Any, stream: int) -> int:
        self.log.append(cuda_abi.Mover(p.mover).name)
        assert p.consumer_stream
        assert p.begin
        assert p.end
        ship, scale = p.producer.ship, p.scale
        out = self._gemm(p.producer, p.kind)
        assert ship.rows == scale.rows == out.data_ptr()
        assert ship.row_bytes == out.shape[1] * 2
        assert ship.n_tiles == -(-out.shape[1] // p.kind.tile_n)
        y = memory(scale.y, DTYPES[scale.dtype], scale.tokens, scale.n)
        if self.fail_combine:
            y.fill_(float("nan"))
            self._tell(ship.view, cuda_abi.Outcome.DEADLINE, 0, 3, 7, cuda_abi.Wait.ARRIVALS)
            return 0
        recv = self._ship(ship.view, out)
        self._scale(scale, out, recv, y)
        if scale.stats:
            stats = cuda_abi.IterationStats.from_address(scale.stats)
            stats.epoch, stats.segments = self.epoch, self.plan.sizes.segments
        return 0

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
        address = int(memory(view.blocks, np.int64, view.world)[view.rank]) + view.offsets.recv
        count = int(self.plan.recv_row[-1])
        recv = memory(address, out.dtype, count, out.shape[1])
        sent: list[list[Any]] = [[] for _ in range(view.world)]
        for segment in self.plan.segments:
            begin, rows = int(segment["src_row"]), int(segment["rows"])
            sent[segment["owner"]].append((int(segment["dst_row"]), out[begin : begin + rows]))
        group = None if view.world == 1 else dist.group.WORLD
        for pieces in gather(sent, group):
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
    ) -> None:
        record = cuda_abi.ErrorRecord.from_address(view.host_error)
        if record.outcome:
            return
        record.wait, record.rank, record.peer = wait, view.rank, peer
        record.seen, record.wanted, record.epoch = seen, wanted, self.epoch
        record.outcome = outcome


class FakeLink:
    """Of the transport: symmetric memory that only its own rank can reach."""

    def __init__(self) -> None:
        self.freed = 0

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def free(self, block: Tensor) -> None:
        self.freed += 1

    def peer_pointer(self, block: Tensor, rank: int) -> int:
        return block.data_ptr() if rank == dist.get_rank() else 1


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeLibrary, FakeLink]:
    """Puts the fake where the library, the GPU and the transport are looked for."""
    library, link = FakeLibrary(), FakeLink()
    builder = SimpleNamespace(load=lambda: library)
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    event = SimpleNamespace(cuda_event=2, record=lambda stream: None)
    monkeypatch.setattr(cuda, "CUDATileMoEBuilder", lambda: builder)
    monkeypatch.setattr(cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cuda_abi, "bind", lambda library: library)
    monkeypatch.setattr(cuda_heap.transport, "start", lambda library: link)
    monkeypatch.setattr(
        cuda_heap, "page_locked", lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    )
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return library, link
