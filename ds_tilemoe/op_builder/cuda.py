"""DeepSpeed op builder of the CUDA kernels: one library with a C ABI, no torch and no Python in it.

Compiling and linking need no GPU; only ``load`` does.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from deepspeed.ops.op_builder.builder import CUDAOpBuilder

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder.base import TileMoEBuilder
from ds_tilemoe.op_builder.cuda_library import (
    ARCHITECTURE,
    CudaLibrary,
    device_obstacle,
    open_library,
)
from ds_tilemoe.op_builder.jit import build_library, find_compiler
from ds_tilemoe.op_builder.toolkit import find_all


class CUDATileMoEBuilder(TileMoEBuilder, CUDAOpBuilder):
    """Builds all .cu files of ``csrc`` as ``libtilemoe_cuda.so`` and loads it with ctypes."""

    BUILD_VAR = "DS_BUILD_TILEMOE_CUDA"
    NAME = "tilemoe_cuda"

    def sources(self) -> list[str]:
        """Absolute paths of the .cu files, and of the host planner, for the copy-engine mover."""
        found = [*self.root.rglob("*.cu"), *self.root.glob("planner/planner.cpp")]
        return [str(path) for path in sorted(found)]

    def include_paths(self) -> list[str]:
        """The sources' own directory; those of CUTLASS and NVSHMEM are found by the build."""
        return [str(self.root)]

    def cxx_args(self) -> list[str]:
        """Flags that nvcc hands to the host compiler."""
        return ["-fPIC"]

    def nvcc_args(self) -> list[str]:
        """Flags of each compilation.

        Not DeepSpeed's: those have --use_fast_math, and an architecture list that cannot say 9.0a.
        NDEBUG: an assert in a kernel is a call, and a call makes ptxas serialise wgmma.
        """
        flags = ["-std=c++17", "-O3", "-DNDEBUG", ARCHITECTURE, "--expt-relaxed-constexpr"]
        return [*flags, *(word for flag in self.cxx_args() for word in ("-Xcompiler", flag))]

    def build(self, verbose: bool = False) -> Path:
        """Path of the library, compiled and linked if need be. Needs no GPU.

        Raises:
            BuildError: see the message for what is missing, or the command that failed.
        """
        try:
            recipe = self._recipe()
        except BuildError as error:
            raise BuildError(f"op {self.name} cannot be built: {error}") from None
        return build_library(recipe, verbose=verbose)

    def jit_load(self, verbose: bool = True) -> ctypes.CDLL:
        """As load(), without the look at what this process has loaded.

        Raises:
            BuildError: it cannot be built, or this machine cannot run it; the message says why.
        """
        # Before the compilation, which takes minutes.
        if obstacle := device_obstacle():
            raise BuildError(f"op {self.name} cannot run here: {obstacle}")
        return open_library(self.build(verbose))

    def _obstacle(self) -> str | None:
        try:
            self._recipe()
        except BuildError as error:
            return str(error)
        return None

    def _recipe(self) -> CudaLibrary:
        """Raises BuildError if something is missing."""
        sources = tuple(map(Path, self.sources()))
        if not any(path.suffix == ".cu" for path in sources):
            raise BuildError(
                f"got no .cu file below {str(self.root)!r}; wanted the CUDA sources; "
                "fix: install ds_tilemoe again"
            )
        compiler = find_compiler()
        if compiler is None:
            raise BuildError(
                "got no C++ compiler (looked for $CXX, c++, g++, clang++), which nvcc needs; "
                "fix: install g++"
            )
        toolkit, cutlass, nvshmem = find_all(compiler)
        return CudaLibrary(
            name=self.name,
            root=self.root,
            sources=sources,
            relocatable=frozenset(p for p in sources if p.parent == self.root / "transport"),
            compiler=compiler,
            flags=tuple(self.nvcc_args()),
            toolkit=toolkit,
            cutlass=cutlass,
            nvshmem=nvshmem,
        )
