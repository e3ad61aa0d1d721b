"""README: two set-up lines, a script, every setting and environment variable, files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_tilemoe.config_block import AdaptiveConfig, TileOverlapConfig
from ds_tilemoe.testing import run_ranks

REPO = Path(__file__).parent.parent
README = (REPO / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_two_set_up_lines_each_complete() -> None:
    lines = [block.strip() for language, block in FENCED if language == "bash"]
    assert len(lines) == 2
    run, test = lines
    for line in (run, test):
        assert "\n" not in line
        assert line.startswith(
            "python3.11 -m venv .venv && . .venv/bin/activate && pip install -e "
        )
    assert run.endswith("&& deepspeed --num_gpus 4 launch/infer.py")
    assert test.endswith("&& pytest")
    assert len(re.findall("-m venv", README)) == 2


def test_the_script_runs(tmp_path: Path) -> None:
    (script,) = (block for language, block in FENCED if language == "python")
    (tmp_path / "mine.py").write_text(script)
    results = run_ranks(tmp_path / "mine.py", 2, timeout_s=300)
    for result in results:
        assert result.returncode == 0, result.tail()
        assert "ds_tilemoe: 1 swapped" in result.stdout
        (difference,) = re.findall(r"^tensor\((\S+)\)$", result.stdout, re.MULTILINE)
        assert float(difference) < 1e-5
        assert re.search(r"^moe\.deepspeed_moe +20( +\S+){5}$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("key", TileOverlapConfig.model_fields)
def test_every_setting_has_its_row(key: str) -> None:
    field = TileOverlapConfig.model_fields[key]
    row = re.search(rf"^\| `{key}` \| (.*?) \| (.+) \|$", README, re.MULTILINE)
    assert row is not None
    values = row[1]
    if key == "adaptive":
        assert [name for name in AdaptiveConfig.model_fields if f"`{name}`" not in row[2]] == []
        return
    default = {True: "true", False: "false", 60.0: "60"}.get(field.default, f'"{field.default}"')
    default = "1" if key == "min_consumer_ctas" else default
    assert values.startswith(f"`{default}`")
    for word in re.findall(r'"\w+"', field.description or ""):
        assert word in values, f"{key} takes {word}"
    for bound in re.findall(r"from \d+ to (\d+)", field.description or ""):
        assert bound in values


def test_no_row_without_a_setting() -> None:
    table = README.split("| key | values", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert rows == list(TileOverlapConfig.model_fields)


def test_environment_variables_are_listed() -> None:
    """Those that only our code reads. Launchers and torch.distributed set the others."""
    known = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"}
    known |= {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR"}
    read = set()
    for path in [*REPO.glob("ds_tilemoe/**/*.py"), *REPO.glob("launch/**/*.py")]:
        read |= set(re.findall(r"(?:environ(?:\.get)?|getenv)[\[(]\"(\w+)\"", path.read_text()))
    assert [name for name in sorted(read - known) if f"`{name}`" not in README] == []


def test_named_files_and_functions_exist() -> None:
    import ds_tilemoe

    for path in re.findall(r"\b(?:launch|ds_configs)/\w+\.\w+", README):
        assert (REPO / path).is_file(), path
    for name in re.findall(r"ds_tilemoe\.(\w+)(?:\.(\w+))?\(", README):
        if name[0] == "testing":
            import ds_tilemoe.testing

            assert hasattr(ds_tilemoe.testing, name[1])
        else:
            assert hasattr(ds_tilemoe, name[0]), name
