"""The launcher of the rank tests: it reports, it goes on where it can, and it ends what hangs."""

from __future__ import annotations

import datetime
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_tilemoe import testing, testing_launch
from ds_tilemoe.testing import (
    RanksError,
    cases_of,
    check_case,
    free_port,
    rank_tests,
    run_ranks,
    tagged_rows,
)

CASES = """
import datetime, os
import torch, torch.distributed as dist
from ds_tilemoe.testing import case

@case(k=[1, 2], drop=[True, False])
def chosen(ctx, k, drop):
    return [ctx.rank, k, drop]

@case
def sums(ctx):
    (ctx.shared_dir / str(ctx.rank)).touch()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert sorted(p.name for p in ctx.shared_dir.iterdir()) == ["0", "1"]
    return total.item()

@case
def raises_alone(ctx):
    if ctx.rank == 1:
        raise ValueError("only here")

@case
def goes_on(ctx):
    dist.barrier()

@case
def leaves_a_collective(ctx):
    if ctx.rank == 1:
        raise ValueError("not taking part")
    dist.all_reduce(torch.ones(1), async_op=True).wait(datetime.timedelta(seconds=2))

@case
def is_not_run(ctx):
    pass
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_cases_of_one_launch(tmp_path: Path) -> None:
    source = write(tmp_path / "some_cases.py", CASES)
    names = cases_of(source)
    chosen = [f"chosen[k={k},drop={d}]" for k in (1, 2) for d in (True, False)]
    rest = ["sums", "raises_alone", "goes_on", "leaves_a_collective", "is_not_run"]
    assert names == chosen + rest
    results = run_ranks(source, 2, timeout_s=100)
    for name in [*chosen, "sums", "goes_on"]:
        check_case(results, name)
    assert [r.cases[1].value for r in results] == [[0, 1, False], [1, 1, False]]
    assert [r.cases[4].value for r in results] == [2.0, 2.0]
    with pytest.raises(RanksError, match=r"rank 1: (.|\n)*only here"):
        check_case(results, "raises_alone")
    with pytest.raises(RanksError, match="not taking part"):
        check_case(results, "leaves_a_collective")
    with pytest.raises(RanksError, match="rank 0 has not run is_not_run"):
        check_case(results, "is_not_run")
    assert [result.returncode for result in results] == [1, 1]


def test_a_hang_ends_with_stacks_and_output(tmp_path: Path) -> None:
    source = write(
        tmp_path / "hangs.py",
        "import os, sys, time\nprint('rank', os.environ['RANK'], os.environ['MINE'], sys.argv[1])\n"
        "def asleep():\n    time.sleep(600)\nif os.environ['RANK'] == '1':\n    asleep()\n",
    )
    began = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(source, 2, timeout_s=8, env={"MINE": "yes"}, args=["argument"])
    assert time.monotonic() - began < 40
    message = str(caught.value)
    assert "ranks [1] still ran after 8 s" in message
    assert "rank 0 yes argument" in message
    assert "in asleep" in message
    assert [result.returncode for result in caught.value.results] == [0, -9]


def test_a_dead_rank_takes_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing_launch, "GRACE_S", 1.0)
    source = write(
        tmp_path / "dies.py",
        "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "os._exit(3) if os.environ['RANK'] == '0' else time.sleep(600)\n",
    )
    results = run_ranks(source, 2, timeout_s=60)
    assert [result.returncode for result in results] == [3, -9]
    children = [int(result.stdout) for result in results]
    deadline = time.monotonic() + 10  # a kill is sent at once, and done when the kernel gets to it
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_runs, children)), "a child of a rank lives on"


def test_a_case_over_its_limit_is_told_with_stacks(tmp_path: Path) -> None:
    """Which case each rank is in, what it has done, and where it stands."""
    source = write(
        tmp_path / "one_hangs.py",
        "import time, torch, torch.distributed as dist\nfrom ds_tilemoe.testing import case\n"
        "def waits_for_nobody():\n    time.sleep(600)\n"
        "@case\ndef ends(ctx):\n    pass\n"
        "@case\ndef hangs(ctx):\n    waits_for_nobody() if ctx.rank else None\n"
        "@case\ndef never(ctx):\n    pass\n",
    )
    test = rank_tests(source, world=2, timeout_s=60, case_timeout_s=3)
    began = time.monotonic()
    test("ends")
    with pytest.raises(RanksError) as caught:
        test("hangs")
    assert time.monotonic() - began < 45
    first, second = str(caught.value).split("--- rank 1, exit 1")
    assert "[done] ends ok 0.0 s, hangs ok" in first
    assert "[doing] behind hangs, waiting for its peers for" in first
    assert "[done] ends ok" in second
    assert "[doing] in hangs for" in second
    assert "in waits_for_nobody" in second
    with pytest.raises(RanksError, match="not run by all ranks; why: see the test of hangs"):
        test("never")


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("lambda: time.sleep(600)", r"ranks \[1\] still ran after 20 s"),
        (
            "lambda: os._exit(3)",
            r"ranks \[1\] did not end well after their cases\n--- rank 1, exit 3",
        ),
    ],
    ids=["hangs", "fails"],
)
def test_a_bad_end_fails_the_last_case(tmp_path: Path, ending: str, told: str) -> None:
    source = write(
        tmp_path / f"ends_{len(ending)}.py",
        "import atexit, os, time\nfrom ds_tilemoe.testing import case\n"
        f"@case\ndef first(ctx):\n    ctx.rank == 1 and atexit.register({ending})\n"
        "@case\ndef last(ctx):\n    pass\n",
    )
    test = rank_tests(source, world=2, timeout_s=20)
    test("first")
    with pytest.raises(RanksError, match=told):
        test("last")


def test_an_import_that_fails_is_told_by_every_rank(tmp_path: Path) -> None:
    source = write(
        tmp_path / "fails_at_import.py",
        "from ds_tilemoe.testing import case\n@case\ndef never(ctx):\n    pass\n1 / 0\n",
    )
    for result in run_ranks(source, 2, timeout_s=60):
        assert result.returncode == 1
        assert "ZeroDivisionError" in result.stderr
        assert not result.cases


@pytest.mark.parametrize(
    ("lines", "timeout_s", "told"),
    [
        ("print('here', flush=True)\nos._exit(7)", 60, r"no ranks \[0, 1\]\nhere\n"),
        (
            "def asleep():\n    time.sleep(600)\nasleep()",
            4,
            r"ranks \[0, 1\] still ran after 4 s\n(.|\n)*in asleep",
        ),
    ],
    ids=["ends", "hangs"],
)
def test_an_import_that_does_not_come_back_is_told(
    tmp_path: Path, lines: str, timeout_s: float, told: str
) -> None:
    source = write(
        tmp_path / "never_imported.py",
        f"import os, time\nfrom ds_tilemoe.testing import case\n{lines}\n"
        "@case\ndef never(ctx):\n    pass\n",
    )
    with pytest.raises(RanksError, match=told):
        run_ranks(source, 2, timeout_s=timeout_s)


def test_cases_whose_import_leaves_a_thread(tmp_path: Path) -> None:
    """Forks would not have it: such ranks are no forks."""
    source = write(
        tmp_path / "has_a_thread.py",
        "import threading\nfrom ds_tilemoe.testing import case\nbegin = threading.Event()\n"
        "done = threading.Event()\ndef work():\n    begin.wait()\n    done.set()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "@case\ndef waits(ctx):\n    begin.set()\n    assert done.wait(20)\n    return ctx.rank\n",
    )
    results = run_ranks(source, 2, timeout_s=60)
    check_case(results, "waits")
    assert [result.cases[0].value for result in results] == [0, 1]


def test_a_line_cut_off_is_a_case_not_run(tmp_path: Path) -> None:
    for name in ("0.out", "0.err"):
        write(tmp_path / name, "")
    whole = '{"name": "a", "ok": true, "error": "", "seconds": 1.0, "value": null}\n'
    write(tmp_path / "0.jsonl", whole + whole[:30])
    result = testing_launch._result(tmp_path, 0, -9)
    assert [entry.name for entry in result.cases] == ["a"]
    check_case([result], "a")
    with pytest.raises(RanksError, match="rank 0 has not run b\n--- rank 0, exit -9"):
        check_case([result], "b")


def test_a_free_port_is_kept_for_who_names_it() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))  # as for a port of the kernel's choice: nothing is shared
    store = dist.TCPStore("127.0.0.1", port, 1, True, timeout=datetime.timedelta(seconds=20))
    assert store.port == port
    assert port not in [free_port() for _ in range(200)]


def test_tagged_rows_tell_their_place() -> None:
    token, expert = torch.meshgrid(torch.arange(40), torch.arange(8), indexing="ij")
    rows = torch.cat(
        [tagged_rows(i, r, token.flatten(), expert.flatten(), 4) for i in (0, 1) for r in (0, 1, 2)]
    )
    assert rows.shape == (2 * 3 * 320, 4)
    assert rows.dtype == torch.float32
    assert len(rows.unique(dim=0)) == len(rows)
    assert ((rows >= 0) & (rows < 1)).all()
    assert torch.equal(rows * 2**20, (rows * 2**20).round())
    assert torch.equal(rows[:320], tagged_rows(0, 0, token, expert, 4).reshape(320, 4))


def test_deepspeeds_shared_memory_op_is_off() -> None:
    import deepspeed.ops

    testing.disable_deepspeed_shm()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False
