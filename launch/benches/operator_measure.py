"""One operator, checked and timed: all variants, its parts alone, the torch peers beside it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benches import peers
from benches.calls import Operator, Routed, Sample, Variant
from benches.clock import Timer
from benches.operator_check import (
    check_peer,
    check_result,
    check_variants,
    dense_rows,
)
from benches.ranks import World, shuffled
from benches.records import BenchError, median, microseconds, number, ratio
from ds_tilemoe.combine_plan import build_plan

COPY_SPLITS = (2, 4, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128)
COPY_ROUNDS = 12
PEER_ROUNDS = 30
FIELDS = Sample._fields
ORDER_SEED = 4242

Times = dict[str, np.ndarray]  # field of Sample -> [rounds], us, of the slowest rank


class Measured:
    """Times of one operator. Making it is the work: a collective.

    Attributes:
        timed: the variants that make records: mover sm at each split, none, copy_engine,
            sequential.
        gemm, copy: [rounds] us, GEMM 2 and the copy of its rows, each alone.

    Raises:
        BenchError: a result is wrong, and nothing has been timed then; or the copy has no time.
    """

    def __init__(
        self, args: argparse.Namespace, world: World, op: Operator, routings: Sequence[Routed]
    ) -> None:
        self._world, self._op, self._routings = world, op, routings
        movers = [Variant("sm", c) for c in args.split] if "sm" in args.mover else []
        movers += [Variant(name, 0) for name in ("none", "copy_engine") if name in args.mover]
        copies = COPY_SPLITS if world.on_gpu else args.split
        self._check([*movers, *(Variant("split", c) for c in copies)])

        alone = [Variant("split", c) for c in copies]
        parts = self._time(alone, COPY_ROUNDS)
        copy_us = {variant: median(parts[variant]["copy"]) for variant in alone}
        # Of equals the largest: the smallest that fills the link is at the edge.
        fastest = least(list(copy_us.values()))
        self.copy_ctas = max(v.ctas for v in alone if copy_us[v] <= 1.005 * fastest)
        self._sequential = Variant("sequential", self.copy_ctas)
        self._split = Variant("split", self.copy_ctas)
        self.timed = [*movers, self._sequential]
        self._times = self._time([*self.timed, self._split], args.rounds)
        split = self._times[self._split]
        self.gemm, self.copy = split["gemm"], split["copy"]
        self._scale, self._exchange = split["scale"], split["exchange"]
        self._time_peers()
        sm = [variant for variant in movers if variant.mover == "sm"]
        even = {v: np.nan_to_num(median(self._times[v]["total"][0::2]), nan=np.inf) for v in sm}
        self._chosen = min(sm, key=even.__getitem__) if sm else None

    def record(self, variant: Variant, gemm: np.ndarray, copy: np.ndarray) -> dict[str, Any]:
        """The fields of one variant.

        Args:
            gemm, copy: as the attributes, of the fastest operator that does this work.
        """
        times, sequential = self._times[variant], self._times[self._sequential]["total"]
        total, scale_us = median(times["total"]), median(self._scale)
        gemm_us, copy_us = median(gemm), median(copy)
        # From the last rank's producer end to the last rank's last arrival.
        exposed = np.maximum(0.0, times["arrival"] - times["end"])
        bound = max(gemm_us, copy_us) + scale_us
        hidden = gemm_us + copy_us - (total - scale_us)
        plan = build_plan(self._op.plan_params, self._routings[0].counts)
        chosen = variant == self._chosen
        odd = times["total"][1::2] if chosen else []
        return {
            "mover": variant.mover,
            "num_consumer_ctas": variant.ctas,
            "rounds": times["total"].size,
            "rows": plan.sizes.rows,
            "padding_rows": plan.sizes.padding_rows,
            "local_tail_bands": self._op.plan_params.local_tail_bands,
            **microseconds("exchange", self._exchange),
            **microseconds("gemm_alone", gemm),
            **microseconds("gemm_here", self.gemm),
            **microseconds("copy_alone", copy),
            "copy_alone_ctas": self.copy_ctas,
            **microseconds("scale", self._scale),
            **microseconds("sequential", sequential),
            **microseconds("overlapped", times["total"]),
            # The best split is chosen on the even rounds and timed on the odd ones.
            "chosen": chosen,
            **microseconds("chosen", odd),
            "bound_us": number(bound),
            "of_bound": number(total / bound, 4),
            **ratio("of_sequential", times["total"], sequential),
            **microseconds("exposed", exposed),
            "overlap_ratio": _share(copy_us - median(exposed), copy_us),
            "hidden_share": _share(hidden, min(gemm_us, copy_us)),
            "backlog": number(median(times["backlog"])),
            "chunks_drained": number(median(times["drained"])),
            "max_rel_err": self.max_rel_err,
            "bit_equal": True,  # or nothing would have been timed
            **microseconds("torch_gemm", self._torch_gemm),
            **microseconds("torch_sequential", self._torch_sequential),
        }

    def _check(self, variants: Sequence[Variant]) -> None:
        op, routed = self._op, self._routings[0]
        op.enqueue(Variant("sequential", 1), 0)
        op.finish()
        self.max_rel_err = check_result(self._world, op, routed, op.weights.dtype)
        wanted = op.y.clone()
        # A's rows are not the next call's: the peers read them as they were.
        rows = dense_rows(self._world, op, routed)
        group, rank = self._world.group, self._world.rank
        self._peer = peers.TorchReturn(group, rank, routed, rows, op.weights)
        check_peer(self._world, "torch", self._peer(), wanted)
        check_variants(self._world, op, variants, wanted)

    def _time(self, variants: Sequence[Variant], rounds: int) -> dict[Variant, Times]:
        """All variants once a round."""
        samples = np.full((rounds, len(variants), len(FIELDS)), np.nan)
        for index, order in shuffled(len(variants), rounds, ORDER_SEED):
            routing = index % len(self._routings)
            reads = {i: self._op.enqueue(variants[i], routing) for i in order}
            self._op.finish()
            if index >= 0:
                for i, read in reads.items():
                    samples[index, i] = read()
        slowest = self._world.reduce(samples)
        # The others' scale waits for the slowest rank's rows: the smallest is the sum alone.
        scale = FIELDS.index("scale")
        slowest[..., scale] = self._world.reduce(samples[..., scale], "min")
        return {
            variant: {name: slowest[:, i, j] for j, name in enumerate(FIELDS)}
            for i, variant in enumerate(variants)
        }

    def _time_peers(self) -> None:
        timers = [Timer(self._world, call) for call in (self._peer.gemm, self._peer)]
        samples = np.full((2, PEER_ROUNDS), np.nan)
        for index, order in shuffled(2, PEER_ROUNDS, ORDER_SEED):
            for i in order:
                elapsed = timers[i].alone()
                if index >= 0:
                    samples[i, index] = elapsed
        self._torch_gemm, self._torch_sequential = self._world.reduce(samples)
        del self._peer


def least(us: ArrayLike) -> np.ndarray:
    """The smallest along the first axis, of times that all ranks share; NaN = not measured.

    Raises:
        BenchError: one has nothing but NaN.
    """
    found = np.where(np.isnan(us), np.inf, us).min(axis=0)
    if np.isinf(found).any():
        raise BenchError(
            "in all rounds of a part a host had not launched a call before its GPU came to it;"
            " wanted a host that nobody else keeps busy"
        )
    return found


def _share(part: float, whole: float) -> float | None:
    """None where there is nothing to share, as on one rank."""
    return number(part / whole, 4) if whole > 0 else None
