"""csrc/planner makes the same bytes as the Python planner, through its C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import figure_counts, params_of, plan_inputs

from ds_tilemoe.combine_plan import (
    CombinePlan,
    Layout,
    PlanParams,
    PlanSizes,
    build_plan,
    check,
    plan_bounds,
)
from ds_tilemoe.errors import PlanError
from ds_tilemoe.plan_abi import BAND_DTYPE, CHUNK_DTYPE, PARAMS_DTYPE, SEGMENT_DTYPE, SIZES_DTYPE

PLANNER = Path(__file__).parents[1] / "csrc" / "planner"
ARRAYS = tuple(field.name for field in dataclasses.fields(CombinePlan))[2:]
GUARD = 4


class PlanView(ctypes.Structure):
    _fields_ = [
        ("sizes", ctypes.c_byte * SIZES_DTYPE.itemsize),
        *((name, ctypes.c_void_p) for name in ARRAYS),
    ]


class NativePlanner:
    """The C ABI of csrc/planner/planner_c.cpp with numpy arrays."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def _call(self, name: str, *arguments) -> None:
        message = ctypes.create_string_buffer(512)
        if getattr(self._library, name)(*arguments, message, ctypes.c_size_t(len(message))):
            raise PlanError(message.value.decode())

    @staticmethod
    def _params(params: PlanParams | tuple) -> np.ndarray:
        values = params if isinstance(params, tuple) else dataclasses.astuple(params)
        return np.array([values], PARAMS_DTYPE)

    def sizes(self, params: PlanParams | tuple, counts: np.ndarray) -> PlanSizes:
        sizes = np.zeros(1, SIZES_DTYPE)
        packed = self._params(params)
        counts = np.ascontiguousarray(counts, np.int32)
        self._call("tilemoe_plan_sizes", _at(packed), _at(counts), _at(sizes))
        return PlanSizes(*sizes[0].tolist())

    def bounds(self, params: PlanParams | tuple, max_rows_in: int) -> PlanSizes:
        sizes = np.zeros(1, SIZES_DTYPE)
        rows = ctypes.c_int64(max_rows_in)
        packed = self._params(params)
        self._call("tilemoe_plan_bounds", _at(packed), rows, _at(sizes))
        return PlanSizes(*sizes[0].tolist())

    def plan(
        self, params: PlanParams, counts: np.ndarray, sizes: PlanSizes | None = None
    ) -> CombinePlan:
        """Fills arrays with a guard behind each, and looks that the guards survive."""
        sizes = sizes or self.sizes(params, counts)
        world, local_experts = params.world, params.local_experts
        lengths = {
            "expert_row": (local_experts + 1, np.int64),
            "run_row": (local_experts * world, np.int64),
            "bands": (sizes.bands, BAND_DTYPE),
            "segments": (sizes.segments, SEGMENT_DTYPE),
            "chunks": (sizes.chunks, CHUNK_DTYPE),
            "arrival_target": (world, np.int64),
            "dispatch_row": (params.experts, np.int64),
            "recv_row": (params.experts + 1, np.int64),
        }
        arrays, view = {}, PlanView()
        packed_sizes = np.array([dataclasses.astuple(sizes)], SIZES_DTYPE)
        ctypes.memmove(view.sizes, _at(packed_sizes), SIZES_DTYPE.itemsize)
        for name, (length, dtype) in lengths.items():
            arrays[name] = np.zeros(length + GUARD, dtype)
            arrays[name].view(np.uint8)[:] = 0xA5
            setattr(view, name, arrays[name].ctypes.data)
        packed = self._params(params)
        counts = np.ascontiguousarray(counts, np.int32)
        self._call("tilemoe_plan_fill", _at(packed), _at(counts), ctypes.byref(view))
        for name, array in arrays.items():
            assert (array[-GUARD:].view(np.uint8) == 0xA5).all(), f"{name} written past its end"
            arrays[name] = array[:-GUARD]
        arrays["run_row"] = arrays["run_row"].reshape(local_experts, world)
        return CombinePlan(params, sizes, **arrays)


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> NativePlanner:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("planner") / "planner.so"
    flags = ["-O2", "-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-shared", "-fPIC"]
    sources = [PLANNER / "planner.cpp", PLANNER / "planner_c.cpp"]
    subprocess.run(["g++", *flags, *sources, "-o", library], check=True, timeout=300)
    return NativePlanner(library)


def assert_same(got: CombinePlan, wanted: CombinePlan) -> None:
    assert got.sizes == wanted.sizes
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), name)
        assert getattr(got, name).tobytes() == getattr(wanted, name).tobytes()


@given(plan_inputs())
@settings(max_examples=200, deadline=None)
def test_any_plan_is_equal(native, case):
    params, counts = case
    assert_same(native.plan(params, counts), build_plan(params, counts))


@given(plan_inputs())
@settings(max_examples=50, deadline=None)
def test_any_bounds_are_equal(native, case):
    params, counts = case
    for rows in (0, 1, int(counts.max()), int(counts.sum())):
        assert native.bounds(params, rows) == plan_bounds(params, rows)


@pytest.mark.parametrize("layout", Layout)
def test_the_plan_itself_is_proved(native, layout):
    params = params_of(4, 2, rank=1, layout=layout, bands_per_segment=2, local_tail_bands=1)
    check(native.plan(params, figure_counts()), figure_counts())


def test_case_04_offsets_have_64_bits(native):
    hidden, rows = 7168, 320_000
    counts = np.zeros((4, 8), np.int32)
    counts[1, 0] = rows
    params = params_of(4, 2, tile_m=128, chunk_rows=9)
    plan = native.plan(params, counts)
    assert_same(plan, build_plan(params, counts))
    segment = plan.segments[-1]
    assert (segment["dst_row"] + segment["rows"] - 1) * hidden == 2_293_752_832
    assert plan.bands["row"].max() * hidden == 319_872 * 7168


@pytest.mark.parametrize("layout", Layout)
def test_rows_beyond_32_bits(native, layout):
    counts = np.full((4, 8), 2**31 - 1, np.int32)
    params = params_of(
        4, 2, rank=2, tile_m=2**22, layout=layout, bands_per_segment=7, chunk_rows=2**31 - 1
    )
    assert_same(native.plan(params, counts), build_plan(params, counts))


@pytest.mark.parametrize(
    "field",
    ["world", "local_experts", "tile_m", "bands_per_segment", "chunk_rows", "local_tail_bands"],
)
def test_bad_params_are_named(native, field):
    names = PARAMS_DTYPE.names
    values = list(dataclasses.astuple(params_of(4, 2)))
    values[names.index(field)] = -3
    with pytest.raises(PlanError, match=rf"PlanParams.{field}: got -3, wanted -?\d or more"):
        native.sizes(tuple(values), figure_counts())
    with pytest.raises(PlanError, match=f"PlanParams.{field}"):
        native.bounds(tuple(values), 10)


def test_bad_input_is_named(native):
    counts = figure_counts()
    params = params_of(4, 2)
    values = dataclasses.astuple(params)
    with pytest.raises(PlanError, match="rank: got 4, wanted less than world, 4"):
        native.sizes((4, 4, *values[2:]), counts)
    with pytest.raises(PlanError, match="layout: got 2, wanted 0"):
        native.sizes((*values[:4], 2, *values[5:]), counts)
    with pytest.raises(PlanError, match="max_rows_in: got -1, wanted 0 or more"):
        native.bounds(params, -1)
    with pytest.raises(PlanError, match=r"chunks: got 2147483648, .* use a larger chunk_rows"):
        native.bounds(params_of(2, 1, tile_m=2**20, chunk_rows=1), 2**31)
    with pytest.raises(PlanError, match=r"bands: got 4294967294, wanted at most 2147483647"):
        native.sizes(params_of(2, 1, tile_m=1), np.full((2, 2), 2**31 - 1, np.int32))
    sizes = native.sizes(params, counts)
    with pytest.raises(PlanError, match="plan->sizes: differs"):
        native.plan(params, counts + 1, sizes)
    counts[2, 5] = -8
    with pytest.raises(PlanError, match=r"counts\[2, 5\]: got -8, wanted 0 or more"):
        native.sizes(params, counts)
