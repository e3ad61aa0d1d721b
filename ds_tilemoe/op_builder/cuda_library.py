"""The library of CUDA kernels: how it is compiled and linked, how it is loaded, and where.

It is compiled and linked here and not by torch.utils.cpp_extension, which has no device-link step
and, with a CPU build of torch, no nvcc.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder.jit import compiler_version, content_key
from ds_tilemoe.op_builder.toolkit import (
    CUDA_MAJOR,
    NVSHMEM_REQUIREMENT,
    Package,
    Toolkit,
    find_nvshmem,
    host_compiler_flags,
    install_command,
)

NVSHMEM_LIBRARY = "libnvshmem_host.so.3"
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"  # sm_90a: wgmma and setmaxnreg
COMPUTE_CAPABILITY = "9.0"

# cudart is linked into our library and its symbols stay inside, as do those of NVSHMEM's device
# library: no clash with torch's CUDA runtime. The two share the primary context and its streams.
_EXPORTS = "{ global: tilemoe_*; local: *; };\n"
# ptxas says so of a kernel that is right and slow: C7510 and its like (wgmma serialised), C7508
# and its like (setmaxnreg ignored). It says it as an info, so that no -Werror catches it.
_SLOW = re.compile(r"^.*Potential Performance Loss.*$", re.MULTILINE)


@dataclass(frozen=True)
class CudaLibrary:
    """How the library is made: a ``jit.Recipe``.

    Attributes:
        name: of the op.
        root: directory of the sources; all .cu, .cuh and .h files below it enter the key.
        sources: the .cu and .cpp files to compile, one object each.
        relocatable: those of them that call device functions of NVSHMEM or of each other; they are
            linked on their own, and the rest keeps the speed of whole-program compilation.
        compiler: the host compiler's command line, without flags.
        flags: flags of each compilation that name no directory.
        toolkit, cutlass, nvshmem: what it is made with. Their versions enter the key, and their
            places do not: the result looks nothing up by a path.
    """

    name: str
    root: Path
    sources: tuple[Path, ...]
    relocatable: frozenset[Path]
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    toolkit: Toolkit
    cutlass: Package
    nvshmem: Package

    @property
    def library(self) -> str:
        """File name of the library."""
        return f"lib{self.name}.so"

    def key(self) -> str:
        """Hash of sources, headers, flags, versions, compilers and kind of machine."""
        parts = [self.name, *self.flags, _EXPORTS, compiler_version(self.compiler)]
        parts += [self.toolkit.version, self.cutlass.version, self.nvshmem.version]
        parts += [path.read_text() for path in self.sources if path.suffix == ".cpp"]
        parts += [os.environ.get(f"NVCC_{which}_FLAGS", "") for which in ("PREPEND", "APPEND")]
        return content_key(parts, self.root, (".cu", ".cuh", ".h"))

    def compile_commands(self, work: Path) -> list[list[str]]:
        """One a source."""
        includes = [f"-I{self.root}"]
        for folder in (self.cutlass.root, self.nvshmem.root / "include"):
            includes += ["-isystem", str(folder)]
        commands = []
        for source, target in zip(self.sources, self._objects(work), strict=True):
            device = ["-rdc=true"] if source in self.relocatable else []
            command = [*self._nvcc(), *self.flags, *device, *includes]
            commands.append([*command, "-c", str(source), "-o", str(target)])
        return commands

    def link_commands(self, work: Path) -> list[list[str]]:
        """The device link of the relocatable objects, and the link of all.

        The second is the host compiler's, because nvcc would link device code once more.
        """
        exports = work / "exports"
        exports.write_text(_EXPORTS)
        folders = [f"-L{self.nvshmem.root / 'lib'}", f"-L{self.toolkit.libraries}"]
        objects = self._objects(work)
        commands = []
        if self.relocatable:
            chosen = [
                str(target)
                for source, target in zip(self.sources, objects, strict=True)
                if source in self.relocatable
            ]
            linked = work / "device-link.o"
            command = [*self._nvcc(), ARCHITECTURE, "-Xcompiler", "-fPIC", "-dlink", *chosen]
            command += [*folders, "-lnvshmem_device", "-lcudadevrt", "-o", str(linked)]
            commands.append(command)
            objects = [*objects, linked]
        command = [*self.compiler, "-shared", *map(str, objects), *folders, "-lnvshmem_device"]
        command += [f"-l:{NVSHMEM_LIBRARY}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        command += [f"-Wl,--version-script={exports}", "-Wl,-z,defs"]
        commands.append([*command, "-o", str(work / self.library)])
        return commands

    def fault(self, output: str) -> str | None:
        """What ptxas says of a kernel that it had to make slow."""
        found = _SLOW.search(output)
        return found[0].strip() if found else None

    def fix(self, output: str) -> str:
        """By what the compiler said."""
        if _SLOW.search(output):
            return "no function call, and no accumulator in use, while wgmma is under way"
        if "unsupported GNU version" in output or "unsupported clang version" in output:
            return "set CXX to a compiler that this nvcc supports"
        return "see what the compiler says; for a release of ds_tilemoe, report it"

    def _nvcc(self) -> list[str]:
        return [str(self.toolkit.nvcc), *host_compiler_flags(self.compiler)]

    def _objects(self, work: Path) -> list[Path]:
        return [work / f"{number}-{path.stem}.o" for number, path in enumerate(self.sources)]


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a built library and the NVSHMEM that it is bound to. Needs no GPU.

    Raises:
        BuildError: it does not load, or NVSHMEM's host and device library differ.
    """
    try:
        _open_nvshmem()
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{str(path)!r} was built and does not load ({error}); wanted a library for this "
            f"machine; fix: remove {str(path.parent)!r} and start again"
        ) from error
    versions = [(ctypes.c_int32 * 3)() for _ in range(2)]
    library.tilemoe_transport_versions(*versions)
    device, host = (".".join(map(str, version)) for version in versions)
    wanted = NVSHMEM_REQUIREMENT.partition("==")[2]
    if (device, host) != (wanted, wanted):
        raise BuildError(
            f"got NVSHMEM {device} in {str(path)!r} and {host} of {NVSHMEM_LIBRARY} in this "
            f"process; wanted {wanted} of both; fix: {install_command(NVSHMEM_REQUIREMENT)}, and "
            "no other NVSHMEM on LD_LIBRARY_PATH"
        )
    return library


def _open_nvshmem() -> None:
    """Loads NVSHMEM's host library, so that the loader finds it by name when ours asks for it."""
    try:
        # torch may have brought it. A second copy would be another library with another state.
        ctypes.CDLL(NVSHMEM_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        ctypes.CDLL(str(find_nvshmem().root / "lib" / NVSHMEM_LIBRARY))


def device_obstacle(driver_library: str = "libcuda.so.1") -> str | None:
    """Why this machine cannot run the op, with the way out; None if it can. Starts the driver."""
    way_out = 'fix: run on an H100 or H200, or set "backend": "cpu"'
    try:
        driver = ctypes.CDLL(driver_library)
    except OSError:
        return f"got no NVIDIA driver ({driver_library} does not load); wanted one; {way_out}"
    if code := driver.cuInit(0):
        return (
            f"the NVIDIA driver finds no GPU that it can use (cuInit gave {code}); wanted one; "
            f"fix: see what nvidia-smi says and what CUDA_VISIBLE_DEVICES holds, or {way_out[5:]}"
        )
    version, count, number = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < CUDA_MAJOR * 1000:
        had = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return (
            f"got an NVIDIA driver for CUDA {had}; wanted {CUDA_MAJOR}.0 or newer; "
            "fix: install driver 580 or newer"
        )
    driver.cuDeviceGetCount(ctypes.byref(count))
    seen = []
    for device in range(count.value):
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(number.value)
        seen.append(".".join(map(str, capability)))
    if COMPUTE_CAPABILITY not in seen:
        return f"got GPUs of compute capability {seen}; wanted {COMPUTE_CAPABILITY}; {way_out}"
    return None
