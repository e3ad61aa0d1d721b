"""The grouped GEMMs of a layer: the producer's params, and tensor maps of its experts' weights.

Shape letters: T tokens of this rank, E_l experts of this rank, H hidden, F ffn, N output width, K
input width, M rows of the layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.base import Expert, LayerShape
from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_heap import CudaHeap, lasting
from ds_tilemoe.backends.cuda_limits import common_front
from ds_tilemoe.backends.cuda_plan import (
    dispatch_ctas,
    down_tile_n,
    expected_bands,
    fewer_columns,
)
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.controller import Controller
from ds_tilemoe.errors import TileMoEError

_MAP_BYTES = ctypes.sizeof(abi.TensorMap)


class OperandTable(NamedTuple):
    """Where the kernels look up the weights and biases: [matrices] tensor maps and addresses."""

    maps: Tensor
    biases: Tensor


class GroupedGemm:
    """D[row] = act(A[row] B[expert]^T + bias[expert]); gated: act(gate) * up.

    Args:
        name: of the layer, for messages.
        heap: gives counters, bands and the view.
        dtype: torch.bfloat16 or torch.float16, of all operands.
        a, d: addresses of A [rows, k] and D [rows, n].
        rows: most rows of the layout.
        experts: E_l.
        tile_n: columns of accumulators a tile: 128 or 256; 256 if gated.
        front: GEMM 1, which raises no flag and counts nothing; else GEMM 2.

    Attributes:
        kind, params: of a launch; ``dispatch`` is a part of them.
        n_tiles: tiles of a band.
    """

    @lasting
    def __init__(
        self,
        name: str,
        heap: CudaHeap,
        dtype: torch.dtype,
        *,
        a: int,
        d: int,
        rows: int,
        n: int,
        k: int,
        experts: int,
        tile_n: int,
        gated: bool = False,
        activation: str = "none",
        front: bool = False,
    ) -> None:
        self._name, self._library, self._device = name, heap.library, heap.device
        self._experts, self._n, self._k = experts, n, k
        self._dtype = dtype
        self.n_tiles = -(-n // (tile_n // 2 if gated else tile_n))
        self.kind = abi.ProducerKind(abi.DTYPES[dtype], tile_n, int(gated))
        self.params = params = abi.aligned(abi.ProducerParams)
        for name, base, columns, box_rows in (
            ("a", a, k, abi.TILE_M),
            ("a_few", a, k, abi.FEW_ROWS),
            ("d", d, n, abi.STORE_ROWS),
            ("d_few", d, n, abi.FEW_ROWS),
        ):
            at = getattr(abi.ProducerParams, name).offset
            self._make_map(ctypes.addressof(params) + at, base, rows, columns, box_rows)
        params.experts, params.n, params.k = experts, n, k
        params.bands = heap.plan.view.bands
        params.activation = abi.Activation[activation.upper()]
        params.ship.view = heap.view
        self.dispatch = params.dispatch  # a view
        self._library.tilemoe_set_counters(params, int(front))
        if front:
            params.ship.view.state = None  # no counts for IterationStats
            params.front_bands = heap.plan.front_bands
        self._matrices = experts * (2 if gated else 1)
        self._table = self._make_table()
        self._kept: dict[tuple[int, ...], OperandTable] = {}  # by operands: graphs read them
        self._nothing = torch.zeros(n, dtype=dtype, device=heap.device)  # of experts without bias
        self._operands: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        self._grid = 0

    @lasting
    def _make_table(self) -> OperandTable:
        maps = torch.zeros(self._matrices * _MAP_BYTES, dtype=torch.uint8, device=self._device)
        biases = torch.zeros(self._matrices, dtype=torch.int64, device=self._device)
        return OperandTable(maps, biases)

    def keep_operands(self) -> None:
        """A captured graph reads the present operands from now on, whatever other calls bring."""
        self._kept[self._operands] = self._table

    def set_operands(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Weights [n, k] and biases [n], expert by expert; gated: all gates, then all ups.

        Maps and pointers are made anew if an address has changed, in order of the current stream;
        that waits for the device.

        Returns:
            Whether all are read where they are. Of the others copies were made, which have to be
            made again in each call.

        Raises:
            TileMoEError: an operand has another dtype than the GEMM, or an address has changed and
                a CUDA graph is being captured.
        """
        # Of one address may come memory of another dtype. Whoever casts, as autocast does, has done
        # so before: see AutocastExpert.
        for number, operand in enumerate((*weights, *biases)):
            if operand is not None and operand.dtype != self._dtype:
                what = "weight" if number < len(weights) else "bias"
                raise TileMoEError(
                    f"layer {self._name}, {what} of local expert {number % self._experts}: got"
                    f" {operand.dtype}; wanted {self._dtype}, which the ranks have agreed on; fix:"
                    " cast the experts back, or call ds_tilemoe.apply on all ranks"
                )
        held = [readable(weight) for weight in weights]
        given = [None if bias is None else readable(bias) for bias in biases]
        present: list[Tensor] = []
        if any(bias is not None for bias in given):
            present = [self._nothing if bias is None else bias for bias in given]
        operands = tuple(t.data_ptr() for t in (*held, *present))
        self._held = [*held, *present]  # copies made here live until the next call
        in_place = all(map(is_, held, weights)) and all(map(is_, given, biases))
        if operands == self._operands:
            return in_place
        table = self._kept.get(operands)
        if table is None:
            table = self._fill_table(held, operands[len(held) :])
        self._table, self._operands = table, operands
        self.params.b = table.maps.data_ptr()
        self.params.bias = table.biases.data_ptr() if present else None
        return in_place

    def _fill_table(self, weights: Sequence[Tensor], biases: Sequence[int]) -> OperandTable:
        """The present table, or a new one where a graph reads that, with these operands."""
        if torch.cuda.is_current_stream_capturing():
            raise TileMoEError(
                "the experts' weights are not where they were in the call before, while a CUDA"
                " graph is captured; run one forward with these weights first, and keep them"
                " contiguous (autocast and transposed weights make new copies in every call)"
            )
        table = self._make_table() if self._operands in self._kept else self._table
        maps = torch.zeros(len(weights) * _MAP_BYTES, dtype=torch.uint8, device="cpu")
        box_rows = self._library.tilemoe_producer_b_box_rows(self.kind)
        for i, weight in enumerate(weights):
            at = maps.data_ptr() + i * _MAP_BYTES
            self._make_map(at, weight.data_ptr(), self._n, self._k, box_rows)
        table.maps.copy_(maps)
        if biases:
            table.biases.copy_(torch.tensor(biases, dtype=torch.int64, device="cpu"))
        return table

    def set_grid(self, ctas: int) -> None:
        """Order of tiles for ``ctas`` CTAs."""
        if ctas != self._grid:
            self._grid = ctas
            self.params.group_bands = self._library.tilemoe_producer_group_bands(
                self.kind, self._n, ctas
            )

    def _make_map(self, target: int, base: int, rows: int, cols: int, box_rows: int) -> None:
        status = self._library.tilemoe_make_tensor_map(
            target, base, abi.DTYPES[self._dtype], rows, cols, box_rows
        )
        check(status, f"the tensor map of a matrix [{rows}, {cols}]")


class Tiling(NamedTuple):
    """The GEMMs of calls of about one size; each rank's own business.

    Attributes:
        front: GEMM 1; None where torch makes the front.
        down: GEMM 2.
        is_small: GEMM 2 has no more tiles than the GPU has SMs.
    """

    front: GroupedGemm | None
    down: GroupedGemm
    is_small: bool


class LayerGemms:
    """Both GEMMs of a layer, in tiles of 256 columns and of 128 where settings leave that open.

    Args:
        shape: the layer.
        heap: where it runs.
        config: the ``tile_overlap`` block.
        rows, hidden, out: [M, H], [M, F], [M, N].
        sms: of the GPU.

    Attributes:
        downs: GEMM 2 in each tile. ``wide_down``: in the one of large calls.
    """

    def __init__(
        self,
        shape: LayerShape,
        heap: CudaHeap,
        config: TileOverlapConfig,
        rows: Tensor,
        hidden: Tensor,
        out: Tensor,
        sms: int,
    ) -> None:
        self._shape, self._heap, self._config, self._sms = shape, heap, config, sms
        self._rows, self._hidden = rows, hidden
        self._local_experts = shape.num_experts // heap.world
        wide = down_tile_n(config, shape.out)
        narrow = min(wide, 128) if config.tile_n == "auto" else wide
        self._downs = {n: self._gemm(hidden, out, tile_n=n) for n in {wide, narrow}}
        self.downs, self.wide_down = list(self._downs.values()), self._downs[wide]
        self._made: dict[tuple[str, int], dict[int, GroupedGemm]] = {}
        self._fronts: dict[int, GroupedGemm] = {}  # of the experts at hand
        self._tilings: dict[int, Tiling] = {}  # by size bucket

    def tiling(self, tokens: int) -> Tiling:
        """Of calls with about so many tokens."""
        bucket = Controller.bucket_of(tokens)
        found = self._tilings.get(bucket)
        if found is None:
            shape, config, sms = self._shape, self._config, self._sms
            bands = expected_bands(shape, self._local_experts, 1 << bucket)
            down, front = self.wide_down, self._fronts.get(256)
            if fewer_columns(config, shape.out, bands, self._local_experts, sms):
                down = self._downs[128]
            if fewer_columns(config, shape.ffn, bands, self._local_experts, sms):
                front = self._fronts.get(128, front)
            is_small = bands * down.n_tiles <= sms
            found = self._tilings[bucket] = Tiling(front, down, is_small)
        return found

    def take(self, experts: Sequence[Expert]) -> bool:
        """Reads these experts' operands from now on; whether all are read where they are.

        Raises:
            TileMoEError: dispatch is fused, and their front is no longer one GEMM; or as
                :meth:`GroupedGemm.set_operands`.
        """
        self._fronts = {}
        self._tilings.clear()
        in_place = True
        fronts = common_front(experts)
        if fronts is None and self._shape.dispatch == "fused":
            raise TileMoEError(f"layer {self._shape.name}: its front is no longer one GEMM")
        if fronts is not None:
            matrices = len(fronts[0].weights)
            gemms = self._front_gemms(fronts[0].activation, matrices)
            weights = [front.weights[i] for i in range(matrices) for front in fronts]
            biases = [front.biases[i] for i in range(matrices) for front in fronts]
            for gemm in gemms.values():
                in_place &= gemm.set_operands(weights, biases)
            self._fronts = gemms
        downs = [expert.down_weight for expert in experts]
        down_biases = [expert.down_bias for expert in experts]
        for gemm in self.downs:
            in_place &= gemm.set_operands(downs, down_biases)
        return in_place

    def keep_operands(self) -> None:
        """See :meth:`GroupedGemm.keep_operands`."""
        for gemm in (*self._fronts.values(), *self.downs):
            gemm.keep_operands()

    def _front_gemms(self, activation: str, matrices: int) -> dict[int, GroupedGemm]:
        """GEMM 1 by columns of a tile, but for the rows that it reads and the operands."""
        made = self._made.setdefault((activation, matrices), {})
        if not made:
            for tile_n in (256, 128) if matrices == 1 and self._config.tile_n == "auto" else (256,):
                options = {"gated": matrices == 2, "activation": activation, "front": True}
                gemm = self._gemm(self._rows, self._hidden, tile_n=tile_n, **options)
                if self._shape.dispatch == "fused":
                    gemm.params.dispatch = self._dispatch_params()
                made[tile_n] = gemm
        return made

    def _dispatch_params(self) -> abi.DispatchParams:
        plan, shape = self._heap.plan.view, self._shape
        senders = dispatch_ctas(self._config, self._sms) if self._heap.world > 1 else 0
        return abi.DispatchParams(
            view=self._heap.view,
            dispatch_row=plan.dispatch_row,
            recv_row=plan.recv_row,
            row_bytes=shape.hidden * shape.dtype.itemsize,
            local_experts=self._local_experts,
            num_dispatch_ctas=senders,
        )

    def _gemm(self, a: Tensor, d: Tensor, **options: Any) -> GroupedGemm:
        return GroupedGemm(
            self._shape.name,
            self._heap,
            self._shape.dtype,
            a=a.data_ptr(),
            d=d.data_ptr(),
            rows=a.shape[0],
            n=d.shape[1],
            k=a.shape[1],
            experts=self._local_experts,
            **options,
        )


def readable(operand: Tensor) -> Tensor:
    """As the kernels read it: contiguous, from a multiple of 16 bytes on; itself if it is so."""
    if operand.is_contiguous() and operand.data_ptr() % 16 == 0:
        return operand
    operand = operand.detach().contiguous()
    return operand if operand.data_ptr() % 16 == 0 else operand.clone()
