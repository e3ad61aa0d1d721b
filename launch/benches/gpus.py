"""Who else computes on the GPUs: two processes on one GPU take turns of milliseconds.

A rank that waits for its peer then waits for turns too, and every time is a turn too long or right
by chance. Such are ranks of an earlier run that still wait for each other.
"""

from __future__ import annotations

import os
import platform
import subprocess

import torch

from benches.ranks import World

QUERY = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]


def need_alone(world: World) -> None:
    """Only ranks of this run compute on their GPUs. A collective.

    Raises:
        BenchError: another process does; on every rank, with its number.
    """
    if not world.on_gpu:
        return
    here = platform.node()
    ranks = [pid for host, pid in world.gather((here, os.getpid())) if host == here]
    uuid = f"GPU-{torch.cuda.get_device_properties(world.device).uuid}"
    try:
        done = subprocess.run(QUERY, check=True, capture_output=True, text=True, timeout=30)
        others = strangers(done.stdout, uuid, ranks)
    except (OSError, subprocess.SubprocessError):
        others = []
    names = ", ".join(f"{pid} ({name})" for pid, name in others)
    world.agree(
        f"got {names} on {uuid} beside this run, wanted no other process that computes there: the"
        f" GPU gives each its turns of milliseconds; end it: kill {others[0][0]}"
        if others
        else ""
    )


def strangers(listed: str, uuid: str, ranks: list[int]) -> list[tuple[int, str]]:
    """Number and name of processes on GPU ``uuid`` that are not among ``ranks``.

    Args:
        listed: a line "UUID, PID, NAME" a process and GPU. If none of them is one of ``ranks``, its
            numbers are of another container, and nothing is known.
    """
    rows = [line.split(", ", 2) for line in listed.splitlines() if line.count(", ") >= 2]
    found = [(int(pid), name) for gpu, pid, name in rows if gpu == uuid and pid.isdigit()]
    if not any(pid in ranks for pid, _ in found):
        return []
    return [(pid, name) for pid, name in found if pid not in ranks]
