"""The protocol as a stand-alone C++ program: threads as ranks, ThreadSanitizer, planted faults."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "protocol_stress.cpp"
SOURCES = [
    ROOT / "csrc" / "planner" / "planner.cpp",
    *sorted((ROOT / "csrc" / "cpu").glob("*.cpp")),
]
ITERATIONS = 10_000

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(directory: Path, name: str, *flags: str) -> Path:
    program = directory / name
    if program.exists():
        return program
    # All in one piece: most of the time goes into the headers, which are read once like that.
    sources = [word for source in SOURCES for word in ("-include", str(source))]
    command = ["g++", "-std=c++20", "-g1", "-pthread", *flags, *sources, str(PROGRAM)]
    subprocess.run([*command, "-o", str(program)], cwd=ROOT, check=True, timeout=240)
    return program


def run(
    program: Path, *, iterations: int, delay_us: int, delay_seed: int, timeout_ms: int, world=4
):
    arguments = [iterations, world, 1, delay_us, delay_seed, timeout_ms]
    return subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("protocol")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_all_values_right_and_repeatable(directory, world):
    program = build(directory, "plain", "-O2", "-Wall", "-Wextra", "-Werror")
    hashes = set()
    for delay_us, delay_seed in ((0, 1), (100, 2)):
        done = run(
            program,
            iterations=ITERATIONS // max(world, 4),
            delay_us=delay_us,
            delay_seed=delay_seed,
            timeout_ms=20_000,
            world=world,
        )
        assert done.returncode == 0, done.stderr
        hashes.add(done.stdout)
    assert len(hashes) == 1, f"the same input gave different bits: {hashes}"


@pytest.mark.parametrize(("world", "iterations"), [(4, ITERATIONS), (8, ITERATIONS // 5)])
def test_clean_under_thread_sanitizer(directory, world, iterations):
    program = build(directory, "tsan", "-O1", "-fsanitize=thread")
    done = run(
        program, iterations=iterations, delay_us=20, delay_seed=3, timeout_ms=30_000, world=world
    )
    assert done.returncode == 0, done.stderr[-4000:]


# What ends the run: 66 is a data race that ThreadSanitizer saw, 1 a wrong value or a deadline.
@pytest.mark.parametrize(
    ("fault", "name", "exits"),
    [
        (1, "no_release", {66}),
        (2, "no_acquire", {66}),
        (3, "one_count_half", {1, 66}),
        (4, "arrival_before_copy", {66}),
    ],
)
def test_planted_fault_is_caught(directory, fault, name, exits):
    program = build(directory, name, "-O1", "-fsanitize=thread", f"-DTILEMOE_FAULT={fault}")
    done = run(program, iterations=3000, delay_us=100, delay_seed=4, timeout_ms=3000)
    assert done.returncode in exits, (done.returncode, done.stdout, done.stderr[-2000:])
