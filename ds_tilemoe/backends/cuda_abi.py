"""ctypes mirror of the C ABI of the CUDA library: structs, enums and prototypes, same bytes.

One class a struct of csrc, same names and order; tests/test_cuda_abi.py compares the two. Pointers
are plain addresses. ctypes knows no alignas: what a struct holds to come to its alignment is in
fields of their own, whose names begin with ``pad``.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import (
    POINTER,
    Structure,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, TypeVar

import torch

S = TypeVar("S", bound=Structure)

TILE_M = 128  # kProducerTileM, the only height of a tile
STORE_ROWS = 64  # kProducerStoreRows
TILE_NS = (128, 256)
MAX_WORLD = 72  # kMaxWorld
MAX_LOCAL_EXPERTS = 1024  # kPlanMaxLocalExperts
STRUCT_ALIGNMENT = 64  # of a TensorMap, and so of what holds one


class Dtype(enum.IntEnum):
    BFLOAT16 = 0
    FLOAT16 = 1


class Activation(enum.IntEnum):
    NONE = 0
    GELU = 1
    SILU = 2
    RELU = 3


class Mover(enum.IntEnum):
    SM = 0
    NONE = 1
    SEQUENTIAL = 2


class Outcome(enum.IntEnum):
    OK = 0
    RANK_FAILURE = 1
    LAYER_MISMATCH = 2
    CAPACITY = 3
    DEADLINE = 4
    PLAN_OVERFLOW = 5


class Wait(enum.IntEnum):
    NONE = 0
    COUNTS = 1
    BAND = 2
    ARRIVALS = 3


DTYPES = {torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}


class PlanParams(Structure):
    _fields_ = [
        (name, c_int32)
        for name in (
            "world",
            "rank",
            "local_experts",
            "tile_m",
            "layout",
            "bands_per_segment",
            "local_tail_bands",
            "chunk_rows",
        )
    ]


class PlanSizes(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("valid_rows", c_int64),
        ("bands", c_int32),
        ("remote_bands", c_int32),
        ("segments", c_int32),
        ("chunks", c_int32),
    ]


class PlanView(Structure):
    _fields_ = [
        ("sizes", PlanSizes),
        ("expert_row", c_void_p),
        ("run_row", c_void_p),
        ("bands", c_void_p),
        ("segments", c_void_p),
        ("chunks", c_void_p),
        ("arrival_target", c_void_p),
        ("dispatch_row", c_void_p),
        ("recv_row", c_void_p),
    ]


class PlanCapacity(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("bands", c_int32),
        ("segments", c_int32),
        ("chunks", c_int32),
    ]


class PlanKernelParams(Structure):
    _fields_ = [
        ("params", PlanParams),
        ("capacity", PlanCapacity),
        ("view", PlanView),
        ("sizes", c_void_p),
        ("overflow", c_void_p),
        ("counts", c_void_p),
    ]


class BlockShape(Structure):
    _fields_ = [("world", c_int32), ("max_experts", c_int32), ("recv_bytes", c_int64)]


class BlockOffsets(Structure):
    _fields_ = [
        ("counts", c_int64),
        ("count_row_bytes", c_int64),
        ("arrivals", c_int64),
        ("recv", c_int64),
        ("block_bytes", c_int64),
    ]


class ErrorRecord(Structure):
    _fields_ = [
        ("outcome", c_int32),
        ("wait", c_int32),
        ("rank", c_int32),
        ("peer", c_int32),
        ("band", c_int64),
        ("seen", c_uint64),
        ("wanted", c_uint64),
        ("epoch", c_uint64),
    ]


class IterationStats(Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            "first_segment_ready",
            "producer_end",
            "last_put",
            "last_arrival",
            "segments",
            "backlog_at_producer_end",
            "chunks_drained",
            "idle_spins",
            "epoch",
        )
    ]


class RankView(Structure):
    _fields_ = [
        ("world", c_int32),
        ("rank", c_int32),
        ("offsets", BlockOffsets),
        ("blocks", c_void_p),
        ("state", c_void_p),
        ("half_bytes", c_int64),
        ("wait_timeout_ns", c_int64),
        ("host_error", c_void_p),
        ("random_delay_ns", c_uint32),
    ]


class ExchangeParams(Structure):
    _fields_ = [
        ("view", RankView),
        ("plan", PlanKernelParams),
        ("counts", c_void_p),
        ("own_counts", c_void_p),
        ("layer", c_uint64),
        ("tokens", c_int64),
        ("max_tokens", c_int64),
        ("group_timeout_ns", c_int64),
        ("status", c_int32),
    ]


class ShipParams(Structure):
    _fields_ = [
        ("view", RankView),
        ("segments", c_void_p),
        ("chunks", c_void_p),
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("n_tiles", c_int32),
    ]


class TensorMap(Structure):
    _fields_ = [("words", c_uint64 * 16)]


class ProducerKind(Structure):
    _fields_ = [("dtype", c_int32), ("tile_n", c_int32), ("gated", c_int32)]


class ProducerParams(Structure):
    _fields_ = [
        ("a", TensorMap),
        ("d", TensorMap),
        ("b", c_void_p),
        ("bias", c_void_p),
        ("bands", c_void_p),
        ("band_count", c_void_p),
        ("epoch", c_void_p),
        ("half_bytes", c_int64),
        ("tile_claim", c_void_p),
        ("band_flags", c_void_p),
        ("start_ns", c_void_p),
        ("end_ns", c_void_p),
        ("ship", ShipParams),
        ("drain", c_int32),
        ("experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("group_bands", c_int32),
        ("activation", c_int32),
        ("pad", c_uint8 * 16),
    ]


class ScaleParams(Structure):
    _fields_ = [
        ("view", RankView),
        ("expert_ids", c_void_p),
        ("positions", c_void_p),
        ("weights", c_void_p),
        ("run_row", c_void_p),
        ("arrival_target", c_void_p),
        ("recv_row", c_void_p),
        ("rows", c_void_p),
        ("y", c_void_p),
        ("stats", c_void_p),
        ("tokens", c_int32),
        ("topk", c_int32),
        ("n", c_int32),
        ("local_experts", c_int32),
        ("dtype", c_int32),
        ("max_ctas", c_int32),
    ]


class CombineParams(Structure):
    _fields_ = [
        ("producer", ProducerParams),
        ("kind", ProducerKind),
        ("scale", ScaleParams),
        ("mover", c_int32),
        ("num_consumer_ctas", c_int32),
        ("sms", c_int32),
        ("consumer_stream", c_void_p),
        ("begin", c_void_p),
        ("end", c_void_p),
        ("pad", c_uint8 * 8),
    ]


# Name -> (result, arguments); a cudaError_t is an int32 that the caller checks.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tilemoe_load": (c_int32, ()),
    "tilemoe_block_offsets": (None, (POINTER(BlockShape), POINTER(BlockOffsets))),
    "tilemoe_half_bytes": (c_int64, (c_int32,)),
    "tilemoe_state_bytes": (c_int64, (c_int32,)),
    "tilemoe_exchange_launch": (c_int32, (POINTER(ExchangeParams), c_void_p)),
    "tilemoe_make_tensor_map": (
        c_int32,
        (c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int32),
    ),
    "tilemoe_set_counters": (None, (POINTER(ProducerParams), c_int32)),
    "tilemoe_producer_b_box_rows": (c_int32, (ProducerKind,)),
    "tilemoe_producer_group_bands": (c_int32, (ProducerKind, c_int32, c_int32)),
    "tilemoe_producer_launch": (
        c_int32,
        (POINTER(ProducerParams), ProducerKind, c_int32, c_void_p),
    ),
    "tilemoe_combine_launch": (c_int32, (POINTER(CombineParams), c_void_p)),
}


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions of a loaded library their prototypes, and returns it."""
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def aligned(kind: type[S]) -> S:
    """A zeroed struct at an address as its alignas demands, which C++ may rely on in a copy."""
    room = ctypes.create_string_buffer(ctypes.sizeof(kind) + STRUCT_ALIGNMENT)
    return kind.from_buffer(room, -ctypes.addressof(room) % STRUCT_ALIGNMENT)
