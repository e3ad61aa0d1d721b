"""The C ABI of the CUDA library and its Python mirror have the same bytes."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from ds_tilemoe.backends import cuda_abi, cuda_functions
from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder import base, toolkit
from ds_tilemoe.op_builder.jit import find_compiler
from ds_tilemoe.stats import IterationStats

HEADERS = ("consumer/combine.h", "planner/exchange.h", "transport/transport.h")
STRUCTS = {
    name: kind
    for name, kind in vars(cuda_abi).items()
    if isinstance(kind, type)
    and issubclass(kind, ctypes.Structure)
    and kind is not ctypes.Structure
}
ENUMS = (
    cuda_abi.Dtype,
    cuda_abi.Activation,
    cuda_abi.Mover,
    cuda_abi.Outcome,
    cuda_abi.Transport,
    cuda_abi.Wait,
)
CONSTANTS = {
    "kProducerTileM": cuda_abi.TILE_M,
    "kProducerStoreRows": cuda_abi.STORE_ROWS,
    "kProducerFewRows": cuda_abi.FEW_ROWS,
    "kMaxWorld": cuda_abi.MAX_WORLD,
    "kPlanMaxLocalExperts": cuda_abi.MAX_LOCAL_EXPERTS,
}


def fields_of(kind: type[ctypes.Structure]) -> list[str]:
    return [field[0] for field in kind._fields_ if not field[0].startswith("pad")]


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, int]:
    """What the host compiler says of structs, fields, enums and constants."""
    compiler = find_compiler()
    try:
        if compiler is None:
            raise BuildError("there is no C++ compiler")
        include = toolkit.find_toolkit(compiler).libraries.parent / "include"
    except BuildError as error:
        if request.config.getoption("--require-cuda-build"):
            pytest.fail(str(error))
        pytest.skip(f"needs the headers of a CUDA toolkit: {error}")
    lines = []
    for struct, kind in STRUCTS.items():
        lines.append(f'show("{struct}", sizeof({struct}));')
        for field in fields_of(kind):
            lines.append(f'show("{struct}.{field}", offsetof({struct}, {field}));')
            lines.append(f'show("{struct}.{field} bytes", sizeof({struct}::{field}));')
    for members in ENUMS:
        for member in members:
            name = f"{members.__name__}::{member.name.lower()}"
            lines.append(f'show("{name}", static_cast<size_t>({name}));')
    lines += [f'show("{name}", {name});' for name in CONSTANTS]
    folder = tmp_path_factory.mktemp("cuda_abi")
    source = folder / "show.cpp"
    source.write_text(
        "#include <cstdio>\n"
        + "".join(f'#include "{header}"\n' for header in HEADERS)
        + "using namespace tilemoe;\n"
        'void show(const char* name, size_t value) { std::printf("%s=%zu\\n", name, value); }\n'
        "int main() {\n" + "\n".join(lines) + "\n}\n"
    )
    command = [*compiler, "-std=c++17", f"-I{base.csrc_root()}", f"-I{include}"]
    command += ["-Wno-invalid-offsetof", str(source), "-o", str(folder / "show")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    shown = subprocess.run(
        [folder / "show"], check=True, capture_output=True, text=True, timeout=10
    )
    return {name: int(value) for name, value in (x.split("=") for x in shown.stdout.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS)
def test_struct(compiled: dict[str, int], struct: str) -> None:
    kind = STRUCTS[struct]
    assert ctypes.sizeof(kind) == compiled[struct]
    for name in fields_of(kind):
        field = getattr(kind, name)
        assert field.offset == compiled[f"{struct}.{name}"], name
        assert field.size == compiled[f"{struct}.{name} bytes"], name


@pytest.mark.parametrize("members", ENUMS)
def test_enum(compiled: dict[str, int], members: type) -> None:
    for member in members:
        assert compiled[f"{members.__name__}::{member.name.lower()}"] == member


def test_constants(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS


def test_every_field_of_a_params_struct_is_mirrored() -> None:
    """Names in the headers, in order; a field that the mirror lacks would be left unset."""
    text = "".join(path.read_text() for path in base.csrc_root().rglob("*.h"))
    text = re.sub(r"//[^\n]*", "", text)
    for struct, kind in STRUCTS.items():
        body = re.search(rf"\bstruct (?:alignas\(\d+\) )?{struct} {{(.*?)\n}};", text, re.DOTALL)
        assert body is not None, struct
        names = re.findall(r"\b(\w+)(?:\[\w+\])?;", body[1])
        assert names == fields_of(kind), struct


def test_iteration_stats_are_those_of_the_layers() -> None:
    assert tuple(fields_of(cuda_abi.IterationStats)) == IterationStats._fields


def test_prototypes_name_functions_of_the_headers() -> None:
    text = "".join(path.read_text() for path in base.csrc_root().rglob("*.h"))
    for name, (_, arguments) in cuda_functions.PROTOTYPES.items():
        declared = re.search(rf"\b{name}\(([^)]*)\);", text)
        assert declared is not None, name
        given = [part for part in declared[1].split(",") if part.strip()]
        assert len(given) == len(arguments), name


def test_aligned_structs_are_zero_and_aligned() -> None:
    for _ in range(20):
        params = cuda_abi.aligned(cuda_abi.CombineParams)
        assert ctypes.addressof(params) % cuda_abi.STRUCT_ALIGNMENT == 0
        assert not any(bytes(params))
