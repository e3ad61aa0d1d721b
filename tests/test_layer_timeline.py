"""bench.py layer --timeline: ranks on one clock, what is drawn, and what is said before a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_bench_operator import lines, start

from ds_tilemoe.stats import Call, IterationStats, LayerTimes

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from benches import layer_timeline
from benches.layer_timeline import Panel, Seen
from demo.options import InputError


def ns(us):
    return int(us * 1000)


def iteration(ready, end, put, arrival, segments=4):
    marks = map(ns, (ready, end, put, arrival))
    return IterationStats(*marks, segments, 0, 0, 0, 7)


def on_gpu(late, us=2400.0, router=-30, **stats):
    """A rank whose own clock says ``late`` us between its exchange's begin and end."""
    at = [router, late, late + 5, late + 900, late + 910, late + 1900, late + 1950, late + 2040]
    marks = {"ready": 120, "end": 990, "put": 1010, "arrival": 1040} | stats
    return Seen(Call(None, None, iteration(**marks), LayerTimes(*map(ns, at))), us)


def test_gpus_are_laid_together_where_the_counts_are_exchanged():
    """One rank came 300 us before the other: it waits in its exchange; both leave it at once."""
    early, late = layer_timeline.rows_of([on_gpu(320, us=2700), on_gpu(20, us=2400)])
    assert early.met == late.met
    for part in ("gemm1", "gemm2", "exposed_combine", "scale"):
        assert early.bars[part] == pytest.approx(late.bars[part])
    assert early.bars["logits"][0] == 0.0  # the first of all
    # Beyond its record the call took 2700 - (2360 + 30) us.
    assert early.bars["logits"] == pytest.approx((0, 310))
    assert early.bars["router"] == pytest.approx((310, 340))
    assert early.bars["counts_and_plan"] == pytest.approx((340, 660))
    assert late.bars["counts_and_plan"] == pytest.approx((640, 660))
    assert early.bars["gemm2"] == pytest.approx((1570, 2560))
    assert early.shipping == pytest.approx((1570 + 120, 1570 + 1010))


def test_a_gate_that_deepspeed_runs_is_one_part():
    (row,) = layer_timeline.rows_of([on_gpu(20, us=2400, router=0)])
    assert "logits" not in row.bars and "router" not in row.bars
    assert row.bars["gate"] == pytest.approx((0, 2400 - 2060))


def test_what_did_not_happen_is_not_drawn():
    (row,) = layer_timeline.rows_of([on_gpu(20, us=2000, segments=0)])
    assert row.shipping is None
    assert "logits" not in row.bars  # events that are shorter than the record: a rounding
    (row,) = layer_timeline.rows_of([on_gpu(20, ready=0, put=0)])
    assert row.shipping is None


def test_ranks_of_one_host_have_one_clock():
    first = Seen(Call(ns(1000), ns(1900), iteration(50, 300, 380, 400)), 900)
    second = Seen(Call(ns(1100), ns(2000), iteration(60, 500, 510, 450)), 900)
    rows = layer_timeline.rows_of([first, second])
    assert [row.bars["before"] for row in rows] == [(0, 500), (100, 490)]
    assert rows[0].bars["gemm2"] == pytest.approx((500, 800))
    assert rows[0].bars["exposed_combine"] == pytest.approx((800, 900))
    assert rows[0].shipping == pytest.approx((550, 880))
    assert rows[1].bars["gemm2"] == pytest.approx((490, 990))
    assert "exposed_combine" not in rows[1].bars  # all had come before its GEMM ended
    assert [row.met for row in rows] == [None, None]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    seen = [on_gpu(20 + 30 * rank) for rank in range(4)]
    slow = [on_gpu(20, us=2600, put=1500, arrival=1600) for _ in range(4)]
    panels = [
        Panel(name, max(one.us for one in calls), layer_timeline.rows_of(calls))
        for name, calls in (("as set", seen), ("mover none", slow))
    ]
    path = tmp_path / f"line{suffix}"
    layer_timeline.draw(path, "8192,8192,2048,64,2 swiglu uniform, graph, 4 ranks", panels)
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        words = written.decode()
        for part in ("GEMM 1 with dispatch", "exposed combine", "as set: 2400 us", "rank 3"):
            assert f"<!-- {part} -->" in words
        assert "DeepSpeed's gate" not in words


def test_what_would_fail_behind_is_said_before(monkeypatch):
    monkeypatch.setattr(layer_timeline.importlib.util, "find_spec", lambda name: object())
    layer_timeline.need_matplotlib()
    monkeypatch.setattr(layer_timeline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'no matplotlib; .*pip install "ds_tilemoe\[bench\]"'):
        layer_timeline.need_matplotlib()


def test_a_picture_of_no_known_kind_is_refused_before_the_ranks_meet(tmp_path):
    path, out = tmp_path / "new" / "x.exe", tmp_path / "x"
    flags = ["--quick", "--commit", "abc", "--out", out, "--timeline", path]
    done = start("layer", *flags, ranks=2)
    assert done.returncode == 2
    wanted = f"--timeline: got '{path}'; wanted a name that ends in .png or .svg or .pdf; fix: "
    assert wanted in done.stderr
    assert done.stderr.count("error: ") == 1
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_of_the_cpu_backend(tmp_path):
    pytest.importorskip("matplotlib")
    png, out = tmp_path / "x.png", tmp_path / "layer.jsonl"
    flags = ["--shape", "48,64,40,8,2", "--quick", "--peers", "none", "--timeline", png]
    done = start("layer", *flags, "--commit", "abc", "--out", out, ranks=2)
    assert done.returncode == 0, done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"time line of a call: {png}" in done.stderr
    assert len(lines(out)) == 1
