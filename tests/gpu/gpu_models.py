"""MoE layers on this rank's GPU, swapped, and compared with the oracle in fp32."""

from __future__ import annotations

import copy
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from moe_models import fill, make_moe, own_routing, run, tokens

import ds_tilemoe
from ds_tilemoe import reference
from ds_tilemoe.errors import DeadlineError, RankFailure
from ds_tilemoe.symmetric_heap import gather
from ds_tilemoe.testing import rank_tests

GPUS = torch.cuda.device_count()
# Two ranks, or one for each GPU of a host with four or eight; or as many as asked for (a power of
# two), which share the GPUs there are: enough to see whether results are right.
WORLD = int(os.environ.get("TILEMOE_TEST_RANKS", max(2, 1 << (min(GPUS or 1, 8).bit_length() - 1))))
IS_SHARED = 0 < GPUS < WORLD and "TILEMOE_TEST_RANKS" in os.environ
HIDDEN, FFN, EXPERTS = 256, 384, 16
SMALL: dict[str, Any] = {"hidden": 64, "ffn": 128, "experts": 8}  # the layer of cases.md
# Rounding of the hidden row, of the row and of the weighted sum, each 2**-9 at most (bf16).
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
FORCE = 50.0  # a token's first number, by which it goes where ``steer`` says


def make(kind: Any = "mlp", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """A MoE over all ranks, without drops, unless ``options`` say otherwise."""
    options = {
        "hidden": HIDDEN,
        "ffn": FFN,
        "experts": EXPERTS,
        "drop_tokens": False,
        "min_capacity": 0,
        **options,
    }
    return make_moe(options.pop("ep_size", WORLD), kind, **options).to("cuda", dtype)


def swap(moe: Any, **block: Any) -> Any:
    """With deadlines far below a case's limit, so that a wait in vain says what it waited for."""
    report = ds_tilemoe.apply(moe, {"backend": "cuda", "wait_timeout_s": 10, **block})
    assert report.swapped, str(report)
    return moe


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Different on every rank."""
    return tokens(*shape, seed=seed, dtype=dtype).cuda()


def steer(moe: Any, wanted: Collection[int]) -> None:
    """Of tokens that begin with FORCE only experts in ``wanted`` get any."""
    with torch.no_grad():
        column = [0.0 if e in wanted else -1.0 for e in range(moe.num_experts)]
        moe.deepspeed_moe.gate.wg.weight[:, 0] = torch.tensor(column)


def forced(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``rows`` for a layer that has been steered."""
    x = rows(*shape, seed=seed, dtype=dtype)
    x[..., 0] = FORCE
    return x


def dense(moe: Any, dtype: torch.dtype) -> list[nn.Module]:
    """All experts of the group in fp32, by weights as they are after a cast to ``dtype``."""
    experts = []
    for e in range(moe.num_experts):
        twin = copy.deepcopy(moe.deepspeed_moe.experts.deepspeed_experts[0])
        fill(twin.float(), e)
        experts.append(twin.to(dtype).float())
    return experts


def oracle(moe: Any, x: Tensor, experts: Sequence[nn.Module] | None = None) -> Tensor:
    """This rank's output in fp32; ``experts`` of :func:`dense` save their making."""
    experts = experts or dense(moe, x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        return reference.moe(flat.float(), own_routing(moe, x), experts).reshape(x.shape)


def last_consumers(moe: Any) -> int:
    """SMs that moved rows in the layer's last call on this rank. Waits for the device."""
    ds_tilemoe.check(moe)
    return moe.deepspeed_moe._tile.stats.choice.num_consumer_ctas


def agree(problem: str) -> None:
    """What is wrong on one rank is raised on all, so that they stay in step."""
    told = gather(problem, dist.group.WORLD)
    assert not any(told), "\n".join(f"rank {r}: {text}" for r, text in enumerate(told) if text)


def together(check: Callable[[], None]) -> None:
    """Runs what asserts other things on each rank; all ranks leave it alike."""
    problem = ""
    try:
        check()
    except Exception:
        problem = traceback.format_exc()
    agree(problem)


def assert_right(moe: Any, x: Tensor, experts: Sequence[nn.Module] | None = None) -> Tensor:
    """This rank's output, compared with the oracle."""
    outputs = []

    def compare() -> None:
        outputs.append(run(moe, x)[0])
        problem = difference(outputs[0], oracle(moe, x, experts), x.dtype)
        assert not problem, problem

    together(compare)
    return outputs[0]


def assert_equal(got: Tensor, want: Tensor, what: object) -> None:
    """Bit for bit, on every rank."""
    same = torch.equal(got, want)
    agree("" if same else f"{what}: {int((got != want).sum())} of {got.numel()} numbers differ")


def assert_rank_1_failed(error: Exception, behind: bool) -> None:
    """``error`` is what a peer raises of a call in which rank 1 failed in its routing.

    Args:
        behind: the peers had queued calls behind it, which fails the group. Where ranks take turns
            on a GPU, one that has not come to that call by then hears of one that had.
    """
    if behind and IS_SHARED and isinstance(error, DeadlineError):
        assert re.search(r"heard too late that call \d+ had failed because of rank 1", str(error))
        return
    assert isinstance(error, RankFailure), repr(error)
    assert "rank 1 of the group failed in its routing" in str(error), str(error)
    assert ("the group has failed" in str(error)) == behind, str(error)


def difference(y: Tensor, want: Tensor, dtype: torch.dtype, tolerance: float | None = None) -> str:
    """What is wrong with ``y``, or ""; token by token, in units of the token's norm."""
    if y.shape != want.shape or y.dtype != dtype:
        return f"got {list(y.shape)} {y.dtype}"
    if not y.numel():
        return ""
    want = want.float()
    norms = want.norm(dim=-1)
    error = (y.float() - want).norm(dim=-1) / norms.clamp_min(norms.mean())
    worst = error.max().item()
    at = int(error.flatten().argmax())
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    return "" if worst <= limit else f"token {at} of {len(error.flatten())} is off by {worst:.2e}"


def gpu_rank_tests(
    source: str,
    timeout_s: float = 90,
    case_timeout_s: float = 30,
    env: Mapping[str, str] | None = None,
) -> Any:
    """As ``rank_tests``, on WORLD GPUs; skipped where there are fewer, unless they are shared."""
    slower = 3 if IS_SHARED else 1  # ranks take turns
    limits = {"timeout_s": slower * timeout_s, "case_timeout_s": slower * case_timeout_s}
    env = {"DS_ACCELERATOR": "cuda", **(env or {})}
    tests = rank_tests(source, world=WORLD, **limits, env=env)
    skip = pytest.mark.skipif(
        not IS_SHARED and GPUS < WORLD,
        reason=f"needs {WORLD} CUDA GPUs, and torch sees {GPUS}",
    )
    return pytest.mark.gpu(skip(tests))


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    """The library, before the ranks start: it takes minutes and each case has a limit."""
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    builder = CUDATileMoEBuilder()
    if not builder.is_compatible():
        pytest.skip(f"the CUDA op cannot be built here: {builder.error_log}")
    return builder.build()
