"""The copies of the copy-engine mover, as a stand-alone C++ program: no GPU needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    built = tmp_path_factory.mktemp("copy_plan") / "check"
    sources = [ROOT / "tests/copy_plan_check.cpp", ROOT / "csrc/planner/planner.cpp"]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined,address"]
    command = ["g++", *flags, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(built)]
    subprocess.run(command, check=True, timeout=240)
    return built


@pytest.mark.parametrize("seed", range(3))
def test_every_row_goes_once_behind_its_bands(program: Path, seed: int) -> None:
    done = subprocess.run([program, "200", str(seed)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    boxes, cut = map(int, done.stdout.split())
    assert boxes > 50, "few copies were boxes"
    assert cut > 50, "few peers got more than one copy"
