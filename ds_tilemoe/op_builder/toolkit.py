"""Finds what the CUDA op is made with: nvcc and its parts, CUTLASS, NVSHMEM.

Each is looked for where pip puts it; nvcc first in ``CUDA_HOME`` and on the path. What is missing
is said with the command that brings it. No torch: a CPU build has no CUDA_HOME of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ds_tilemoe.errors import BuildError

CUDA_MAJOR = 13  # NVSHMEM's device library wants an nvlink that is not older
CUDA_REQUIREMENTS = (
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
)
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
NVSHMEM_REQUIREMENT = "nvidia-nvshmem-cu13==3.4.5"

Found = TypeVar("Found")

# A file of each package that nvcc needs beside it: pip can install nvcc without them.
_PARTS = {
    "nvidia-cuda-nvcc": ("bin/ptxas", "bin/nvlink"),
    "nvidia-cuda-crt": ("include/crt/host_config.h",),
    "nvidia-nvvm": ("nvvm/bin/cicc",),
    "nvidia-cuda-runtime": ("include/cuda_runtime.h", "lib*/libcudart_static.a"),
    "nvidia-cuda-cccl": ("include/cccl/cuda/std/cstdint",),
}


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler that can be used.

    Attributes:
        nvcc: the program; may be a wrapper, and so says nothing of where the rest is.
        version: all that it prints for ``--version``.
        libraries: directory of libcudart_static.a and libcudadevrt.a.
    """

    nvcc: Path
    version: str
    libraries: Path


@dataclass(frozen=True)
class Package:
    """An installed package: its version, and the directory of what we need of it."""

    version: str
    root: Path


def find_all(compiler: Sequence[str]) -> tuple[Toolkit, Package, Package]:
    """CUDA toolkit, CUTLASS and NVSHMEM.

    Args:
        compiler: the host compiler's command line, without which nvcc says nothing of itself.

    Raises:
        BuildError: a line for each that is not there.
    """
    missing = []

    def attempt(find: Callable[[], Found]) -> Found | None:
        try:
            return find()
        except BuildError as error:
            missing.append(str(error))
            return None

    toolkit = attempt(lambda: find_toolkit(compiler))
    cutlass, nvshmem = attempt(find_cutlass), attempt(find_nvshmem)
    if toolkit is None or cutlass is None or nvshmem is None:
        raise BuildError("\n".join(missing))
    return toolkit, cutlass, nvshmem


def find_toolkit(compiler: Sequence[str]) -> Toolkit:
    """The first nvcc that is complete and new enough: of $CUDA_HOME, the path, pip's package.

    Args:
        compiler: as for find_all.

    Raises:
        BuildError: there is none; the message tells what is wrong with each that was found.
    """
    refused = []
    for nvcc in _nvcc_places():
        found = _examine(str(nvcc), compiler)
        if isinstance(found, Toolkit):
            return found
        refused.append(found)
    seen = "; ".join(refused) or "no nvcc in $CUDA_HOME/bin, on the path or among pip's packages"
    raise BuildError(
        f"got {seen}; wanted nvcc of CUDA {CUDA_MAJOR} with its parts; "
        f"fix: {install_command(*CUDA_REQUIREMENTS)}"
    )


def find_cutlass() -> Package:
    """CUTLASS; ``root`` holds the folder ``cutlass``.

    Raises:
        BuildError: not there, or not the version that we build with.
    """
    return _find(CUTLASS_REQUIREMENT, "cutlass_library/source/include", ("cutlass/cutlass.h",))


def find_nvshmem() -> Package:
    """NVSHMEM; ``root`` holds ``include`` and ``lib``.

    Raises:
        BuildError: not there, or not the version that we build with.
    """
    files = ("include/nvshmem.h", "lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3")
    return _find(NVSHMEM_REQUIREMENT, "nvidia/nvshmem", files)


def host_compiler_flags(compiler: Sequence[str]) -> list[str]:
    """How nvcc is told of the host compiler; it takes a program, and no command line."""
    return ["-ccbin", compiler[0]] if len(compiler) == 1 else []


def install_command(*requirements: str) -> str:
    """The command that brings packages, without what they depend on: we need files of theirs."""
    return "pip install --no-deps " + shlex.join(requirements)


def _nvcc_places() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    if package := _distribution("nvidia-cuda-nvcc"):
        yield Path(str(package.locate_file("nvidia/cu13/bin/nvcc")))


def _examine(nvcc: str, compiler: Sequence[str]) -> Toolkit | str:
    """The toolkit of an nvcc, or what is wrong with it."""
    if not os.access(nvcc, os.X_OK):
        return f"no program {nvcc}"
    try:
        version = _output([nvcc, "--version"])
        # Of a wrapper's own place nothing follows; what nvcc would do tells where its files are.
        plan = _output([nvcc, *host_compiler_flags(compiler), "--dryrun", "-c", "none.cu"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"{nvcc}, which does not run ({error})"
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or int(release[1]) != CUDA_MAJOR:
        return f"{nvcc} of CUDA {release[0].split()[1] if release else '(version not said)'}"
    top_line = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    if top_line is None:
        return f"{nvcc}, which does not say where its files are"
    top = Path(os.path.normpath(top_line[1].strip()))
    for package, patterns in _PARTS.items():
        for pattern in patterns:
            if not any(top.glob(pattern)):
                return f"{nvcc} without {top / pattern} (package {package})"
    return Toolkit(Path(nvcc), version, next(top.glob("lib*/libcudart_static.a")).parent)


def _output(command: list[str]) -> str:
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=60,
        check=True,
    )
    return result.stdout


def _find(requirement: str, folder: str, files: tuple[str, ...]) -> Package:
    name, _, wanted = requirement.partition("==")
    fix = install_command(requirement)
    package = _distribution(name)
    if package is None:
        raise BuildError(f"got no package {name}; wanted version {wanted}; fix: {fix}")
    if package.version != wanted:
        raise BuildError(f"got {name} {package.version}; wanted version {wanted}; fix: {fix}")
    root = Path(str(package.locate_file(folder)))
    for file in files:
        if not (root / file).is_file():
            raise BuildError(
                f"got {name} {wanted} without {root / file}; wanted all of it; "
                f"fix: {fix} --force-reinstall"
            )
    return Package(wanted, root)


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
