"""Swapped DeepSpeed layers on GPUs: shapes, experts and settings, against the oracle in fp32."""

from __future__ import annotations

import copy
import time
from typing import Any

import deepspeed
import torch
from gpu_models import (
    EXPERTS,
    FFN,
    HIDDEN,
    WORLD,
    agree,
    assert_equal,
    assert_right,
    built,
    difference,
    gpu_rank_tests,
    make,
    oracle,
    rows,
    swap,
    together,
)
from moe_models import make_moe, own_routing, raised, run, same_everywhere
from torch import Tensor, nn

import ds_tilemoe
from ds_tilemoe import reference
from ds_tilemoe.errors import ConfigError, DeadlineError, UnsupportedLayerError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import RankContext, case

__all__ = ["built"]


@case(kind=["mlp", "swiglu", "megatron", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for k in (1, 2):
            moe = swap(make(kind, dtype, k=k), layout=layout)
            assert type(moe.deepspeed_moe) is TileMOELayer
            first = assert_right(moe, rows(3, 67, HIDDEN, dtype=dtype))
            again = run(moe, rows(3, 67, HIDDEN, dtype=dtype))[0]
            assert_equal(again, first, "run to run")
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
            moe = swap(make(kind, hidden=hidden, ffn=ffn, experts=2 * WORLD))
            assert_right(moe, rows(401, hidden))


@case
def experts_and_ranks_without_rows(ctx: RankContext) -> None:
    for wanted in ({0}, {EXPERTS - 1}, {1, 2, 6}, set(range(EXPERTS // 2, EXPERTS))):
        moe = swap(make(k=1))
        with torch.no_grad():
            column = [0.0 if e in wanted else -1.0 for e in range(EXPERTS)]
            moe.deepspeed_moe.gate.wg.weight[:, 0] = torch.tensor(column)
        x = rows(333, HIDDEN)
        x[:, 0] = 50.0
        found = set(own_routing(moe, x).expert_ids.unique().tolist())
        agree("" if found <= wanted else f"got rows of experts {found}, wanted {wanted}")
        assert_right(moe, x)


@case
def dropping(ctx: RankContext) -> None:
    for k in (1, 2):
        moe = make(k=k, drop_tokens=True, eval_capacity_factor=0.5, min_capacity=1)
        swap(moe)
        for seed, count in enumerate(((300, 300), (40, 7), (0, 16))):
            x = rows(count[ctx.rank % 2], HIDDEN, seed=seed)
            y, want = run(moe, x)[0].float(), oracle(moe, x)
            limit = 2e-2 * max([1.0, *want.abs().flatten().tolist()])
            lost = (own_routing(moe, x).expert_ids < 0).all(dim=1)
            # NaN is off, too.
            off = int((~((y - want).abs() <= limit)).sum())
            kept = int((y[lost] != 0).sum())
            agree(f"k {k}: {off} numbers are off, {kept} of lost tokens" if off or kept else "")


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
        assert_equal(run(moe, x)[0], want, block)


@case
def large(ctx: RankContext) -> None:
    for kind in ("mlp", "swiglu"):
        moe = swap(make(kind, hidden=2048, ffn=2048, experts=16))
        x = rows(4096, 2048)
        first = assert_right(moe, x)
        for turn in range(20):
            assert_equal(run(moe, x)[0], first, f"{kind}, run {turn}")


@case
def weights_that_move(ctx: RankContext) -> None:
    """Maps follow data_ptr; new numbers in the same place are seen as well."""
    moe, x = swap(make()), rows(90, HIDDEN)
    want = assert_right(moe, x)
    for expert in moe.deepspeed_moe.experts.deepspeed_experts:
        for linear in (expert[0], expert[2]):
            linear.weight.data = linear.weight.data.clone()
    assert_equal(run(moe, x)[0], want, "elsewhere")
    with torch.no_grad():
        for expert in moe.deepspeed_moe.experts.deepspeed_experts:
            expert[2].weight.mul_(2)
            expert[2].bias.mul_(2)
    assert_equal(run(moe, x)[0], 2 * want, "other numbers")


@case
def groups_of_one(ctx: RankContext) -> None:
    for kind in ("mlp", "swiglu"):
        moe = make(kind, ep_size=1)
        swap(moe)
        for count in ((5, 300), (0, 64)):
            x = rows(count[ctx.rank % 2], HIDDEN)
            y = run(moe, x)[0].float()
            flat = [copy.deepcopy(e).float() for e in moe.deepspeed_moe.experts.deepspeed_experts]
            with torch.no_grad():
                want = reference.moe(x.float(), own_routing(moe, x), flat)
            assert (y - want).norm() <= 8e-3 * want.norm()


@case
def restored(ctx: RankContext) -> None:
    moe, x = make(), rows(2, 50, HIDDEN)
    want = run(moe, x)
    swap(moe)
    got = run(moe, x)
    distance = float((got[0] - want[0]).float().norm() / want[0].float().norm())
    problem = "" if distance <= 1.2e-2 else f"off by {distance:.2e}"
    if not torch.allclose(got[1].float(), want[1].float(), rtol=1e-5):
        problem += f" l_aux {got[1].item()}, wanted {want[1].item()}"
    if not torch.equal(got[2], want[2]):
        problem += f" exp_counts {got[2].tolist()}, wanted {want[2].tolist()}"
    agree(problem)
    assert ds_tilemoe.restore(moe) == 1
    assert_equal(run(moe, x)[0], want[0], "DeepSpeed's own")


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
    # Layer by layer: another rounding in front of a gate may change a route.
    layers = {"first": engine.module.first, "second": engine.module.second}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str) -> Any:
        return lambda _, args, out: seen.update({name: (args[0], out[0])})

    hooks = [moe.register_forward_hook(look(name)) for name, moe in layers.items()]
    got = run(engine, x)
    for hook in hooks:
        hook.remove()
    ds_tilemoe.check(engine)  # no call is left that would count later
    ds_tilemoe.stats.reset()
    assert_equal(run(engine, x), got, "a second call")
    with ds_tilemoe.measure_combine_alone(engine):
        assert_equal(run(engine, x), got, "a measured call")
    ds_tilemoe.check(engine)
    records = {record["layer"]: record for record in ds_tilemoe.stats.layers()}
    for name in report.swapped:
        record = records[name]
        assert record["calls"] == 1
        assert record["segments"] > 0
        assert record["combine_alone_us"] is not None
    chosen = ds_tilemoe.stats.export_config()["tile_overlap"]
    assert {"backend": "cuda", "tile_m": 128, "num_dispatch_ctas": 4}.items() <= chosen.items()
    ds_tilemoe.load_config(chosen)
    assert ds_tilemoe.restore(engine) == 2
    for name, moe in layers.items():
        given, out = seen[name]
        agree(difference(out, run(moe, given)[0], x.dtype, 1.6e-2))
    assert_equal(run(engine, x), want, "restored")


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
        assert isinstance(error, ConfigError), repr(error)
        assert words in str(error)


@case
def one_rank_fails_in_its_own_front(ctx: RankContext) -> None:
    """In torch, between two launches: its peers hear of it at once, long before the deadline."""
    expert = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Tanh(), nn.Linear(FFN, HIDDEN))
    moe, x = swap(make(expert), wait_timeout_s=15), rows(50, HIDDEN)
    want = assert_right(moe, x)

    def fail() -> None:
        began = time.monotonic()
        if ctx.rank == 1:
            for cut in moe.deepspeed_moe._tile.experts:
                cut.front = lambda rows: 1 / 0
            assert isinstance(raised(run, moe, x), ZeroDivisionError)
        else:
            assert run(moe, x)[0].isnan().all()
        wanted = "ZeroDivisionError" if ctx.rank == 1 else "rank 1 of the group raised an exception"
        for error in (raised(ds_tilemoe.check, moe), raised(run, moe, x)):
            assert isinstance(error, DeadlineError), repr(error)
            assert wanted in str(error), str(error)
        seconds = time.monotonic() - began
        assert seconds < 10, f"it took {seconds:.0f} s"

    together(fail)
    swap(moe, wait_timeout_s=15)
    assert_equal(run(moe, x)[0], want, "on the new heap")
    ds_tilemoe.check(moe)


@case
def a_peer_that_does_not_come(ctx: RankContext) -> None:
    """A passed deadline, in front of GEMM 1 or behind GEMM 2: said by all that wait, in time."""
    moe, x = swap(make(), wait_timeout_s=2), rows(50, HIDDEN)
    want = assert_right(moe, x)
    (runtime,) = moe.deepspeed_moe._tile.session.runtimes()
    library = runtime.backend._library
    real = library.tilemoe_producer_launch
    if ctx.rank == 1:  # sends its counts, and no rows
        library.tilemoe_producer_launch = lambda *arguments: 0

    def fail() -> None:
        began = time.monotonic()
        y = run(moe, x)[0]
        library.tilemoe_producer_launch = real
        error = raised(ds_tilemoe.check, moe)
        seconds = time.monotonic() - began
        assert isinstance(error, DeadlineError), repr(error)
        assert "waited too long for" in str(error)
        assert y.isnan().all()
        # All ranks within one more timeout, and what the hosts take.
        assert seconds < 8, f"it took {seconds:.0f} s"

    together(fail)
    swap(moe, wait_timeout_s=2)
    assert_equal(run(moe, x)[0], want, "on the new heap")


@case
def nvshmem_ends(ctx: RankContext) -> None:
    """Last: a process that ends with NVSHMEM running is tested by launch/infer.py."""
    from ds_tilemoe import transport
    from ds_tilemoe.op_builder import CUDATileMoEBuilder

    transport.start(CUDATileMoEBuilder().load()).close()


test_ranks = gpu_rank_tests(__file__, timeout_s=140, case_timeout_s=40)
