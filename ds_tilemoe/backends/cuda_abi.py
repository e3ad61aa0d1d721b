"""ctypes mirror of the C ABI of the CUDA library: structs and enums, same bytes.

One class a struct of csrc, same names and order; tests/test_cuda_abi.py compares the two. Pointers
are plain addresses. ctypes knows no alignas: what a struct holds to come to its alignment is in
fields of their own, whose names begin with ``pad``. The functions: cuda_functions.py.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import (
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

from ds_tilemoe.plan_abi import ITERATION_DTYPE, TIMES_DTYPE

S = TypeVar("S", bound=Structure)

TILE_M = 128  # kProducerTileM, the only height of a tile
STORE_ROWS = 64  # kProducerStoreRows
FEW_ROWS = 16  # kProducerFewRows
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
    COPY_ENGINE = 3


class Outcome(enum.IntEnum):
    OK = 0
    RANK_FAILURE = 1
    LAYER_MISMATCH = 2
    CAPACITY = 3
    DEADLINE = 4
    PLAN_OVERFLOW = 5
    HOST_FAILURE = 6
    OUT_OF_STEP = 7


class Wait(enum.IntEnum):
    NONE = 0
    COUNTS = 1
    BAND = 2
    ARRIVALS = 3
    DISPATCH = 4


class Transport(enum.IntEnum):
    MAPPED = 0
    PUT = 1


DTYPES = {torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}


def padded(*fields: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Fields of a struct that holds a TensorMap, whose size is a multiple of its alignment."""
    size = ctypes.sizeof(type("Unpadded", (Structure,), {"_fields_": fields}))
    return [*fields, ("pad", c_uint8 * (-size % STRUCT_ALIGNMENT))]


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
        ("counts", c_void_p),
        ("front_bands", c_void_p),
    ]


class BlockShape(Structure):
    _fields_ = [
        ("world", c_int32),
        ("max_experts", c_int32),
        ("max_slots", c_int32),
        ("recv_bytes", c_int64),
        ("dispatch_bytes", c_int64),
    ]


class BlockOffsets(Structure):
    _fields_ = [
        (name, c_int64)
        for name in (
            "counts",
            "count_row_bytes",
            "arrivals",
            "slot_rows",
            "slot_half_bytes",
            "recv",
            "dispatch",
            "block_bytes",
        )
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
        ("layer", c_uint64),
    ]


class IterationStats(Structure):
    _fields_ = [(name, c_int64) for name in ITERATION_DTYPE.names or ()]


class LayerTimes(Structure):
    _fields_ = [(name, c_int64) for name in TIMES_DTYPE.names or ()]


class CallRecord(Structure):
    _fields_ = [
        ("iteration", IterationStats),
        ("times", LayerTimes),
        ("layer", c_uint64),
        ("tokens", c_int64),
        ("rows", c_int64),
        ("remote_rows", c_int64),
        ("consumer_ctas", c_int32),
        ("bands", c_int32),
        ("epoch", c_uint64),
    ]


class State(Structure):
    """Device memory; here for the offsets of its words."""

    _fields_ = [
        ("epoch", c_uint64),
        ("outcome", c_int32),
        ("bands", c_int32),
        ("chunks", c_int32),
        ("segments", c_int32),
        ("consumer_ctas", c_int32),
        ("router_start_ns", c_uint64),
        ("exchanges", c_uint64),
        ("recorded", c_uint64),
        ("unheard", c_uint64),
        ("unheard_peer", c_int32),
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
        ("own_counts", c_void_p),
        ("layer", c_uint64),
        ("tokens", c_int64),
        ("max_tokens", c_int64),
        ("group_timeout_ns", c_int64),
        ("status", c_int32),
        ("consumer_ctas", c_int32),
        ("wanted_ctas", c_void_p),
        ("records", c_void_p),
        ("behind_router", c_int32),
    ]


class ShipParams(Structure):
    _fields_ = [
        ("view", RankView),
        ("segments", c_void_p),
        ("chunks", c_void_p),
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("n_tiles", c_int32),
        ("device_split", c_int32),
    ]


class DispatchParams(Structure):
    _fields_ = [
        ("view", RankView),
        ("x", c_void_p),
        ("sources", c_void_p),
        ("dispatch_row", c_void_p),
        ("recv_row", c_void_p),
        ("row_bytes", c_int64),
        ("local_experts", c_int32),
        ("num_dispatch_ctas", c_int32),
    ]


class TensorMap(Structure):
    _fields_ = [("words", c_uint64 * 16)]


class ProducerKind(Structure):
    _fields_ = [("dtype", c_int32), ("tile_n", c_int32), ("gated", c_int32)]


class ProducerParams(Structure):
    _fields_ = padded(
        ("a", TensorMap),
        ("a_few", TensorMap),
        ("d", TensorMap),
        ("d_few", TensorMap),
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
        ("dispatch", DispatchParams),
        ("front_bands", c_void_p),
        ("drain", c_int32),
        ("behind_front", c_int32),
        ("experts", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("group_bands", c_int32),
        ("activation", c_int32),
    )


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
        ("tokens", c_int32),
        ("topk", c_int32),
        ("n", c_int32),
        ("local_experts", c_int32),
        ("dtype", c_int32),
        ("max_ctas", c_int32),
        ("uncounted", c_int32),
    ]


class CombineParams(Structure):
    _fields_ = padded(
        ("producer", ProducerParams),
        ("kind", ProducerKind),
        ("scale", ScaleParams),
        ("mover", c_int32),
        ("num_consumer_ctas", c_int32),
        ("sms", c_int32),
        ("transport", c_int32),
        ("device_split", c_int32),
        ("consumer_stream", c_void_p),
        ("begin", c_void_p),
        ("end", c_void_p),
        ("pes", c_void_p),
        ("copy_engine", c_void_p),
    )


def aligned(kind: type[S]) -> S:
    """A zeroed struct at an address as its alignas demands, which C++ may rely on in a copy."""
    room = ctypes.create_string_buffer(ctypes.sizeof(kind) + STRUCT_ALIGNMENT)
    return kind.from_buffer(room, -ctypes.addressof(room) % STRUCT_ALIGNMENT)
