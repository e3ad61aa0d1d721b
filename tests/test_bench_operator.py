"""bench.py operator: what it calls, what it refuses to time, and its records on the CPU backend."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import cuda_library_fake
import forked_runs
import numpy as np
import pytest
import torch
from cuda_library_fake import FakeLibrary
from infer_runs import environment

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.errors import TileMoEError
from ds_tilemoe.reference import places_in_runs
from ds_tilemoe.testing import case, free_port, rank_tests

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from benches import calls, layer_parts, operator, operator_check, peers, ranks
from benches.calls import OperatorShape, Sample, Settings, Variant
from benches.operator_measure import Measured
from benches.records import BenchError
from demo.options import InputError

LAUNCH = Path(__file__).parents[1] / "launch"
ALONE = ranks.World(0, 1, torch.device("cpu"), None)
SHAPE = OperatorShape(m=96, n=40, k=24, local_experts=4, topk=2)
SETTINGS = Settings("compact", "auto", 1, "auto")


def make(settings=SETTINGS, dtype=torch.float32):
    routings = [calls.make_routing("uniform", ALONE, SHAPE, seed) for seed in range(3)]
    weights = calls.random_rows((4, 40, 24), 24**-0.5, dtype, 1, ALONE.device)
    return operator.make_operator(ALONE, SHAPE, dtype, settings, routings, weights), routings


def start(*flags, ranks=None, limit=200):
    """The command as users give it; its exit code, stdout and stderr."""
    command = [sys.executable]
    if ranks is not None:
        command += ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        command += ["--master_port", str(free_port())]
    command += [str(LAUNCH / "bench.py"), *map(str, flags)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=limit, check=False
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("routing", ["balanced", "moderate_skew"])
def test_routes_and_counts_agree(routing):
    """Positions come from another sort than the reference's loop; all ranks share C."""
    shape = OperatorShape(240, 8, 8, 4, 3)
    made = [
        calls.make_routing(routing, ranks.World(rank, 4, ALONE.device, None), shape, seed=5)
        for rank in range(4)
    ]
    for rank, routed in enumerate(made):
        assert (routed.counts == made[0].counts).all()
        assert (np.bincount(routed.ids.ravel(), minlength=16) == routed.counts[rank]).all()
        want = places_in_runs(torch.from_numpy(routed.ids))
        assert torch.equal(torch.from_numpy(routed.positions).long(), want)
    assert not np.array_equal(made[0].weights, made[1].weights)
    wanted = {"balanced": 1.0, "moderate_skew": 1.6}[routing]
    assert calls.hot_ratio(made[0].counts) == pytest.approx(wanted, rel=0.02)


def test_all_ranks_share_an_order_that_changes():
    rounds = list(ranks.shuffled(5, 20, seed=1))
    assert rounds == list(ranks.shuffled(5, 20, seed=1))
    assert [index for index, _ in rounds] == list(range(-ranks.WARM_UP, 20))
    assert all(sorted(order) == list(range(5)) for _, order in rounds)
    assert len({tuple(order) for _, order in rounds}) > 10


@pytest.mark.parametrize("layout", ["compact", "aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_accepts_the_backend_and_sees_one_wrong_element(layout, dtype):
    op, routings = make(SETTINGS._replace(layout=layout), dtype)
    op.enqueue(Variant("sequential", 1), 0)
    error = operator_check.check_result(ALONE, op, routings[0], dtype)
    assert error <= operator_check.TOLERANCE[dtype]
    op.y[47, 3] += 1.0  # of the last token, which is among those sampled
    with pytest.raises(BenchError, match=r"a token is off by \d.*not timed"):
        operator_check.check_result(ALONE, op, routings[0], dtype)
    op.y[47, 3] = float("nan")
    with pytest.raises(BenchError, match=r"off by 1\.00e"):
        operator_check.check_result(ALONE, op, routings[0], dtype)


def test_check_compares_with_the_routing_that_was_called():
    op, routings = make()
    op.enqueue(Variant("sequential", 1), 1)
    with pytest.raises(BenchError):
        operator_check.check_result(ALONE, op, routings[0], torch.float32)


def test_a_variant_with_other_bits_is_not_timed():
    op, _ = make()
    op.enqueue(Variant("sequential", 1), 0)
    wanted = op.y.clone()
    operator_check.check_variants(ALONE, op, [Variant("sm", 2), Variant("none", 0)], wanted)
    wanted[3, 4] += 1e-7 * wanted[3, 4].abs() + 1e-7
    with pytest.raises(BenchError, match=r"sm at 2 CTAs: 1 of 1920 elements differ.*not timed"):
        operator_check.check_variants(ALONE, op, [Variant("sm", 2)], wanted)


def test_the_torch_peer_does_the_same_work():
    op, routings = make()
    op.enqueue(Variant("sequential", 1), 0)
    rows = operator_check.dense_rows(ALONE, op, routings[0])
    assert rows.shape == (96, 24)
    peer = peers.TorchReturn(None, 0, routings[0], rows, op.weights)
    operator_check.check_peer(ALONE, "torch", peer(), op.y)
    assert peer.gemm().shape == (96, 40)
    with pytest.raises(BenchError, match="torch is off by"):
        operator_check.check_peer(ALONE, "torch", peer().roll(1, 0), op.y)


class Clockwork:
    """The CPU operator with times that are known."""

    def __init__(self, late=False):
        self._op, self.routings = make()
        self._calls, self._late = 0, late

    def __getattr__(self, name):
        return getattr(self._op, name)

    def enqueue(self, variant, routing):
        self._op.enqueue(variant, routing)
        self._calls += 1
        slow = {"sequential": 180.0, "none": 150.0, "split": 180.0}
        total = slow.get(variant.mover, 120.0 + variant.ctas)
        nan, split = float("nan"), variant.mover == "split"
        # The copy of two CTAs is as fast as that of four, but for a hair.
        copy = nan if self._late else {1: 70.0, 2: 50.0, 4: 50.1}.get(variant.ctas, nan)
        sample = Sample(
            total=total,
            exchange=9.0 if split else nan,
            front=nan,
            gemm=100.0 if split else nan,
            copy=copy if split else nan,
            scale=20.0 if split else nan,
            end=101.0,
            arrival=106.0,
            backlog=3,
            drained=1,
        )
        return lambda: sample


def measured(late=False):
    op = Clockwork(late)
    args = argparse.Namespace(split=(1, 2, 4), mover=["sm", "none"], rounds=50)
    return Measured(args, ALONE, op, op.routings)


def test_record_is_arithmetic_on_the_times():
    found = measured()
    assert [variant.mover for variant in found.timed] == ["sm", "sm", "sm", "none", "sequential"]
    assert found.copy_ctas == 4  # of equals the largest
    assert set(found.gemm) == {100.0}
    assert set(found.copy) == {50.1}
    gemm, copy = np.full(50, 90.0), np.full(50, 50.0)
    record = found.record(Variant("sm", 1), gemm, copy)
    assert record["bound_us"] == 110.0  # the larger of both, and scale
    assert record["overlapped_us"] == record["overlapped_p90_us"] == 121.0
    assert record["of_bound"] == pytest.approx(121 / 110, abs=1e-4)
    assert record["sequential_us"] == 180.0
    assert record["of_sequential"] == pytest.approx(121 / 180, abs=1e-4)
    assert record["exposed_us"] == 5.0
    assert record["overlap_ratio"] == pytest.approx(1 - 5 / 50)
    assert record["hidden_share"] == pytest.approx((90 + 50 - 101) / 50)
    assert record["exchange_us"] == 9.0
    assert record["gemm_here_us"] == 100.0
    assert record["chosen"] is True
    assert record["chosen_us"] == 121.0
    other = found.record(Variant("sm", 2), gemm, copy)
    assert other["chosen"] is False
    assert other["chosen_us"] is None
    json.dumps(record, allow_nan=False)


def test_a_host_that_is_always_late_is_named():
    with pytest.raises(BenchError, match="a host had not launched a call before its GPU came"):
        measured(late=True)


def test_a_rank_alone_has_no_overlap_to_report():
    record = measured().record(Variant("none", 0), np.full(50, 90.0), np.zeros(50))
    assert record["overlap_ratio"] is None
    assert record["hidden_share"] is None


def test_one_rank_without_a_launcher(tmp_path):
    out = tmp_path / "operator.jsonl"
    done = start("operator", "--quick", "--commit", "abc", "--out", out)
    assert done.returncode == 0, done.stderr
    found = lines(out)
    assert [record["mover"] for record in found] == ["sm", "sm", "none", "sequential"]
    assert f"4 record(s) appended to {out}" in done.stdout
    header, *rows = [line for line in done.stderr.splitlines() if "mover" in line or "512" in line]
    assert [len(row) for row in rows] == [len(header)] * 4
    for record in found:
        assert record["bench"] == "operator"
        assert (record["backend"], record["gpu"], record["ranks"]) == ("cpu", None, 1)
        assert record["dtype"] == "float32"
        assert record["rounds"] == 50
        assert record["bit_equal"] is True
        assert record["max_rel_err"] <= 1e-5
        for name in ("overlapped", "sequential", "torch_gemm", "torch_sequential"):
            assert 0 < record[f"{name}_p10_us"] <= record[f"{name}_us"] <= record[f"{name}_p90_us"]
    assert sum(record["chosen"] for record in found) == 1


def test_two_ranks(tmp_path):
    out = tmp_path / "operator.jsonl"
    flags = ["--shape", "256,72,40,4,2", "--routing", "moderate_skew", "--rounds", "50"]
    flags += ["--layout", "compact", "--layout", "aligned", "--split", "1,3", "--dtype", "bfloat16"]
    flags += ["--bands-per-segment", "2", "--local-tail-waves", "1", "--mover", "sm"]
    done = start("operator", *flags, "--commit", "abc", "--out", out, ranks=2)
    assert done.returncode == 0, done.stderr
    found = lines(out)
    assert [(r["layout"], r["mover"], r["num_consumer_ctas"]) for r in found[:2]] == [
        ("compact", "sm", 1),
        ("compact", "sm", 3),
    ]
    assert len(found) == 6
    assert {record["layout"] for record in found} == {"compact", "aligned"}
    for record in found:
        wanted = {"ranks": 2, "gemm_m": 256, "gemm_n": 72, "gemm_k": 40, "topk": 2}
        wanted |= {"bands_per_segment": 2, "local_tail_waves": 1, "local_tail_bands": 1}
        assert wanted.items() <= record.items()
        assert record["hot_ratio"] == pytest.approx(1.6, rel=0.02)
        assert 0 < record["max_rel_err"] <= 8e-3
        assert record["copy_alone_us"] > 0
        best = max(record["gemm_alone_us"], record["copy_alone_us"]) + record["scale_us"]
        assert record["bound_us"] == pytest.approx(best, abs=0.02)
    # The bound is that of the faster layout, for both.
    assert len({record["gemm_alone_us"] for record in found}) == 1
    assert min(record["gemm_here_us"] for record in found) == found[0]["gemm_alone_us"]


@pytest.mark.parametrize(
    ("split", "runs"), [(None, operator.CPU_SPLITS), ((3,), (3,))], ids=["default", "told"]
)
def test_quick_keeps_the_split_that_was_asked_for(split, runs):
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    args = parser.parse_args(["--quick"])
    args.split = split
    operator._defaults(args, ALONE)
    assert args.split == runs
    assert args.rounds == 50
    args = parser.parse_args(["--quick", "--rounds", "70", "--mover", "none", "--mover", "none"])
    operator._defaults(args, ALONE)
    assert args.rounds == 70
    assert args.mover == ["none"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--split", "4,132"], "--split: got 132; wanted 1 to 131 SMs of this GPU"),
        (["--split", "4", "--mover", "none"], "--split: got one beside --mover none; wanted a"),
        (["--tile-n", "64"], "--tile-n: got 64; wanted 128 or 256 on a GPU"),
        (["--dtype", "float32"], "--dtype: got float32; wanted bfloat16 or float16 on a GPU"),
        (["--shape", "64,100,64,4,2"], "--shape: got N 100 and K 64; wanted multiples of 8 on a"),
    ],
)
def test_what_a_gpu_cannot_do_is_said_before_it_is_tried(monkeypatch, flags, words):
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: argparse.Namespace(multi_processor_count=132),
    )
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    gpus = ranks.World(0, 4, torch.device("cuda"), None)
    operator._defaults(parser.parse_args([]), gpus)
    with pytest.raises(InputError, match=re.escape(words)):
        operator._defaults(parser.parse_args(flags), gpus)


BAD_FLAGS = [
    (
        ["--routing", "stress_skew"],
        "start it on more ranks: deepspeed --num_gpus 4 launch/bench.py operator"
        " --routing stress_skew",
    ),
    (
        ["--shape", "1,2,3"],
        "--shape: got '1,2,3'; wanted integers from 1 to 2147483647, M,N,K,LOCAL_EXPERTS,TOPK",
    ),
    (["--shape", "9,8,8,4,2"], "M: got 9, wanted a multiple of topk, 2"),
    (["--rounds", "10"], "--rounds: got '10'; wanted an integer from 50 to"),
    (["--local-tail-waves", "some"], "--local-tail-waves: got 'some'; wanted auto, all or an int"),
    (["--local-tail-waves", "-1"], "--local-tail-waves: got '-1'; wanted auto, all or an int"),
    (["--mover", "copy_engine"], "--mover: got copy_engine; wanted sm or none on a CPU"),
    (["--mover", "sn"], "--mover: got 'sn'; wanted one of sm, none, copy_engine; fix: cho"),
    (
        ["--quick", "--split", "2,20"],
        "--split: got 20; wanted 1 to 8 consumer threads on a CPU",
    ),
    (["--split", "2,2"], "--split: got '2,2'; wanted integers from 1 to 255, A,B,... without rep"),
    (["--tile-n", "5000"], "--tile-n: got '5000'; wanted integers from 1 to 4096"),
    (["--others"], "--others: got no option of this name; wanted one that there is"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    return forked_runs.refused(
        tmp_path_factory.mktemp("refused"), "operator", [flags for flags, _ in BAD_FLAGS]
    )


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_named(refused, flags, message):
    done = refused[" ".join(flags)]
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(done.args[-1]).exists()


def test_settings_are_the_blocks_own_fields():
    """A name that the block does not know would be refused only on a GPU, after minutes."""
    from ds_tilemoe.config import TileOverlapConfig

    assert set(Settings._fields) <= set(TileOverlapConfig.model_fields)
    with pytest.raises(TileMoEError):
        TileOverlapConfig(**SETTINGS._replace(layout="odd")._asdict())


class ApartLibrary(FakeLibrary):
    """The fake CUDA library with the launches that the bench makes one by one."""

    def __init__(self, group):
        super().__init__(group)
        for name in ("tilemoe_consumer_launch", "tilemoe_scale_launch"):
            setattr(self, name, self._entry(getattr(self, name)))

    def tilemoe_producer_launch(self, p, kind, grid, stream):
        if not p.ship.view.state:
            return super().tilemoe_producer_launch(p, kind, grid, stream)
        self.log.append("down")
        assert not p.drain
        self.out = self._gemm(p, kind)
        return 0

    def tilemoe_consumer_launch(self, p, ctas, stream):
        self.log.append(f"consumer {ctas}")
        self.recv = self._ship(p.view, self.out)
        return 0

    def tilemoe_scale_launch(self, p, stream):
        self.log.append("scale")
        self._leave_record(p.tokens)
        y = cuda_library_fake.memory(p.y, torch.bfloat16, p.tokens, p.n)
        self._scale(p, self.out, self.recv, y)
        return 0


class Event:
    """A CUDA event on the host's clock."""

    cuda_event = 2

    def __init__(self, **options):
        self.at = None

    def record(self, stream=None):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3

    def query(self):
        return Event.is_over


Event.is_over = False  # whether the device is there before the host has launched what follows


@case
def numbers_that_one_rank_lacks(ctx):
    """A pair of ranks one of which has not measured gives no time of the slowest."""
    group = torch.distributed.group.WORLD
    world = ranks.World(ctx.rank, ctx.world, torch.device("cpu"), group)
    mine = np.array([[1.0, 5.0, np.nan], [np.nan, 7.0, 3.0]][ctx.rank])
    nan = np.nan
    np.testing.assert_array_equal(world.reduce(mine), [nan, 7.0, nan])
    np.testing.assert_array_equal(world.reduce(mine, "min"), [nan, 5.0, nan])
    np.testing.assert_array_equal(world.reduce(mine, "sum"), [nan, 12.0, nan])


@case
def cuda_operator_without_a_gpu(ctx):
    """Names, params and order of what it takes from the backend, which only a GPU would tell."""
    group = torch.distributed.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_library_fake, "FakeLibrary", ApartLibrary)
        library, _ = cuda_library_fake.install(patch, group)
        stream = cuda_library_fake.Stream(library)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "Event", Event)
        from benches.operator_cuda import CudaOperator, Front

        world = ranks.World(ctx.rank, ctx.world, torch.device("cpu"), group)
        shape = OperatorShape(m=64, n=128, k=64, local_experts=2, topk=2)
        routings = [calls.make_routing("uniform", world, shape, seed) for seed in range(2)]
        weights = calls.random_rows((2, 128, 64), 0.1, torch.bfloat16, 3 + ctx.rank, world.device)
        made = (world, shape, torch.bfloat16, SETTINGS)
        op = CudaOperator(*made, routings, weights)
        read = op.enqueue(Variant("sequential", 4), 0)
        op.finish()
        assert operator_check.check_result(world, op, routings[0], torch.bfloat16) > 0
        sample = read()
        assert sample.total > 0
        assert np.isnan(sample.gemm)
        assert (sample.end, sample.arrival) == (0.002, 0.004)
        patch.setattr(Event, "is_over", True)
        read = op.enqueue(Variant("sequential", 4), 0)
        op.finish()
        assert np.isnan(read()).all()  # the launches would be in its time
        patch.setattr(Event, "is_over", False)
        library.log.clear()
        variants = [Variant("sm", 4), Variant("none", 0), Variant("split", 5)]
        operator_check.check_variants(world, op, variants, op.y.clone())
        launched = [name for name in library.log if name not in ("exchange", "waits")]
        apart = ["down", "consumer 5", "scale"]
        assert launched == ["NONE", "SM", "NONE", "NONE", "NONE", *apart]
        library.log.clear()
        for _ in range(2):  # one engine; its counts are fetched behind the exchange
            operator_check.check_variants(world, op, [Variant("copy_engine", 0)], op.y.clone())
        launched = [name for name in library.log if name not in ("exchange", "waits", "NONE")]
        assert launched == ["engine made", *2 * ["fetch", "COPY_ENGINE", "host waits"]]

        # With GEMM 1 in front, and with counts that only move rows.
        front = Front("silu", (torch.ones(2, 64, 32, dtype=torch.bfloat16),) * 2)
        moving = [routings[0], layer_parts.turned_round(routings[0])]
        op = CudaOperator(*made, moving, weights, front)
        library.log.clear()
        read = op.enqueue(Variant("split", 4), 1)
        op.finish()
        assert library.log[:6] == ["exchange", "exchange", "front", "down", "consumer 4", "scale"]
        sample = read()
        assert min(sample.exchange, sample.front, sample.gemm, sample.copy, sample.scale) > 0
        assert library.front.activation == abi.Activation.SILU
        assert (library.recv.shape[0] > 0) is (library.exchange.tokens == 0)


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
