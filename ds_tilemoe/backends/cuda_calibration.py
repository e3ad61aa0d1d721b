"""Runs and times the kernels for ``calibration.py``: copies to peers, and GEMMs of so many tiles.

Once a machine, on the first heap; the numbers are kept on disk.

Shape letters: W ranks, N output width, K input width.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import ds_tilemoe
from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.calibration import cached_machine, calibrate, typical
from ds_tilemoe.cost_model import Machine
from ds_tilemoe.plan_abi import BAND_DTYPE, CHUNK_DTYPE, SEGMENT_DTYPE

logger = logging.getLogger("ds_tilemoe")

_ROW_BYTES = 16 << 10
_CHUNK_ROWS = 4
_TILE_N = 256
_A_ROWS = 16 * abi.TILE_M  # bands read them in turn


def measured_machine(heap: CudaHeap, sms: int, cache_dir: str | None) -> Machine:
    """What this GPU and its links do, from disk or measured now, in a fraction of a second.

    Rows go into the peers' receive rooms: no rank may be in a call until all have come back.

    Args:
        heap: of more than one rank, connected.
        sms: of the GPU.
        cache_dir: of the block; None for the user's cache directory.

    Returns:
        The machine; an H200's, with a warning, where it cannot be measured.
    """
    try:
        return cached_machine(
            torch.cuda.get_device_name(heap.device),
            f"{heap.world} ranks",
            f"{ds_tilemoe.__version__}, CUDA {torch.version.cuda}",
            lambda: calibrate(sms, _CopyRun(heap), _GemmRun(heap, sms)),
            cache_dir,
        )
    except Exception as error:  # the peers wait for this rank
        logger.warning("the GPU could not be calibrated, an H200's numbers are taken: %s", error)
        return typical(sms)


class _CopyRun:
    """``MeasureCopy``: consumer CTAs that ship rows to the peers in turn, and wait for no flag."""

    def __init__(self, heap: CudaHeap) -> None:
        self._heap = heap
        self._room_rows = heap.needs.recv_bytes // _ROW_BYTES
        if self._room_rows < _CHUNK_ROWS:
            raise ValueError(f"the receive room has {heap.needs.recv_bytes} bytes only")

    def __call__(self, ctas: int, nbytes: int) -> float:
        heap, library = self._heap, self._heap.library
        chunks = nbytes // (_ROW_BYTES * _CHUNK_ROWS)
        segments = np.zeros(chunks, SEGMENT_DTYPE)
        number = np.arange(chunks)
        segments["src_row"] = number * _CHUNK_ROWS
        places = self._room_rows // _CHUNK_ROWS
        segments["dst_row"] = number // (heap.world - 1) % places * _CHUNK_ROWS
        segments["rows"] = _CHUNK_ROWS
        segments["owner"] = (heap.view.rank + 1 + number % (heap.world - 1)) % heap.world
        pieces = np.zeros(chunks, CHUNK_DTYPE)
        pieces["segment"], pieces["rows"] = number, _CHUNK_ROWS
        source = torch.zeros(nbytes, dtype=torch.uint8, device=heap.device)
        # Of an even epoch; arrival words of its half are zeroed by the exchange of call 2.
        words = torch.zeros(library.tilemoe_state_bytes(1), dtype=torch.uint8, device="cpu")
        state = abi.State(epoch=2, chunks=chunks)
        words[: ctypes.sizeof(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        held = [_on_device(array, heap.device) for array in (segments, pieces)]
        view = abi.RankView.from_buffer_copy(heap.view)
        on_device = words.to(heap.device)
        view.state, view.host_error = on_device.data_ptr(), None
        view.half_bytes = library.tilemoe_half_bytes(1)
        params = abi.ShipParams(
            view=view,
            segments=held[0].data_ptr(),
            chunks=held[1].data_ptr(),
            rows=source.data_ptr(),
            row_bytes=_ROW_BYTES,
            n_tiles=1,
        )
        return _time(
            lambda stream: library.tilemoe_consumer_launch(params, ctas, stream), heap.device
        )


class _GemmRun:
    """``MeasureGemm``: the producer without flags, tiles of 256 columns, bf16."""

    def __init__(self, heap: CudaHeap, sms: int) -> None:
        self._heap, self._sms = heap, sms

    def __call__(self, tiles: int, k: int) -> float:
        heap, library = self._heap, self._heap.library
        n_tiles = next(n for n in (4, 2, 1) if tiles % n == 0)
        n, bands = n_tiles * _TILE_N, tiles // n_tiles
        plan = np.zeros(bands, BAND_DTYPE)
        plan["row"] = np.arange(bands) % (_A_ROWS // abi.TILE_M) * abi.TILE_M
        plan["rows"] = abi.TILE_M
        a, b = (
            torch.randn(rows, k, device=heap.device).to(torch.bfloat16) for rows in (_A_ROWS, n)
        )
        d = torch.empty(_A_ROWS, n, dtype=torch.bfloat16, device=heap.device)
        kind = abi.ProducerKind(abi.Dtype.BFLOAT16, _TILE_N, 0)
        params = abi.aligned(abi.ProducerParams)

        def set_map(target: int, matrix: Tensor, box_rows: int) -> None:
            status = library.tilemoe_make_tensor_map(
                target, matrix.data_ptr(), kind.dtype, *matrix.shape, box_rows
            )
            check(status, "a tensor map of the calibration")

        for name, matrix, box_rows in (
            ("a", a, abi.TILE_M),
            ("a_few", a, abi.FEW_ROWS),
            ("d", d, abi.STORE_ROWS),
            ("d_few", d, abi.FEW_ROWS),
        ):
            at = getattr(abi.ProducerParams, name).offset
            set_map(ctypes.addressof(params) + at, matrix, box_rows)
        host_map = abi.aligned(abi.TensorMap)
        set_map(ctypes.addressof(host_map), b, library.tilemoe_producer_b_box_rows(kind))
        held = [
            _on_device(np.frombuffer(bytes(host_map), np.uint8), heap.device),
            _on_device(plan, heap.device),
            _on_device(np.array([bands, 0], np.int32), heap.device),
        ]
        params.b, params.bands, params.band_count = (tensor.data_ptr() for tensor in held)
        params.tile_claim = held[2].data_ptr() + 4
        params.experts, params.n, params.k = 1, n, k
        params.group_bands = library.tilemoe_producer_group_bands(kind, n, self._sms)
        return _time(
            lambda stream: library.tilemoe_producer_launch(params, kind, self._sms, stream),
            heap.device,
        )


def _time(launch: Callable[[int], int], device: torch.device) -> float:
    """ns of one launch, behind a warm device."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    check(launch(stream.cuda_stream), "a launch of the calibration")
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e6


def _on_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.view(np.uint8).copy()).to(device)
