"""One grouped GEMM of a layer: the producer's params, and tensor maps of its experts' weights.

Shape letters: E_l experts of this rank, N output width, K input width, M rows of the layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.errors import TileMoEError

_MAP_BYTES = ctypes.sizeof(abi.TensorMap)


def check(status: int, what: str) -> None:
    """Raise if a call of the library gave an error."""
    if status:
        raise TileMoEError(f"{what} gave cudaError {status} (see cudaGetErrorString)")


class GroupedGemm:
    """D[row] = act(A[row] B[expert]^T + bias[expert]); gated: act(gate) * up.

    Args:
        heap: gives counters, bands and the view.
        dtype: torch.bfloat16 or torch.float16, of all operands.
        a, d: addresses of A [rows, k] and D [rows, n].
        rows: most rows of the layout.
        experts: E_l.
        tile_n: columns of accumulators a tile: 128 or 256; 256 if gated.
        front: GEMM 1, which raises no flag and counts nothing; else GEMM 2.
    """

    def __init__(
        self,
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
        self._library, self._device = heap.library, heap.device
        self._experts, self._n, self._k = experts, n, k
        self._dtype = dtype
        self.kind = abi.ProducerKind(abi.DTYPES[dtype], tile_n, int(gated))
        self.params = params = abi.aligned(abi.ProducerParams)
        self._make_map(ctypes.addressof(params), a, rows, k, abi.TILE_M)
        self._make_map(
            ctypes.addressof(params) + abi.ProducerParams.d.offset, d, rows, n, abi.STORE_ROWS
        )
        params.experts, params.n, params.k = experts, n, k
        params.bands = heap.plan.view.bands
        params.activation = abi.Activation[activation.upper()]
        params.ship.view = heap.view
        self._library.tilemoe_set_counters(params, int(front))
        if front:
            params.ship.view.state = None  # no counts for IterationStats
        matrices = experts * (2 if gated else 1)
        self._maps = torch.zeros(matrices * _MAP_BYTES, dtype=torch.uint8, device=heap.device)
        self._biases = torch.zeros(matrices, dtype=torch.int64, device=heap.device)
        self._operands: tuple[int, ...] = ()
        self._held: list[Tensor] = []
        params.b = self._maps.data_ptr()

    @property
    def n_tiles(self) -> int:
        """Tiles of a band."""
        columns = self.kind.tile_n // (2 if self.kind.gated else 1)
        return -(-self._n // columns)

    def set_operands(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """Weights [n, k] and biases [n], expert by expert; gated: all gates, then all ups.

        Maps and pointers are made anew if an address has changed, in order of the current stream.
        """
        held = [_readable(weight) for weight in weights]
        given = [None if bias is None else _readable(bias) for bias in biases]
        if any(bias is not None for bias in given):
            nothing = torch.zeros(self._n, dtype=self._dtype, device=self._device)
            given = [nothing if bias is None else bias for bias in given]
        present = [bias for bias in given if bias is not None]
        operands = tuple(t.data_ptr() for t in (*held, *present))
        self._held = [*held, *present]  # copies made here live until the next call
        if operands == self._operands:
            return
        maps = torch.zeros(len(held) * _MAP_BYTES, dtype=torch.uint8)
        box_rows = self._library.tilemoe_producer_b_box_rows(self.kind)
        for i, weight in enumerate(held):
            at = maps.data_ptr() + i * _MAP_BYTES
            self._make_map(at, weight.data_ptr(), self._n, self._k, box_rows)
        self._maps.copy_(maps)
        if present:
            self._biases.copy_(torch.tensor(operands[len(held) :], dtype=torch.int64))
        self.params.bias = self._biases.data_ptr() if present else None
        self._operands = operands

    def set_grid(self, ctas: int) -> None:
        """Order of tiles for ``ctas`` CTAs."""
        self.params.group_bands = self._library.tilemoe_producer_group_bands(
            self.kind, self._n, ctas
        )

    def _make_map(self, target: int, base: int, rows: int, cols: int, box_rows: int) -> None:
        status = self._library.tilemoe_make_tensor_map(
            target, base, abi.DTYPES[self._dtype], rows, cols, box_rows
        )
        check(status, f"the tensor map of a matrix [{rows}, {cols}]")


def _readable(operand: Tensor) -> Tensor:
    """As the kernels read it: contiguous, from a multiple of 16 bytes on."""
    operand = operand.detach().contiguous()
    return operand if operand.data_ptr() % 16 == 0 else operand.clone()
