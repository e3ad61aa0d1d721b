"""Sums, ratios, table, trace and exported settings."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

from ds_tilemoe import stats
from ds_tilemoe.config import load_config
from ds_tilemoe.cost_model import ALL_TAIL_WAVES, Choice
from ds_tilemoe.stats import IterationStats, LayerStats, LayerTimes

CSRC = Path(__file__).parent.parent / "csrc"


def iteration(producer_end=1000, last_arrival=1400, **more):
    values = {
        "first_segment_ready": 100,
        "producer_end": producer_end,
        "last_put": 1200,
        "last_arrival": last_arrival,
        "segments": 6,
        "backlog_at_producer_end": 2,
        "chunks_drained": 1,
        "idle_spins": 40,
        "epoch": 1,
    }
    return IterationStats(**{**values, **more})


def layer_times(**more):
    values = {
        "router_start": -2000,
        "exchange_end": 500,
        "front_start": 600,
        "front_end": 3600,
        "down_start": 3700,
        "down_end": 4700,
        "last_arrival": 5100,
        "scale_end": 6000,
    }
    return LayerTimes(**{**values, **more})


@pytest.fixture
def layer():
    gc.collect()
    return LayerStats("mlp", keep_history=True)


def test_mirrors_plan_abi():
    text = (CSRC / "plan_abi.h").read_text()
    body = re.search(r"struct IterationStats \{(.*?)\};", text, re.DOTALL).group(1)
    assert tuple(re.findall(r"int64_t (\w+);", body)) == IterationStats._fields
    body = re.search(r"struct LayerTimes \{(.*?)\};", text, re.DOTALL).group(1)
    assert tuple(re.findall(r"int64_t (\w+);", body)) == LayerTimes._fields


def test_exposed_combine_is_never_negative():
    assert iteration().exposed_combine == 400
    assert iteration(last_arrival=700).exposed_combine == 0


def test_record_has_means_per_call(layer):
    layer.add(iteration(), 0, 10_000)
    layer.add(iteration(last_arrival=900, backlog_at_producer_end=4), 10_000, 40_000)
    record = layer.record()
    assert record["calls"] == 2
    assert record["time_us"] == 20.0
    assert record["exposed_combine_us"] == 0.2
    assert record["backlog"] == 3
    assert record["segments"] == 6
    assert record["chunks_drained"] == 1
    assert json.loads(json.dumps(record)) == record


def test_overlap_ratio_is_unknown_until_measured(layer):
    layer.add(iteration(), 0, 1)
    assert layer.overlap_ratio is None
    assert layer.record()["overlap_ratio"] is None
    assert "-" in stats.table([layer.record()]).splitlines()[1]
    layer.add_alone(iteration(last_arrival=2500))
    layer.add_alone(iteration(last_arrival=3500))
    assert layer.combine_alone_ns == 2000
    assert layer.overlap_ratio == pytest.approx(0.8)
    assert layer.calls == 1, "a measuring run is not a call"


def test_overlap_ratio_without_calls_or_combine(layer):
    layer.add_alone(iteration(last_arrival=0))
    layer.add(iteration(last_arrival=0), 0, 1)
    assert layer.overlap_ratio is None, "nothing to hide"
    layer.add_alone(iteration(last_arrival=2500))
    assert layer.overlap_ratio is not None
    layer.clear()
    layer.add(iteration(segments=0), 0, 1)
    assert layer.overlap_ratio is None, "a rank alone"


def test_layers_and_reset_of_the_process(layer):
    other = LayerStats("never called")
    layer.add(iteration(), 0, 1)
    layer.add_alone(iteration())
    assert [r["layer"] for r in stats.layers()] == ["mlp"]
    stats.reset()
    assert stats.layers() == []
    assert layer.history.maxlen
    assert not layer.history
    assert layer.combine_alone_ns == 400, "what was measured stays"
    del layer, other


def test_dead_layers_vanish():
    dead = LayerStats("dead")
    dead.add(iteration(), 0, 1)
    del dead
    gc.collect()
    assert "dead" not in [record["layer"] for record in stats.layers()]


def test_table(layer):
    layer.add(iteration(), 0, 12_000)
    head, row = stats.table([layer.record()]).splitlines()
    assert re.split(r"  +", head) == [
        "layer", "calls", "time [us]", "exposed combine [us]", "overlap ratio", "backlog [chunks]",
        "split",
    ]  # fmt: skip
    assert row.split() == ["mlp", "1", "12", "0", "-", "2.0", "-"]
    layer.add(iteration(), 0, 12_000, choice=Choice(8, 2, 1, "sm"), reason="start")
    assert stats.table([layer.record()]).split()[-1] == "8"
    assert stats.table([layer.record() | {"split": None}]).split()[-1] == "-"
    assert stats.table() == stats.table(stats.layers())
    assert stats.table().splitlines()[1].startswith("mlp")
    assert len(stats.table([]).splitlines()) == 1  # none are not all


def test_parts_are_means_over_the_calls_that_have_them(layer):
    assert layer.record()["gemm1_us"] is None
    layer.add(iteration(), 0, 10_000)
    layer.add(iteration(), None, None, times=layer_times())
    layer.add(iteration(), None, None, times=layer_times(router_start=0, front_end=4600))
    record = layer.record()
    assert record["calls"] == 3
    assert record["time_us"] == pytest.approx((10 + 8 + 6) / 3)
    assert [record[f"{part}_us"] for part in stats.PARTS] == [
        1.0, 0.5, 3.5, 1.0, pytest.approx(0.4), pytest.approx(0.9),
    ]  # fmt: skip
    stats.reset()
    assert layer.record()["gemm1_us"] is None


def test_a_front_by_other_kernels_lies_between_plan_and_gemm_2():
    assert layer_times(front_start=0, front_end=0).spans["gemm1"] == (500, 3700)


def test_rows_that_came_early_leave_no_exposed_combine():
    spans = layer_times(last_arrival=4000).spans
    assert spans["exposed_combine"] == (4700, 4700)
    assert spans["scale"] == (4700, 6000)


def test_a_call_without_any_length_is_refused(layer):
    with pytest.raises(ValueError, match="no begin and end and no times"):
        layer.add(iteration(), None, None)


def test_changes_of_the_split_are_kept_with_their_reasons(layer):
    eight, ten = Choice(8, 2, 1, "sm"), Choice(10, 2, 1, "sm")
    for choice, reason in ((eight, "start"), (eight, "start"), (ten, "backlog"), (None, None)):
        layer.add(iteration(), 0, 1, choice=choice, reason=reason)
    record = layer.record()
    assert record["split"] == 10
    assert record["changes"] == [
        {"call": 1, "split": 8, "reason": "start"},
        {"call": 3, "split": 10, "reason": "backlog"},
    ]
    assert json.loads(json.dumps(record)) == record
    layer.clear()
    assert layer.record()["split"] == 10, "it is still in force"
    assert layer.record()["changes"] == []


def test_trace(layer):
    layer.add(iteration(), 5000, 9000)
    events = stats.to_chrome_trace(rank=3)["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert spans["mlp"]["ts"] == 5.0
    assert spans["mlp"]["dur"] == 4.0
    assert spans["exposed_combine"]["dur"] == 0.4
    assert spans["exposed_combine"]["ts"] + 0.4 == pytest.approx(9.0)
    assert {event["pid"] for event in events} == {3}
    json.dumps(events)


def test_trace_by_the_devices_clock(layer):
    layer.add(iteration(epoch=5), None, None, times=layer_times())
    layer.add(iteration(epoch=4), None, None, times=layer_times(router_start=0))
    layer.add(iteration(epoch=6), 50_000, 60_000, times=layer_times())
    events = [e for e in stats.to_chrome_trace()["traceEvents"] if e["ph"] == "X"]

    def spans(name):
        return [(e["ts"], round(e["dur"], 3)) for e in events if e["name"] == name]

    assert spans("mlp") == [(0.0, 6.0), (6.0, 8.0), (50.0, 10.0)], "by epoch, then the host's clock"
    assert spans("router") == [(6.0, 2.0), (50.0, 2.0)]
    assert spans("gemm2") == [(3.7, 1.0), (11.7, 1.0), (55.7, 1.0)]
    assert spans("exposed_combine") == [(4.7, 0.4), (12.7, 0.4), (56.7, 0.4)]
    assert spans("consumer")[0] == (3.8, 1.1), "from the first segment to the last put"


def test_no_history_unless_asked():
    layer = LayerStats("quiet")
    layer.add(iteration(), 0, 1)
    assert not layer.history


def test_export_config(layer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    layer.settings = load_config({"layout": "aligned"}).model_dump() | {"tile_m": 16}
    path = tmp_path / "block.json"
    block = stats.export_config(path)
    assert block["tile_overlap"]["tile_m"] == 16
    assert load_config(path) == load_config(block)
    assert load_config(path).layout == "aligned"
    stats.export_config("~/new/folder/block.json")
    assert load_config(tmp_path / "new/folder/block.json") == load_config(path)


def test_export_config_has_the_controllers_split(layer):
    layer.settings = load_config({}).model_dump() | {"num_consumer_ctas": 8, "mover": "sm"}
    layer.add(iteration(), 0, 1, choice=Choice(11, 2, 1, "sm"), reason="start")
    block = stats.export_config()["tile_overlap"]
    assert [block[name] for name in Choice._fields] == [11, 2, 1, "sm"]
    assert load_config({"tile_overlap": block}).num_consumer_ctas == 11
    layer.add(iteration(), 0, 1, choice=Choice(0, ALL_TAIL_WAVES, 1, "none"), reason="little to do")
    block = stats.export_config()["tile_overlap"]
    assert [block[name] for name in Choice._fields[1:]] == ["all", 1, "none"]
    assert "num_consumer_ctas" not in block, "nobody consumes"
    assert load_config({"tile_overlap": block}).mover == "none"


def test_export_config_before_any_call(monkeypatch):
    monkeypatch.setattr(stats, "_alive", [])
    never_run = LayerStats("never run")
    with pytest.raises(ValueError, match="run a forward first"):
        stats.export_config()
    never_run.settings = {"tile_m": 16}
    assert stats.export_config() == {"tile_overlap": {"tile_m": 16}}
