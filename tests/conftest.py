"""Settings of every test run: one thread a rank, the CPU accelerator, why GPU tests are skipped."""

from __future__ import annotations

import os

import pytest

# Before anything imports torch or deepspeed: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Continuous integration installs a CUDA compiler and wants it used."""
    parser.addoption(
        "--require-cuda-build",
        action="store_true",
        help="fail, instead of skip, where the CUDA op cannot be compiled",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked ``gpu`` where there is none."""
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))
