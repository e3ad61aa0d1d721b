"""What the calibration runs, with the kernels played: no GPU needed."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_library_fake import FakeLibrary, memory

from ds_tilemoe.backends import cuda_abi, cuda_calibration
from ds_tilemoe.backends.cuda_calibration import measured_machine
from ds_tilemoe.calibration import typical
from ds_tilemoe.plan_abi import BAND_DTYPE, CHUNK_DTYPE, SEGMENT_DTYPE

WORLD, RANK, SMS = 4, 2, 132
ROOM = 1 << 20


class Library(FakeLibrary):
    """Checks what it is told to run, and says how long that would take."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ns = 0.0
        self.copies: list[tuple[int, int]] = []
        self.gemms: list[tuple[int, int]] = []

    def tilemoe_consumer_launch(self, p: Any, ctas: int, stream: int) -> int:
        state = cuda_abi.State.from_address(p.view.state)
        segments = memory(p.segments, SEGMENT_DTYPE, state.chunks)
        chunks = memory(p.chunks, CHUNK_DTYPE, state.chunks)
        assert (chunks["segment"] == np.arange(state.chunks)).all()
        assert (chunks["rows"] == segments["rows"]).all()
        assert (segments["band_count"] == 0).all(), "nothing raises flags"
        peers, counts = np.unique(segments["owner"], return_counts=True)
        assert peers.tolist() == [0, 1, 3]
        assert counts.max() - counts.min() <= 1
        assert (segments["dst_row"] + segments["rows"]).max() * p.row_bytes <= ROOM
        nbytes = int(segments["rows"].sum()) * p.row_bytes
        memory(p.rows, np.uint8, nbytes)  # is there
        assert state.epoch % 2 == 0
        assert not p.view.host_error
        self.copies.append((ctas, nbytes))
        self.ns = nbytes / min(40.0 * ctas, 300.0)
        return 0

    def tilemoe_producer_launch(self, p: Any, kind: Any, grid: int, stream: int) -> int:
        bands = int(memory(p.band_count, np.int32, 1)[0])
        assert memory(p.tile_claim, np.int32, 1)[0] == 0
        plan = memory(p.bands, BAND_DTYPE, bands)
        a, d = list(p.a.words)[:5], list(p.d.words)[:5]
        assert (plan["row"] + plan["rows"]).max() <= a[2] == d[2]
        assert a[3] == p.k
        assert d[3] == p.n
        b = list(cuda_abi.TensorMap.from_address(p.b).words)[:5]
        assert b[2:4] == [p.n, p.k]
        assert b[4] == kind.tile_n == 256
        assert grid == SMS
        assert not (p.band_flags or p.epoch or p.ship.view.state or p.dispatch.view.state)
        tiles = bands * (p.n // 256)
        self.gemms.append((tiles, p.k))
        self.ns = -(-tiles // SMS) * (500.0 + 10.0 * p.k)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Any) -> float:
            return library.ns / 1e6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    return library


def heap(library: Library, room: int = ROOM) -> Any:
    view = cuda_abi.RankView(world=WORLD, rank=RANK, host_error=1)
    needs = SimpleNamespace(recv_bytes=room)
    return SimpleNamespace(
        library=library, device=torch.device("cpu"), world=WORLD, view=view, needs=needs
    )


def test_a_machine_of_known_rates_is_found(library: Library, tmp_path: Path) -> None:
    machine = measured_machine(heap(library), SMS, str(tmp_path))
    assert machine.rate_per_cta == pytest.approx(40.0)
    assert machine.link == pytest.approx(300.0)
    assert machine.tile_ns_per_k == pytest.approx(10.0)
    assert machine.tile_base_ns == pytest.approx(500.0)
    assert {ctas for ctas, _ in library.copies} == {2, 24}
    assert {k for _, k in library.gemms} == {1024, 4096}
    runs = len(library.copies) + len(library.gemms)
    assert measured_machine(heap(library), SMS, str(tmp_path)) == machine
    assert len(library.copies) + len(library.gemms) == runs, "from disk"


def test_where_it_cannot_be_measured(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="ds_tilemoe"):
        found = measured_machine(heap(library, room=4096), SMS, str(tmp_path))
    assert found == typical(SMS)
    assert "the receive room has 4096 bytes only" in caplog.text
    assert list(tmp_path.iterdir()) == [], "what was not measured is not kept"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), OSError("a disk")])
def test_whatever_goes_wrong_its_peers_do_not_wait(
    error: Exception,
    library: Library,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(cuda_calibration, "_time", fail)
    with caplog.at_level(logging.WARNING, logger="ds_tilemoe"):
        assert measured_machine(heap(library), SMS, str(tmp_path)) == typical(SMS)
    assert str(error) in caplog.text


def test_state_words_are_where_the_kernels_read_them() -> None:
    assert ctypes.sizeof(cuda_abi.State) <= 128
    assert cuda_calibration._A_ROWS % cuda_abi.TILE_M == 0
