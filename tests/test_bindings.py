"""The extension refuses what would read or write out of bounds; nothing here reaches a peer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ds_tilemoe.errors import CapacityError
from ds_tilemoe.op_builder import CPUTileMoEBuilder

TOKENS, WIDTH = 40, 32


@pytest.fixture(scope="module")
def op():
    return CPUTileMoEBuilder().load()


def params_of(op, local_experts=2):
    return op.PlanParams(
        world=1,
        rank=0,
        local_experts=local_experts,
        tile_m=16,
        layout=0,
        bands_per_segment=1,
        local_tail_bands=-1,
        chunk_rows=8,
    )


def make(op, **changes):
    shape = {"world": 1, "max_experts": 2, "dispatch_bytes": 1 << 16, "recv_bytes": 1 << 16}
    shape |= {name: value for name, value in changes.items() if name in shape}
    world, *rest = shape.values()
    nbytes = max(world, 1) * op.block_bytes(max(world, 1), *(max(value, 1) for value in rest))
    arguments = {"region": torch.zeros(nbytes, dtype=torch.uint8), "rank": 0, "max_tokens": 64}
    arguments |= {"wait_timeout_s": 1.0, "group_timeout_s": 1e300, "pids": [0]}
    return op.Rank(**arguments | shape | changes)


def begin(op, rank, local_experts=2):
    rank.begin(
        name="layer",
        fingerprint=1,
        params=params_of(op, local_experts),
        in_row_bytes=WIDTH * 4,
        out_row_bytes=WIDTH * 4,
        expert_ids=torch.zeros(TOKENS, 1, dtype=torch.int32),
        routing_error=None,
    )
    return rank


def combine(rank, **changes):
    arguments = {
        "hidden": torch.ones(48, WIDTH),
        "out": torch.empty(48, WIDTH),
        "weights": [torch.eye(WIDTH)] * 2,
        "biases": [None] * 2,
        "tile_n": 16,
        "group_bands": 1,
        "num_consumers": 1,
        "mover": 0,
    }
    rank.combine(**arguments | changes)


def test_a_right_call(op):
    rank = begin(op, make(op))
    x = torch.randn(TOKENS, WIDTH)
    rank.dispatch(x)
    rank.wait_expert(0)
    assert torch.equal(rank.dispatched(x)[:TOKENS], x)
    combine(rank, hidden=rank.dispatched(x).clone())
    y = torch.empty(TOKENS, WIDTH)
    rank.scale(torch.full((TOKENS, 1), 2.0), y)
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.dispatch(torch.ones(TOKENS, 1)),
        lambda rank: rank.dispatch(torch.ones(TOKENS - 1, WIDTH)),
        lambda rank: rank.dispatch(torch.ones(TOKENS, WIDTH, dtype=torch.float64)),
        lambda rank: rank.dispatch(torch.ones(WIDTH, TOKENS).t()),
        lambda rank: rank.wait_expert(2),
        lambda rank: combine(rank, biases=[]),
        lambda rank: combine(rank, weights=[torch.eye(WIDTH)]),
        lambda rank: combine(rank, weights=[torch.eye(WIDTH + 1)] * 2),
        lambda rank: combine(rank, out=torch.empty(48, 1)),
        lambda rank: combine(rank, hidden=torch.ones(47, WIDTH)),
        lambda rank: combine(rank, tile_n=0),
        lambda rank: combine(rank, num_consumers=0),
        lambda rank: combine(rank, mover=3),
        lambda rank: rank.scale(torch.ones(TOKENS, 1), torch.empty(TOKENS, 1)),
        lambda rank: rank.scale(torch.ones(TOKENS, 2), torch.empty(TOKENS, WIDTH)),
    ],
)
def test_wrong_tensors_are_refused(op, call):
    with pytest.raises(ValueError, match=r"wanted|must be|of 2"):
        call(begin(op, make(op)))


def test_nothing_before_begin(op):
    rank = make(op)
    for call in (rank.expert_rows, rank.expert_valid, lambda: rank.wait_expert(0)):
        with pytest.raises(ValueError, match="begin"):
            call()


def test_a_glance_wants_what_modules_have(op):
    linear = torch.nn.Linear(2, 2)
    table = vars(linear)
    good = {"modules": [linear], "tables": [table], "parents": [], "linears": [table]}
    good["attributes"] = [(table, "in_features")]
    assert op.Glance(**good).holds()
    with pytest.raises(ValueError, match="got 0 tables, wanted 1"):
        op.Glance(**good | {"tables": []})
    with pytest.raises(ValueError, match="no parameters"):
        op.Glance(**good | {"linears": [{}]})
    with pytest.raises(ValueError, match="no submodules"):
        op.Glance(**good | {"parents": [{"_modules": None}]})
    with pytest.raises(ValueError, match=r"no attribute in_feature$"):
        op.Glance(**good | {"attributes": [(table, "in_feature")]})
    with pytest.raises(TypeError, match="incompatible"):
        op.Glance(**good | {"tables": [linear]})


def test_a_glance_is_collected(op):
    class Known:
        """Knows what knows it, by each of a glance's arguments."""

    for name in ("modules", "tables", "parents", "linears", "attributes"):
        known = Known()
        table = {"_modules": {}, "_parameters": {}, "known": known}
        arguments = {"modules": [], "tables": [], "parents": [], "linears": []}
        pairs = {"modules": [known], "tables": [table], "attributes": [(table, "known")]}
        arguments |= {"attributes": [], name: pairs.get(name, [table])}
        if name in ("modules", "tables"):
            arguments |= {"modules": [known], "tables": [table]}
        known.glance = op.Glance(**arguments)
        gone = weakref.ref(known)
        gc.collect()
        assert gone() is known
        del known, table, arguments, pairs
        gc.collect()
        assert gone() is None, name
    for _ in range(3):  # one that was not made, and is tracked
        with pytest.raises(ValueError, match="wanted 0"):
            op.Glance(modules=[], tables=[{}], parents=[], linears=[], attributes=[])
        gc.collect()


def test_a_tensor_without_memory_is_another(op):
    linear = torch.nn.Linear(2, 2)
    table = vars(linear)
    glance = op.Glance(modules=[linear], tables=[table], parents=[], linears=[table], attributes=[])
    assert glance.holds()
    torch.utils.swap_tensors(linear.weight, torch.nn.Parameter(torch.eye(2).to_sparse()))
    assert not glance.holds()


def test_a_heap_made_for_less_is_refused(op):
    with pytest.raises(CapacityError, match="has 3 experts, the heap was made for 2"):
        begin(op, make(op), local_experts=3)
    with pytest.raises(CapacityError, match="dispatch room of the heap: needed 6144 bytes"):
        begin(op, make(op, dispatch_bytes=64))
    with pytest.raises(CapacityError, match="receive room of the heap: needed 5120 bytes"):
        begin(op, make(op, recv_bytes=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": torch.zeros(64, dtype=torch.uint8)}, "region has 64 bytes, wanted"),
        ({"rank": 1}, "rank 1 is outside a world of 1"),
        ({"rank": -1}, "rank -1 is outside a world of 1"),
        ({"world": 0}, "rank 0 is outside a world of 0"),
        ({"world": -1}, "rank 0 is outside a world of -1"),
        ({"max_experts": 0}, "max_experts must be at least 1"),
        ({"dispatch_bytes": -64}, "dispatch_bytes and recv_bytes at least 0"),
        ({"recv_bytes": -64}, "dispatch_bytes and recv_bytes at least 0"),
        ({"pids": [0, 0]}, "got 2 pids, wanted none or one a rank, 1"),
        ({"world": 3, "pids": [0, 0]}, "got 2 pids, wanted none or one a rank, 3"),
    ],
)
def test_a_rank_of_wrong_numbers_is_refused(op, changes, message):
    with pytest.raises(ValueError, match=message):
        make(op, **changes)


def test_processes_need_not_be_watched(op):
    begin(op, make(op, pids=[]))
