"""launch/bench.py: records, refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from ds_tilemoe.combine_plan import build_plan

BENCH = Path(__file__).parents[1] / "launch" / "bench.py"
SMALL = ["planner", "--local-experts", "2", "--rows", "160", "--topk", "2", "--repeats", "50"]


@pytest.fixture
def bench(monkeypatch):
    """The script as a module, without the native planner, which would be compiled."""
    spec = importlib.util.spec_from_file_location("bench_script", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "load_native_planner", lambda: (None, "not in this test"))
    return module


@pytest.mark.parametrize("routing", ["balanced", "uniform", "moderate_skew", "stress_skew"])
def test_planner_appends_a_record(bench, tmp_path, capsys, routing):
    out = tmp_path / "new" / "planner.jsonl"
    line = [
        *SMALL,
        "--routing",
        routing,
        "--layout",
        "aligned",
        "--commit",
        "abc",
        "--out",
        str(out),
    ]
    assert bench.main(line) == 0
    assert bench.main(line) == 0
    assert "native planner not timed: not in this test" in capsys.readouterr().err
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(records) == 2
    record = records[1]
    wanted = {"bench": "planner", "commit": "abc", "ranks": 4, "gemm_m": 160, "routing": routing}
    assert wanted.items() <= record.items()
    nulls = ("gpu", "driver", "dtype", "gemm_n", "gemm_k", "native_us", "native_p90_us")
    assert all(record[name] is None for name in nulls)
    assert 0 < record["python_p10_us"] <= record["python_us"] <= record["python_p90_us"]
    assert record["most_segments"] >= 3


def test_planner_times_the_native_one_beside_it(bench, tmp_path, monkeypatch):
    def native(params, counts):
        return {name: getattr(build_plan(params, counts), name) for name in bench.PLAN_ARRAYS}

    monkeypatch.setattr(bench, "load_native_planner", lambda: (native, ""))
    out = tmp_path / "planner.jsonl"
    assert bench.main([*SMALL, "--commit", "abc", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["native_us"] > 0


@pytest.mark.parametrize("fault", ["python", "native"])
def test_a_wrong_plan_is_not_timed(bench, tmp_path, monkeypatch, capsys, fault):
    def wrong(params, counts):
        plan = build_plan(params, counts)
        return dataclasses.replace(plan, arrival_target=plan.arrival_target + 1)

    def native(params, counts):
        return vars(wrong(params, counts))

    if fault == "python":
        monkeypatch.setattr(bench, "build_plan", wrong)
    else:
        monkeypatch.setattr(bench, "load_native_planner", lambda: (native, ""))
    out = tmp_path / "planner.jsonl"
    assert bench.main([*SMALL, "--commit", "abc", "--out", str(out)]) == 1
    assert not out.exists()
    assert "arrival_target" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["operator", "layer", "contention"])
def test_benches_to_come_are_refused(bench, capsys, name):
    with pytest.raises(SystemExit) as ended:
        bench.main([name])
    assert ended.value.code == 2
    assert f"{name} is not built yet; built so far: planner" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert name not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "0"], "--ranks: got '0', wanted an integer from 1 on"),
        (["--repeats", "49"], "--repeats: got '49', wanted an integer from 50 on"),
        (["--tile-m", "x"], "--tile-m: got 'x', wanted an integer"),
        (["--rows", "161"], "--rows: got 161, wanted a multiple of --topk, 2"),
        (["--tile-m", "4000000000"], "tile_m: got 4000000000, wanted an integer from 1 to"),
        (["--ranks", "2", "--routing", "stress_skew"], "one of 2 ranks cannot get 2.6 times"),
        (["--out", "/"], "--out: got '/', wanted a file that can be written"),
    ],
)
def test_bad_flags_are_named(bench, capsys, tmp_path, flags, message):
    line = [*SMALL, "--commit", "abc", "--out", str(tmp_path / "planner.jsonl"), *flags]
    try:
        code = bench.main(line)
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2)
    assert message in capsys.readouterr().err


def test_commit_comes_from_git_or_must_be_given(bench, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert bench.main(SMALL) == 1
    assert "git tells no commit" in capsys.readouterr().err
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        bench.subprocess.run([*git, *words], check=True)
    clean = bench._commit()
    assert len(clean) == 40
    (tmp_path / "docs" / "results").mkdir(parents=True, exist_ok=True)
    (tmp_path / "docs" / "results" / "planner.jsonl").write_text("{}\n")
    assert bench._commit() == clean
    (tmp_path / "file").write_text("")
    assert bench._commit() == f"{clean}-dirty"
