"""launch/bench.py: its command line, records and refusals, and the planner bench."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from full_disk import room

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import bench
from benches import contention, planner, records
from demo import options
from demo.outputs import OutputError
from ds_tilemoe.backends.cuda_abi import MAX_WORLD
from ds_tilemoe.combine_plan import build_plan

LAUNCH = Path(bench.__file__).parent
SMALL = ["planner", "--local-experts", "2", "--rows", "160", "--topk", "2", "--repeats", "50"]


@pytest.fixture(autouse=True)
def _no_native_planner(monkeypatch):
    """It would be compiled."""
    monkeypatch.setattr(planner, "load_native_planner", lambda: (None, "not in this test"))


@pytest.mark.parametrize("routing", ["balanced", "uniform", "moderate_skew", "stress_skew"])
def test_planner_appends_a_record(tmp_path, capsys, routing):
    out = tmp_path / "planner.jsonl"
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
    found = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(found) == 2
    record = found[1]
    wanted = {"bench": "planner", "commit": "abc", "ranks": 4, "gemm_m": 160, "routing": routing}
    assert wanted.items() <= record.items()
    nulls = ("gpu", "driver", "dtype", "gemm_n", "gemm_k", "native_us", "native_p90_us")
    assert all(record[name] is None for name in nulls)
    assert 0 < record["python_p10_us"] <= record["python_us"] <= record["python_p90_us"]
    assert record["most_segments"] >= 3


def test_planner_times_the_native_one_beside_it(tmp_path, monkeypatch):
    def native(params, counts):
        return {name: getattr(build_plan(params, counts), name) for name in planner.PLAN_ARRAYS}

    monkeypatch.setattr(planner, "load_native_planner", lambda: (native, ""))
    out = tmp_path / "planner.jsonl"
    assert bench.main([*SMALL, "--commit", "abc", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["native_us"] > 0


@pytest.mark.parametrize("fault", ["python", "native"])
def test_a_wrong_plan_is_not_timed(tmp_path, monkeypatch, capsys, fault):
    def wrong(params, counts):
        plan = build_plan(params, counts)
        return dataclasses.replace(plan, arrival_target=plan.arrival_target + 1)

    def native(params, counts):
        return vars(wrong(params, counts))

    if fault == "python":
        monkeypatch.setattr(planner, "build_plan", wrong)
    else:
        monkeypatch.setattr(planner, "load_native_planner", lambda: (native, ""))
    out = tmp_path / "planner.jsonl"
    assert bench.main([*SMALL, "--commit", "abc", "--out", str(out)]) == 1
    assert not out.exists()
    assert "arrival_target" in capsys.readouterr().err


def test_planner_is_for_one_process(monkeypatch, capsys, tmp_path):
    def leave(message, code):
        raise SystemExit(f"{code} {message}")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(bench, "leave", leave)
    with pytest.raises(SystemExit) as ended:
        bench.main([*SMALL, "--out", str(tmp_path / "x")])
    wanted = "2 ranks: got 2; wanted one process; fix: python launch/bench.py planner"
    assert str(ended.value) == wanted


def test_help_says_how_few_repeats_there_may_be(capsys):
    with pytest.raises(SystemExit):
        bench.main(["planner", "--help"])
    assert "50 or more, with fresh counts" in " ".join(capsys.readouterr().out.split())


def test_a_folder_is_made_for_what_is_written_there_and_for_nothing_else(tmp_path):
    out = tmp_path / "new one" / "planner.jsonl"
    line = [*SMALL, "--commit", "abc", "--out", str(out)]
    assert bench.main([*line, "--rows", "161"]) == 2
    assert not out.parent.exists()
    assert bench.main(line) == 0
    assert len(out.read_text().splitlines()) == 1


def test_a_plan_for_which_there_is_no_room_is_refused(tmp_path, monkeypatch, capsys):
    def too_large(*args, **sizes):
        raise MemoryError("Unable to allocate 4.66 TiB")

    monkeypatch.setattr(planner, "build_plan", too_large)
    line = [*SMALL, "--commit", "abc", "--out", str(tmp_path / "x.jsonl")]
    assert bench.main(line) == 2
    said = capsys.readouterr().err
    assert "planner: got Unable to allocate 4.66 TiB; wanted a case that fits" in said


def test_faults_of_the_program_are_not_taken_for_small_memory(tmp_path, monkeypatch):
    def broken(*args, **sizes):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(planner, "build_plan", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        bench.main([*SMALL, "--commit", "abc", "--out", str(tmp_path / "x.jsonl")])


def test_the_most_ranks_are_those_of_the_gpu_code():
    assert records.MOST_RANKS == MAX_WORLD


def test_a_full_disk_names_the_option_and_leaves_no_file(tmp_path, capsys):
    out = tmp_path / "planner.jsonl"
    line = [*SMALL, "--commit", "abc", "--out", str(out)]
    with room(100):
        code = bench.main(line)
    assert code == 1
    said = capsys.readouterr().err
    assert (
        f"error: --out: got '{out}' (File too large); wanted a file that can be written; " in said
    )
    assert list(tmp_path.iterdir()) == []
    assert bench.main([*line[:-1], "/dev/full"]) == 1
    assert "--out: got '/dev/full' (No space left on device); wanted " in capsys.readouterr().err
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_leaves_the_last_export(tmp_path):
    choice = SimpleNamespace(export=lambda: {"num_consumer_ctas": 8})
    trial = SimpleNamespace(controllers=[choice])
    path = tmp_path / "block.json"
    contention._export(path, trial)
    before = path.read_text()
    with room(10), pytest.raises(OutputError, match=r"^--export: got '.*' .File too large.; wan"):
        contention._export(path, trial)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


PROCESS = f"import sys; sys.path.insert(0, {str(LAUNCH)!r}); from demo.process import end, tell\n"


@pytest.mark.parametrize(
    "words",
    [
        [str(LAUNCH / "bench.py"), "--help"],
        ["-c", PROCESS + "end(0 if tell('results') else 1)"],
        ["-c", PROCESS + "print('results'); end(0)"],
    ],
    ids=["help", "told", "left in the buffer"],
)
def test_stdout_that_takes_nothing_is_no_traceback(words):
    line = [sys.executable, *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = {"stderr": subprocess.PIPE, "text": True, "env": env}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, timeout=300, check=False, **pipe)
    assert done.returncode == 1
    assert "error: stdout: got No space left on device; wanted " in done.stderr
    assert "Traceback" not in done.stderr
    with subprocess.Popen(line, stdout=subprocess.PIPE, **pipe) as process:
        process.stdout.close()  # a reader that has gone
        said = process.stderr.read()
    assert (process.returncode, said) == (1, "")


@pytest.mark.parametrize(
    ("flags", "closed", "code"),
    [
        (["--help"], ">&-", 1),
        (["operator", "--quick"], ">&-", 1),
        (["operator", "--quick"], "2>&-", 0),
        (["planner", "--repeats", "50"], "2>&-", 0),
    ],
)
def test_closed_streams(tmp_path, flags, closed, code):
    if "--help" not in flags:
        flags = [*flags, "--commit", "abc", "--out", str(tmp_path / "x.jsonl")]
    line = [sys.executable, str(LAUNCH / "bench.py"), *flags]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *line],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code == 0:
        assert "record(s) appended" in done.stdout
    else:
        assert "bench.py: error: stdout: got Bad file descriptor; wanted a place" in done.stderr


def test_help_lists_the_benches_without_torch():
    """Importing torch and DeepSpeed takes seconds; a newcomer asks for help first."""
    code = f"import sys; sys.path.insert(0, {str(LAUNCH)!r}); import bench\n"
    code += "try: bench.main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("planner", "operator", "layer"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "0"], "--ranks: got '0'; wanted an integer from 1 to 72; fix: "),
        (["--repeats", "49"], "--repeats: got '49'; wanted an integer from 50 to"),
        (["--tile-m", "x"], "--tile-m: got 'x'; wanted an integer"),
        (["--rows", "161"], "--rows: got 161; wanted a multiple of --topk, 2; fix: --rows 162"),
        (["--tile-m", "4000000000"], "--tile-m: got '4000000000'; wanted an integer from 1 to"),
        (["--ranks", "2", "--routing", "stress_skew"], "one of 2 ranks cannot get 2.6 times"),
        (["--ranks", "1000000"], "--ranks: got '1000000'; wanted an integer from 1 to 72; fix: "),
        (["--rows", "2147483646"], "--rows: got 2147483646; wanted at most 22369088 with these si"),
        (["--local-experts", "99999"], "--local-experts: got 99999; wanted at most 41943 on 4 ra"),
        (["--out", "/proc/x.jsonl"], "--out: got '/proc/x.jsonl'; wanted a file that can be writ"),
        (["--out", "/"], "--out: got '/'; wanted a file that can be written"),
        (["--out", "x.png"], "--out: got 'x.png'; wanted a name that ends in .jsonl; fix: --out x"),
        (["--commit", ""], "--commit: got ''; wanted a commit"),
        (["--mover", "sm"], "--mover: got no option of this name; wanted one that there is; fix: "),
        (
            ["--row", "16"],
            "--row: got no option of this name; wanted one that there is; fix: wri",
        ),
        (["--layout", "packed"], "--layout: got 'packed'; wanted one of compact, aligned; fix: "),
        (["--seed"], "--seed: got too few or none; wanted one argument; fix: write it behind"),
    ],
)
def test_bad_flags_are_named(capsys, tmp_path, flags, message):
    line = [*SMALL, "--commit", "abc", "--out", str(tmp_path / "planner.jsonl"), *flags]
    try:
        code = bench.main(line)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert message in said
    assert list(tmp_path.iterdir()) == []


def test_commit_comes_from_git_or_must_be_given(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert bench.main(SMALL) == 2
    assert "--commit: got none; wanted a commit that git tells of" in capsys.readouterr().err
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    clean = records.head_commit()
    assert len(clean) == 40
    (tmp_path / "docs" / "results" / "planner.jsonl").write_text("{}\n")
    assert records.head_commit() == clean
    (tmp_path / "file").write_text("")
    assert records.head_commit() == f"{clean}-dirty"


def test_times_are_medians_and_say_nothing_of_what_is_missing():
    nan = float("nan")
    found = records.microseconds("x", [nan, *range(1, 12), nan])
    assert found == {"x_us": 6.0, "x_p10_us": 2.0, "x_p90_us": 10.0}
    assert set(records.microseconds("x", [nan]).values()) == {None}
    pairs = records.ratio("r", np.array([2.0, 9.0, nan]), np.array([1.0, 3.0, 1.0]))
    assert pairs == {"r": 2.5, "r_p10": 2.1, "r_p90": 2.9}
    assert np.isnan(records.median([]))


def test_records_hold_no_nan(tmp_path):
    """Not JSON: a reader of the file would stop there."""
    with pytest.raises(ValueError):
        records.append(tmp_path / "x", {"a": float("nan")})
    records.append(tmp_path / "x", {"a": None})
    assert (tmp_path / "x").read_text().endswith('{"a": null}\n')


def test_table_lines_up():
    rows = [{"a": 1, "b": 1234.56}, {"a": None, "b": 0.12345}]
    assert records.table(rows).splitlines() == ["a      b", "1   1235", "-  0.123"]
    assert records.table([]) == ""


def test_sizes_want_all_their_numbers():
    parse = options.sizes("M,N")
    assert parse("1_000,2") == (1000, 2)
    for text in ("1", "1,2,3", "1,0", "a,b"):
        with pytest.raises(argparse.ArgumentTypeError, match="M,N"):
            parse(text)
    assert options.sizes("...")("3") == (3,)
