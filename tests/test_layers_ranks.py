"""Swapped DeepSpeed layers on four ranks: every native variant equals the unswapped layer."""

from __future__ import annotations

import copy
import functools
import io

import deepspeed
import torch
from deepspeed.moe.sharded_moe import MOELayer
from moe_models import (
    HIDDEN,
    KINDS,
    assert_close,
    make_moe,
    oracle,
    own_routing,
    raised,
    run,
    tokens,
)
from torch import nn

import ds_tilemoe
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.layers.native import TileMOELayer
from ds_tilemoe.testing import case, rank_tests

DS_CONFIG = {"train_micro_batch_size_per_gpu": 1}


def compare(moe, x, tolerance=1e-5, **block):
    """Unswapped, swapped and restored give the same three things."""
    want = run(moe, x)
    report = ds_tilemoe.apply(moe, block)
    assert report.swapped == ("deepspeed_moe",), str(report)
    got = run(moe, x)
    assert type(moe.deepspeed_moe) is TileMOELayer
    assert got[0].dtype == want[0].dtype
    assert_close(got[0], want[0], tolerance)
    assert torch.equal(got[1], want[1]), "l_aux"
    assert torch.equal(got[2], want[2]), "exp_counts"
    assert got[2].dtype == torch.int64
    assert ds_tilemoe.restore(moe) == 1
    assert type(moe.deepspeed_moe) is MOELayer
    assert torch.equal(run(moe, x)[0], want[0])


@case(k=[1, 2, 3, 4], ep_size=[1, 2, 4])
def variants(ctx, k, ep_size):
    kinds = ["mlp", "swiglu", "megatron"]
    for number, (drop, training) in enumerate([(a, b) for a in (0, 1) for b in (0, 1)]):
        moe = make_moe(
            ep_size,
            kinds[(number + k + ep_size) % 3],
            k=k,
            drop_tokens=bool(drop),
            use_residual=(number + k) % 2 == 0,
            capacity_factor=0.75,
            eval_capacity_factor=0.5,
            min_capacity=2,
        ).train(bool(training))
        x = tokens(2, 12, HIDDEN, seed=number)
        if drop:
            dropped = (own_routing(moe, x).expert_ids < 0).sum()
            assert dropped > 0, "this case should drop"
        compare(moe, x)


@case(kind=list(KINDS), layout=["compact", "aligned"])
def kinds_and_layouts(ctx, kind, layout):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)):
        moe = make_moe(4, kind, drop_tokens=False).to(dtype)
        compare(moe, tokens(2, 9, HIDDEN, dtype=dtype), tolerance, layout=layout)


@case
def layouts_give_the_same_output(ctx):
    moe, x, results = make_moe(4, drop_tokens=False), tokens(37, HIDDEN), []
    for block in ({"layout": "compact"}, {"layout": "aligned"}, {"layout": "compact", "tile_m": 8}):
        ds_tilemoe.apply(moe, block)
        results.append(run(moe, x)[0])
        assert all(torch.equal(run(moe, x)[0], results[-1]) for _ in range(3)), "run to run"
        # Across layouts the library's GEMM of the front sees other row counts, and may round so.
        assert_close(results[-1], results[0], 1e-6)


@case
def used_token_mask(ctx):
    moe, x = make_moe(4, k=1, drop_tokens=False), tokens(11, HIDDEN)
    mask = torch.arange(11) % 3 != 0
    want = run(moe, x, mask.long())
    ds_tilemoe.apply(moe)
    got = run(moe, x, mask.long())
    assert_close(got[0], want[0])
    assert (got[0][~mask] == 0).all()
    assert torch.equal(got[2], want[2])


@case(k=[1, 2, 3])
def unequal_counts_with_dropping(ctx, k):
    """DeepSpeed itself cannot run these: every rank is compared with its own gate's decisions."""
    moe = make_moe(4, k=k, drop_tokens=True, eval_capacity_factor=0.5, min_capacity=1)
    ds_tilemoe.apply(moe)
    for count in ((40, 7, 3, 21), (0, 16, 1, 9), (0, 0, 0, 5), (5, 5, 5, 5)):
        x = tokens(count[ctx.rank], HIDDEN, seed=count[0])
        routing = own_routing(moe, x)
        y, l_aux, exp_counts = run(moe, x)
        assert_close(y, oracle(moe, x, routing))
        assert torch.equal(l_aux, routing.l_aux)
        assert torch.equal(exp_counts, routing.exp_counts)
        if count[ctx.rank] == 0:
            assert l_aux.item() == 0
            assert exp_counts.tolist() == [0] * 8


class Model(nn.Module):
    """Two MoE layers with a dense one between."""

    def __init__(self, ep_size=4, **options):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.first = make_moe(ep_size, "mlp", parallel=False, drop_tokens=False, **options)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.second = make_moe(ep_size, "swiglu", parallel=False, drop_tokens=False, seed=1)

    def forward(self, x):
        x = x + self.first(self.norm(x))[0]
        return x + self.second(self.dense(x))[0]


def engine_of(model, **more):
    engine, *_ = deepspeed.initialize(model=model, config={**DS_CONFIG, **more})
    engine.eval()
    return engine


@case
def before_initialize_layers_are_pending(ctx):
    torch.manual_seed(0)
    model = Model()
    keys = list(model.state_dict())
    parameters = list(map(id, model.parameters()))
    report = ds_tilemoe.apply(model, {"strict": True})
    names = ("first.deepspeed_moe", "second.deepspeed_moe")
    assert report.pending == names, str(report)
    assert "no expert-parallel group" in str(raised(run, model.first, tokens(3, HIDDEN)))
    engine = engine_of(model)
    assert list(map(type, engine.moe_layers)) == [TileMOELayer] * 2
    x = tokens(2, 7, HIDDEN)
    got = run(engine, x)
    assert report.swapped == names, "the first forward has decided"
    assert ds_tilemoe.apply(engine, {"strict": True}).swapped == names
    assert torch.equal(run(engine, x), got)
    assert ds_tilemoe.restore(engine) == 2
    assert_close(got, run(engine, x))
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == parameters


@case
def engine_with_a_block_and_timers(ctx):
    torch.manual_seed(0)
    block = {"tile_overlap": {"layers": "second", "stats": True}, "wall_clock_breakdown": True}
    engine = engine_of(Model(), **block)
    x = tokens(2, 7, HIDDEN)
    want = run(engine, x)
    report = ds_tilemoe.apply(engine)
    assert report.swapped == ("second.deepspeed_moe",)
    assert report.layers[0].status == "kept"
    got = run(engine, x)
    assert_close(got, want)
    first, second = engine.moe_layers
    assert type(first) is MOELayer
    assert type(second) is TileMOELayer
    assert second.time_moe > 0
    assert second.time_salltoall > 0
    assert second.time_falltoall >= 0
    assert second.gate.gate_time > 0
    run(engine, x)
    (record,) = [r for r in ds_tilemoe.stats.layers() if r["layer"] == "second.deepspeed_moe"]
    assert record["calls"] == 2
    assert record["segments"] > 0
    assert record["overlap_ratio"] is None, "not measured yet, so not known"
    with ds_tilemoe.measure_combine_alone(engine):
        assert torch.equal(run(engine, x), got)
    (record,) = [r for r in ds_tilemoe.stats.layers() if r["layer"] == "second.deepspeed_moe"]
    assert record["calls"] == 2
    assert record["overlap_ratio"] <= 1
    assert ds_tilemoe.stats.to_chrome_trace(ctx.rank)["traceEvents"]
    written = ds_tilemoe.stats.export_config(ctx.shared_dir / f"block{ctx.rank}.json")
    chosen = {"layout": "compact", "mover": "sm", "max_tokens_per_rank": 1024, "tile_m": 16}
    assert chosen.items() <= written["tile_overlap"].items()
    assert ds_tilemoe.load_config(written).layers == "second"
    ds_tilemoe.check(engine)
    ds_tilemoe.restore(engine)


class Variants(nn.Module):
    """One MoE layer of each kind of expert, gate and residual."""

    def __init__(self, ep_size):
        super().__init__()
        made = functools.partial(make_moe, ep_size, parallel=False)
        self.layers = nn.ModuleList(
            [
                made("mlp", k=1, drop_tokens=False, use_residual=True),
                made("swiglu", k=2, drop_tokens=True, eval_capacity_factor=0.5, seed=1),
                made("megatron", k=3, drop_tokens=False, seed=2),
                made("plain", k=2, drop_tokens=False, use_residual=True, seed=3),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


@case(ep_size=[1, 2, 4])
def checkpoints_in_both_directions(ctx, ep_size):
    x, folder = tokens(2, 5, HIDDEN), ctx.shared_dir / f"ep{ep_size}"
    swapped, other = engine_of(Variants(ep_size)), engine_of(Variants(ep_size))
    assert len(ds_tilemoe.apply(swapped).swapped) == 4
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.mul_(0.5)
    want_swapped, want_other = run(swapped, x), run(other, x)
    assert not torch.allclose(want_swapped, want_other)
    swapped.save_checkpoint(str(folder / "swapped"), tag="t")
    other.save_checkpoint(str(folder / "other"), tag="t")
    torch.distributed.barrier()
    swapped.load_checkpoint(str(folder / "other"), tag="t")
    other.load_checkpoint(str(folder / "swapped"), tag="t")
    assert_close(run(swapped, x), want_other)
    assert_close(run(other, x), want_swapped)
    assert all(type(layer) is TileMOELayer for layer in swapped.moe_layers)
    assert not any(type(layer) is TileMOELayer for layer in other.moe_layers)


@case
def copies_and_pickles(ctx):
    """CASE-11: deepcopy shares process groups, pickling drops them and a loaded module says so."""
    moe, x = make_moe(4, drop_tokens=False), tokens(9, HIDDEN)
    keys = {name: value.shape for name, value in moe.state_dict().items()}
    ds_tilemoe.apply(moe)
    want = run(moe, x)[0]
    twin = copy.deepcopy(moe)
    assert twin.deepspeed_moe.ep_group is moe.deepspeed_moe.ep_group
    with torch.no_grad():
        for expert in twin.deepspeed_moe.experts.deepspeed_experts:
            expert[2].weight.mul_(2)
            expert[2].bias.mul_(2)
    assert_close(run(twin, x)[0], 2 * want)
    assert torch.equal(run(moe, x)[0], want)
    assert_close(run(copy.deepcopy(twin), x)[0], 2 * want)
    del twin
    assert torch.equal(run(moe, x)[0], want)
    assert {name: value.shape for name, value in moe.state_dict().items()} == keys
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.deepspeed_moe.ep_group is None
    assert moe.deepspeed_moe.gate.ep_group is not None
    error = raised(run, loaded, x)
    assert isinstance(error, TileMoEError)
    assert "set_deepspeed_parallelism" in str(error)
    assert "ds_tilemoe.apply" in str(error)
    loaded.set_deepspeed_parallelism()
    assert ds_tilemoe.apply(loaded).swapped
    assert torch.equal(run(loaded, x)[0], want)


test_ranks = rank_tests(__file__, world=4, timeout_s=300)
