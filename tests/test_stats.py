"""Sums, ratios, table, trace and exported settings."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest

from ds_tilemoe import stats
from ds_tilemoe.config import load_config
from ds_tilemoe.stats import IterationStats, LayerStats

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


@pytest.fixture
def layer():
    gc.collect()
    return LayerStats("mlp", keep_history=True)


def test_mirrors_plan_abi():
    text = (CSRC / "plan_abi.h").read_text()
    body = re.search(r"struct IterationStats \{(.*?)\};", text, re.DOTALL).group(1)
    assert tuple(re.findall(r"int64_t (\w+);", body)) == IterationStats._fields


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
    ]  # fmt: skip
    assert row.split() == ["mlp", "1", "12", "0", "-", "2.0"]


def test_trace(layer):
    layer.add(iteration(), 5000, 9000)
    events = stats.to_chrome_trace(rank=3)["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert spans["mlp"]["ts"] == 5.0
    assert spans["mlp"]["dur"] == 4.0
    assert spans["exposed combine"]["dur"] == 0.4
    assert spans["exposed combine"]["ts"] + 0.4 == pytest.approx(9.0)
    assert {event["pid"] for event in events} == {3}
    json.dumps(events)


def test_no_history_unless_asked():
    layer = LayerStats("quiet")
    layer.add(iteration(), 0, 1)
    assert not layer.history


def test_export_config(layer, tmp_path):
    layer.settings = load_config({"layout": "aligned"}).model_dump() | {"tile_m": 16}
    path = tmp_path / "block.json"
    block = stats.export_config(path)
    assert block["tile_overlap"]["tile_m"] == 16
    assert load_config(path) == load_config(block)
    assert load_config(path).layout == "aligned"


def test_export_config_before_any_call(monkeypatch):
    monkeypatch.setattr(stats, "_alive", [])
    never_run = LayerStats("never run")
    with pytest.raises(ValueError, match="run a forward first"):
        stats.export_config()
    never_run.settings = {"tile_m": 16}
    assert stats.export_config() == {"tile_overlap": {"tile_m": 16}}
