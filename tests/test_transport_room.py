"""What the transport foresees of NVSHMEM's heap, against NVSHMEM's own rules (nvshmem_heap.py)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvshmem_heap import GIB, MIB, PIECE, Died, NvshmemHeap

from ds_tilemoe.transport_room import ALIGNMENT, Room, read_settings


def room_of(heap: NvshmemHeap) -> Room:
    first = heap.malloc(ALIGNMENT)
    heap.free(first)
    return Room(heap.base, first, read_settings(heap.environment, True))


SIZES = st.one_of(
    st.integers(1, 4 * ALIGNMENT),
    st.integers(1, 3 * GIB),
    st.builds(lambda pieces, by: pieces * PIECE + by, st.integers(1, 6), st.integers(-1024, 1024)),
)


@settings(max_examples=300, deadline=None)
@given(
    own=st.builds(
        lambda most, others: [most, *others],
        st.integers(1, 1100 * MIB),
        st.lists(st.integers(1, PIECE), max_size=3),
    ),
    limit=st.integers(3 * GIB, 6 * GIB),
    steps=st.lists(st.one_of(SIZES, st.integers(-5, -1)), max_size=30),
)
def test_room_foresees_what_nvshmem_does(own: list[int], limit: int, steps: list[int]) -> None:
    """Blocks of so many bytes, and, where negative, the free of one of the last: it refuses what
    NVSHMEM would not survive, and nothing else."""
    heap = NvshmemHeap(tuple(own), -(-limit // PIECE) * PIECE)
    room, blocks = room_of(heap), []
    for step in steps:
        if step < 0:
            if blocks:
                address = blocks.pop(max(step, -len(blocks)))
                heap.free(address)
                room.release(address)
            continue
        before, growth, available = heap.physical, room.growth(step), room.available
        wanted, largest = room.limit_for(step), max(heap.chunks.values(), default=0)
        assert available >= largest
        try:
            address = heap.malloc(step)
        except Died:
            assert available < step
            assert growth > 0
            assert wanted > heap.limit
            continue
        assert available >= step
        assert heap.physical - before == growth
        assert wanted == before + growth + PIECE
        if growth:
            assert wanted <= heap.limit
        room.take(address, step)
        blocks.append(address)


def test_the_least_limit_is_enough() -> None:
    room = room_of(NvshmemHeap(limit=1 * GIB))
    wanted = room.limit_for(700 * MIB)
    assert wanted == 2 * GIB, "the first piece, two more and one that stays free"
    with pytest.raises(Died):
        NvshmemHeap(limit=wanted - PIECE).malloc(700 * MIB)
    assert NvshmemHeap(limit=wanted).malloc(700 * MIB)


def test_a_limit_without_growth_leaves_what_the_first_piece_has() -> None:
    room = room_of(NvshmemHeap((500 * MIB,), limit=1 * GIB))
    assert room.available == 12 * MIB
    assert room.growth(12 * MIB) == 0
    assert room.growth(12 * MIB + 1) == PIECE
    room = room_of(heap := NvshmemHeap((PIECE - 1024,), limit=1 * GIB))
    room.take(heap.malloc(513), 513)  # which takes 1024
    assert room.available == 0
    assert room.growth(1) == PIECE


def test_blocks_that_others_have_made_are_counted_where_they_are_seen() -> None:
    heap = NvshmemHeap(limit=8 * GIB)
    room = room_of(heap)
    heap.malloc(3 * GIB)
    room.take(heap.malloc(MIB), MIB)
    assert room.available >= 8 * GIB - PIECE - heap.physical
    assert room.limit_for(1 * GIB) <= heap.physical + 1 * GIB + PIECE


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("100", 100),
        ("20m", 20_971_520),
        ("3.1M", 3_250_586),
        (".5m", 524_288),
        ("20kk", 20_480),
        ("2GB", 2 * GIB),
        ("1T", 1 << 40),
        ("1e3", 1000),
        (" 7", 7),
        ("0", 0),
    ],
)
def test_sizes_as_nvshmem_reads_them(text: str, nbytes: int) -> None:
    assert read_settings({"NVSHMEM_SYMMETRIC_SIZE": text}, True).fixed_size == nbytes
    whole = -(-nbytes // PIECE) * PIECE
    assert read_settings({"NVSHMEM_MAX_MEMORY_PER_GPU": text}, True).limit == whole


@pytest.mark.parametrize("text", ["", "G", "1X", "1 G", "-1", "many"])
def test_sizes_that_nvshmem_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"NVSHMEM_MAX_MEMORY_PER_GPU: got .*; wanted a number of"):
        read_settings({"NVSHMEM_MAX_MEMORY_PER_GPU": text}, True)


def test_settings_that_are_not_made() -> None:
    assert read_settings({}, True) == ("", 128 * GIB, PIECE, 1 * GIB)
    for text, piece in (("8M", 8 * MIB), ("1", 2 * MIB), ("3G", 2 * GIB)):
        assert read_settings({"NVSHMEM_CUMEM_GRANULARITY": text}, True).piece == piece


@pytest.mark.parametrize(
    ("word", "grows"),
    [("0", True), ("no", True), ("False", True), ("1", False), ("", False), ("yes", False)],
)
def test_words_that_mean_yes(word: str, grows: bool) -> None:
    fixed_by = read_settings({"NVSHMEM_DISABLE_CUDA_VMM": word}, True).fixed_by
    assert fixed_by == ("" if grows else "NVSHMEM_DISABLE_CUDA_VMM")


@pytest.mark.parametrize(
    ("kind", "has_vmm", "fixed_by"),
    [
        ("SYSMEM", True, "NVSHMEM_HEAP_KIND=SYSMEM"),
        ("sysmem", True, "NVSHMEM_HEAP_KIND=SYSMEM"),
        ("SYSMEM2", True, ""),
        ("VIDMEM", True, ""),
        ("VIDMEM", False, "the GPU has no CUDA VMM with GPUDirect RDMA"),
    ],
)
def test_heaps_that_do_not_grow(kind: str, has_vmm: bool, fixed_by: str) -> None:
    assert read_settings({"NVSHMEM_HEAP_KIND": kind}, has_vmm).fixed_by == fixed_by


def test_aligned_blocks_are_refused() -> None:
    name = "NVSHMEM_ENABLE_ALIGNED_MALLOC"
    assert read_settings({name: "0"}, True) == read_settings({}, True)
    for word in ("1", "yes", ""):
        with pytest.raises(ValueError, match=f"{name}: got '{word}'; wanted 0.*fix: unset it"):
            read_settings({name: word}, True)
