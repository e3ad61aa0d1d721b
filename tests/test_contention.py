"""bench.py contention, and what the controller achieves in the simulator: the Must-show list.

100 seeds are a bench (docs/results/contention_simulated.jsonl); here are a few.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import cuda_library_fake
import numpy as np
import pytest
import torch
from test_bench_operator import ApartLibrary, Event

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.combine_plan import build_plan
from ds_tilemoe.config import load_config
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice
from ds_tilemoe.routings import ROUTINGS as KNOWN
from ds_tilemoe.simulator import Simulator
from ds_tilemoe.testing import case, rank_tests

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import bench
from benches import (
    contention,
    contention_calls,
    contention_gpus,
    contention_operator,
    contention_overhead,
    contention_plot,
    contention_records,
    contention_study,
    ranks,
)
from benches.contention import CASES, ROUTINGS, SPLITS, STARTS
from benches.contention_calls import Case, back_and_forth, hot_ratio, pool
from benches.contention_gpus import Effort
from benches.contention_simulate import SimulatedOperator, simulate, wrong_machine
from benches.contention_study import Trial, drive, is_close
from benches.records import BenchError
from demo.options import InputError

RANKS, CALLS, SETTLE = 4, 60, 20
RECORDS = Path(__file__).parents[1] / "docs" / "results" / "contention_simulated.jsonl"


def calls_of(case, routing, count=CALLS, hot=0):
    some = pool(case, routing, RANKS, hot)
    return [(case.tokens, some[i % len(some)]) for i in range(count)]


def trials_of(case, calls, seeds, splits=SPLITS, starts=(None,)):
    return simulate({case.tokens: Simulator(case.problem(RANKS))}, calls, splits, seeds, starts)


# -- the controller ---------------------------------------------------------------------------


@pytest.mark.parametrize("routing", [*ROUTINGS, "uniform"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.m}x{c.n}")
def test_it_settles_near_the_best_static_split_from_any_start(case, routing):
    """Calibration wrong by up to 30 %, noise of 3 %, reports read a call late."""
    steady = slice(SETTLE, None)
    found = trials_of(case, calls_of(case, routing), range(4), starts=STARTS)
    excess = [trial.excess(steady) for trial in found]
    assert all(map(is_close, excess)), (excess, [t.splits[-1] for t in found])
    changes = [trial.changes_after(SETTLE) * 50 / (CALLS - SETTLE) for trial in found]
    assert np.mean(changes) < 1.5, "of four runs; the bench's 100 stay below 1"
    for trial in found:
        late = trial.controller[steady] / trial.sequential[steady]
        assert np.median(late) < 1.0


@pytest.mark.parametrize(
    ("before", "after"), [("balanced", "stress_skew"), ("stress_skew", "balanced")]
)
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=lambda c: f"{c.m}x{c.n}")
def test_after_a_switch_it_is_near_the_new_best_within_eight_calls(case, before, after):
    at = 20
    calls = calls_of(case, before, at) + calls_of(case, after, 20, hot=1)
    found = trials_of(case, calls, range(20))
    over, sequential = [], []
    for trial in found:
        best = trial.static[trial.best_split(slice(at, None))]
        over.append((trial.controller / best)[at:])
        sequential.append((trial.controller / trial.sequential)[at:])
    assert np.median(over, axis=0)[8:].max() <= 1.03
    assert np.median(sequential, axis=0).max() <= 1.0, "never slower than sequential in between"


def test_a_mixed_trace_takes_no_longer_than_static_splits():
    case, rng = CASES[0], np.random.default_rng(1)
    shorter = [case._replace(m=tokens * case.topk) for tokens in (8192, 4096, 2048)]
    simulators = {c.tokens: Simulator(c.problem(RANKS)) for c in shorter}
    calls = []
    while len(calls) < 160:
        one, name = shorter[rng.integers(3)], [*ROUTINGS, "uniform"][rng.integers(4)]
        calls += [(one.tokens, c) for c in pool(one, name, RANKS)[: rng.integers(1, 9)]]
    for trial in simulate(simulators, calls, (8, 14, 16), range(2)):
        for split, us in trial.static.items():
            assert us.sum() / trial.controller.sum() >= 0.985, split


def test_feedback_beats_the_rule_and_the_cost_model_alone():
    """The rule adds no wave, and so leaves most to the drain where a call has many waves."""
    found = trials_of(CASES[0], calls_of(CASES[0], "balanced"), range(8))
    steady = slice(SETTLE, None)
    mean = {
        name: np.mean([getattr(trial, name)[steady].mean() for trial in found])
        for name in ("controller", "rule", "open_loop")
    }
    assert mean["rule"] > 1.2 * mean["controller"]
    assert mean["open_loop"] > 1.02 * mean["controller"]


def test_ranks_decide_alone():
    """A skew makes them differ: the hottest rank cannot have what suits the others."""
    (trial,) = trials_of(CASES[4], calls_of(CASES[4], "stress_skew"), [0], splits=(8,))
    assert len(set(trial.splits[-1].tolist())) > 1


def test_the_same_seed_gives_the_same_trial():
    case = CASES[3]
    calls = calls_of(case, "uniform", 30)
    one, two = (trials_of(case, calls, [7], splits=(4,))[0] for _ in range(2))
    assert (one.splits == two.splits).all()
    assert (one.controller == two.controller).all()


def test_calibrations_are_wrong_both_ways():
    rates = {round(wrong_machine(132, seed).rate_per_cta, 1) for seed in range(30)}
    assert rates == {28.7, 41.0, 53.3}


# -- a real operator's way --------------------------------------------------------------------


def test_an_operator_is_driven_call_by_call():
    case = CASES[3]
    operator = SimulatedOperator(Simulator(case.problem(RANKS)), wrong_machine(132, 1), seed=0)
    calls = calls_of(case, "balanced", 50)
    trial = drive(operator, case.topk, calls, (2, 4, 12, 24), seed=0, start=24)
    assert trial.splits[0].tolist() == [24] * RANKS
    assert trial.splits.shape == (50, RANKS)
    # Noise differs from call to call here, as on GPUs.
    assert trial.excess(slice(SETTLE, None))[0] < 0.03
    assert trial.controller[SETTLE:].mean() < trial.static[24][SETTLE:].mean()
    for us in (trial.open_loop, trial.sequential, trial.rule):
        assert (us > 0).all()


def test_models_beside_the_controller_can_be_left_out():
    case = CASES[3]
    operator = SimulatedOperator(Simulator(case.problem(RANKS)), wrong_machine(132, 1), seed=0)
    trial = drive(
        operator, case.topk, calls_of(case, "balanced", 3), (4,), seed=0, with_models=False
    )
    assert np.isnan(trial.rule).all()
    assert np.isnan(trial.open_loop).all()
    assert (trial.controller > 0).all()


# -- calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "wanted"), [(2, 1.9), (4, 2.6)])
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda c: f"{c.m}x{c.n}")
def test_few_ranks_get_the_skew_that_they_can_have(case, world, wanted):
    for counts in pool(case, "stress_skew", world, hot=1):
        assert counts.shape == (world, world * case.local_experts)
        assert (counts.sum(axis=1) == case.m).all()
        assert counts.max() <= case.tokens
        assert hot_ratio(counts) == pytest.approx(wanted, rel=0.02)
        rows = counts.reshape(world, world, -1).sum(axis=(0, 2))
        assert rows.argmax() == 1


def test_routings_are_switched_back_and_forth():
    case, some = CASES[3], [np.full((2, 32), i, np.int32) for i in range(5)]
    calls, switches = back_and_forth(case, (some[:2], some[2:]), visits=2, first=3, more=2)
    assert [int(c[0, 0]) for _, c in calls] == [0, 1, 0, 2, 3, 1, 0, 4, 2, 1, 0]
    assert switches == [3, 5, 7, 9]
    assert {tokens for tokens, _ in calls} == {case.tokens}


def test_a_part_of_a_trial():
    us = np.arange(6.0)
    trial = Trial({4: us, 8: us[::-1]}, us + 1, us + 2, us + 3, us + 4, np.arange(12).reshape(6, 2))
    part = trial.part(slice(2, 4))
    assert part.static[8].tolist() == [3, 2]
    assert part.controller.tolist() == [3, 4]
    assert part.open_loop.tolist() == [6, 7]
    assert part.splits.tolist() == [[4, 5], [6, 7]]
    assert len(trial.controller) == 6


# -- records ----------------------------------------------------------------------------------


def trial_of(latencies, faster):
    """One whose variants have these latencies; static split 4 is faster than 8 by so much."""
    us = np.array(latencies, float)
    splits = np.full((len(us), 2), 4)
    return Trial({4: us - faster, 8: us}, us + 1, us + 2, us + 3, us + 4, splits)


def test_times_of_a_switch_are_of_the_calls_after_it():
    late = contention_records.AFTER_SWITCH
    trials = [trial_of([100] * 30 + [500] * late + [200] * 12, 10)] * 2
    record = contention_records.switch_record(TINY, ("a", "b"), 2, 30, trials, True)
    assert record["static_us"] == {"4": 190, "8": 200}
    for name, us in {"best_static": 190, "controller": 201, "sequential": 202, "rule": 203}.items():
        assert [record[f"{name}{of}_us"] for of in ("", "_p10", "_p90")] == [us] * 3
    assert record["calls"] == 30 + late + 12
    assert len(record["over_best_after_switch"]) == late + 12


def test_times_of_a_trace_are_means():
    record = contention_records.trace_record(TINY, "mixed", 2, [trial_of([9, 1, 2], 0)], (4,), True)
    wanted = {"best_static_us": 4, "controller_us": 5, "sequential_us": 6, "rule_us": 7}
    assert wanted.items() <= record.items()
    without = dataclasses.replace(trial_of([9, 1, 2], 0), rule=np.full(3, np.nan))
    record = contention_records.trace_record(TINY, "mixed", 2, [without], (4,), True)
    assert record["rule_us"] is None


# -- the command ------------------------------------------------------------------------------


SMALL = ["contention", "--simulate", "--shape", "16384,1024,4096,16,2,128", "--seeds", "1"]
SMALL += ["--rounds", "40", "--split", "4,12", "--commit", "abc"]


def run_bench(tmp_path, *more):
    out = tmp_path / "contention.jsonl"
    code = bench.main([*SMALL, "--out", str(out), *more])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if not code else []


def test_records_have_what_the_issue_lists(tmp_path):
    code, records = run_bench(tmp_path, "--routing", "balanced", "--export", str(tmp_path / "b"))
    assert code == 0
    assert [r["study"] for r in records] == [
        "steady", "switch", "switch", "switch", "mixed", "bimodal", "drift", "bursts",
    ]  # fmt: skip
    for record in records:
        assert record["bench"] == "contention"
        assert record["simulated"] is True
        assert record["parts"] == ["steady", "switch", "mixed"]
        assert record["gemm_n"] == 1024
        assert {"4", "12"} <= set(record["static_us"])
        assert record["best_static_us"] <= record["sequential_us"]
        assert record["rule_us"] > 0
    steady, switch = records[0], records[1]
    assert steady["controller_split"] == [4] * RANKS
    assert steady["controller_p10_us"] <= steady["controller_us"] <= steady["controller_p90_us"]
    assert steady["share_close"] == 1.0
    assert 0 <= steady["iterations_to_settle"] <= SETTLE
    assert len(switch["over_best_after_switch"]) == 20
    block = json.loads((tmp_path / "b").read_text())
    assert load_config(block).num_consumer_ctas == 4


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "picture.png"
    assert run_bench(tmp_path, "--routing", "stress_skew", "--png", str(png))[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contention_plot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(contention, "simulate", lambda *args: pytest.fail("it ran"))
    assert bench.main([*SMALL, "--out", str(tmp_path / "x"), "--png", str(tmp_path / "x.png")]) == 2
    assert 'pip install "ds_tilemoe[bench]"' in capsys.readouterr().err


def test_the_simulator_is_for_one_process(monkeypatch, tmp_path):
    def leave(message, code):
        raise SystemExit(f"{code} {message}")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(bench, "leave", leave)
    wanted = "got 2; wanted one process; fix: python launch/bench.py contention --simulate"
    with pytest.raises(SystemExit, match=wanted):
        bench.main([*SMALL, "--out", str(tmp_path / "x")])


def test_a_shape_that_was_not_measured_is_refused(tmp_path, capsys):
    out = str(tmp_path / "x.jsonl")
    line = ["contention", "--simulate", "--shape", "64,100,200,2,2,256", "--out", out]
    assert bench.main([*line, "--commit", "abc"]) == 2
    assert "--shape: got N 100 K 200 tile_n 256; wanted one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--simulate", "--part", "overhead"], "--part: got overhead; wanted a part that can be"),
        (["--part", "switch", "--png", "x.png"], "--png: got it without --part steady"),
        (["--part", "mixed", "--export", "x.json"], "--export: got it without --part steady"),
        (["--part", "stead"], "--part: got 'stead'; wanted one of steady, switch, mixed, overhead"),
        (
            ["--part", "mixed", "--part", "switch", "--routing", "balanced"],
            "--routing: got it without --part steady, all that it is about (mixed, switch); wanted",
        ),
        (
            ["--simulate", "--part", "switch", "--routing", "balanced"],
            "--routing: got it without --part steady, ",
        ),
        (["--part", "switch", "--rounds", "50"], "--rounds: got it without --part steady or mixed"),
        (["--part", "overhead", "--seeds", "1"], "--seeds: got it without --part steady or switch"),
        (["--part", "mixed", "--split", "4"], "--split: got it without --part steady or switch"),
        (
            ["--ranks", "8", "--part", "overhead"],
            "--ranks: got 8 without --simulate; wanted both or neither; fix: deepspeed --num_gpus",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    line = ["contention", *flags, "--out", str(tmp_path / "y.jsonl"), "--commit", "abc"]
    try:
        code = bench.main(line)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SHAPE, OTHER = "16384,1024,4096,16,2,128", "16384,512,2048,16,2,128"


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        ([], "5 shape(s) and 3 routing(s)"),
        (["--shape", SHAPE], "1 shape(s) and 3 routing(s)"),
        (["--shape", SHAPE, OTHER, "--routing", "balanced"], "2 shape(s) and 1 routing(s)"),
        (["--quick", "--routing", "balanced"], "2 shape(s) and 1 routing(s)"),
    ],
)
@pytest.mark.parametrize("where", [["--simulate"], []], ids=["simulated", "GPUs"])
def test_one_export_is_of_one_choice(tmp_path, capsys, where, flags, got):
    line = ["contention", *where, *flags, "--commit", "abc", "--out", str(tmp_path / "x.jsonl")]
    assert bench.main([*line, "--export", str(tmp_path / "b.json")]) == 2
    said = capsys.readouterr().err
    assert f"--export: got {got}, each with a choice of its own; wanted one shape and" in said
    assert "fix: name one --shape and one --routing" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--simulate", "--shape", "16385,1024,4096,16,2,128"],
            "16385,1024,4096,16,2,128: got M 16385; wanted a multiple of TOPK, 2; fix: M 16384",
        ),
        (["--shape", "5,1024,4096,16,8,128"], "wanted a multiple of TOPK, 8; fix: M 8"),
        (
            ["--simulate", "--ranks", "2", "--shape", "15,1024,4096,1,3,128"],
            "got TOPK 3; wanted 1 to the experts of 2 rank(s), 2; fix: lower it",
        ),
        (["--shape", "15,1024,4096,1,3,128"], "TOPK 3; wanted 1 to the experts of 1 rank(s), 1;"),
        (["--simulate", "--split", "4,132"], "--split: got 132; wanted 1 to 131 SMs of this GPU;"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, capsys, flags, message):
    line = ["contention", *flags, "--out", str(tmp_path / "x.jsonl"), "--commit", "abc"]
    assert bench.main(line) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_simulated_records_have_a_file_of_their_own(tmp_path, monkeypatch):
    """That of the GPUs is left alone."""
    monkeypatch.setattr(bench.records, "ROOT", tmp_path)
    out = tmp_path / "docs" / "results" / "contention_simulated.jsonl"
    assert bench.main([*SMALL, "--part", "steady", "--routing", "balanced"]) == 0
    assert len(out.read_text().splitlines()) == 1
    assert list(out.parent.iterdir()) == [out]


def test_a_simulation_chooses_no_backend(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "choose_accelerator", lambda backend: pytest.fail(backend))
    assert run_bench(tmp_path, "--part", "steady", "--routing", "balanced")[0] == 0


def test_some_parts_are_run_alone(tmp_path):
    code, records = run_bench(tmp_path, "--part", "switch", "--part", "switch")
    assert code == 0
    assert [(r["study"], r["parts"]) for r in records] == [("switch", ["switch"])] * 3


def test_the_simulator_needs_no_torch():
    """It is arithmetic: a laptop without torch can draw the figures."""
    code = "import sys; import benches.contention; assert 'torch' not in sys.modules"
    folder = Path(contention_study.__file__).parents[1]
    root = folder.parent
    env = {"PYTHONPATH": f"{folder}:{root}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=300)


def test_committed_figures_meet_the_bars():
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    steady = [r for r in records if r["study"] == "steady"]
    assert len(steady) == len(CASES) * len(ROUTINGS)
    for r in steady:
        assert r["runs"] == 100
        assert r["share_close"] >= 0.99
        assert r["controller_over_best"] <= 1.01
        assert r["changes_per_50"] < 1
        assert r["share_settled"] >= 0.85, "within 20 calls, but for trials"
    switches = [r for r in records if r["study"] == "switch"]
    assert len(switches) == 3 * len(CASES)
    for r in switches:
        assert max(r["over_best_after_switch"][8:]) <= 1.03
        assert r["worst_over_sequential"] <= 1.0


# -- on GPUs ----------------------------------------------------------------------------------


def test_without_gpus_the_way_out_is_named(monkeypatch):
    alone = ranks.World(0, 1, torch.device("cpu"), None)
    monkeypatch.setattr(contention_operator, "join", lambda: alone)
    with pytest.raises(InputError, match=r"got 1 rank\(s\) on cpu; .*--num_gpus 4.*--simulate"):
        contention_operator.open_world(["overhead"])


def test_on_one_gpu_there_is_the_overhead_alone(monkeypatch):
    alone = ranks.World(0, 1, torch.device("cuda"), None)
    monkeypatch.setattr(contention_operator, "join", lambda: alone)
    monkeypatch.setattr(contention_operator, "need_alone", lambda world: None)
    wanted = (
        "--part: got steady, mixed on one rank, where .*--num_gpus 4.*; or name --part overhead"
    )
    with pytest.raises(InputError, match=wanted):
        contention_operator.open_world(["steady", "mixed", "overhead"])
    assert contention_operator.open_world(["overhead"]) is alone


def test_quick_bounds_the_time_on_gpus(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(contention_gpus, "on_gpus", lambda *told: asked.append(told) or iter([]))
    line = ["contention", "--out", str(tmp_path / "x"), "--commit", "abc"]
    assert bench.main([*line, "--quick"]) == 0
    line += ["--shape", "64,128,64,4,2,128", "--rounds", "50", "--part", "mixed"]
    assert bench.main(line) == 0
    (cases, routings, splits, quick), (one, _, every, effort) = asked
    assert [(c.m, c.n) for c in cases] == [(16384, 8192), (16384, 1024)]
    assert routings == list(ROUTINGS)
    assert len(splits) == 8
    assert quick.parts == ["steady", "switch", "mixed", "overhead"]
    assert effort.parts == ["mixed"]
    assert (quick.rounds, quick.starts, quick.traces) == (40, [1, 131], 1)
    assert quick.pairs == (("balanced", "stress_skew"),)
    assert one == [Case(64, 128, 64, 4, 2, 128)]
    assert every == SPLITS
    assert (effort.rounds, effort.starts) == (50, list(STARTS))


def test_quick_leaves_what_is_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(contention_gpus, "on_gpus", lambda *told: asked.append(told) or iter([]))
    line = ["contention", "--out", str(tmp_path / "x"), "--commit", "abc", "--quick"]
    assert bench.main([*line, "--rounds", "50", "--seeds", "3"]) == 0
    assert (asked[0][3].rounds, asked[0][3].starts) == (50, [1, 131, 1])
    more = ["--quick", "--seeds", "3", "--rounds", "44", "--part", "steady"]
    _, (record,) = run_bench(tmp_path, *more, "--routing", "uniform")
    assert (record["runs"], record["calls"]) == (3, 44)


def test_a_split_that_a_gpu_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr(ranks.World, "most_consumers", 77)
    alone = ranks.World(0, 2, torch.device("cuda"), None)
    monkeypatch.setattr(contention_gpus, "open_world", lambda parts: alone)
    effort = Effort(["steady"], 40, (None,), segment=10, pairs=[], leading=1, traces=1)
    with pytest.raises(InputError, match="--split: got 78; wanted 1 to 77 SMs of this GPU; fix:"):
        next(contention_gpus.on_gpus([TINY], ["balanced"], (4, 78), effort))


def test_a_command_can_be_pasted_into_a_shell(monkeypatch):
    flags = ["layer", "--block", '{"num_consumer_ctas": 2}', "--local_rank=0", "--quick"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    wanted = """deepspeed --num_gpus 4 launch/bench.py layer --block '{"num_consumer_ctas": 2}'"""
    assert ranks.command("layer", 4) == f"{wanted} --quick"


class Library(ApartLibrary):
    """Counts the calls with records."""

    with_records = 0

    def tilemoe_exchange_launch(self, p, stream):
        self.with_records += bool(p.records)
        return super().tilemoe_exchange_launch(p, stream)


TINY = Case(m=32, n=128, k=64, local_experts=4, topk=2, tile_n=128)


def fake_gpus(rank, count, patch):
    """The world, and the library as it is once an operator has been made."""
    group = torch.distributed.group.WORLD if count > 1 else None
    patch.setattr(cuda_library_fake, "FakeLibrary", Library)
    library, _ = cuda_library_fake.install(patch, group)
    stream = cuda_library_fake.Stream(library)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(ranks.World, "most_consumers", 131)

    def captured(launch):
        with cuda_library_fake.capture(patch):
            launch()
        return launch

    patch.setattr(contention_overhead, "captured", captured)
    return ranks.World(rank, count, torch.device("cpu"), group), library


@case
def a_choice_reaches_the_kernels(ctx):
    """And what it left behind comes back. Names of the backend, which only a GPU would miss."""
    with pytest.MonkeyPatch.context() as patch:
        world, library = fake_gpus(ctx.rank, ctx.world, patch)
        some = [*pool(TINY, "balanced", 2), *pool(TINY, "stress_skew", 2)]
        with contention_operator.open_operator(world, TINY, some, (2, 5)) as operator:
            assert operator.ranks == (ctx.rank,)
            assert operator.work.n_tiles == 1
            assert 0 < operator.max_rel_err < 8e-3
            us, (seen,) = operator.run([Choice(5, 3, 2, "sm")], some[9])
            assert us > 0
            told = library.combine, library.exchange.plan.params
            assert (told[0].mover, told[0].num_consumer_ctas) == (abi.Mover.SM, 5)
            assert (told[1].bands_per_segment, told[1].local_tail_bands) == (2, 3 * 132)
            plan = build_plan(library.params, some[9])
            assert (seen.rows, seen.tokens, seen.num_consumer_ctas) == (
                plan.sizes.valid_rows,
                TINY.tokens,
                5,
            )
            assert seen.remote_rows == sum(int(s["rows"]) for s in plan.segments)
            assert (seen.first_segment_ready, seen.producer_end, seen.last_put) == (1, 2, 3)
            operator.run([Choice(0, ALL_TAIL_WAVES, 1, "none")], some[0])
            assert library.combine.mover == abi.Mover.NONE
            assert library.exchange.plan.params.local_tail_bands == -1
            operator.sequential(some[0])
            assert library.combine.mover == abi.Mover.SEQUENTIAL
            assert library.combine.num_consumer_ctas in contention_operator.COPY_SPLITS
            with pytest.raises(KeyError):  # no routes have been made for it
                operator.run([Choice(5, 3, 2, "sm")], some[0] + 1)


@case
def a_call_without_a_time_is_made_again(ctx):
    """On all ranks, or their exchanges would not match."""
    with pytest.MonkeyPatch.context() as patch:
        world, library = fake_gpus(ctx.rank, ctx.world, patch)
        some = pool(TINY, "balanced", 2)
        with contention_operator.open_operator(world, TINY, some, ()) as operator:
            late = iter([ctx.rank == 1, False])
            patch.setattr(Event, "query", lambda self: next(late, False))
            before = library.epoch
            us, _ = operator.run([Choice(5, 2, 1, "sm")], some[0])
            assert np.isfinite(us)
            assert library.epoch == before + 2
            patch.setattr(Event, "query", lambda self: ctx.rank == 0)
            with pytest.raises(BenchError, match="5 times in a row a host"):
                operator.run([Choice(5, 2, 1, "sm")], some[0])


@case
def all_studies(ctx):
    """Records of the whole bench, as the command makes them."""
    pairs = [("balanced", "stress_skew")]
    parts = contention.PARTS
    effort = Effort(parts, 28, (None, 131), segment=10, pairs=pairs, leading=1, traces=1)
    with pytest.MonkeyPatch.context() as patch:
        world, library = fake_gpus(ctx.rank, ctx.world, patch)
        patch.setattr(contention_calls, "MIXED_TOKENS", (32, 20, 16))
        patch.setattr(contention_gpus, "SWITCHES", 4)
        patch.setattr(contention_gpus, "OVERHEAD_PAIRS", 5)
        patch.setattr(contention_gpus, "open_world", lambda parts: world)
        found = list(
            contention_gpus.on_gpus([TINY], ["balanced", "moderate_skew"], (2, 24), effort)
        )
    records = [record for record, _ in found]
    json.dumps(records, allow_nan=False)
    studies = ["steady", "steady", "switch", "switch", "mixed", "overhead"]
    assert [r["study"] for r in records] == studies
    for record in records:
        wanted = {"ranks": 2, "gemm_m": 32, "tile_n": 128, "simulated": False, "bit_equal": True}
        assert wanted.items() <= record.items()
        assert record["calibrated"]["sms"] == 132
    steady, switch, mixed, overhead = records[1], records[2], records[4], records[5]
    assert steady["hot_ratio"] == pytest.approx(KNOWN["moderate_skew"], rel=0.05)
    assert set(steady["static_us"]) == {"2", "24"}
    for name in ("controller", "rule", "sequential", "best_static", "open_loop_over_best"):
        assert steady[name if name.endswith("best") else f"{name}_us"] > 0
    assert len(steady["controller_split"]) == 2  # of each rank
    first, last = steady["trials"]
    assert last["start"] == [131, 131]
    assert first["start"] != last["start"]
    assert [len(told) for told in (first["changes"], last["changes"])] == [2, 2]
    assert last["changes"][0][0] == "0: 131, start: as told"
    assert switch["routing"] == "balanced->stress_skew"
    assert records[3]["routing"] == "stress_skew->balanced"
    assert switch["runs"] == 4
    assert switch["hot_ratio"][1] == pytest.approx(1.9, rel=0.03)
    assert switch["switch_at"] == len(switch["over_best_after_switch"]) == 10
    assert min(switch["over_best_after_switch"]) >= 1
    assert set(mixed["worst_static_over_controller"]) == {"8", "14", "16"}
    for kind in ("", "graph_"):
        for name in ("on_us", "off_us", "on_over_off"):  # on the host's clock: of any size
            assert overhead[f"{kind}{name}"] > 0
        assert overhead[f"{kind}added_us"] is not None
    assert overhead["signals_host_us"] > 0
    assert overhead["signals_host_mean_us"] > 0
    # The loops without records, behind HOST_CALLS and two calls more that make their timer.
    assert library.epoch - library.with_records >= 5 * (overhead["calls"] + overhead["graph_calls"])
    # Times are those of the group: all ranks have the same records.
    records_of_ranks = world.gather(records[:5])
    assert records_of_ranks[0] == records_of_ranks[1]
    if ctx.rank == 0 and importlib.util.find_spec("matplotlib"):
        contention_plot.draw(ctx.shared_dir / "picture.png", [_drawn(*one) for one in found])
        assert (ctx.shared_dir / "picture.png").stat().st_size > 10_000


@case
def some_studies(ctx):
    """Switches without the steady calls that tell which splits lead."""
    pairs = [("balanced", "stress_skew")]
    effort = Effort(["switch"], 28, (None,), segment=10, pairs=pairs, leading=1, traces=1)
    with pytest.MonkeyPatch.context() as patch:
        world, _ = fake_gpus(ctx.rank, ctx.world, patch)
        patch.setattr(contention_gpus, "SWITCHES", 1)
        patch.setattr(contention_gpus, "open_world", lambda parts: world)
        found = list(contention_gpus.on_gpus([TINY], ["balanced"], (2, 24), effort))
    assert [record["study"] for record, _ in found] == ["switch", "switch"]
    assert set(found[0][0]["static_us"]) == {"2", "24"}


def test_the_overhead_on_one_rank(monkeypatch):
    """Nothing is remote; what is left is what records of calls cost."""
    world, library = fake_gpus(0, 1, monkeypatch)
    monkeypatch.setattr(contention_gpus, "OVERHEAD_PAIRS", 5)
    monkeypatch.setattr(contention_gpus, "open_world", lambda parts: world)
    effort = Effort(["overhead"], 28, (None,), segment=10, pairs=[], leading=1, traces=1)
    ((record, trial),) = contention_gpus.on_gpus([TINY], ["balanced"], (2, 24), effort)
    assert trial is None
    json.dumps(record, allow_nan=False)
    wanted = {"study": "overhead", "ranks": 1, "num_consumer_ctas": [0], "calibrated": {}}
    assert wanted.items() <= record.items()
    assert record["on_us"] > 0
    assert record["graph_off_us"] > 0
    assert 0 < library.with_records < library.epoch


def _drawn(record, trial):
    return {"record": record, "trial": trial}


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
