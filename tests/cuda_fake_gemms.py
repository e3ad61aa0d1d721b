"""GEMMs, movers and the weighted sum of the fake CUDA library: see cuda_library_fake.py."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from cuda_fake_memory import DTYPES, SMS, mapped, memory
from torch import Tensor

from ds_tilemoe.backends import cuda_abi, cuda_copy, cuda_plan
from ds_tilemoe.plan_abi import BAND_DTYPE, CALL_RECORD_DTYPE, CALL_RECORDS

ACTIVATIONS = {0: lambda x: x, 1: F.gelu, 2: F.silu, 3: F.relu}


class FakeGemms:
    """Their part of FakeLibrary, with dispatch in front and the return of rows behind."""

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
        self._leave_record(scale.tokens)
        if self.outcome or self.failed:
            y.fill_(float("nan"))
            if self.failed:
                self._tell(ship.view, *self.failed)
            return 0
        self._scale(scale, out, recv, y)
        return 0

    def _leave_record(self, tokens: int) -> None:
        """Of the call at hand, until the next one's exchange or somebody who asks brings it."""
        slot = np.zeros(1, CALL_RECORD_DTYPE)
        sizes, exchange = self.plan.sizes, self.exchange
        slot["iteration"] = (*self.iteration, self.epoch)
        slot["iteration"]["segments"] = sizes.segments
        slot["times"] = (-1, 10, 20, 30, 40, 50, 60, self.scale_end)
        slot["layer"], slot["tokens"], slot["rows"] = exchange.layer, tokens, sizes.valid_rows
        slot["remote_rows"] = sum(int(s["rows"]) for s in self.plan.segments)
        word = exchange.wanted_ctas
        slot["consumer_ctas"] = memory(word, np.int32, 1)[0] if word else exchange.consumer_ctas
        slot["epoch"] = self.epoch
        self.left = slot

    def tilemoe_record_launch(self, view: Any, records: int, stream: int) -> int:
        if self.left is not None and records:
            epoch = int(self.left["epoch"][0])
            memory(records, CALL_RECORD_DTYPE, CALL_RECORDS)[epoch % CALL_RECORDS] = self.left[0]
        self.left = None
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
