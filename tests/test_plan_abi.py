"""csrc/plan_abi.h and its Python mirror have the same bytes."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ds_tilemoe import plan_abi
from ds_tilemoe.plan_abi import CombinePlan, Layout, PlanParams, PlanSizes

CSRC = Path(__file__).parents[1] / "csrc"

MIRRORS = {
    "PlanParams": plan_abi.PARAMS_DTYPE,
    "PlanSizes": plan_abi.SIZES_DTYPE,
    "Band": plan_abi.BAND_DTYPE,
    "Segment": plan_abi.SEGMENT_DTYPE,
    "Chunk": plan_abi.CHUNK_DTYPE,
    "IterationStats": plan_abi.ITERATION_DTYPE,
    "LayerTimes": plan_abi.TIMES_DTYPE,
    "CallRecord": plan_abi.CALL_RECORD_DTYPE,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, int]:
    """What the compiler says: size of every struct, offset and size of every field, enum values."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    lines = []
    for struct, dtype in MIRRORS.items():
        lines.append(f'show("{struct}", sizeof({struct}));')
        for field in dtype.names:
            lines.append(f'show("{struct}.{field}", offsetof({struct}, {field}));')
            lines.append(f'show("{struct}.{field} bytes", sizeof({struct}::{field}));')
    for layout in Layout:
        lines.append(f'show("{layout.name}", static_cast<size_t>(Layout::{layout.name.lower()}));')
    lines.append('show("kCallRecords", kCallRecords);')
    for field in dataclasses.fields(CombinePlan)[2:]:
        # An array that PlanView does not have would not compile.
        lines.append(f'show("view {field.name}", sizeof(*PlanView::{field.name}));')
    folder = tmp_path_factory.mktemp("plan_abi")
    source = folder / "show.cpp"
    source.write_text(
        '#include <cstdio>\n#include "plan_abi.h"\nusing namespace tilemoe;\n'
        'void show(const char* name, size_t value) { std::printf("%s=%zu\\n", name, value); }\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Werror", f"-I{CSRC}", source, "-o", folder / "show"],
        check=True,
        timeout=300,
    )
    shown = subprocess.run(
        [folder / "show"], check=True, capture_output=True, text=True, timeout=10
    )
    return {name: int(value) for name, value in (x.split("=") for x in shown.stdout.splitlines())}


@pytest.mark.parametrize("struct", MIRRORS)
def test_struct(compiled, struct):
    dtype = MIRRORS[struct]
    assert dtype.itemsize == compiled[struct]
    for name in dtype.names:
        field_type, offset = dtype.fields[name][:2]
        assert offset == compiled[f"{struct}.{name}"], name
        assert field_type.itemsize == compiled[f"{struct}.{name} bytes"], name
    # Fields without gap up to the end: none is missing in the mirror.
    assert sum(dtype.fields[name][0].itemsize for name in dtype.names) == dtype.itemsize


def test_layout_values(compiled):
    assert [compiled[layout.name] for layout in Layout] == [int(layout) for layout in Layout]


def test_ring_of_call_records(compiled):
    assert compiled["kCallRecords"] == plan_abi.CALL_RECORDS
    names = plan_abi.CALL_RECORD_DTYPE.names
    assert names[-1] == "epoch", "written last: it says that the record is whole"


@pytest.mark.parametrize(
    ("mirror", "dtype"),
    [(PlanParams, plan_abi.PARAMS_DTYPE), (PlanSizes, plan_abi.SIZES_DTYPE)],
)
def test_dataclass_fields_are_those_of_the_struct(mirror, dtype):
    assert tuple(field.name for field in dataclasses.fields(mirror)) == dtype.names


def test_view_arrays_have_the_mirrors_items(compiled):
    structs = {"bands": "Band", "segments": "Segment", "chunks": "Chunk"}
    for field in dataclasses.fields(CombinePlan)[2:]:
        wanted = compiled[structs[field.name]] if field.name in structs else np.int64().itemsize
        assert compiled[f"view {field.name}"] == wanted, field.name
