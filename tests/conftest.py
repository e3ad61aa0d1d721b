"""Settings of every test run: one thread a rank, the CPU accelerator, why GPU tests are skipped.

A run of the whole suite is shared by two processes of pytest-xdist, since ranks wait for each other
and for deadlines much of their time. Named files run in one process, as do all with ``-n 0``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

# Before anything imports torch or deepspeed: both read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

WORKERS = 2
# Long files, begun first: none is left for the end, when the other process has nothing to do.
LONG = (
    "test_protocol_stress",
    "test_infer",
    "test_bench_layer",
    "test_testing",
    "test_infer_errors",
    "test_contention",
    "test_cuda_choices_ranks",
    "test_layers_cases_ranks",
    "test_protocol_worlds",
    "test_package",
    "test_demo",
    "test_cuda_layers_ranks",
    "test_cuda_backend_ranks",
    "test_bench_operator",
    "test_shared_memory",
    "test_protocol_ranks",
    "test_layers_ranks",
    "test_op_builder",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Continuous integration installs a CUDA compiler and wants it used."""
    parser.addoption(
        "--require-cuda-build",
        action="store_true",
        help="fail, instead of skip, where the CUDA op cannot be compiled",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Shares a run of the whole suite; before pytest-xdist, if it is there, reads its options."""
    option = config.option
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    is_worker = hasattr(config, "workerinput")
    if whole and not is_worker and not option.usepdb and getattr(option, "numprocesses", 0) is None:
        option.numprocesses = WORKERS
        option.loadscopereorder = False  # the order is that of LONG


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file never parts: one launch of ranks serves all of its cases. Nor do the GPUs' tests."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "gpu" if "gpu" in file else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests on GPUs and long files first, and skips the former where there is no GPU."""
    place, last = {name: number for number, name in enumerate(LONG)}, len(LONG)
    items.sort(key=lambda item: place.get(item.path.stem, -1 if "gpu" in item.keywords else last))
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))
