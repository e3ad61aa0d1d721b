"""The CUDA op's builder: what it finds, what it says, and the real kernels compiled without a GPU.

The tests that compile skip, with the reason, where nvcc, CUTLASS or NVSHMEM is missing; with
``pytest --require-cuda-build`` they fail there instead.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_fakes import fake_packages, fake_toolkit
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder import CUDATileMoEBuilder, base, cuda_library, jit, toolkit
from ds_tilemoe.op_builder import cuda as cuda_builder

KERNEL = '#include "twice.cuh"\nextern "C" int tilemoe_twice(int x) { return twice(x); }\n'
# wgmma with a failing assert in its pipeline: a call, as far as ptxas is concerned.
SLOW_KERNEL = """
#include <cstdint>
#include <cstdio>
__device__ __forceinline__ void multiply(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
__global__ void __launch_bounds__(128, 1) serialised(float* out, uint64_t a, uint64_t b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply(d, a, b);
  if (a == 7) {
    printf("no");
    asm volatile("trap;");
  }
  multiply(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


class Builder(CUDATileMoEBuilder):
    NAME = "tilemoe_cuda_test"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return fake_packages(tmp_path, monkeypatch)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny source tree, and a build cache of this test's own."""
    folder = tmp_path / "csrc"
    (folder / "common").mkdir(parents=True)
    (folder / "plan_abi.h").touch()
    (folder / "common" / "twice.cuh").write_text("inline int twice(int x) { return 2 * x; }\n")
    (folder / "common" / "twice.cu").write_text(KERNEL)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(OpBuilder._loaded_ops, Builder.NAME, raising=False)
    return folder


def test_is_compatible_says_all_that_is_missing(
    root: Path, packages: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    packages.pop("nvidia-cutlass")
    packages["nvidia-nvshmem-cu13"] = "3.6.5"
    builder = Builder(root)
    assert not builder.is_compatible()
    assert capsys.readouterr().out == ""
    assert not builder.is_compatible(verbose=True)
    told = capsys.readouterr().out
    assert "got no nvcc in" in told
    assert "fix: pip install --no-deps nvidia-cutlass==4.2.0.0\n" in told
    assert "got nvidia-nvshmem-cu13 3.6.5; wanted version 3.4.5; fix: pip install" in told
    with pytest.raises(BuildError, match=f"op {Builder.NAME} cannot be built: got no nvcc"):
        builder.build()


def test_no_sources_and_no_compiler(
    root: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(root))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="which nvcc needs; fix: install g"):
        Builder(root).build()
    (root / "common" / "twice.cu").unlink()
    with pytest.raises(BuildError, match=r"got no \.cu file.*install ds_tilemoe again"):
        Builder(root).build()


@pytest.fixture
def recipe(
    root: Path, tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], cuda_library.CudaLibrary]:
    """Makes the tiny tree's recipe anew, with a fake toolkit."""
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "home").parents[1]))
    return lambda: Builder(root)._recipe()


def test_commands(root: Path, recipe: Callable[[], cuda_library.CudaLibrary]) -> None:
    (root / "transport").mkdir()
    (root / "transport" / "put.cu").touch()
    work = root.parent
    compiles = {Path(c[c.index("-c") + 1]).name: c for c in recipe().compile_commands(work)}
    assert set(compiles) == {"twice.cu", "put.cu"}
    for command in compiles.values():
        assert {"-O3", "-DNDEBUG", "-gencode=arch=compute_90a,code=sm_90a"} <= set(command)
        assert not re.search(r"fast.math|maxrreg|-G\b", " ".join(command))
    assert "-rdc=true" in compiles["put.cu"]
    assert "-rdc=true" not in compiles["twice.cu"]
    device, link = recipe().link_commands(work)
    assert [Path(word).name for word in device if word.endswith(".o")] == [
        "1-put.o",
        "device-link.o",
    ]
    assert {"-dlink", "-lnvshmem_device", "-lcudadevrt"} <= set(device)
    assert {"-lcudart_static", "-l:libnvshmem_host.so.3"} <= set(link)
    assert not re.search("rpath", " ".join(link))
    (root / "transport" / "put.cu").unlink()
    assert len(recipe().link_commands(work)) == 1


def test_the_host_planner_is_compiled_too(
    root: Path, recipe: Callable[[], cuda_library.CudaLibrary]
) -> None:
    first = recipe().key()
    (root / "planner").mkdir()
    for name in ("planner.cpp", "planner_c.cpp"):
        (root / "planner" / name).write_text("int plan;\n")
    commands = recipe().compile_commands(root.parent)
    assert {Path(c[c.index("-c") + 1]).name for c in commands} == {"twice.cu", "planner.cpp"}
    second = recipe().key()
    (root / "planner" / "planner.cpp").write_text("int other;\n")
    assert len({first, second, recipe().key()}) == 3


def test_key_follows_what_matters_and_no_place(
    root: Path,
    tmp_path: Path,
    recipe: Callable[[], cuda_library.CudaLibrary],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = recipe().key()
    (root / "common" / "notes.md").touch()
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "elsewhere").parents[1]))
    assert recipe().key() == first
    seen = [first]
    for name in ("twice.cuh", "more.h", "more.cu"):
        (root / "common" / name).write_text("// changed\n")
        seen.append(recipe().key())
    fake_toolkit(tmp_path / "elsewhere", release="13.1")
    seen.append(recipe().key())
    for name in ("cutlass", "nvshmem"):
        found = toolkit.Package("99", tmp_path)
        monkeypatch.setattr(toolkit, f"find_{name}", lambda found=found: found)
        seen.append(recipe().key())
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    seen.append(recipe().key())
    monkeypatch.setattr(cuda_library, "compiler_version", lambda compiler: "another")
    seen.append(recipe().key())
    monkeypatch.setattr(Builder, "nvcc_args", lambda self: ["-O2"])
    seen.append(recipe().key())
    assert len(set(seen)) == len(seen)


def test_a_damaged_library_is_built_again(
    recipe: Callable[[], cuda_library.CudaLibrary],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def write_output(recipe: object, command: list[str], *_: object) -> None:
        Path(command[command.index("-o") + 1]).write_text("what a compiler makes")

    monkeypatch.setattr(jit, "_run", write_output)
    library = jit.build_library(recipe())
    library.write_text("")
    assert jit.build_library(recipe()) == library
    assert library.read_text() == "what a compiler makes"
    assert caplog.text.count("damaged: got 0 bytes with digest e3b0c44298fc; wanted 21") == 1
    monkeypatch.setattr(jit, "_run", lambda *_: pytest.fail("it runs a compiler"))
    jit.build_library(recipe())


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to the presence of Extern calls in the function 'f'",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to "
        "determine register count at entry.",
    ],
)
def test_slow_kernels_are_faults(line: str, recipe: Callable[[], cuda_library.CudaLibrary]) -> None:
    noise = "ptxas info    : (C7519) warpgroup.arrive is injected in around line 77"
    assert recipe().fault(f"{noise}\n") is None
    assert recipe().fault(f"{noise}\n{line}\n{noise}\n") == line


DRIVER = """
extern "C" int cuInit(unsigned) {{ return {init}; }}
extern "C" int cuDriverGetVersion(int* v) {{ *v = {version}; return 0; }}
extern "C" int cuDeviceGetCount(int* n) {{ *n = {count}; return 0; }}
extern "C" int cuDeviceGetAttribute(int* v, int a, int d) {{
  *v = a == 75 ? {major} + d : a == 76 ? 0 : -1;
  return 0;
}}
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"major": 8, "count": 2}, None),  # the second is 9.0
        ({"init": 100}, "finds no GPU .*cuInit gave 100.*CUDA_VISIBLE_DEVICES"),
        ({"version": 12080}, r"driver for CUDA 12\.8; wanted 13\.0 or newer; fix: .*580"),
        ({"major": 8}, r"compute capability \['8\.0'\]; wanted 9\.0; fix: "),
    ],
)
def test_device_obstacle(change: dict[str, int], reason: str | None, tmp_path: Path) -> None:
    source, library = tmp_path / "driver.cpp", tmp_path / "libcuda.so"
    values = {"init": 0, "version": 13000, "count": 1, "major": 9, **change}
    source.write_text(DRIVER.format(**values))
    compiler = jit.find_compiler()
    assert compiler is not None
    subprocess.run([*compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    obstacle = cuda_library.device_obstacle(str(library))
    if reason is None:
        assert obstacle is None
    else:
        assert obstacle is not None
        assert re.search(reason, obstacle)


def test_load_without_a_driver_is_refused_before_anything_compiles(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "libcuda-of-no-machine.so.1"
    monkeypatch.setattr(cuda_builder, "device_obstacle", lambda: cuda_library.device_obstacle(gone))
    monkeypatch.setattr(Builder, "build", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(BuildError, match=rf"cannot run here: got no NVIDIA driver \({gone}"):
        Builder(root).load()


# ---- With a real nvcc.


@pytest.fixture(scope="session")
def require_toolchain(request: pytest.FixtureRequest) -> None:
    builder = CUDATileMoEBuilder()
    if not builder.is_compatible():
        missing = "; ".join(str(builder.error_log).splitlines())
        reason = f"the CUDA op cannot be built here: {missing}"
        if request.config.getoption("--require-cuda-build"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def library(require_toolchain: None) -> Path:
    """The real kernels, in the user's build cache."""
    return CUDATileMoEBuilder().build()


@pytest.mark.usefixtures("require_toolchain")
def test_a_kernel_that_ptxas_serialises_is_an_error(root: Path) -> None:
    (root / "common" / "twice.cu").write_text(SLOW_KERNEL)
    with pytest.raises(BuildError, match=r"may not be used(.|\n)*\(C7510\)(.|\n)*fix: no function"):
        Builder(root).build()
    home = jit.cache_root() / Builder.NAME
    assert {path.suffix for path in home.iterdir()} == {".lock", ".failed"}


@pytest.mark.usefixtures("require_toolchain")
def test_a_failing_compile_names_the_error(root: Path) -> None:
    (root / "common" / "twice.cu").write_text("__global__ void k() { missing(); }\n")
    with pytest.raises(BuildError, match=r"exit \d+\): .*nvcc(.|\n)*missing(.|\n)*fix: "):
        Builder(root).build()


# The build itself takes minutes, in whichever of these tests is first.
@pytest.mark.timeout(1800)
class TestRealLibrary:
    def test_exports_only_the_c_abi(self, library: Path) -> None:
        table = run("nm", "-D", "--defined-only", str(library))
        names = {line.split()[2] for line in table.splitlines()}
        assert [name for name in names if not re.fullmatch(r"tilemoe_\w+", name)] == []
        declared = set()
        for header in base.csrc_root().rglob("*.h"):
            if header.with_suffix(".cu").is_file() or header.parent.name == "transport":
                declared |= set(re.findall(r"\b(tilemoe_\w+)\(", header.read_text()))
        assert {"tilemoe_producer_launch", "tilemoe_transport_attach"} <= declared <= names

    def test_needs_no_place_of_this_machine(self, library: Path) -> None:
        dynamic = run("readelf", "-d", str(library))
        needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
        assert not re.search(r"RPATH|RUNPATH", dynamic)
        assert "libnvshmem_host.so.3" in needed
        assert [name for name in needed if re.match(r"libcuda|libtorch|libpython", name)] == []

    def test_holds_code_for_hopper_only(self, library: Path) -> None:
        # What ptxas and nvlink write beside their code; sm_90 is NVSHMEM's own.
        targets = set(re.findall(rb"-arch (sm_\w+)", library.read_bytes()))
        assert b"sm_90a" in targets
        assert targets <= {b"sm_90a", b"sm_90"}
        if shutil.which("cuobjdump"):
            listed = run("cuobjdump", "--list-elf", str(library))
            assert len(re.findall(r"sm_90a\.cubin", listed)) > 6

    def test_opens_without_a_gpu_with_one_nvshmem(self, library: Path) -> None:
        program = (
            "import sys; from pathlib import Path; from ds_tilemoe.op_builder import cuda_library;"
            "opened = cuda_library.open_library(Path(sys.argv[1]));"
            "opened.tilemoe_producer_launch, opened.tilemoe_exchange_launch;"
            "print(opened.tilemoe_transport_attach(None, None))"
        )
        # 1: the host library is there and nobody has started it.
        assert run(sys.executable, "-c", program, str(library)).split()[-1] == "1"

    def test_other_nvshmem_is_refused(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_library, "NVSHMEM_REQUIREMENT", "nvidia-nvshmem-cu13==3.5.0")
        with pytest.raises(BuildError, match=r"got NVSHMEM 3\.4\.5 in .* and 3\.4\.5 of"):
            cuda_library.open_library(library)

    def test_second_build_compiles_nothing(
        self, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jit, "_run", lambda *_: pytest.fail("it runs a compiler"))
        assert CUDATileMoEBuilder().build() == library
        built = {path.name for path in library.parent.iterdir()}
        assert built == {"libtilemoe_cuda.so", "libtilemoe_cuda.so.sha256"}


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
