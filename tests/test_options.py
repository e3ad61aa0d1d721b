"""Command lines of launch/: one form of refusal, files looked at before any work. No torch."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import room

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from demo import process
from demo.options import InputError, Parser, above_zero, at_least, sizes, word
from demo.outputs import OutputError, append_whole, make_folders, need_writable, whole_file

LAUNCH = Path(process.__file__).parents[1]
FORM = re.compile(r"^\S+: error: [^:]+: got .+; wanted .+; fix: .+$")


@pytest.fixture
def parser():
    made = Parser(prog="x.py")
    made.add_argument("--count", type=int)
    made.add_argument("--other", type=at_least(0))
    made.add_argument("--on", action="store_true")
    made.add_argument("--local_rank", help=argparse.SUPPRESS)
    below = made.add_subparsers(dest="what", required=True, metavar="a|b").add_parser("a")
    below.add_argument("--kind", choices=["first", "second"])
    below.add_argument("--two", nargs=2)
    return made


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "a|b: got nothing; wanted one of them"),
        (["c"], "a|b: got 'c'; wanted one of a; fix: "),
        (["--count", "x", "a"], "--count: got 'x'; wanted a value of type int"),
        (["--on=3", "a"], "--on: got '3'; wanted no value; fix: leave the value out"),
        (["--count"], "--count: got too few or none; wanted one argument; fix: "),
        (["a", "--two", "1"], "--two: got too few or none; wanted 2 arguments; fix: "),
        (
            ["a", "--kind", "firstt"],
            "--kind: got 'firstt'; wanted one of first, second; fix: write",
        ),
        (["a", "--knd", "first"], "--knd: got no option of this name; wanted one that there is; f"),
        (["--coun=1", "a"], "--coun=1: got no option of this name"),  # no cut names
        (["a", "more"], "more: got no option of this name"),
    ],
)
def test_what_argparse_says_has_our_form(parser, capsys, monkeypatch, line, words):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(line)
    assert ended.value.code == 2
    *usage, said = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage: x.py")
    assert FORM.match(said), said
    assert f"error: {words}" in said


def test_a_hidden_option_is_no_advice(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--local_ran", "3"])
    assert "fix: take it out; x.py --help lists the options" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["1", "2"])
def test_other_ranks_leave_the_word_to_rank_0(number, tmp_path):
    """They wait first, so that the launcher does not end rank 0 before it has spoken."""
    code = (
        f"import sys; sys.path.insert(0, {str(LAUNCH)!r})\n"
        "from demo import options, process\n"
        "process.time.sleep = lambda s: print('waits', s, flush=True)\n"
        "parser = options.Parser(prog='x.py')\n"
        "parser.parse_args(['--odd'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RANK": number, "WORLD_SIZE": "3"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == f"waits {process.GRACE_S}\n"
    assert f"error: rank {number}: --odd: got no option" in done.stderr
    assert "usage" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (at_least(3, 9), "3", 3),
        (at_least(0), "1_000", 1000),
        (at_least(-1), "-1", -1),
        (at_least(3, 9), "2", None),
        (at_least(3, 9), "10", None),
        (at_least(0), " 1", None),
        (at_least(0), "1.0", None),
        (at_least(0), "\u0661", None),  # int() would take it
        (at_least(0), str(2**31), None),
        (sizes("..."), "3", (3,)),
        (sizes("A,B"), "3,3", (3, 3)),
        (sizes("..."), "3,3", None),
        (sizes("A,B", 1, 4), "1,5", None),
        (sizes("A,B"), "1,", None),
        (sizes("A,B"), "1,2,3", None),
        (above_zero, "1e-3", 1e-3),
        (above_zero, "0", None),
        (above_zero, "inf", None),
        (above_zero, "nan", None),
        (above_zero, "much", None),
        (word("a commit"), "abc", "abc"),
        (word("a commit"), "", None),
        (word("a commit"), "a b", None),
    ],
)
def test_values(kind, text, value):
    if value is not None:
        assert kind(text) == value
        return
    with pytest.raises(argparse.ArgumentTypeError, match=r"^got '.*'; wanted .+; fix: .+"):
        kind(text)


@pytest.mark.parametrize(
    ("path", "endings", "wanted"),
    [
        ("folder", (), "a file that can be written, no folder"),
        ("new/x.exe", (".png",), "a name that ends in .png; fix: --png new/x.png"),
        ("x", (".png", ".svg"), "a name that ends in .png or .svg"),
        ("file/x", (), "a folder where '.*file' is a file"),
        ("file/new/x", (), "a folder where '.*file' is a file"),
        ("locked/x", (), r"a file that can be written \('.*locked' cannot\)"),
        ("locked/new/x", (), r"a file that can be written \('.*locked' cannot\)"),
        ("x" * 300, (), "a file that can be written .File name too long"),
        ("loop", (), "a file that can be written .Symlink loop"),
        ("/proc/x", (), "a file that can be written .No such file"),
        ("/proc/self/status", (), "a file that can be written .No such file"),
    ],
)
def test_files_that_cannot_be_written(tmp_path, monkeypatch, path, endings, wanted):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("locked").mkdir()
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    real = os.access  # root may write anywhere
    locked = tmp_path / "locked"
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != locked and real(p, mode))
    with pytest.raises(InputError, match=f"^--png: got '.*'; wanted {wanted}"):
        need_writable({"--png": (Path(path), endings)})


def test_files_that_can_be_written(tmp_path):
    old, new = tmp_path / "old.PNG", tmp_path / "a" / "b" / "x.svg"
    old.write_text("kept")
    files = {
        "--png": (old, (".png",)),
        "--new": (new, (".svg", "")),
        "--plain": (tmp_path / "plain", (".svg", "")),
        "--nothing": (Path("/dev/null"), ()),
        "--more": (Path("/dev/null"), ()),
    }
    need_writable(files)
    assert list(tmp_path.iterdir()) == [old]  # looking makes nothing
    make_folders(files)
    assert new.parent.is_dir()
    assert old.read_text() == "kept"


def test_lines_are_appended_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.jsonl"
    for wanted in ("", "12345\n"):
        with room(10), pytest.raises(OutputError, match=r"^--out: got '.*' .File too large.; want"):
            append_whole("--out", path, "a line of many letters\n")
        assert path.exists() == bool(wanted)  # one that was not there is not there
        if wanted:
            assert path.read_text() == wanted
        else:
            append_whole("--out", path, "12345\n")
    append_whole("--out", path, "6\n")
    assert path.read_text() == "12345\n6\n"
    append_whole("--out", Path("/dev/null"), "7\n")


def test_files_are_whole_or_as_they_were(tmp_path):
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    link.symlink_to(path)
    with whole_file("--trace", link) as beside:
        assert beside.suffix == ".json"
        beside.write_text("12345")
    path.chmod(0o640)
    with (
        room(10),
        pytest.raises(OutputError, match=r"^--trace: got '.*'.*; wanted .*; fix: make room"),
        whole_file("--trace", link) as beside,
    ):
        beside.write_text("a text of many letters")
    assert path.read_text() == "12345"
    with pytest.raises(KeyError), whole_file("--trace", path) as beside:  # any other failure, too
        {}[beside.write_text("half")]
    assert path.read_text() == "12345"
    with whole_file("--trace", link) as beside:
        beside.write_text("6")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("6", 0o640)
    assert sorted(tmp_path.iterdir()) == [link, path]
    with (
        pytest.raises(OutputError, match="No space left"),
        whole_file("--png", Path("/dev/full")) as own,
    ):
        own.write_text("x")
    assert Path("/dev/full").is_char_device()


def test_no_file_is_written_twice_or_over_what_is_read(tmp_path):
    (tmp_path / "text").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    with pytest.raises(InputError, match=r"--trace: .*wanted another file than that of --text"):
        need_writable({"--trace": (tmp_path / "link", ())}, {"--text": tmp_path / "text"})
    both = {"--out": (tmp_path / "x", ()), "--export": (tmp_path / "." / "x", ())}
    with pytest.raises(InputError, match=r"--export: .*wanted another file than that of --out"):
        need_writable(both)


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(InputError, match=r"--out: .*a folder that can be made .Permission denied"):
        make_folders({"--out": (tmp_path / "new" / "x", ())})


def test_one_rank_gets_a_port_that_nobody_else_is_given(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(process, "free_port", lambda: 12345)
    process.prepare_environment()
    assert os.environ["MASTER_PORT"] == "12345"
    assert os.environ["WORLD_SIZE"] == "1"
