"""How nvcc, CUTLASS and NVSHMEM are found, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_fakes import PARTS, fake_packages, fake_toolkit, program

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder import toolkit

HOST = ("c++",)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return fake_packages(tmp_path, monkeypatch)


def test_nvcc_of_cuda_home_then_path_then_packages(
    tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="got no nvcc in"):
        toolkit.find_toolkit(HOST)
    packages["nvidia-cuda-nvcc"] = "13.0.88"
    last = fake_toolkit(tmp_path / "site" / "nvidia" / "cu13")
    assert toolkit.find_toolkit(HOST).nvcc == last
    second = fake_toolkit(tmp_path / "on path")
    monkeypatch.setenv("PATH", str(second.parent), prepend=":")
    assert toolkit.find_toolkit(HOST).nvcc == second
    first = fake_toolkit(tmp_path / "home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolkit.find_toolkit(HOST).nvcc == first
    assert toolkit.find_toolkit(HOST).libraries == tmp_path / "home" / "lib64"
    # One that is not there, too old or incomplete does not hide a good one.
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    fake_toolkit(tmp_path / "on path", release="12.8")
    assert toolkit.find_toolkit(HOST).nvcc == last


def test_wrapper_on_the_path(
    tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake_toolkit(tmp_path / "real")
    wrapper = program(tmp_path / "bin" / "nvcc", f'#!/bin/sh\nexec {real} "$@"\n')
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    found = toolkit.find_toolkit(HOST)
    assert (found.nvcc, found.libraries) == (wrapper, tmp_path / "real" / "lib64")


def test_reason_tells_all_that_was_found_and_one_command(
    tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "old", "12.8").parents[1]))
    monkeypatch.setenv("PATH", str(fake_toolkit(tmp_path / "p", without=PARTS[3]).parent), ":")
    packages["nvidia-cuda-nvcc"] = "13.0.88"
    program(tmp_path / "site/nvidia/cu13/bin/nvcc", "#!/bin/sh\nexit 3\n")
    with pytest.raises(BuildError) as caught:
        toolkit.find_toolkit(HOST)
    message = str(caught.value)
    assert f"{tmp_path}/old/bin/nvcc of CUDA 12.8; " in message
    assert f"{tmp_path}/p/nvvm/bin/cicc (package nvidia-nvvm); " in message
    assert f"{tmp_path}/site/nvidia/cu13/bin/nvcc, which does not run" in message
    assert message.count("fix: ") == 1
    command = message.split("fix: ")[1]
    assert command.startswith("pip install --no-deps 'nvidia-cuda-nvcc==13.0.*' ")
    assert all(requirement in command for requirement in toolkit.CUDA_REQUIREMENTS)


@pytest.mark.parametrize("part", PARTS)
def test_incomplete_toolkit_names_the_part(
    part: str, tmp_path: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_toolkit(tmp_path / "home", without=part).parents[1]))
    with pytest.raises(BuildError, match=rf"without .*{Path(part).name} \(package nvidia-"):
        toolkit.find_toolkit(HOST)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("cutlass_library/source/include/cutlass/cutlass.h", "without .*cutlass.h.*--force-rein"),
        ("nvidia/nvshmem/lib/libnvshmem_device.a", "without .*libnvshmem_device.a"),
    ],
)
def test_package_that_lost_a_file(
    file: str, reason: str, tmp_path: Path, packages: dict[str, str]
) -> None:
    (tmp_path / "site" / file).unlink()
    with pytest.raises(BuildError, match=reason):
        toolkit.find_all(HOST)
