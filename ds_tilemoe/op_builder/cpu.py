"""DeepSpeed op builder of the CPU backend's extension."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder.base import TileMoEBuilder
from ds_tilemoe.op_builder.extension import Extension, load_extension
from ds_tilemoe.op_builder.jit import find_compiler

# std::atomic_ref of C++20 is what the shared-memory protocol is written with.
_PROBE = "#include <atomic>\n#include <Python.h>\nstatic_assert(__cpp_lib_atomic_ref >= 201806L);\n"


class CPUTileMoEBuilder(TileMoEBuilder):
    """Makes the module ``tilemoe_cpu`` of ``csrc/bindings.cpp``, ``csrc/cpu``, ``csrc/planner``."""

    BUILD_VAR = "DS_BUILD_TILEMOE_CPU"
    NAME = "tilemoe_cpu"

    def sources(self) -> list[str]:
        """Absolute paths of the .cpp files."""
        folders = (self.root / "cpu", self.root / "planner")
        found = [path for folder in folders for path in sorted(folder.glob("*.cpp"))]
        return [str(path) for path in (self.root / "bindings.cpp", *found)]

    def include_paths(self) -> list[str]:
        """The sources' own directory; torch's and Python's are system directories in cxx_args."""
        return [str(self.root)]

    def cxx_args(self) -> list[str]:
        """Flags of each compilation.

        No -march=native: the GEMM is torch's, which looks at the CPU itself; what is left is copies
        and short sums, so a cache may be shared by machines with different CPUs. No -ffast-math:
        results repeat bit for bit.
        """
        import torch
        from torch.utils.cpp_extension import include_paths

        system = [*include_paths(), sysconfig.get_path("include")]
        return [
            "-std=c++20",
            "-O3",
            "-fPIC",
            "-pthread",
            "-fvisibility=hidden",
            "-Wall",
            f"-DTORCH_EXTENSION_NAME={self.NAME}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(flag for path in system for flag in ("-isystem", path)),
        ]

    def extra_ldflags(self) -> list[str]:
        """Flags of the link: torch's libraries, and librt for shm_open before glibc 2.34."""
        from torch.utils.cpp_extension import library_paths

        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lrt", "-pthread"]
        return [*(f"-L{path}" for path in library_paths()), *libraries]

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """As load(), without the look at what this process has loaded."""
        if not self.is_compatible():
            raise BuildError(f"op {self.name} cannot be built: {self.error_log}")
        compiler = find_compiler()
        assert compiler is not None, "is_compatible has found it"
        return load_extension(self._extension(compiler), verbose=verbose)

    def _extension(self, compiler: tuple[str, ...]) -> Extension:
        import torch

        includes = [f"-I{path}" for path in self.include_paths()]
        return Extension(
            name=self.name,
            root=self.root,
            sources=tuple(map(Path, self.sources())),
            compiler=compiler,
            cxx_flags=(*includes, *self.cxx_args()),
            link_flags=tuple(self.extra_ldflags()),
            keys=(torch.__version__, str(torch.version.git_version)),
        )

    def _obstacle(self) -> str | None:
        """Why this op cannot be built here, with the fix; None if it can."""
        try:
            missing = [path for path in self.sources() if not Path(path).is_file()]
        except BuildError as error:
            return str(error)
        if missing:
            return f"got no {missing[0]!r}; wanted the C++ sources; fix: install ds_tilemoe again"
        compiler = find_compiler()
        if compiler is None:
            return "got no C++ compiler (looked for $CXX, c++, g++, clang++); fix: install g++"
        return _compiler_obstacle(compiler)


@functools.cache
def _compiler_obstacle(compiler: tuple[str, ...]) -> str | None:
    include = ["-isystem", sysconfig.get_path("include")]
    command = [*compiler, "-std=c++20", "-fsyntax-only", *include, "-x", "c++", "-"]
    try:
        result = subprocess.run(
            command, input=_PROBE, capture_output=True, text=True, errors="replace", timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler {compiler[0]!r} does not run ({error}); fix: set CXX to a working one"
    if result.returncode == 0:
        return None
    if "Python.h" in result.stderr:
        version = sysconfig.get_python_version()
        return (
            f"got no Python.h in {include[1]!r}; wanted the header files of Python {version}; "
            f"fix: install them (e.g. python{version}-dev)"
        )
    first = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
    return (
        f"the compiler {compiler[0]!r} lacks C++20's std::atomic_ref ({first.strip()}); "
        "fix: install GCC 10 or newer, or set CXX to such a compiler"
    )
