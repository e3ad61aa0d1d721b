"""Layers whose process group is not made yet: what apply() builds for them. One process."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from cuda_library_fake import install
from moe_models import HIDDEN, make_moe
from torch import distributed as dist
from torch import nn

import ds_tilemoe
from ds_tilemoe import op_builder, swap
from ds_tilemoe.errors import BuildError
from ds_tilemoe.layers import device_op


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    """As if nothing had made a process group, which tests in this process may have."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)


def pending_moe(**options):
    """With a group of two ranks that does not exist yet."""
    return make_moe(2, parallel=False, **options)


def count_builds(monkeypatch, name):
    """Loads of an op from now on."""
    loads, kind = [], getattr(device_op, name)
    load = kind.load
    monkeypatch.setattr(kind, "load", lambda self: (loads.append(name), load(self))[1])
    return loads


def test_what_pending_layers_need_is_built_in_apply(monkeypatch):
    loads = count_builds(monkeypatch, "CPUTileMoEBuilder")
    assert ds_tilemoe.apply(nn.Sequential(pending_moe(), pending_moe())).count("pending") == 2
    assert len(loads) == 1, "once for all layers"
    for block in ({"enabled": False}, {"layers": "none of them"}):
        ds_tilemoe.apply(pending_moe(), block)
    unknown = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Softsign())
    assert ds_tilemoe.apply(pending_moe(kind=unknown)).count("kept") == 1
    assert len(loads) == 1, "no layer that may be swapped"


def test_a_shallow_copy_tells_no_report_of_a_later_apply():
    moe = pending_moe(drop_tokens=False)
    first = ds_tilemoe.apply(moe)
    twin = copy.copy(moe.deepspeed_moe)
    second = ds_tilemoe.apply(moe, {"layout": "aligned"})
    ds_tilemoe.restore(moe)
    assert [report.layers[0].status for report in (first, second)] == ["kept", "kept"]
    twin._tile.tell("of no concern to them")
    assert "put back" in first.layers[0].reason


def test_the_cuda_library_of_pending_layers_is_built_in_apply(monkeypatch):
    install(monkeypatch, None)  # as if their parameters were on a GPU
    builder, loads = op_builder.CUDATileMoEBuilder(), []
    monkeypatch.setattr(builder, "load", lambda: loads.append("cuda"))
    assert ds_tilemoe.apply(pending_moe().bfloat16()).pending
    assert loads == ["cuda"]


@pytest.mark.parametrize(
    ("accelerator", "block", "wanted"),
    [
        ("cuda", {}, "cuda"),
        ("cpu", {}, "cpu"),
        ("cuda", {"backend": "cpu"}, "cpu"),
        ("cpu", {"backend": "cuda"}, "cuda"),
    ],
)
def test_deepspeed_will_move_pending_layers(accelerator, block, wanted, monkeypatch):
    there = SimpleNamespace(device_name=lambda: accelerator, is_available=lambda: True)
    monkeypatch.setattr(device_op, "get_accelerator", lambda: there)
    built = []
    monkeypatch.setattr(swap, "prepare_backend", lambda device, *_, alone: built.append(device))
    ds_tilemoe.apply(pending_moe(), block)
    assert built == [wanted]


def test_layers_on_the_meta_device_are_pending(monkeypatch):
    """deepspeed.initialize, or who fills them, comes later; what they run with is built now."""
    loads = count_builds(monkeypatch, "CPUTileMoEBuilder")
    (entry,) = ds_tilemoe.apply(pending_moe().to("meta"), {"strict": True}).layers
    assert (entry.status, "on the meta device" in entry.reason) == ("pending", True)
    assert loads == ["CPUTileMoEBuilder"]
    (entry,) = ds_tilemoe.apply(make_moe().to("meta")).layers
    assert (entry.status, "on meta; wanted" in entry.reason) == ("kept", True)


def fail_to_build(*_, **__):
    raise BuildError("g++ is not there; install it")


def test_a_build_that_fails_is_told_by_a_report_of_pending_layers(monkeypatch, caplog):
    monkeypatch.setattr(swap, "prepare_backend", fail_to_build)
    (entry,) = ds_tilemoe.apply(pending_moe(), {"backend": "cpu"}).layers
    assert entry.status == "pending", "all ranks will hear of it in the first forward"
    assert entry.reason == "the CPU backend could not be built: g++ is not there; install it"
    assert entry.reason in caplog.text
