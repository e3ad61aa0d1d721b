"""launch/infer.py with wrong input, on a taken port, and ended early."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from infer_runs import INFER, RANKS, ROOT, alone, command, environment, launch, record_in

from ds_tilemoe.testing import free_port

sys.path.insert(0, str(ROOT / "launch"))

import infer
from demo.options import InputError


def test_misspelt_settings_end_before_any_work(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4, "tile_overlap": {"num_consumer_cta": 2}}')
    done = launch("--deepspeed_config", path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert "tile_overlap.num_consumer_cta:" in done.stderr
    assert "'num_consumer_ctas'" in done.stderr
    assert "warning" not in done.stderr  # no accelerator chosen, so nothing heavy imported


NUMBER = '"tile_overlap": {"num_consumer_ctas": %s}'


@pytest.mark.parametrize(
    ("block", "words"),
    [(NUMBER % v, "num_consumer_ctas: got") for v in ('"8"', "-1", "0", "1.5", "null", "true")]
    + [
        ('"tile-overlap": {}', 'rename it to "tile_overlap"'),
        ('"zero_optimization": {"tile_overlap": {}}', "at the top level"),
        ('"tile_overlap": {"backend": "gpu"}', "backend: got"),
        ('"bf16": 1', "bf16: got 1; wanted a block"),
        ('"bf16": {"enabled": true}, "fp16": {"enabled": true}', "wanted one dtype"),
        ('"zero_optimization": {"stage": 1}', "optimizer"),
    ],
)
def test_wrong_settings(tmp_path, block, words):
    path = tmp_path / "ds.json"
    path.write_text(f'{{"train_batch_size": 1, {block}}}')
    done = alone("--deepspeed_config", path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--deepspeed_config", "none.json"], "none.json"),
        (["--model-config", "none.json"], "model config 'none.json': got No such file"),
        (["--model-config", ""], "model config '': got Is a directory; wanted a JSON object"),
        (["--dtype", "float"], "--dtype: got 'float'; wanted one of fp32, bf16, fp16; fix: "),
        (["--max-new-tokens", "-1"], "--max-new-tokens: got '-1'; wanted an integer from 0 to"),
        (["--max-new-tokens", "many"], "--max-new-tokens: got 'many'; wanted an integer from 0 to"),
        (["--max-new-tokens", "1" * 5000], "1'; wanted an integer from 0 to 2147483647; fix: e.g."),
        (["--max-new-tokens", "16384"], "--max-new-tokens: got 16384; wanted at most 16383, for w"),
        (["--max-new-tokens"], "--max-new-tokens: got too few or none; wanted one argument"),
        (["--trace", "/dev/null/t.json"], "wanted a folder where '/dev/null' is a file"),
        (["--trace", "/"], "--trace: got '/'; wanted a file that can be written, no folder"),
        (["--trace", ""], "--trace: got '.'; wanted a file that can be written, no folder"),
        (["--trace", "/proc/t.json"], "--trace: got '/proc/t.json'; wanted a file that can be"),
        (["--trace", "x.exe"], "--trace: got 'x.exe'; wanted a name that ends in .json"),
        (["--text", "x.json", "--trace", "x.json"], "--trace: got 'x.json'; wanted another file"),
        (["--unheard-of"], "--unheard-of: got no option of this name"),
        (["--max-new-token", "1"], "fix: write --max-new-tokens"),
    ],
)
def test_wrong_arguments(tmp_path, args, words):
    (tmp_path / "x.json").write_text("a text")
    done = alone(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_other_ranks_are_quiet_while_rank_0_may_speak():
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(INFER), "--max-new-tokens", "-1"],
        env=environment(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1"),
        stderr=subprocess.PIPE,
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.terminate()  # as a launcher does when rank 0 has ended
        assert process.communicate()[1] == b""
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "--text: got '.*' .No such file.*; wanted a file that can be read"),
        (b"", "got 0 bytes of .*; wanted at least 8, two for each of 4"),
        (b"1234567", "got 7 bytes of .*; wanted at least 8"),
        (b"x" * 404, "got 101 bytes for each of 4 rank.*; wanted at most 100, .* has room"),
    ],
)
def test_wrong_texts(tmp_path, text, words):
    path = tmp_path / "text"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=words):
        infer.read_text(str(path), RANKS, limit=100)
    path.write_bytes(b"x" * 403)
    assert len(infer.read_text(str(path), RANKS, limit=100)) == 403


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        infer.read_text(str(tmp_path), RANKS, limit=100)
    with pytest.raises(InputError, match="null byte"):
        infer.read_text("a\0b", RANKS, limit=100)


def test_bytes_that_are_no_letters_and_no_continuation(tmp_path):
    """A text is bytes; stdout that lacks a letter of it is no failure."""
    (tmp_path / "text").write_bytes(b"\xff\xfe bytes of no encoding \x80\xc3")
    trace = tmp_path / "new" / "trace.json"
    flags = ["--text", tmp_path / "text", "--trace", trace]
    done = alone(*flags, "--max-new-tokens", 0, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    assert "decode -" in done.stdout
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_trace_of_layers_that_are_left_alone_is_refused(tmp_path):
    (tmp_path / "ds.json").write_text('{"tile_overlap": {"enabled": false}}')
    done = alone("--deepspeed_config", tmp_path / "ds.json", "--trace", tmp_path / "t.json")
    assert done.returncode == 2
    assert "--trace: got a file, and tile_overlap.enabled is false; wanted swapped" in done.stderr
    assert not (tmp_path / "t.json").exists()


def test_a_text_that_is_too_short_ends_every_rank(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    done = launch("--text", tmp_path / "text", ranks=3)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert "got 5 bytes" in done.stderr
    assert "wanted at least 6, two for each of 3 rank(s)" in done.stderr


def test_a_failure_in_a_layer_is_said_once(tmp_path):
    (tmp_path / "ds.json").write_text('{"tile_overlap": {"max_tokens_per_rank": 100}}')
    done = launch("--deepspeed_config", tmp_path / "ds.json", ranks=2)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("error:") == 1
    assert "CapacityError" in done.stderr
    assert "max_tokens_per_rank" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(ranks=2, port=port)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1
    assert f"port {port} of 127.0.0.1: got one that another process has" in done.stderr
    assert f"fix: deepspeed --master_port {port + 1}" in done.stderr


def test_sigterm_leaves_nothing_behind():
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        command("--max-new-tokens", 8000, "--model-config", ROOT / "launch/demo/config.json"),
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            said = ""
            while "swapped" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            time.sleep(2)
            assert process.poll() is None, said
            process.terminate()
            process.wait(60)
            limit = time.monotonic() + 20
            while _lives(process.pid) and time.monotonic() < limit:
                time.sleep(0.1)
            assert not _lives(process.pid), "ranks outlive their launcher"
        finally:
            if _lives(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "tilemoe" in name}


def _lives(group: int) -> bool:
    """Whether the process group has a member that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


ADOPT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, which exec keeps
os.execvp(sys.argv[1], sys.argv[1:])
"""
# Ends the deepspeed command as soon as its launcher is there, and lives on.
KILL_EARLY = """
"$@" & runner=$!
until launcher=$(cat /proc/$runner/task/*/children) && [ -n "$launcher" ] &&
      tr '\\0' ' ' </proc/${launcher% }/cmdline | grep -q deepspeed.launcher.launch
do sleep 0.02; done
kill -TERM $runner
sleep 600
"""


def test_sigterm_before_a_rank_has_looked(tmp_path):
    script = tmp_path / "kill_early.sh"
    script.write_text(KILL_EARLY)
    # As an entry point of a container has it: the command's own words are among the shell's.
    deepspeed = tmp_path / "deepspeed"
    deepspeed.write_text('#!/bin/sh\nexec "$@"\n')
    deepspeed.chmod(0o755)
    words = command("--max-new-tokens", 8000, ranks=2)
    systemd = tmp_path / "systemd"  # a shell that is named so
    systemd.symlink_to(shutil.which("sh"))
    adopt = [sys.executable, "-c", ADOPT]
    line = [*adopt, str(systemd), str(script), str(deepspeed), *words]
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as process:
        try:
            ranks: list[int] = []
            while len(ranks) < 2:
                text = process.stdout.readline()
                assert text
                ranks += map(int, re.findall(r"process (\d+) spawned", text))
            limit = time.monotonic() + 30
            while _members(process.pid, "launch/infer.py") and time.monotonic() < limit:
                time.sleep(0.1)
            assert _members(process.pid, "launch/infer.py") == []
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("adopted", [False, True])
def test_a_launcher_that_was_started_by_hand_is_left_alone(adopted):
    """By a shell that lives, with all that the command would have set, or that has gone at once and
    whose words are no command's."""
    world = base64.urlsafe_b64encode(b'{"localhost": [0]}').decode()
    words = [sys.executable, *(() if adopted else ("-u",)), "-m", "deepspeed.launcher.launch"]
    words += [f"--world_info={world}", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    script = '"$@" &' if adopted else '"$@"; exit $?'
    env = environment()
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if adopted:
        del env["PYTORCH_NVML_BASED_CUDA_CHECK"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words, str(INFER), "--max-new-tokens", "1", "--json"],
        env=env,
        capture_output=True,  # until all that hold it have ended
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert record_in(done.stdout)["ranks"] == 1


def test_a_rank_whose_launcher_has_gone_before_it_looked():
    done = subprocess.run(
        ["sh", "-c", '"$@" &', "sh", sys.executable, str(INFER), "--max-new-tokens", "1"],
        env=environment(CROSS_RANK="0"),  # as DeepSpeed's launcher sets it
        capture_output=True,  # until all that hold it have ended
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


def _members(group: int, word: str) -> list[int]:
    """The processes of a group with ``word`` in their command lines, but for its leader."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group != pid and word in (folder / "cmdline").read_text():
                found.append(pid)
    return found


def test_compare_fails_where_nothing_was_swapped(tmp_path):
    nowhere = {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = alone("--compare", "--max-new-tokens", 1, **nowhere)
    assert done.returncode == 1, done.stderr
    assert "no layer was swapped" in done.stderr
    assert "/bin/false" in done.stderr


@pytest.mark.parametrize(
    ("closed", "code", "words"),
    [
        (">&-", 1, "infer.py: error: stdout: got Bad file descriptor; wanted a place for the res"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 1, ""),
        (
            "<&-",
            2,
            "infer.py: error: --text: got '-' (Bad file descriptor); wanted a file that can",
        ),
    ],
)
def test_closed_streams(closed, code, words):
    text = ["--text", "-"] if closed == "<&-" else []
    line = [sys.executable, str(INFER), "--max-new-tokens", "1", "--json", *text]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *line],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if code == 0:
        assert record_in(done.stdout)["ranks"] == 1
    else:
        assert done.stdout == ""


def test_results_that_nobody_takes():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(INFER), "--max-new-tokens", "1", "--json"],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1, done.stderr
    assert "infer.py: error: stdout: got No space left on device; wanted " in done.stderr
    assert "Traceback" not in done.stderr
