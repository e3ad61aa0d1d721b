"""Shared memory after kill -9, SIGTERM, exceptions and a normal end; a /dev/shm too small."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ds_tilemoe.symmetric_heap import _unnamed_file
from ds_tilemoe.testing import free_port

ROOT = Path(__file__).parents[1]
WORLD = 4

# One process imports torch and the op once and forks the ranks of every round: what is tested is
# the heap, not the start of Python. Each round ends in its own way; then a right forward follows.
DRIVER = """
import os, signal, sys, time
import torch, torch.distributed as dist
from ds_tilemoe.backends.base import LayerShape
from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.op_builder import CPUTileMoEBuilder
from ds_tilemoe.routing import Routing

CPUTileMoEBuilder().load()
WORLD, TOKENS, HIDDEN = {world}, 2000, 64
shape = LayerShape("layer", 8, 2, HIDDEN, HIDDEN, HIDDEN, torch.float32)

class Identity:
    down_bias = None
    down_weight = torch.eye(HIDDEN)
    def __init__(self, sleep_s):
        self.sleep_s = sleep_s
    def front(self, x):
        time.sleep(self.sleep_s)
        return x

def rank_main(rank, store, ready, ending):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=WORLD)
    backend = CpuBackend(dist.group.WORLD, TileOverlapConfig())
    backend.ensure([shape], TOKENS)
    ids = torch.stack([torch.arange(TOKENS) % 8, (torch.arange(TOKENS) + 3) % 8], 1).int()
    routing = Routing(ids, torch.full((TOKENS, 2), 0.5), torch.zeros(()), torch.zeros(8).long())
    x = torch.randn(TOKENS, HIDDEN)
    def forward(sleep_s):
        return backend.forward(shape, [Identity(sleep_s)] * 2, x, routing)
    assert torch.allclose(forward(0.0), x)
    os.write(ready, b".")
    if ending == "raise":
        raise RuntimeError("user code")
    if ending != "return":
        forward(30.0)  # the parent kills the rank in here

def start(store, ending):
    ready, write = os.pipe()
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(rank, store, write, ending)
                os._exit(0)
            except BaseException as error:
                print(type(error).__name__, error, file=sys.stderr)
                os._exit(1)
        children.append(pid)
    os.close(write)
    seen = b""
    while len(seen) < WORLD:
        more = os.read(ready, WORLD)
        assert more, "a rank ended early"
        seen += more
    os.close(ready)
    return children

def free_bytes():
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize

def ours():
    return {{name for name in os.listdir("/dev/shm") if "tilemoe" in name}}

names, free = ours(), free_bytes()
for number, ending in enumerate({endings}):
    children = start(sys.argv[1] + str(number), ending)
    if ending in ("KILL", "TERM", "INT"):
        time.sleep(0.1)
        for pid in children:
            os.kill(pid, getattr(signal, "SIG" + ending))
    for pid in children:
        os.waitpid(pid, 0)
    left = ours() - names
    assert not left, (ending, left)
    lost = free - free_bytes() if {alone} else 0
    # One heap is 14 MB; in a /dev/shm that other jobs share, some of theirs may come and go.
    assert lost < 8 << 20, f"{{ending}}: {{lost}} bytes of /dev/shm are gone"
print("rounds", number + 1)
"""


def private_shm(size: str, *command: str) -> list[str]:
    """``command`` with a /dev/shm of its own, where this machine allows that."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    for unshare in (["unshare", "-m"], ["unshare", "-rm"]):
        with contextlib.suppress(OSError):
            if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True).returncode == 0:
                return [*unshare, "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    return []


def test_the_region_has_no_name_and_no_other_reader():
    fd = _unnamed_file(1 << 16)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 1 << 16
    assert status.st_blocks * 512 >= 1 << 16, "not reserved"


def test_nothing_is_left_behind_and_the_next_start_is_right(tmp_path):
    endings = ["KILL"] * 20 + ["TERM", "INT", "raise", "return"]
    script = tmp_path / "driver.py"
    command = [sys.executable, str(script), str(tmp_path / "store")]
    private = private_shm("256m", *command)
    # Where this machine has one /dev/shm for all, the heaps of other workers' tests are in it.
    alone = bool(private) or "PYTEST_XDIST_WORKER" not in os.environ
    script.write_text(DRIVER.format(world=WORLD, endings=endings, alone=alone))
    done = subprocess.run(
        private or command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"rounds {len(endings)}" in done.stdout


SMALL = textwrap.dedent(
    """
    import sys, torch, torch.distributed as dist
    from ds_tilemoe.backends.base import LayerShape
    from ds_tilemoe.backends.cpu import CpuBackend
    from ds_tilemoe.config import TileOverlapConfig
    from ds_tilemoe.errors import CapacityError
    from ds_tilemoe.testing import init_cpu_group

    init_cpu_group()
    backend = CpuBackend(dist.group.WORLD, TileOverlapConfig())
    shape = LayerShape("layer", 8, 2, 1024, 1024, 1024, torch.float32)
    try:
        backend.ensure([shape], 4096)
    except CapacityError as error:
        print("refused:", error)
    else:
        sys.exit("a heap larger than /dev/shm was mapped")
    backend.ensure([shape], 64)  # and what fits is there
    print("fits")
    """
)


def test_small_dev_shm_is_a_clear_error_on_all_ranks(tmp_path):
    if not private_shm("64m", "true"):
        pytest.skip("needs the right to make a mount namespace")
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    port = free_port()
    ranks = " ".join(
        f"RANK={rank} {sys.executable} {script} >{tmp_path}/{rank}.log 2>&1 &"
        for rank in range(WORLD)
    )
    subprocess.run(
        private_shm("64m", "sh", "-c", f"{ranks} wait"),
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        },
    )
    for rank in range(WORLD):
        log = (tmp_path / f"{rank}.log").read_text()
        assert "refused: rank 0 of the group" in log, log
        for word in ("needed", "available", "max_tokens_per_rank", "4096 tokens a rank"):
            assert word in log, log
        assert "fits" in log, log


def test_a_dead_peer_is_noticed_before_the_group_timeout(tmp_path):
    script = tmp_path / "dead.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time, torch, torch.distributed as dist
            from ds_tilemoe.backends.base import LayerShape
            from ds_tilemoe.backends.cpu import CpuBackend
            from ds_tilemoe.config import TileOverlapConfig
            from ds_tilemoe.errors import DeadlineError
            from ds_tilemoe.routing import Routing
            from ds_tilemoe.testing import init_cpu_group

            init_cpu_group()
            rank = dist.get_rank()
            backend = CpuBackend(dist.group.WORLD, TileOverlapConfig())
            shape = LayerShape("layer", 4, 1, 16, 16, 16, torch.float32)
            backend.ensure([shape], 16)
            dist.barrier()
            time.sleep(rank)  # rank 0 is out of the barrier and waits
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            routing = Routing(
                torch.zeros(4, 1).int(), torch.ones(4, 1), torch.zeros(()), torch.zeros(4).long()
            )
            started = time.monotonic()
            try:
                backend.forward(shape, [], torch.ones(4, 16), routing)
            except DeadlineError as error:
                print("raised", time.monotonic() - started < 20, error, flush=True)
            os._exit(0)
            """
        )
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    limit = time.monotonic() + 60
    while ranks[0].poll() is None and time.monotonic() < limit:
        time.sleep(0.05)  # rank 1 is not reaped meanwhile: a zombie counts as dead
    for rank in ranks:
        rank.kill()
    assert ranks[1].wait() == -signal.SIGKILL
    text = ranks[0].stdout.read()
    assert "raised True" in text, text
    assert "rank 1 of the group (process" in text and "has ended" in text, text
