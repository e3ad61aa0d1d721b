"""The op builder: one build for many processes, no build for a second start, and clear refusals.

Most tests build a module of a few lines that includes Python.h only; test_package.py and the tests
of the backend build the real one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_tilemoe.errors import BuildError
from ds_tilemoe.op_builder import CPUTileMoEBuilder, extension, jit, report_cli
from ds_tilemoe.op_builder import cpu as cpu_builder

BINDINGS = """
#include <Python.h>
#include "twice.h"
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)
#define TEXT(name) #name
#define NAME(name) TEXT(name)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(twice(21)); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, ""}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME(TORCH_EXTENSION_NAME), "", -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&module); }
"""
# Stands in for the compiler: notes each compilation, takes its time, then does it.
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) echo "$$" >> {log}; sleep {delay};; esac
exec {real} "$@"
"""


class Builder(CPUTileMoEBuilder):
    NAME = "tilemoe_test"


BUILT = {f"{Builder.NAME}.so", f"{Builder.NAME}.so.sha256"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny source tree, and a build cache of this test's own."""
    folder = tmp_path / "csrc"
    (folder / "cpu").mkdir(parents=True)
    (folder / "planner").mkdir()
    (folder / "bindings.cpp").write_text(BINDINGS)
    (folder / "twice.h").write_text("int twice(int value);\n")
    (folder / "cpu" / "twice.cpp").write_text("int twice(int value) { return 2 * value; }\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(OpBuilder._loaded_ops, Builder.NAME, raising=False)
    return folder


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, delay: float = 0.3) -> Path:
    """Puts the slow compiler into CXX; returns its log."""
    real = jit.find_compiler()
    assert real is not None
    script, log = folder / "slow-c++", folder / "log"
    script.write_text(COMPILER.format(log=log, delay=delay, real=shutil.which(real[0])))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def start(root: Path) -> subprocess.Popen[str]:
    """Another process that builds and loads the tiny module and prints its answer."""
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import test_op_builder as t; "
        "print(t.Builder(pathlib.Path(sys.argv[2])).load().answer())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline, f"no {lines} lines in {path}"
        time.sleep(0.02)


def test_loads_and_is_cached(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stand_in(root.parent, monkeypatch, delay=0)
    module = Builder(root).load()
    assert module.answer() == 42
    assert module.__name__ == Builder.NAME
    assert Builder(root).load() is module
    assert len(log.read_text().splitlines()) == 2  # two sources
    del OpBuilder._loaded_ops[Builder.NAME]
    assert Builder(root).load().answer() == 42
    assert len(log.read_text().splitlines()) == 2


def _truncate(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def _empty(library: Path) -> None:
    os.truncate(library, 0)


def _flip(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def _without_record(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").unlink()


def _empty_record(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").write_text("")


def _bad_record(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").write_bytes(b"\xff\0")


@pytest.mark.parametrize(
    "harm", [_truncate, _empty, _flip, _without_record, _empty_record, _bad_record]
)
def test_a_damaged_library_is_built_again_once(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
) -> None:
    def write_output(recipe: object, command: list[str], *_: object) -> None:
        Path(command[command.index("-o") + 1]).write_text("what a compiler makes")

    monkeypatch.setattr(jit, "_run", write_output)
    recipe = Builder(root)._extension(jit.find_compiler() or ())
    library = jit.build_library(recipe)
    assert jit.damage(library) is None
    harm(library)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # as ranks that start at once
        found = list(pool.map(lambda _: jit.build_library(recipe), range(4)))
    assert found == [library] * 4
    assert library.read_text() == "what a compiler makes"
    assert caplog.text.count(f"op {Builder.NAME}: the cached library {str(library)!r}") == 1
    assert caplog.text.count("; it is built again") == 1
    monkeypatch.setattr(jit, "_run", lambda *_: pytest.fail("it runs a compiler"))
    assert jit.build_library(recipe) == library


def test_a_library_cut_short_is_not_loaded(root: Path) -> None:
    """In a process of its own: to load it would end that process by a signal."""
    recipe = Builder(root)._extension(jit.find_compiler() or ())
    library = jit.build_library(recipe)
    _truncate(library)
    process = start(root)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.strip()) == (0, "42"), err
    size = library.stat().st_size
    assert f"is damaged: got {size // 2} bytes with digest " in err
    assert f"; wanted {size} bytes with digest " in err


def test_four_processes_build_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stand_in(root.parent, monkeypatch, delay=1)
    processes = [start(root) for _ in range(4)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out.strip()) == (0, "42"), err
    assert len(log.read_text().splitlines()) == 2


def test_kill_in_mid_build_then_next_builds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = stand_in(root.parent, monkeypatch, delay=1)
    victim = start(root)
    wait_for(log, 1)
    victim.send_signal(signal.SIGKILL)  # the process alone: its compilers live on for a while
    victim.wait(timeout=30)
    home = jit.cache_root() / Builder.NAME
    assert len(list(home.glob("*.part-*"))) == 1
    assert Builder(root).load().answer() == 42
    assert list(home.glob("*.part-*")) == []
    with contextlib.suppress(ProcessLookupError):  # the compilers have ended, too
        os.killpg(victim.pid, signal.SIGKILL)


def test_leftovers_of_dead_builds_are_removed(root: Path) -> None:
    builder = Builder(root)
    compiler = jit.find_compiler()
    assert compiler is not None
    key = builder._extension(compiler).key()
    home = jit.cache_root() / Builder.NAME
    for name in (f"{key}.part-dead", key):  # a part, and a directory without its library
        (home / name).mkdir(parents=True)
        (home / name / "lock").touch()
    (home / f"{key}.lock").write_text("process 1 on a machine long gone")
    (home / f"{key}.failed").write_text("an old failure")
    assert builder.load().answer() == 42
    assert sorted(path.name for path in home.iterdir()) == [key, f"{key}.lock"]
    assert {path.name for path in (home / key).iterdir()} == BUILT


def test_what_compilers_leave_behind_goes_with_the_build(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = jit.find_compiler()
    assert real is not None
    untidy = root.parent / "untidy-c++"
    untidy.write_text(
        f'#!/bin/sh\nmkdir -p "$TMPDIR/left/$$"\ntouch "$TMPDIR/$$"\nexec {real[0]} "$@"\n'
    )
    untidy.chmod(0o755)
    monkeypatch.setenv("CXX", str(untidy))
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert Builder(root).load().answer() == 42
    home = jit.cache_root() / Builder.NAME
    assert {path.suffix for path in home.iterdir()} == {"", ".lock"}
    assert {path.name for path in home.glob("*/*")} == BUILT


def test_key_follows_all_that_matters(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = jit.find_compiler()
    assert compiler is not None

    def key() -> str:
        return Builder(root)._extension(compiler).key()

    first = key()
    assert key() == first
    (root / "cpu" / "notes.txt").write_text("not a source")
    assert key() == first
    seen = {first}
    (root / "twice.h").write_text("int twice(int);\n")
    seen.add(key())
    (root / "cpu" / "more.cpp").write_text("")
    seen.add(key())
    (root / "cpu" / "more.cpp").rename(root / "planner" / "more.cpp")
    seen.add(key())
    monkeypatch.setattr(Builder, "cxx_args", lambda self: [*super(Builder, self).cxx_args(), "-g"])
    seen.add(key())
    monkeypatch.setattr("torch.__version__", "2.99.0")
    seen.add(key())
    monkeypatch.setattr(extension, "compiler_version", lambda compiler: "another")
    seen.add(key())
    assert len(seen) == 7


def test_failing_compile_names_command_error_and_fix(root: Path) -> None:
    (root / "cpu" / "twice.cpp").write_text("int twice(int value) { return valu_e; }\n")
    with pytest.raises(BuildError) as caught:
        Builder(root).load()
    message = str(caught.value)
    assert "-std=c++20" in message
    assert f"-c {root / 'cpu' / 'twice.cpp'}" in message
    assert "valu_e" in message
    assert "\nfix: " in message
    (root / "cpu" / "twice.cpp").write_text("int twice(int value) { return 2 * value; }\n")
    assert Builder(root).load().answer() == 42


def test_what_is_queued_ends_with_an_interrupt(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "cpu" / "more.cpp").write_text("")
    monkeypatch.setenv("MAX_JOBS", "1")
    begun = []

    def interrupted(recipe: object, command: object, work: object, verbose: object) -> None:
        begun.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(jit, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Builder(root).load()
    assert len(begun) < 3, "commands that nobody waits for"


def test_a_command_that_cannot_be_started_is_no_fault_of_the_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def refuse(command: list[str], **options: Any) -> Any:
        if "-c" in command:
            raise OSError(12, "Cannot allocate memory")
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(BuildError, match=r"could not be started .*Cannot allocate.*-std=c\+\+20"):
        Builder(root).load()


def test_failing_link_is_told_at_load(root: Path) -> None:
    (root / "cpu" / "twice.cpp").write_text("")
    with pytest.raises(BuildError, match=r"does not load .*twice"):
        Builder(root).load()


def test_who_waits_for_a_failing_build_does_not_repeat_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "cpu" / "twice.cpp").unlink()
    (root / "bindings.cpp").write_text("#error no luck\n")
    log = stand_in(root.parent, monkeypatch, delay=1)
    messages: list[str] = []

    def build() -> None:
        try:
            Builder(root).load()
        except BuildError as error:
            messages.append(str(error))

    assert Builder(root).is_compatible()
    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(messages) == 4
    assert len(set(messages)) == 1
    assert "no luck" in messages[0]
    assert len(log.read_text().splitlines()) == 1
    build()  # a later start does try again
    assert len(log.read_text().splitlines()) == 2


def test_waiting_says_for_whom(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "WAIT_NOTICE_S", 0.2)
    compiler = jit.find_compiler()
    assert compiler is not None
    home = jit.cache_root() / Builder.NAME
    home.mkdir(parents=True)
    with open(home / f"{Builder(root)._extension(compiler).key()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 4711 on elsewhere")
        lock.flush()
        thread = threading.Thread(target=Builder(root).load)
        with caplog.at_level(logging.WARNING, "ds_tilemoe"):
            thread.start()
            deadline = time.monotonic() + 30
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.02)
        assert "process 4711 on elsewhere, which is building it" in caplog.text
    thread.join(timeout=300)
    assert Builder(root).load().answer() == 42


def test_no_compiler(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(root))
    assert not Builder(root).is_compatible()
    assert capsys.readouterr().out == ""
    assert not Builder(root).is_compatible(verbose=True)
    assert "install g++" in capsys.readouterr().out
    with pytest.raises(BuildError, match=r"tilemoe_test cannot be built: got no C\+\+ compiler"):
        Builder(root).load()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x: error: static assertion failed' >&2; exit 1", "atomic_ref"),
        ("echo 'x: fatal error: Python.h: No such file' >&2; exit 1", "python3.11-dev"),
    ],
)
def test_unfit_compiler(
    root: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    compiler = root.parent / "unfit"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    cpu_builder._compiler_obstacle.cache_clear()
    with pytest.raises(BuildError, match=reason.replace("3.11", rf"{sys.version_info[0]}\.\d+")):
        Builder(root).load()


def test_missing_sources(root: Path) -> None:
    (root / "bindings.cpp").unlink()
    assert not Builder(root).is_compatible()
    with pytest.raises(BuildError, match=r"bindings\.cpp.*install ds_tilemoe again"):
        Builder(root).load()


def test_cache_that_cannot_be_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root / "twice.h"))
    with pytest.raises(BuildError, match="set TORCH_EXTENSIONS_DIR"):
        Builder(root).load()


def test_cache_lives_where_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert jit.cache_root() == Path("/somewhere/ds_tilemoe")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert jit.cache_root() == Path.home() / ".cache" / "ds_tilemoe"


def test_report_lists_the_op(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    monkeypatch.setattr(sys, "argv", ["ds_tilemoe_report"])
    # Their probes run compilers, and are theirs.
    for name in list(ALL_OPS):
        monkeypatch.delitem(ALL_OPS, name)
    report_cli.main()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("tilemoe_cpu"))
    assert "[OKAY]" in line
    assert set(ALL_OPS) == {"tilemoe_cpu", "tilemoe_cuda"}


@pytest.mark.parametrize(("name", "value"), [("MAX_JOBS", "two"), ("MAX_JOBS", "0"), ("CXX", "'")])
def test_wrong_variables_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(BuildError, match=name):
        jit._jobs() if name == "MAX_JOBS" else jit.find_compiler()
