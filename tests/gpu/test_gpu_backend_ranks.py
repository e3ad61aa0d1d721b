"""Swapped DeepSpeed layers on two GPUs: the CUDA backend against the oracle in fp32."""

from __future__ import annotations

import copy
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from moe_models import fill, make_moe, own_routing, raised, run, same_everywhere, tokens

import ds_tilemoe
from ds_tilemoe import reference
from ds_tilemoe.errors import (
    BuildError,
    CapacityError,
    DeadlineError,
    RankFailure,
    UnsupportedLayerError,
)
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.symmetric_heap import gather
from ds_tilemoe.testing import RankContext, case, rank_tests

WORLD = 2
HIDDEN, FFN, EXPERTS = 256, 384, 8
# Rounding of the hidden row, of the row and of the weighted sum, each 2**-9 at most (bf16).
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}


def make(kind: Any = "mlp", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    options = {"hidden": HIDDEN, "ffn": FFN, "drop_tokens": False, **options}
    return make_moe(options.pop("ep_size", WORLD), kind, **options).to("cuda", dtype)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return tokens(*shape, seed=seed, dtype=dtype).cuda()


def oracle(moe: Any, x: Tensor) -> Tensor:
    """This rank's output in fp32, by weights as they are after the cast."""
    experts = []
    for e in range(moe.num_experts):
        twin = copy.deepcopy(moe.deepspeed_moe.experts.deepspeed_experts[0])
        fill(twin.float(), e)
        experts.append(twin.to(x.dtype).float())
    flat = x.reshape(-1, x.shape[-1])
    with torch.no_grad():
        return reference.moe(flat.float(), own_routing(moe, x), experts).reshape(x.shape)


def assert_right(moe: Any, x: Tensor) -> Tensor:
    """This rank's output; what is wrong on one rank is raised on all, so that they stay in step."""
    y, problem = x, ""
    try:
        y = run(moe, x)[0]
        problem = _difference(y, oracle(moe, x), x.dtype)
    except Exception:
        problem = traceback.format_exc()
    assert not any(told := gather(problem, torch.distributed.group.WORLD)), "\n".join(told)
    return y


def _difference(y: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    if y.shape != want.shape or y.dtype != dtype:
        return f"got {list(y.shape)} {y.dtype}"
    if not y.numel():
        return ""
    norms = want.norm(dim=-1)
    error = (y.float() - want).norm(dim=-1) / norms.clamp_min(norms.mean())
    worst = error.max().item()
    return "" if worst <= TOLERANCE[dtype] else f"a token is off by {worst:.2e}"


def swap(moe: Any, **block: Any) -> Any:
    report = ds_tilemoe.apply(moe, {"backend": "cuda", **block})
    assert report.swapped, str(report)
    return moe


@case(kind=["mlp", "swiglu", "megatron", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for k in (1, 2):
            moe = swap(make(kind, dtype, k=k), layout=layout)
            assert type(moe.deepspeed_moe) is TileMOELayer
            first = assert_right(moe, rows(3, 67, HIDDEN, dtype=dtype))
            again = run(moe, rows(3, 67, HIDDEN, dtype=dtype))[0]
            assert torch.equal(first, again), "run to run"
            assert_right(moe, rows(700, HIDDEN, seed=1, dtype=dtype))


@case
def fronts_by_kernel_and_by_torch(ctx: RankContext) -> None:
    """The kernel's epilogue where it has the activation; else the expert's own front."""
    for activation in (nn.GELU(), nn.SiLU(), nn.ReLU(), nn.GELU(approximate="tanh"), nn.Tanh()):
        expert = nn.Sequential(nn.Linear(HIDDEN, FFN), activation, nn.Linear(FFN, HIDDEN))
        moe = swap(make(expert))
        assert_right(moe, rows(300, HIDDEN))
        made = moe.deepspeed_moe._tile.experts[0].front_gemm
        own = isinstance(activation, nn.SiLU | nn.ReLU) or (
            isinstance(activation, nn.GELU) and activation.approximate == "none"
        )
        assert (made is not None) is own


@case
def wide_and_odd(ctx: RankContext) -> None:
    for hidden, ffn in ((1536, 512), (520, 1000), (8, 72), (2048, 136)):
        for kind in ("mlp", "swiglu"):
            moe = swap(make(kind, hidden=hidden, ffn=ffn, experts=4))
            assert_right(moe, rows(401, hidden))


@case
def token_counts_change(ctx: RankContext) -> None:
    moe = swap(make("swiglu"))
    counts = ((5, 900), (900, 5), (0, 17), (17, 0), (0, 0), (1, 1), (1024, 1024), (128, 127))
    for seed, count in enumerate(counts):
        assert_right(moe, rows(count[ctx.rank], HIDDEN, seed=seed))
    ds_tilemoe.check(moe)


@case
def experts_and_ranks_without_rows(ctx: RankContext) -> None:
    for wanted in ({0}, {7}, {1, 2, 6}, {4, 5, 6, 7}):
        moe = swap(make(k=1))
        with torch.no_grad():
            column = [0.0 if e in wanted else -1.0 for e in range(EXPERTS)]
            moe.deepspeed_moe.gate.wg.weight[:, 0] = torch.tensor(column)
        x = rows(333, HIDDEN)
        x[:, 0] = 50.0
        assert set(own_routing(moe, x).expert_ids.unique().tolist()) <= wanted
        assert_right(moe, x)


@case
def dropping(ctx: RankContext) -> None:
    for k in (1, 2):
        moe = make(k=k, drop_tokens=True, eval_capacity_factor=0.5, min_capacity=1)
        swap(moe)
        for seed, count in enumerate(((300, 300), (40, 7), (0, 16))):
            x = rows(count[ctx.rank], HIDDEN, seed=seed)
            y, want = run(moe, x)[0].float(), oracle(moe, x)
            limit = 2e-2 * max([1.0, *want.abs().flatten().tolist()])
            assert ((y - want).abs() <= limit).all()
            if len(x):
                lost = (own_routing(moe, x).expert_ids < 0).all(dim=1)
                assert (y[lost] == 0).all()


@case
def every_split_gives_the_same_bits(ctx: RankContext) -> None:
    moe, x = make(hidden=1024, ffn=512), rows(2000, 1024)
    swap(moe, num_consumer_ctas=8)
    want = assert_right(moe, x)
    for block in (
        *({"num_consumer_ctas": c} for c in (1, 2, 24, 131)),
        {"mover": "none"},
        {"bands_per_segment": 3},
        {"local_tail_waves": 1},
        {"local_tail_waves": 0, "num_consumer_ctas": 1 + 7 * ctx.rank},
    ):
        swap(moe, **block)
        assert torch.equal(run(moe, x)[0], want), block


@case
def large(ctx: RankContext) -> None:
    for kind in ("mlp", "swiglu"):
        moe = swap(make(kind, hidden=2048, ffn=2048, experts=16))
        x = rows(4096, 2048)
        first = assert_right(moe, x)
        assert all(torch.equal(run(moe, x)[0], first) for _ in range(20))


@case
def many_forwards(ctx: RankContext) -> None:
    moe = swap(make())
    generator = torch.Generator().manual_seed(ctx.rank)
    for i in range(300):
        x = rows(int(torch.randint(0, 1025, (1,), generator=generator)), HIDDEN, seed=i)
        if i % 10 == 0:
            assert_right(moe, x)
        else:
            run(moe, x)
    ds_tilemoe.check(moe)


@case
def too_many_tokens_then_right_again(ctx: RankContext) -> None:
    moe = swap(make(), max_tokens_per_rank=128)
    assert_right(moe, rows(128, HIDDEN))
    x = rows(256 if ctx.rank == 1 else 3, HIDDEN)
    error = raised(run, moe, x)
    assert isinstance(error, CapacityError), repr(error)
    for part in ("256", "128", "max_tokens_per_rank"):
        assert part in same_everywhere(str(error))
    assert_right(moe, rows(4, HIDDEN))
    swap(moe, max_tokens_per_rank=256)
    assert_right(moe, x)


@case
def one_rank_fails_in_its_gate(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(50, HIDDEN)
    want = assert_right(moe, x)
    bad = x[:, :-8] if ctx.rank == 1 else x
    error = raised(run, moe, bad)
    assert isinstance(error, RankFailure), repr(error)
    assert "rank 1 of the group failed in its routing" in same_everywhere(str(error))
    assert torch.equal(run(moe, x)[0], want)


@case
def weights_that_move(ctx: RankContext) -> None:
    """Maps follow data_ptr; new numbers in the same place are seen as well."""
    moe, x = swap(make()), rows(90, HIDDEN)
    want = assert_right(moe, x)
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        for linear in (expert[0], expert[2]):
            linear.weight.data = linear.weight.data.clone()
    assert torch.equal(run(moe, x)[0], want)
    with torch.no_grad():
        for expert in moe.deepspeed_moe.experts.deepspeed_experts:
            expert[2].weight.mul_(2)
            expert[2].bias.mul_(2)
    assert torch.equal(run(moe, x)[0], 2 * want)


@case
def groups_of_one(ctx: RankContext) -> None:
    for kind in ("mlp", "swiglu"):
        moe = make(kind, ep_size=1)
        swap(moe)
        for count in ((5, 300), (0, 64)):
            x = rows(count[ctx.rank], HIDDEN)
            y = run(moe, x)[0].float()
            flat = [copy.deepcopy(e).float() for e in moe.deepspeed_moe.experts.deepspeed_experts]
            with torch.no_grad():
                want = reference.moe(x.float(), own_routing(moe, x), flat)
            assert (y - want).norm() <= 8e-3 * want.norm()


@case
def on_a_stream_of_its_own(ctx: RankContext) -> None:
    moe, x = swap(make()), rows(200, HIDDEN)
    want = assert_right(moe, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run(moe, x)[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)
    assert torch.equal(run(moe, x)[0], want)


@case
def restored(ctx: RankContext) -> None:
    moe, x = make(), rows(2, 50, HIDDEN)
    want = run(moe, x)
    swap(moe)
    got = run(moe, x)
    assert torch.equal(got[1], want[1]), "l_aux"
    assert torch.equal(got[2], want[2]), "exp_counts"
    assert (got[0] - want[0]).float().norm() <= 1.2e-2 * want[0].float().norm()
    assert ds_tilemoe.restore(moe) == 1
    assert torch.equal(run(moe, x)[0], want[0])


class Model(nn.Module):
    """Two MoE layers with a dense one between."""

    def __init__(self) -> None:
        super().__init__()
        options = {"hidden": HIDDEN, "ffn": FFN, "parallel": False, "drop_tokens": False}
        self.norm = nn.LayerNorm(HIDDEN)
        self.first = make_moe(WORLD, "mlp", **options)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.second = make_moe(WORLD, "swiglu", seed=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))[0]
        return x + self.second(self.dense(x))[0]


@case
def through_initialize(ctx: RankContext) -> None:
    torch.manual_seed(0)
    block = {"tile_overlap": {"stats": True}, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = deepspeed.initialize(model=Model().bfloat16(), config=block)
    engine.eval()
    x = rows(2, 150, HIDDEN)
    want = run(engine, x)
    report = ds_tilemoe.apply(engine)
    assert report.swapped == ("first.deepspeed_moe", "second.deepspeed_moe"), str(report)
    assert ds_tilemoe.apply(engine).swapped == report.swapped
    got = run(engine, x)
    assert (got - want).float().norm() <= 1.2e-2 * want.float().norm()
    ds_tilemoe.stats.reset()
    assert torch.equal(run(engine, x), got)
    with ds_tilemoe.measure_combine_alone(engine):
        assert torch.equal(run(engine, x), got)
    ds_tilemoe.check(engine)
    records = {record["layer"]: record for record in ds_tilemoe.stats.layers()}
    for name in report.swapped:
        record = records[name]
        assert record["calls"] == 1
        assert record["segments"] > 0
        assert record["combine_alone_us"] is not None
    chosen = ds_tilemoe.stats.export_config()["tile_overlap"]
    assert {"backend": "cuda", "tile_m": 128, "num_consumer_ctas": 8}.items() <= chosen.items()
    ds_tilemoe.load_config(chosen)
    assert ds_tilemoe.restore(engine) == 2
    assert torch.equal(run(engine, x), want)


@case
def layers_that_stay_as_they_are(ctx: RankContext) -> None:
    for moe, reason in (
        (make(dtype=torch.float32), "only bfloat16 and float16"),
        (make(hidden=68), "multiple of 8"),
    ):
        report = ds_tilemoe.apply(moe)
        assert reason in same_everywhere(report.layers[0].reason)
        error = raised(ds_tilemoe.apply, moe, {"strict": True})
        assert isinstance(error, UnsupportedLayerError)
    moe = make()
    for block, words in (
        ({"backend": "cpu"}, "parameters are on cuda"),
        ({"num_consumer_ctas": 132}, "at most 131"),
        ({"tile_m": 64}, "wanted 128"),
        ({"tile_n": 100}, "wanted 128 or 256"),
    ):
        error = raised(ds_tilemoe.apply, moe, block)
        assert isinstance(error, BuildError), repr(error)
        assert words in str(error)


@case
def one_rank_fails_in_mid_call(ctx: RankContext) -> None:
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Tanh(), nn.Linear(FFN, HIDDEN))
    moe, x = swap(make(expert), wait_timeout_s=2), rows(50, HIDDEN)
    want = assert_right(moe, x)
    if ctx.rank == 1:
        for cut in moe.deepspeed_moe._tile.experts:
            cut.front = lambda rows: 1 / 0
        assert isinstance(raised(run, moe, x), ZeroDivisionError)
    else:
        assert run(moe, x)[0].isnan().all()
    error = raised(ds_tilemoe.check, moe)
    assert isinstance(error, DeadlineError), repr(error)
    wanted = ("rows of rank 1", "ZeroDivisionError")[ctx.rank]
    assert wanted in str(error)
    error = raised(run, moe, x)
    assert isinstance(error, DeadlineError), repr(error)
    assert wanted in str(error)
    torch.distributed.barrier()
    swap(moe, wait_timeout_s=2)
    assert torch.equal(run(moe, x)[0], want)
    ds_tilemoe.check(moe)


@case
def nvshmem_ends(ctx: RankContext) -> None:
    """Last: a process that ends with NVSHMEM running is tested by launch/infer.py."""
    from ds_tilemoe import transport
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    transport.start(CUDATileMoEBuilder().load()).close()


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    """The library, before the ranks start: it takes minutes and each case has a limit."""
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    builder = CUDATileMoEBuilder()
    if not builder.is_compatible():
        pytest.skip(f"the CUDA op cannot be built here: {builder.error_log}")
    return builder.build()


test_ranks = pytest.mark.gpu(
    pytest.mark.skipif(
        torch.cuda.device_count() < WORLD,
        reason=f"needs {WORLD} CUDA GPUs, and torch sees {torch.cuda.device_count()}",
    )(rank_tests(__file__, world=WORLD, timeout_s=240, env={"DS_ACCELERATOR": "cuda"}))
)
