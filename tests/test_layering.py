"""The order of the files: each imports only files above it, and a few names stay in one place."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PACKAGE = REPO / "ds_tilemoe"
CSRC = REPO / "csrc"

# Top to bottom; a package's name is its __init__.py.
ORDER = [
    "errors",
    "config_block",
    "config",
    "plan_abi",
    "layout",
    "schedule",
    "plan_check",
    "combine_plan",
    "routings",
    "routing",
    "router_rules",
    "reference",
    "cost_model",
    "controller",
    "calibration",
    "simulator",
    "stats",
    "op_builder.jit",
    "op_builder.extension",
    "op_builder.base",
    "op_builder.cpu",
    "op_builder.toolkit",
    "op_builder.cuda_library",
    "op_builder.cuda",
    "op_builder",
    "op_builder.report_cli",
    "symmetric_heap",
    "transport_room",
    "transport",
    "backends.base",
    "backends.cpu",
    "backends.cuda_abi",
    "backends.cuda_functions",
    "backends.cuda_errors",
    "backends.cuda_limits",
    "backends.cuda_plan",
    "backends.cuda_growth",
    "backends.cuda_records",
    "backends.cuda_heap",
    "backends.cuda_copy",
    "backends.cuda_gemm",
    "backends.cuda_routes",
    "backends.cuda_router",
    "backends.cuda_layer",
    "backends.cuda_calibration",
    "backends.cuda_split",
    "backends.cuda_blocks",
    "backends.nccl_dispatch",
    "backends.cuda_call",
    "backends.cuda",
    "backends",
    "layers.attributes",
    "layers.experts",
    "layers.recognise",
    "layers.agreement",
    "layers.device_op",
    "layers.runtime",
    "layers.watch",
    "layers.surroundings",
    "layers.appearance",
    "layers.layer_state",
    "layers.meeting",
    "layers.native",
    "layers.survey",
    "layers",
    "report",
    "swap",
    "testing_case",
    "testing_launch",
    "testing",
    "testing_rank",
    "testing_fork",
    "",
]
# Integers, times and settings: no torch, no deepspeed. mypy checks them (pyproject.toml).
PURE = [
    "errors",
    "config_block",
    "config",
    "plan_abi",
    "layout",
    "schedule",
    "plan_check",
    "combine_plan",
    "routings",
    "cost_model",
    "controller",
    "simulator",
]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> Iterator[str]:
    """Absolute names of all that a file imports, anywhere in it."""
    path = FILES[name]
    package = ["ds_tilemoe", *path.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix("ds_tilemoe.")
                yield f"ds_tilemoe.{inner}" if inner in FILES else module


def attributes_of_package(name: str) -> set[str]:
    """What a file takes from ``ds_tilemoe`` itself: its version is fair, all else stands below."""
    nodes = [
        n for n in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(n, ast.Attribute)
    ]
    return {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "ds_tilemoe"}


def test_every_file_has_its_place() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert [name for name in FILES if name not in ORDER] == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_files_above_it(name: str) -> None:
    place = ORDER.index(name)
    for imported in imports_of(name):
        if imported.split(".")[0] != "ds_tilemoe":
            continue
        target = imported.removeprefix("ds_tilemoe").removeprefix(".")
        if target == "" and name != "":
            assert attributes_of_package(name) == {"__version__"}, f"{name} imports all of it"
            continue
        assert target in ORDER, f"{name} imports {imported}, which is no file"
        assert ORDER.index(target) < place, f"{name} imports {imported}, which stands below it"


@pytest.mark.parametrize("name", [name for name in PURE if name in FILES])
def test_pure_modules_know_no_torch(name: str) -> None:
    roots = {imported.split(".")[0] for imported in imports_of(name)}
    assert not roots & {"torch", "deepspeed", "transformers"}
    inside = {i.removeprefix("ds_tilemoe.") for i in imports_of(name) if i.startswith("ds_tilemoe")}
    assert inside <= set(PURE)


def test_mypy_checks_the_pure_modules() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["files"] == [f"ds_tilemoe/{name}.py" for name in PURE if name in FILES]


def test_only_routing_knows_the_gate_tuple() -> None:
    knowing = [n for n, path in FILES.items() if "sparse_routes" in path.read_text()]
    assert set(knowing) <= {"routing"}


def sources() -> dict[str, str]:
    """C++ and CUDA files below csrc, without comments: a comment may name what the code may not."""
    found = {}
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            found[str(path.relative_to(CSRC))] = text
    return found


def test_torch_and_python_stay_in_the_bindings() -> None:
    pattern = re.compile(r'#include\s*[<"](torch/|ATen/|c10/|pybind11|Python\.h)')
    knowing = {name for name, text in sources().items() if pattern.search(text)}
    assert knowing == {"bindings.cpp", "glance.h"}


def test_nvshmem_stays_in_the_transport_file() -> None:
    knowing = [name for name, text in sources().items() if "nvshmem" in text.lower()]
    assert [name for name in knowing if "transport" not in name] == []
    assert len(knowing) <= 1


def test_flag_instructions_stay_in_one_file() -> None:
    pattern = re.compile(r"\b(ld\.acquire|red\.(release|relaxed)|fence\.(acq_rel|proxy))")
    knowing = [name for name, text in sources().items() if pattern.search(text)]
    assert len(knowing) <= 1


def test_plan_abi_is_plain() -> None:
    text = sources()["plan_abi.h"]
    assert set(re.findall(r"#include\s*[<\"]([^>\"]+)", text)) == {"cstddef", "cstdint"}


@pytest.mark.parametrize("name", sources())
def test_sources_include_only_what_exists(name: str) -> None:
    for included in re.findall(r'#include\s*"([^"]+)"', sources()[name]):
        near, from_root = (CSRC / name).parent / included, CSRC / included
        assert near.is_file() or from_root.is_file(), f"{name} includes {included!r}"
