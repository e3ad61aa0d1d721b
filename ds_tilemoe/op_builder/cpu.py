"""DeepSpeed op builder of the CPU backend's extension."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

from deepspeed.ops.op_builder.builder import OpBuilder

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder.jit import Extension, find_compiler, load_extension

# std::atomic_ref of C++20 is what the shared-memory protocol is written with.
_PROBE = "#include <atomic>\n#include <Python.h>\nstatic_assert(__cpp_lib_atomic_ref >= 201806L);\n"


def csrc_root() -> Path:
    """The C++ sources: inside the package in a wheel, beside it in a source checkout.

    Raises:
        BuildError: neither place holds them.
    """
    package = Path(__file__).resolve().parent.parent
    places = [package / "csrc", package.parent / "csrc"]
    for place in places:
        if (place / "plan_abi.h").is_file():
            return place
    raise BuildError(
        f"no C++ sources: got neither of {[str(place) for place in places]}; wanted plan_abi.h in "
        "one; fix: install ds_tilemoe again"
    )


class CPUTileMoEBuilder(OpBuilder):
    """Builds and loads ``csrc/bindings.cpp``, ``csrc/cpu`` and ``csrc/planner`` as ``tilemoe_cpu``.

    Args:
        root: directory of the sources; None = those of the package.
    """

    BUILD_VAR = "DS_BUILD_TILEMOE_CPU"
    NAME = "tilemoe_cpu"

    def __init__(self, root: Path | None = None) -> None:
        super().__init__(name=self.NAME)
        self._root = root

    @property
    def root(self) -> Path:
        """Directory of the C++ sources."""
        return self._root or csrc_root()

    def absolute_name(self) -> str:
        """Name under which DeepSpeed would look for a prebuilt op; there is none."""
        return f"ds_tilemoe.op_builder.{self.NAME}"

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

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be built here. With ``verbose``, the reason is printed if not."""
        self.error_log = self._obstacle()
        if self.error_log and verbose:
            self.warning(self.error_log)
        return self.error_log is None

    def load(self, verbose: bool = False) -> ModuleType:
        """The extension module, built if need be; once a process.

        Raises:
            BuildError: see the message for the command that failed and the fix.
        """
        if self.name not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.name] = self.jit_load(verbose)
        return OpBuilder._loaded_ops[self.name]

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
