"""Stand-ins for nvcc, its toolkit and pip's packages, for tests of the CUDA op's builder."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_tilemoe.op_builder import jit, toolkit

# A program that answers what the builder asks of nvcc.
NVCC = """#!/bin/sh
case "$*" in
--version) echo "Cuda compilation tools, release {release}, V{release}.1";;
*--dryrun*) echo '#$ TOP={top}/bin/..' >&2;;
*) exit 1;;
esac
"""
PARTS = [
    "bin/ptxas",
    "bin/nvlink",
    "include/crt/host_config.h",
    "nvvm/bin/cicc",
    "include/cuda_runtime.h",
    "lib64/libcudart_static.a",
    "include/cccl/cuda/std/cstdint",
]


def fake_toolkit(top: Path, release: str = "13.0", without: str = "") -> Path:
    """Makes a directory that looks like a CUDA toolkit; returns its nvcc."""
    for part in PARTS:
        if part != without:
            (top / part).parent.mkdir(parents=True, exist_ok=True)
            (top / part).touch()
    return program(top / "bin" / "nvcc", NVCC.format(release=release, top=top))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def fake_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed packages, name -> version, as the builder sees them; the test may change them.

    At first CUTLASS and NVSHMEM are there, and no nvcc.
    """
    site = tmp_path / "site"
    for file in ("cutlass_library/source/include/cutlass/cutlass.h", "nvidia/nvshmem/include"):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
    (site / "cutlass_library/source/include/cutlass/cutlass.h").touch()
    for file in ("include/nvshmem.h", "lib/libnvshmem_device.a", "lib/libnvshmem_host.so.3"):
        (site / "nvidia/nvshmem" / file).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia/nvshmem" / file).touch()
    versions = dict(
        requirement.split("==")
        for requirement in (toolkit.CUTLASS_REQUIREMENT, toolkit.NVSHMEM_REQUIREMENT)
    )

    def distribution(name: str) -> SimpleNamespace | None:
        if name not in versions:
            return None
        return SimpleNamespace(version=versions[name], locate_file=lambda file: site / file)

    monkeypatch.setattr(toolkit, "_distribution", distribution)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    compiler = jit.find_compiler()
    assert compiler is not None
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "c++").symlink_to(str(shutil.which(compiler[0])))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    return versions
