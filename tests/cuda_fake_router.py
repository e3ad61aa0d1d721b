"""The router of the fake CUDA library: see cuda_library_fake.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cuda_fake_memory import memory

from ds_tilemoe import reference, router_rules


def play_logits(p: Any) -> None:
    """What ``tilemoe_logits_launch`` does, from a LogitsParams."""
    rest = memory(p.weights, torch.float32, p.experts, p.hidden).clone()
    parts = memory(p.parts, torch.bfloat16, 3, p.experts, p.hidden)
    for part in parts:
        part.copy_(rest)
        rest -= part.float()
    x = memory(p.tokens, torch.bfloat16, p.num_tokens, p.hidden).float()
    depth, left = divmod(p.hidden, p.slices)
    assert left == 0 and depth % 8 == 0
    for number, logits in enumerate(
        memory(p.logits, torch.float32, p.slices, p.num_tokens, 3, p.experts)
    ):
        span = slice(number * depth, (number + 1) * depth)
        logits.copy_(torch.einsum("th,peh->tpe", x[:, span], parts[:, :, span].float()))


class FakeRouter:
    """Its part of FakeLibrary: logits to experts, weights and places."""

    def tilemoe_router_load(self) -> int:
        return 0

    def tilemoe_logits_launch(self, p: Any, stream: int) -> int:
        self.log.append("logits")
        play_logits(p)
        return 0

    def tilemoe_widen_launch(self, first: Any, second: Any, stream: int) -> int:
        for w in (first, second):
            narrow = memory(w.source, torch.float16 if w.is_half else torch.bfloat16, w.count)
            memory(w.wide, torch.float32, w.count)[:] = narrow.float()
        return 0

    def tilemoe_places_scratch_bytes(self, tokens: int, experts: int) -> int:
        return 64

    def tilemoe_router_scratch_bytes(self, tokens: int, topk: int, experts: int) -> int:
        return 64

    def tilemoe_places_launch(self, p: Any, stream: int) -> int:
        self.log.append("places")
        self._places(p)
        return 0

    def _places(self, p: Any) -> None:
        ids = torch.from_numpy(memory(p.expert_ids, np.int32, p.tokens, p.topk))
        kept = (ids >= 0).numpy()
        memory(p.positions, np.int32, p.tokens, p.topk)[kept] = reference.places_in_runs(
            ids
        ).numpy()[kept]
        memory(p.counts, np.int32, p.experts)[:] = reference.counts(ids, p.experts).numpy()
        order = torch.where(ids < 0, p.experts, ids).flatten().sort(stable=True).indices
        memory(p.sources, np.int32, p.tokens * p.topk)[:] = (order // p.topk).numpy()

    def tilemoe_router_launch(self, p: Any, stream: int) -> int:
        self.log.append("router")
        places = p.places
        shape = (p.logit_slices, places.tokens, p.logit_parts, places.experts)
        logits = memory(p.logits, torch.float32, *shape).sum(dim=0).flip(1).sum(dim=1)
        rule = router_rules.Rule(router_rules.Drop(p.drop), p.capacity)
        routing = router_rules.route_reference(logits, places.topk, rule)
        shape = (places.tokens, places.topk)
        memory(p.expert_ids, np.int32, *shape)[:] = routing.expert_ids.numpy()
        memory(p.weights, np.float32, *shape)[:] = routing.weights.numpy()
        memory(p.l_aux, np.float32, 1)[:] = float(routing.l_aux)
        memory(p.exp_counts, np.int64, places.experts)[:] = routing.exp_counts.numpy()
        if p.start_ns:
            memory(p.start_ns, np.uint64, 1)[:] = 7
        self._places(places)
        return 0
