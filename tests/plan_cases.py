"""Inputs of the planner tests: hand-made counts, the hypothesis strategy, mutants of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import strategies as st

from ds_tilemoe.combine_plan import CombinePlan, Layout, PlanParams, build_plan


def params_of(
    world: int,
    local_experts: int,
    *,
    rank: int = 0,
    tile_m: int = 4,
    layout: Layout = Layout.COMPACT,
    bands_per_segment: int = 1,
    local_tail_bands: int = -1,
    chunk_rows: int = 3,
) -> PlanParams:
    return PlanParams(
        world,
        rank,
        local_experts,
        tile_m,
        layout,
        bands_per_segment,
        local_tail_bands,
        chunk_rows,
    )


def plans_of(params: PlanParams, counts: np.ndarray) -> list[CombinePlan]:
    """The plans of all ranks."""
    ranks = range(params.world)
    return [build_plan(dataclasses.replace(params, rank=rank), counts) for rank in ranks]


def figure_counts() -> np.ndarray:
    """Four ranks, two experts each, like the paper's Figure 2b: rank 1 has experts 2 and 3.

    Expert 2 gets 4, 8, 4, 2 rows from ranks 0 to 3 and expert 3 gets 8, 3, 5, 4; every rank also
    sends 1 row to expert 0, 2 rows to expert 1 and nothing further.
    """
    counts = np.zeros((4, 8), np.int32)
    counts[:, 0], counts[:, 1] = 1, 2
    counts[:, 2], counts[:, 3] = (4, 8, 4, 2), (8, 3, 5, 4)
    return counts


@st.composite
def plan_inputs(draw: st.DrawFn) -> tuple[PlanParams, np.ndarray]:
    """Any group and options; counts from empty over a few hot runs to dense."""
    world, local_experts = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    params = params_of(
        world,
        local_experts,
        rank=draw(st.integers(0, world - 1)),
        tile_m=draw(st.integers(1, 33)),
        layout=draw(st.sampled_from(Layout)),
        bands_per_segment=draw(st.integers(1, 4)),
        local_tail_bands=draw(st.integers(-1, 5)),
        chunk_rows=draw(st.integers(1, 40)),
    )
    shape = (world, world * local_experts)
    cells = hnp.arrays(np.int32, shape, elements=st.integers(0, 200), fill=st.just(0))
    counts = draw(cells)
    most = draw(st.sampled_from([0, 1, 4, 60]))
    if most:
        counts = counts + np.random.default_rng(draw(st.integers(0, 999))).integers(
            0, most + 1, shape, dtype=np.int32
        )
    return params, counts


def mutants(plan: CombinePlan) -> Iterator[tuple[str, CombinePlan]]:
    """The plan with one thing altered, for every array, field and size, at both ends and inside."""
    for field in dataclasses.fields(plan.sizes):
        for by in (-1, 1):
            value = getattr(plan.sizes, field.name) + by
            sizes = dataclasses.replace(plan.sizes, **{field.name: value})
            yield f"sizes.{field.name} {by:+}", dataclasses.replace(plan, sizes=sizes)
    for field in dataclasses.fields(plan):
        name, array = field.name, getattr(plan, field.name)
        if not isinstance(array, np.ndarray) or array.size == 0:
            continue
        for label, altered in _altered(array):
            yield f"{name}{label}", dataclasses.replace(plan, **{name: altered})


def _altered(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for at in sorted({0, array.size // 2, array.size - 1}):
        for part in array.dtype.names or [None]:
            old = int((array.reshape(-1) if part is None else array[part])[at])
            for new in (old - 1, old + 1, 2**31 - 2):
                altered = array.copy()
                (altered.reshape(-1) if part is None else altered[part])[at] = new
                yield f".{part}[{at}] {old} -> {new}", altered
    for at in range(len(array) - 1):
        altered = array.copy()
        altered[[at, at + 1]] = altered[[at + 1, at]]
        if not np.array_equal(altered, array):
            yield f" swapped at {at}", altered
    yield " cut", array[:-1]
    if array.dtype == np.int64:
        yield " of 32 bits", array.astype(np.int32)
