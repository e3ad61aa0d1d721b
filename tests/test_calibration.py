"""Numbers of a made-up machine come back; the cache survives what happens to files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import multiprocessing
import os

import pytest

from ds_tilemoe import calibration
from ds_tilemoe.calibration import cache_file, cached_machine, calibrate, typical
from ds_tilemoe.cost_model import Machine

KEY = {"gpu": "NVIDIA H200", "link": "NV18", "version": "1"}


class Gpu:
    """42 GB/s a CTA up to 350, tiles of 500 ns + 11 ns per K, a lone one at 0.8, start at 0.5."""

    def __init__(self, sms=132):
        self.sms, self.launches, self.ns = sms, 0, 0.0

    def copy(self, ctas, size):
        return self._run(size / min(42.0 * ctas, 350.0))

    def gemm(self, tiles, k):
        tile = 500 + 11 * k
        waves, last = divmod(tiles, self.sms)
        time = 0.5 * tile + waves * tile
        return self._run(time + (tile * (0.8 + 0.2 * last / self.sms) if last else 0.0))

    def _run(self, ns):
        self.launches += 1
        self.ns += ns
        return ns


@pytest.mark.parametrize("sms", [4, 78, 108, 132])
def test_calibration_finds_the_machine(sms):
    gpu = Gpu(sms)
    machine = calibrate(sms, gpu.copy, gpu.gemm)
    assert machine.sms == sms
    assert machine.rate_per_cta == pytest.approx(42.0)
    assert machine.link == pytest.approx(350.0)
    assert machine.tile_ns_per_k == pytest.approx(11.0)
    assert machine.tile_base_ns == pytest.approx(500.0)
    assert machine.lone_share == pytest.approx(0.8, abs=0.06)
    assert machine.start_share == pytest.approx(0.5)
    assert gpu.launches <= 40
    assert gpu.ns < 0.05e9, "well under a second of GPU time"


def test_impossible_times_are_refused():
    gpu = Gpu()
    with pytest.raises(ValueError, match=r"copy by 2 CTAs took 0\.0 ns"):
        calibrate(132, lambda ctas, size: 0.0, gpu.gemm)
    with pytest.raises(ValueError, match=r"GEMM of 132 tiles took 5\.0 ns, of 4x 5\.0 ns"):
        calibrate(132, gpu.copy, lambda tiles, k: 5.0)


def test_a_second_process_reads_what_the_first_measured(tmp_path):
    made = []
    for _ in range(2):
        machine = cached_machine(
            **KEY, calibrate_now=lambda: made.append(1) or typical(132), cache_dir=tmp_path
        )
        assert machine == typical(132)
    assert len(made) == 1
    assert [p.name for p in tmp_path.iterdir()] == [cache_file(KEY, tmp_path).name]


@pytest.mark.parametrize("field", list(KEY), ids="another_{}".format)
def test_another_gpu_link_or_version_is_measured_anew(tmp_path, field):
    cached_machine(**KEY, calibrate_now=lambda: typical(132), cache_dir=tmp_path)
    other = cached_machine(
        **{**KEY, field: "other"}, calibrate_now=lambda: typical(78), cache_dir=tmp_path
    )
    assert other.sms == 78


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"key": {}}',
        b'{"key": 1, "machine": {}}',
        b"[" * 100_000,
        "other key",
        "no sms",
        "sms -1",
    ],
)
def test_a_damaged_file_is_measured_anew_with_one_warning(tmp_path, caplog, content):
    path = cache_file(KEY, tmp_path)
    cached_machine(**KEY, calibrate_now=lambda: typical(132), cache_dir=tmp_path)
    if isinstance(content, str):
        found = json.loads(path.read_text())
        if content == "other key":
            found["key"]["gpu"] = "another"
        elif content == "no sms":
            del found["machine"]["sms"]
        else:
            found["machine"]["sms"] = -1
        content = json.dumps(found).encode()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "ds_tilemoe"):
        machine = cached_machine(**KEY, calibrate_now=lambda: typical(99), cache_dir=tmp_path)
    assert machine.sms == 99
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert cached_machine(**KEY, calibrate_now=lambda: typical(1), cache_dir=tmp_path).sms == 99


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field.name, "1") for field in dataclasses.fields(Machine)),
        *((field.name, None) for field in dataclasses.fields(Machine)),
        *((field.name, -1) for field in dataclasses.fields(Machine)),
        *((field.name, 10**400) for field in dataclasses.fields(Machine)),
        *((field.name, True) for field in dataclasses.fields(Machine) if field.type != "bool"),
        *((field.name, math.nan) for field in dataclasses.fields(Machine)),
        *((field.name, math.inf) for field in dataclasses.fields(Machine)),
        ("sms", 132.0),
        ("sms", 0),
        ("tile_n", 0),
        ("tile_n", 256.0),
        ("consumer_takes_sm", 1),
        ("start_share", 3.0),
        ("put_bytes", 0.5),
        ("link", 0),
        ("unheard_of", 1),
    ],
)
def test_a_field_that_cannot_be_is_measured_anew(tmp_path, caplog, field, value):
    path = cache_file(KEY, tmp_path)
    machine = dataclasses.asdict(typical(132)) | {field: value}
    path.write_text(json.dumps({"key": KEY, "machine": machine}))
    with caplog.at_level(logging.WARNING, "ds_tilemoe"):
        found = cached_machine(**KEY, calibrate_now=lambda: typical(99), cache_dir=tmp_path)
    assert found == typical(99)
    assert [field in record.getMessage() for record in caplog.records] == [True]


def test_every_field_has_its_range_and_type():
    assert set(calibration._RANGES) == {field.name for field in dataclasses.fields(Machine)}
    assert {field.type for field in dataclasses.fields(Machine)} <= set(calibration._TYPES)


def test_without_a_directory_to_write_it_works_and_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "ds_tilemoe"):
            machine = cached_machine(
                **KEY, calibrate_now=lambda: typical(132), cache_dir=blocked / "below"
            )
        assert machine == typical(132)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for word in (str(blocked / "below"), "Not a directory", "fix: ", "adaptive.cache_dir"):
        assert word in record.getMessage()


def test_no_half_file_is_left_when_writing_fails(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(calibration.os, "replace", fail)
    assert cached_machine(**KEY, calibrate_now=lambda: typical(132), cache_dir=tmp_path) == typical(
        132
    )
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file(KEY).parent == tmp_path / "ds_tilemoe"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/other")
    assert cache_file(KEY).parent == tmp_path / "home" / "other" / "ds_tilemoe"
    assert cache_file(KEY, "~/mine").parent == tmp_path / "home" / "mine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file(KEY).parent == tmp_path / "home" / ".cache" / "ds_tilemoe"


def _write_and_read(folder, start, sms, rounds):
    start.wait(30)
    for _ in range(rounds):
        calibration._write(
            cache_file(KEY, folder),
            {"key": KEY, "machine": calibration.dataclasses.asdict(typical(sms))},
        )
        machine = cached_machine(**KEY, calibrate_now=lambda: typical(1), cache_dir=folder)
        assert machine.sms in (100, 101), machine.sms  # whole, whoever wrote it


def test_two_processes_write_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Event()
    writers = [
        context.Process(target=_write_and_read, args=(tmp_path, start, sms, 200))
        for sms in (100, 101)
    ]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert os.listdir(tmp_path) == [cache_file(KEY, tmp_path).name]
