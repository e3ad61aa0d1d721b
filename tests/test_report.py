"""The swap report: counts, names, the table."""

from __future__ import annotations

import dataclasses

import pytest

import ds_tilemoe
from ds_tilemoe.report import KEPT, NOT_SUPPORTED, PENDING, SWAPPED, LayerReport, SwapReport


def test_an_entry_that_is_decided_is_told_by_the_report():
    entry, other = LayerReport("a", PENDING, "", "E=8"), LayerReport("b", NOT_SUPPORTED, "unknown")
    report = SwapReport((entry, other))
    assert (report.pending, report.swapped) == (("a",), ())
    assert str(report).splitlines()[0] == "ds_tilemoe: 1 pending, 1 not supported"
    entry.become(SWAPPED, "a remark", "E=16")
    assert (report.pending, report.swapped) == ((), ("a",))
    lines = str(report).splitlines()
    assert lines[0] == "ds_tilemoe: 1 swapped, 1 not supported"
    assert lines[2].split() == ["a", "swapped", "E=16", "a", "remark"]
    entry.become(KEPT, "it has hooks")
    assert (report.count(KEPT), entry.shape) == (1, ""), "the shape was that of another decision"
    assert "E=16" not in str(report)


def test_it_is_plain_data():
    report = SwapReport((LayerReport("a", SWAPPED),))
    wanted = {"name": "a", "status": "swapped", "reason": "", "shape": ""}
    assert [dataclasses.asdict(layer) for layer in report.layers] == [wanted]
    with pytest.raises(AttributeError):
        report.layers = ()
    assert ds_tilemoe.SwapReport is SwapReport
