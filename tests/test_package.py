"""The package as others get it: metadata, pins, a wheel whose op builds far from the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
SOURCES = (".h", ".cpp", ".cu", ".cuh")

# One rank of the CPU backend against plain torch.
PROGRAM = """
import sys, torch, ds_tilemoe
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import load_config
from ds_tilemoe.op_builder.base import csrc_root
from ds_tilemoe.routing import Routing

class Expert:
    down_bias = None
    def __init__(self): self.down_weight = torch.randn(8, 8)
    def front(self, x): return x

T, K, E, H = 50, 2, 4, 8
torch.manual_seed(0)
x, weights = torch.randn(T, H), torch.rand(T, K)
ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
experts = [Expert() for _ in range(E)]
shape = LayerShape("layer", E, K, H, H, H, torch.float32)
backend = CpuBackend(None, load_config({}))
backend.ensure([shape], T)
counts = torch.bincount(ids.flatten(), minlength=E)
y = backend.forward(shape, experts, x, Routing(ids, weights, torch.zeros(()), counts))
stacked = torch.stack([x @ expert.down_weight.T for expert in experts], 1)
wanted = sum(stacked[torch.arange(T), ids[:, k].long()] * weights[:, k:k + 1] for k in range(K))
torch.testing.assert_close(y, wanted)
print(ds_tilemoe.__file__, csrc_root(), backend._op.__file__, sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build directory is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, copy)
    for name in ("ds_tilemoe", "csrc"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run = subprocess.run([*command, "-w", str(out), str(copy)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return path


def test_imports_are_dependencies() -> None:
    """What stands in an extra alone is imported where it is asked for, and nowhere else."""
    named = re.compile(r"[\w-]+")
    dependencies = {named.match(entry)[0] for entry in PROJECT["project"]["dependencies"]}
    own = {"ds_tilemoe", "demo", "benches", *(path.stem for path in REPO.glob("launch/*.py"))}
    extras = {
        "pytest": ["testing.py"],
        "nvshmem": ["transport.py"],
        "cuda": ["transport.py"],
        "matplotlib": ["contention_plot.py", "layer_timeline.py"],
        "flashinfer": ["peer_flashinfer.py"],
    }
    for path in [*REPO.glob("ds_tilemoe/**/*.py"), *REPO.glob("launch/**/*.py")]:
        text = path.read_text()
        found = set(re.findall(r"^ *(?:import|from) (\w+)[\w.]*(?: import| as|$)", text, re.M))
        for name in found - sys.stdlib_module_names - own - dependencies:
            assert path.name in extras.get(name, []), f"{path.name} imports {name}"


def test_wheel_holds_every_source_and_nothing_compiled(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.endswith("-py3-none-any.whl")
    for folder, target in ((REPO / "ds_tilemoe", "ds_tilemoe"), (REPO / "csrc", "ds_tilemoe/csrc")):
        files = [path for path in folder.rglob("*") if path.suffix in (".py", *SOURCES)]
        missing = [path for path in files if f"{target}/{path.relative_to(folder)}" not in names]
        assert missing == []
    allowed = {".py", *SOURCES}
    inside = [name for name in names if name.startswith("ds_tilemoe/")]
    assert [name for name in inside if Path(name).suffix not in allowed] == []
    info = f"ds_tilemoe-{PROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"ds_tilemoe", info}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_op_builds_and_runs_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(site)]
    run = subprocess.run([*command, str(wheel)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    before = sorted(site.rglob("*"))
    cache = tmp_path / "cache"
    env = {**os.environ, "PYTHONPATH": str(site), "TORCH_EXTENSIONS_DIR": str(cache)}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    package, csrc, op = map(Path, run.stdout.splitlines()[-3:])
    assert package == site / "ds_tilemoe" / "__init__.py"
    assert csrc == site / "ds_tilemoe" / "csrc"
    assert cache in op.parents
    assert sorted(site.rglob("*")) == before, "a build wrote into the installed package"


def test_console_script_is_declared(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        text = archive.read(name).decode()
    assert "ds_tilemoe_report = ds_tilemoe.op_builder.report_cli:main" in text


def test_every_package_is_listed() -> None:
    folders = {path.parent for path in (REPO / "ds_tilemoe").rglob("*.py")}
    names = {".".join(folder.relative_to(REPO).parts) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names | {"ds_tilemoe.csrc"}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_version_is_said_once() -> None:
    import ds_tilemoe

    assert ds_tilemoe.__version__ == PROJECT["project"]["version"]
    assert f"## {ds_tilemoe.__version__}" in (REPO / "CHANGELOG.md").read_text()


def test_ranges_that_are_promised() -> None:
    project = PROJECT["project"]
    assert {"torch>=2.11,<2.14", "deepspeed>=0.19.7,<0.20"} <= set(project["dependencies"])
    extras = project["optional-dependencies"]
    assert "nvidia-nvshmem-cu13==3.4.5" in extras["cuda"]
    assert "transformers>=5.0,<5.23" in extras["hf"]


def test_what_the_cuda_op_is_built_with_is_pinned_alike() -> None:
    from ds_tilemoe.op_builder import toolkit

    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["nvcc"] == list(toolkit.CUDA_REQUIREMENTS)
    assert {toolkit.CUTLASS_REQUIREMENT, toolkit.NVSHMEM_REQUIREMENT} <= set(extras["cuda"])
    installed = (REPO / ".ci" / "run").read_text()
    for requirement in (*extras["nvcc"], toolkit.CUTLASS_REQUIREMENT, toolkit.NVSHMEM_REQUIREMENT):
        assert requirement in installed


def test_tools_are_pinned_alike() -> None:
    pins = PROJECT["project"]["optional-dependencies"]["dev"]
    assert [pin for pin in pins if not re.fullmatch(r"[\w-]+==[\d.]+", pin)] == []
    named = re.findall(r"\(([\w-]+==[\d.]+)\)", (REPO / ".pre-commit-config.yaml").read_text())
    tools = {pin.split("==")[0] for pin in named}
    assert tools == {"ruff", "mypy", "clang-format", "codespell"}
    assert set(named) <= set(pins)


@pytest.mark.parametrize("tool", ["ruff", "mypy", "clang-format", "codespell", "pytest"])
def test_pinned_tools_are_those_that_run(tool: str) -> None:
    from importlib.metadata import version

    assert f"{tool}=={version(tool)}" in PROJECT["project"]["optional-dependencies"]["dev"]
