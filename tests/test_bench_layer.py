"""bench.py layer: its layers and inputs, what it refuses to time, its records on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import forked_runs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_bench_operator import lines, start

from ds_tilemoe import reference
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.routing import Routing

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from benches import (
    layer,
    layer_check,
    layer_models,
    layer_options,
    layer_others,
    layer_parts,
    peer_flashinfer,
    peers,
    ranks,
)
from benches.calls import Routed, Sample, hot_ratio
from benches.layer_models import EXPERT_KINDS, LayerShape
from benches.records import BenchError
from demo.options import InputError

CPU = torch.device("cpu")
ALONE = ranks.World(0, 1, CPU, None)


def rank_of(ranks_, rank):
    """A rank that meets nobody: enough for what each rank makes by itself."""
    return ranks.World(rank, ranks_, CPU, None)


@pytest.mark.parametrize("kind", list(EXPERT_KINDS))
@pytest.mark.parametrize("topk", [1, 3])
def test_the_torch_layer_is_a_moe_layer(kind, topk):
    """Against the oracle, which loops over tokens' experts; an expert without rows among them."""
    expert, paths, activation = EXPERT_KINDS[kind]
    generator = torch.Generator().manual_seed(3)

    def made(*shape):
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    experts = [expert(12, 20) for _ in range(5)]
    matrices = []
    for path in paths:
        weights = [module.get_submodule(path).weight for module in experts]
        stack = made(5, *weights[0].shape)
        for weight, values in zip(weights, stack, strict=True):
            weight.data.copy_(values)
        matrices.append(stack)
    *ups, down = matrices
    gate, x = made(5, 12) * 12**0.5, made(33, 12) * 12**0.5
    gate[2], x[:, 0] = -10 * F.one_hot(torch.tensor(0), 12).float(), x[:, 0].abs() + 1
    dropless = peers.TorchMoE(None, gate, tuple(ups), down, activation, topk)
    weights, ids = F.linear(x, gate).softmax(1).topk(topk)
    assert not (ids == 2).any()
    if topk > 1:
        weights = weights / weights.sum(1, keepdim=True)
    nothing = torch.zeros(())
    routing = Routing(ids.int(), weights, nothing, torch.zeros(5, dtype=torch.int64))
    with torch.no_grad():
        want = reference.moe(x, routing, experts)
        got = dropless(x)
    assert got.shape == x.shape
    assert torch.allclose(got, want, atol=1e-5)
    assert dropless(x[:0]).shape == (0, 12)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_few_tokens_can_be_balanced(tokens):
    """128 experts and 8 routes a token: one token a rank has to spread over all ranks."""
    shape = LayerShape(tokens, 4096, 1536, 128, 8)
    for seed in range(3):
        ids = [layer_models.make_ids("balanced", rank_of(4, r), shape, seed) for r in range(4)]
        assert all(len(set(token)) == 8 for rank in ids for token in rank.tolist())
        rows = np.bincount(np.concatenate(ids).ravel() // 32, minlength=4)
        assert (rows == tokens * 8).all()
        counts = np.bincount(np.concatenate(ids).ravel(), minlength=128)
        assert counts.max() - counts.min() <= 1
    others = [layer_models.make_ids("balanced", rank_of(4, 0), shape, s).tolist() for s in range(4)]
    assert any(other != others[0] for other in others[1:])


@pytest.mark.parametrize("routing", ["balanced", "uniform", "moderate_skew", "stress_skew"])
def test_the_gate_decides_as_the_routing_says(routing):
    """Also in bf16, where rows and gate are rounded; make_input itself raises where it does not."""
    shape = LayerShape(512, 64, 1, 16, 2)
    generator = torch.Generator().manual_seed(0)
    gate = torch.linalg.qr(torch.randn(64, 16, generator=generator)).Q.t().bfloat16()
    counts = []
    for rank in range(4):
        world = rank_of(4, rank)
        ids = layer_models.make_ids(routing, world, shape, seed=7)
        x = layer_models.make_input(world, gate, ids, torch.bfloat16, seed=7)
        decided = F.linear(x.float(), gate.float()).topk(2).indices
        assert torch.equal(decided.sort().values, torch.from_numpy(ids).long().sort().values)
        counts.append(np.bincount(ids.ravel(), minlength=16))
        assert 0.5 < x.float().std() < 8
    wanted = {"balanced": 1.0, "moderate_skew": 1.6, "stress_skew": 2.6}.get(routing)
    if wanted is not None:
        assert hot_ratio(np.stack(counts)) == pytest.approx(wanted, rel=0.02)


def test_an_input_that_goes_elsewhere_is_refused():
    gate = torch.zeros(4, 8)  # it decides nothing
    with pytest.raises(BenchError, match=r"the gate sends \d+ of 9 tokens elsewhere"):
        layer_models.make_input(ALONE, gate, np.full((9, 1), 3, np.int32), torch.float32, 0)


class _Layer:
    """What a MoE returns, with a fault in call number ``bad``."""

    def __init__(self, bad=None, fault=0.0):
        self.calls, self.bad, self.fault = 0, bad, fault

    def __call__(self, x):
        self.calls += 1
        y = x * 2
        if self.calls == self.bad:
            y[1, 2] += self.fault
        return y, None, None


def both(*args):
    return {"nodrop": _Layer(), "drop": _Layer(*args)}


def test_layers_that_differ_are_not_timed():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    x[3] = 0  # all of its routes dropped
    assert layer_check.check(ALONE, both(), both(), lambda x: x * 2, [x, x]) == 0.0
    with pytest.raises(BenchError, match="drop: 1 elements of two calls differ: not timed"):
        layer_check.check(ALONE, both(2, 1e-6), both(), lambda x: x * 2, [x])
    with pytest.raises(BenchError, match=r"drop: a token is off by .*not timed"):
        layer_check.check(ALONE, both(), both(1, 0.1), lambda x: x * 2, [x])
    with pytest.raises(BenchError, match="the torch layer is off by"):
        layer_check.check(ALONE, both(), both(), lambda x: x * 2.1, [x])
    zero = torch.zeros(6, 5)
    assert layer_check.token_error(zero, zero) == 0.0
    assert layer_check.token_error(zero + 1, zero) > 1
    assert layer_check.token_error(zero / 0, zero) == 1e9


def test_a_sequential_layer_with_other_bits_is_not_timed():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    inside = []

    @contextlib.contextmanager
    def measured(layers):
        inside.append(layers)
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_check.ds_tilemoe, "measure_combine_alone", measured)
        alone = {"nodrop": _Layer()}
        layer_check.check_sequential(ALONE, alone, both(), x)
        assert inside == [alone]
        with pytest.raises(BenchError, match="sequential: 1 of 30 elements are others: not timed"):
            layer_check.check_sequential(ALONE, {"nodrop": _Layer(1, 1e-3)}, both(), x)


def test_a_graph_that_keeps_its_old_input_is_not_timed():
    class Replay:
        forward = staticmethod(lambda x: x + 1)

        def __init__(self, is_stale):
            self.is_stale, self.x = is_stale, torch.zeros(3)

        def load(self, x):
            self.x = self.x if self.is_stale else x

        def __call__(self):
            return self.x + 1

    inputs = [torch.zeros(3), torch.ones(3)]
    layer_check.check_replays(ALONE, Replay(False), inputs)
    with pytest.raises(BenchError, match="as a graph 3 of 3 elements are others: not timed"):
        layer_check.check_replays(ALONE, Replay(True), inputs)


def test_idle_gaps_are_what_kernels_do_not_fill():
    times = np.array([1000.0, float("nan"), 1100.0, 900.0])
    assert layer_parts.idle_fields(times, 250.04) == {
        "deepspeed_busy_us": 250.0,
        "deepspeed_idle_us": 750.0,
    }
    assert layer_parts.idle_fields(times, 2000.0)["deepspeed_idle_us"] == 0.0
    assert set(layer_parts.idle_fields(times, None).values()) == {None}


def test_covered_time_counts_overlaps_once():
    assert layer_parts.covered([]) == 0.0
    assert layer_parts.covered([(5, 7), (0, 2), (1, 4), (6, 6.5), (10, 11)]) == 4 + 2 + 1


def test_counts_turned_round_move_what_dispatch_moves():
    """Rows from rank a to rank b at dispatch are rows from a to b at that combine."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (3, 6)).astype(np.int32)
    nothing = np.empty((0, 2), np.int32)
    turned = layer_parts.turned_round(Routed(counts, nothing, nothing, nothing)).counts
    dispatched = counts.reshape(3, 3, 2).sum(axis=2)  # [owner, expert's rank]
    returned = turned.reshape(3, 3, 2).sum(axis=2).T  # [expert's rank, owner]
    assert (dispatched == returned).all()


class _Stranger:
    """An adapter on a CPU, of experts that double; ``fault`` says where it goes wrong."""

    version = "1.2.3"

    def __init__(self, group, gate, ups, down, activation, topk, tokens, fault=None):
        self.fault, self.seen, self.is_open = fault, [], True
        if fault == "made":
            raise RuntimeError("no such GPU")

    def route(self, x):
        return torch.full((len(x), 2), float(x[0, 0])), torch.ones(len(x), 2)

    def experts(self, x, ids, weights):
        assert self.is_open
        assert (ids == x[0, 0]).all()  # the routes of this input
        if self.fault == "timed" and len(self.seen) > 6:
            raise RuntimeError("poisoned")
        self.seen.append(float(x[0, 0]))
        return x * (2.5 if self.fault == "wrong" else 2)

    def close(self):
        self.is_open = False


@pytest.fixture
def beside(monkeypatch):
    """Times a stranger beside our layer; returns what was found and said, and the stranger."""
    made = []

    def run(fault=None):
        def make(*args, **kwargs):
            made.append(_Stranger(*args, **kwargs, fault=fault))
            return made[-1]

        said = []
        monkeypatch.setattr(ranks.World, "say", lambda world, text: said.append(text))
        monkeypatch.setattr(layer_others.ds_tilemoe, "check", lambda layers: None)
        monkeypatch.setattr(peer_flashinfer, "FlashInferMoE", make)
        args = argparse.Namespace(others=["flashinfer"], mode=["eager"], peer_rounds=10)
        layers = SimpleNamespace(swapped=both(), gate=0, ups=(0, 0), down=0, activation=F.silu)
        inputs = [torch.full((6, 5), float(i + 1)) for i in range(4)]
        shape = LayerShape(6, 5, 1, 4, 2)
        found = layer_others.time_others(args, ALONE, shape, layers, inputs)
        return found, "".join(said), made[-1] if made else None

    return run


def test_a_bound_has_fp32_logits_where_the_layer_has():
    assert layer_parts.has_fp32_logits({}, 4096)
    assert layer_parts.has_fp32_logits({"router_logits": "bf16x3"}, 255)
    assert not layer_parts.has_fp32_logits({"router_logits": "bf16x3"}, 256)


def test_a_stranger_is_timed_in_turn_with_ours(beside):
    found, said, stranger = beside()
    fields = found.fields("eager")
    for name in ("flashinfer", "flashinfer_routed"):
        assert 0 < fields[f"{name}_p10_us"] <= fields[f"{name}_us"] <= fields[f"{name}_p90_us"]
        assert fields[f"{name}_over_ours"] > 0
        assert fields[f"{name}_device_us"] is None  # of a GPU only
    assert fields["peers_versions"] == {"flashinfer": "1.2.3"}
    assert fields["peers_absent"].keys() == {"tutel", "deep_ep"}
    assert said == ""
    assert set(stranger.seen) == {1.0, 2.0, 3.0, 4.0}
    assert not stranger.is_open
    assert found.fields("graph")["flashinfer_us"] is None


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("made", "RuntimeError: no such GPU"),
        ("wrong", r"flashinfer is off by .* of the norm, wanted at most .*: not timed"),
        ("timed", "RuntimeError: poisoned"),
    ],
)
def test_a_stranger_that_fails_is_named_and_ends_nothing(beside, fault, why):
    found, said, stranger = beside(fault)
    fields = found.fields("eager")
    assert fields["peers_versions"] == {}
    assert fields["flashinfer_us"] is fields["flashinfer_routed_over_ours"] is None
    assert re.fullmatch(why, fields["peers_absent"]["flashinfer"])
    assert "*** flashinfer WAS NOT TIMED: " in said
    assert stranger is None or not stranger.is_open


def test_strangers_are_chosen_by_what_is_installed(monkeypatch):
    monkeypatch.setattr(layer_others.importlib.util, "find_spec", lambda name: None)
    assert layer_others.choose(None) == []
    wanted = "--others: got flashinfer, which is not installed; wanted one that is; fix: leave it"
    with pytest.raises(InputError, match=wanted):
        layer_others.choose(["flashinfer"])
    monkeypatch.setattr(layer_others.importlib.util, "find_spec", lambda name: object())
    assert layer_others.choose(None) == ["flashinfer"]
    assert layer_others.choose([]) == []
    with pytest.raises(InputError, match="tutel, which is installed, and this bench has no adapt"):
        layer_others.choose(["flashinfer", "tutel"])
    args = argparse.Namespace(others=[])
    absent = layer_others.time_others(args, ALONE, None, None, []).absent
    assert absent["flashinfer"] == "not wanted (--others)"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "float32"], "--dtype: got float32; wanted bfloat16 or float16 on a GPU"),
        (["--shape", "8,64,36,4,2"], "its ffn width is 36; on CUDA it has to be a multiple of 8"),
        (["--shape", "8,64,64,32,17"], "its gate chooses 17 experts; on CUDA at most 16"),
    ],
)
def test_what_a_gpu_cannot_do_is_said_before_it_is_tried(flags, words):
    parser = argparse.ArgumentParser()
    layer_options.add_arguments(parser)

    def settled(flags):
        args = parser.parse_args(flags)
        layer_options.check(args)
        layer_options.settle(args, ranks.World(0, 4, torch.device("cuda"), None))
        return args

    args = settled(["--quick", "--rounds", "60", "--mode", "graph", "--mode", "graph"])
    assert (args.rounds, args.peer_rounds, args.mode) == (60, 10, ["graph"])
    with pytest.raises(InputError, match=words):
        settled(flags)


@pytest.mark.parametrize(
    ("block", "count", "is_refused"),
    [
        ({"mover": "copy_engine"}, 4, True),
        ({"mover": "copy_engine"}, 1, False),  # nothing to copy, so no counts to wait for
        ({"dispatch": "nccl"}, 4, True),
        ({"dispatch": "nccl"}, 1, True),
        ({"mover": "none", "dispatch": "fused"}, 4, False),
    ],
)
def test_what_no_graph_can_have_is_refused_before_any_work(block, count, is_refused):
    parser = argparse.ArgumentParser()
    layer_options.add_arguments(parser)
    world = ranks.World(0, count, torch.device("cuda"), None)

    def settle(*flags):
        args = parser.parse_args(["--quick", "--block", json.dumps(block), *flags])
        layer_options.check(args)
        layer_options.settle(args, world)

    settle("--mode", "eager")
    if not is_refused:
        settle()
        return
    words = f"--block: got '{json.dumps(block)}' beside mode graph; wanted .*; fix: --mode eager"
    for flags in ([], ["--mode", "graph"]):
        with pytest.raises(InputError, match=words):
            settle(*flags)


@pytest.mark.parametrize("bounds", [{"max_consumer_ctas": 6}, {"min_consumer_ctas": 16}])
def test_a_sequential_layer_has_the_fastest_copy_whatever_the_bounds(bounds):
    block = {"layout": "aligned", "mover": "none", **bounds}
    config = TileOverlapConfig(**layer.sequential_block(block, 8))
    assert (config.num_consumer_ctas, config.mover, config.layout) == (8, "sm", "aligned")
    assert not config.adaptive.enabled
    on_cpu = layer.sequential_block(block, None)
    assert bounds.items() <= on_cpu.items()
    assert "num_consumer_ctas" not in on_cpu


class _Late:
    """An operator whose host is late in all calls; ``timed`` has times all the same."""

    def __init__(self, *timed):
        sample = dict.fromkeys(Sample._fields, float("nan")) | dict.fromkeys(timed, 5.0)
        self.sample = Sample(**sample)

    def enqueue(self, variant, routing):
        return lambda: self.sample

    def finish(self):
        pass


@pytest.mark.parametrize("timed", [(), ("front", "gemm"), ("front", "copy")])
def test_parts_without_a_time_are_no_bound(timed):
    with pytest.raises(BenchError, match="a host had not launched a call before its GPU came"):
        layer_parts._split_us(ALONE, _Late(*timed), 0)
    found = layer_parts._split_us(ALONE, _Late("front", "gemm", "copy"), 0)
    assert found == (5.0, 5.0, 5.0, layer_parts.COPY_CTAS[0])


def test_strangers_that_are_named_need_a_gpu(monkeypatch):
    monkeypatch.setattr(layer_others.importlib.util, "find_spec", lambda name: object())
    parser = argparse.ArgumentParser()
    layer_options.add_arguments(parser)
    args = parser.parse_args(["--others", "flashinfer"])
    layer_options.check(args)
    with pytest.raises(InputError, match="--others: got flashinfer without a GPU; wanted none"):
        layer_options.settle(args, ALONE)


@pytest.mark.parametrize(
    ("ups", "activation", "why"),
    [
        (1, F.gelu, r"experts of 2 matrices with gelu, wanted SwiGLU \(3 with silu\)"),
        (2, F.relu, "experts of 3 matrices with relu, wanted SwiGLU"),
        (2, F.silu, "got torch.bfloat16 on cpu, wanted torch.bfloat16 on a GPU"),
    ],
)
def test_flashinfer_is_asked_for_what_it_has_only(ups, activation, why):
    """Before it is imported: it is not installed here."""
    matrix = torch.zeros(4, 8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=why):
        peer_flashinfer.FlashInferMoE(
            None, matrix[0], (matrix,) * ups, matrix, activation, 2, tokens=8
        )


def test_a_stranger_without_its_gpu_is_said_and_ours_is_recorded(tmp_path, monkeypatch):
    """An installed one, as the command finds it, on two ranks."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "layer.jsonl"
    flags = ["--quick", "--expert-kind", "swiglu", "--peers", "none", "--commit", "abc"]
    done = start("layer", *flags, "--out", out, ranks=2)
    assert done.returncode == 0, done.stderr
    (record,) = lines(out)
    why = "rank 0: ValueError: got torch.float32 on cpu, wanted torch.bfloat16 on a GPU"
    assert record["peers_absent"]["flashinfer"] == why
    assert record["ours_us"] > 0
    assert record["flashinfer_us"] is None
    assert done.stderr.count(f"*** flashinfer WAS NOT TIMED: {why}") == 2  # at once, at the end


def test_one_rank_without_a_launcher(tmp_path):
    out = tmp_path / "layer.jsonl"
    done = start("layer", "--quick", "--commit", "abc", "--out", out)
    assert done.returncode == 0, done.stderr
    (record,) = lines(out)
    wanted = {"bench": "layer", "ranks": 1, "tokens": 64, "expert_kind": "gelu", "mode": "eager"}
    assert wanted.items() <= record.items()
    assert record["bound_us"] is None  # of a GPU only
    assert record["ours_device_us"] is record["ours_host_us"] is None
    assert record["router"] == "deepspeed"
    assert record["calls_in_a_row"] == 1  # a call has ended when it returns
    assert record["peers_absent"].keys() == {"tutel", "deep_ep", "flashinfer"}
    header, row = [
        line for line in done.stderr.splitlines() if "ours_us" in line or " gelu " in line
    ]
    assert len(header) == len(row)


def test_two_ranks(tmp_path):
    out = tmp_path / "layer.jsonl"
    flags = ["--shape", "48,64,40,8,2", "3,64,40,8,3", "--routing", "balanced"]
    flags += ["--rounds", "50", "--peer-rounds", "10", "--dtype", "bfloat16"]
    flags += ["--block", json.dumps({"num_consumer_ctas": 2, "layout": "aligned"})]
    done = start("layer", *flags, "--commit", "abc", "--out", out, ranks=2)
    assert done.returncode == 0, done.stderr
    found = lines(out)
    assert [(r["tokens"], r["topk"], r["expert_kind"]) for r in found] == [
        (48, 2, "gelu"),
        (48, 2, "swiglu"),
        (3, 3, "gelu"),
        (3, 3, "swiglu"),
    ]
    for record in found:
        wanted = {"ranks": 2, "backend": "cpu", "gpu": None, "dtype": "bfloat16", "hidden": 64}
        wanted |= {"ffn": 40, "experts": 8, "local_experts": 4, "hot_ratio": 1.0, "gemm_n": 64}
        wanted |= {"inputs": 4, "bound_input": 0}
        assert wanted.items() <= record.items()
        assert record["settings"]["num_consumer_ctas"] == 2
        assert record["settings"]["layout"] == "aligned"
        assert record["max_rel_err"] <= 1.6e-2
        for name in ("ours", "ours_drop", "sequential", "deepspeed", "deepspeed_nodrop", "torch"):
            assert 0 < record[f"{name}_p10_us"] <= record[f"{name}_us"] <= record[f"{name}_p90_us"]
        assert record["deepspeed_over_ours"] > 0
        assert record["torch_over_ours"] > 0
        assert record["parts"]["exposed_combine_us"] > 0


@pytest.mark.parametrize(("peers_", "timed"), [("none", []), ("torch", ["torch"])])
def test_only_the_wanted_peers_are_timed(tmp_path, peers_, timed):
    out = tmp_path / "layer.jsonl"
    flags = ["--quick", "--expert-kind", "swiglu", "--peers", peers_, "--commit", "abc"]
    done = start("layer", *flags, "--out", out)
    assert done.returncode == 0, done.stderr
    (record,) = lines(out)
    assert (record["expert_kind"], record["peers"]) == ("swiglu", peers_)
    assert record["ours_us"] > 0
    assert record["of_sequential"] > 0
    names = ("deepspeed", "deepspeed_nodrop", "torch")
    assert [name for name in names if record[f"{name}_us"] is not None] == timed
    assert (record["torch_over_ours"] is not None) is ("torch" in timed)
    assert "No existing process group" not in done.stdout + done.stderr


BAD_FLAGS = [
    (["--mode", "graph"], "--mode: got graph without a GPU; wanted eager"),
    (["--block", "{"], "--block: got '{' (Expecting property name"),
    (["--block", "[1]"], "--block: got '[1]'; wanted a JSON object"),
    (["--block", '{"mver": "sm"}'], "--block: tile_overlap.mver: "),
    (
        ["--block", '{"enabled": false}'],
        """--block: got '{"enabled": false}'; wanted a block that swaps the layers""",
    ),
    (
        ["--quick", "--block", '{"layers": "no_such", "strict": false}'],
        "not swapped: ['nodrop', 'drop']; wanted a block that swaps the layers",
    ),
    (["--shape", "8,4,8,8,2"], "--shape 8,4,8,8,2: got EXPERTS 8; wanted at most as many as HID"),
    (["--shape", "8,8,8,4,5"], "--shape 8,8,8,4,5: got TOPK 5; wanted 1 to EXPERTS, 4"),
    (["--peers", "none", "--peer-rounds", "10"], "--peer-rounds: got a number beside --peers none"),
    (["--quick", "--peer-rounds", "60"], "--peer-rounds: got 60; wanted at most the number of ro"),
    (
        ["--routing", "stress_skew"],
        "start it on more ranks: deepspeed --num_gpus 4 launch/bench.py layer",
    ),
    (
        ["--others", "deep_ep"],
        "--others: got deep_ep, which is not installed, and this bench has no adapter for it",
    ),
    (["--decode", "--shape", "1,8,8,2,1"], "--decode and --shape: got both; wanted one"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return forked_runs.refused(
        tmp_path_factory.mktemp("refused"), "layer", [flags for flags, _ in BAD_FLAGS]
    )


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_named(refused, flags, message):
    done = refused[" ".join(flags)]
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(done.args[-1]).exists()


def test_a_wrong_number_of_ranks_is_answered_with_the_right_command(tmp_path):
    flags = ["--shape", "8,8,8,7,1", "--out", tmp_path / "x", "--commit", "abc"]
    done = start("layer", *flags, ranks=2)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "got 7 experts on 2 ranks; wanted a number of ranks that divides them" in done.stderr
    assert "deepspeed --num_gpus 7 launch/bench.py layer --shape 8,8,8,7,1" in done.stderr
