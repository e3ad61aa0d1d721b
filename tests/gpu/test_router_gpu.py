"""The fused router's kernels on one GPU: against DeepSpeed's gate, the reference and a sort."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_router_rules import Case, difference, random_case, ulps

from ds_tilemoe.backends.cuda_router import FusedRouter
from ds_tilemoe.op_builder import CUDATileMoEBuilder
from ds_tilemoe.router_rules import Drop, Rule, find_ties, route_reference, rule_of
from ds_tilemoe.routing import Places, Routing, route

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# Tokens that end a CTA, a chunk and the way of one CTA; experts that fill lanes or do not.
SIZES = [
    (0, 8),
    (1, 128),
    (16, 1),
    (63, 33),
    (64, 256),
    (65, 256),
    (129, 100),
    (2048, 1024),
    (2049, 60),
    (4096, 256),
    (8192, 64),
    (8200, 8),
    (20000, 16),
    (65536, 160),
]


def make_router(*, bf16x3: bool = False) -> FusedRouter:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    library, device = CUDATileMoEBuilder().load(), torch.device("cuda", 0)
    return FusedRouter(library, device, sms, bf16x3=bf16x3)


def tokens_and_gate(tokens: int, hidden: int, experts: int, k: int) -> tuple[Tensor, Any]:
    """Random ones, bf16 and fp32, whose logits have the standard deviation 1."""
    gate = Case(tokens, experts, k, False).gate("cuda")
    gate.wg = torch.nn.Linear(hidden, experts, bias=False, device="cuda").requires_grad_(False)
    gate.wg.weight.normal_(0, hidden**-0.5)
    return torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16), gate


@pytest.fixture(scope="module")
def router() -> FusedRouter:
    return make_router()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 77, 1024])
def test_widened_numbers_are_those_of_torch(
    router: FusedRouter, dtype: torch.dtype, tokens: int
) -> None:
    every = torch.arange(1 << 16, device="cuda").to(torch.uint16).view(dtype)  # NaN among them
    x, weight = torch.randn(tokens, 4096, device="cuda").to(dtype), every.view(16, 4096)
    for wide, narrow in zip(router._widen(x, weight, None), (x, weight), strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(wide.view(torch.int32), narrow.float().view(torch.int32))


def sorted_places(ids: Tensor, experts: int) -> Places:
    """Places by a stable sort."""
    tokens, topk = ids.shape
    flat = torch.where(ids < 0, experts, ids).flatten()
    ordered, order = flat.sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=ids.device) - first[ordered.long()]
    return Places(positions.view(tokens, topk), order // topk, first.diff())


def places_difference(places: Places, ids: Tensor, experts: int) -> str:
    want, kept = sorted_places(ids, experts), ids >= 0
    if not torch.equal(places.counts.long(), want.counts.long()):
        return f"counts {places.counts.tolist()}, wanted {want.counts.tolist()}"
    if (wrong := (places.positions.long() != want.positions.long()) & kept).any():
        return f"{int(wrong.sum())} positions wrong, first at {wrong.nonzero()[0].tolist()}"
    rows = int(kept.sum())
    if (wrong := places.sources[:rows].long() != want.sources[:rows]).any():
        return f"{int(wrong.sum())} of {rows} sources wrong, first at row {int(wrong.nonzero()[0])}"
    return ""


def reference_difference(ours: Routing, want: Routing) -> str:
    """The kernel's choices and the reference's, ties included."""
    if (wrong := ours.expert_ids != want.expert_ids).any():
        t = int(wrong.any(dim=1).nonzero()[0])
        got, wanted = ours.expert_ids[t].tolist(), want.expert_ids[t].tolist()
        return f"{int(wrong.sum())} ids wrong; token {t} has {got}, wanted {wanted}"
    if ours.weights.numel() and (off := int(ulps(ours.weights, want.weights).max())) > 2:
        return f"weights off by {off} ulp"
    if not torch.equal(ours.exp_counts, want.exp_counts):
        return "exp_counts differ"
    if not torch.allclose(ours.l_aux, want.l_aux, rtol=1e-5):
        return f"l_aux {ours.l_aux.item()}, wanted {want.l_aux.item()}"
    return ""


@dataclass
class Tally:
    """Over all cases of a run, for its message."""

    failures: list[str] = field(default_factory=list)
    tied_routes: int = 0
    compared: int = 0
    experts: int = 0

    def check(self, router: FusedRouter, case: Case) -> None:
        logits, gate = case.logits("cuda"), case.gate("cuda")
        rule = rule_of(gate, case.tokens)
        ours = router.route(gate, logits)
        assert ours.places is not None
        ties = find_ties(logits, case.k, rule)
        differences = {
            "DeepSpeed": difference(route(gate, logits), ours, case.k, logits, ties),
            "reference": reference_difference(ours, route_reference(logits, case.k, rule)),
            "places": places_difference(ours.places, ours.expert_ids, case.experts),
        }
        self.failures += [f"{case}: {who}: {what}" for who, what in differences.items() if what]
        self.tied_routes += ties.routes
        self.compared += int((~ties.experts).sum())
        self.experts += case.experts

    def judge(self, share: float) -> None:
        print(
            f"{self.tied_routes} routes within 4 ulp of a cut,"
            f" {self.compared} of {self.experts} experts compared"
        )
        shown = "\n".join(self.failures[:8])
        assert not self.failures, f"{len(self.failures)} differences:\n{shown}"
        assert self.compared > self.experts * share


@pytest.mark.parametrize(("coarse", "cases"), [(False, 1000), (True, 100)])
def test_decides_as_deepspeeds_gate(router: FusedRouter, coarse: bool, cases: int) -> None:
    tally = Tally()
    for seed in range(cases):
        big = seed % 10 == 0
        tally.check(router, random_case(seed, coarse, 1500 if big else 130, 300 if big else 40))
    tally.judge(0.4 if coarse else 0.8)


@pytest.mark.parametrize(("tokens", "experts"), SIZES)
def test_sizes(router: FusedRouter, tokens: int, experts: int) -> None:
    """With and without dropping; the poison shows what a kernel reads before it is written."""
    tally = Tally()
    for k in (1, 2, 8, 16):
        for drop in (False, True):
            if k > experts:
                continue
            for scratch in router._scratch.values():
                scratch.fill_(0xEE)
            tally.check(router, Case(tokens, experts, k, drop, factor=0.7, seed=k))
    assert not tally.failures, "\n".join(tally.failures)


def test_gates_are_torch_softmax_to_the_last_bit(router: FusedRouter) -> None:
    """Choices are made by probability, so that these decide between logits that are close."""
    generator = torch.Generator().manual_seed(0)
    wrong = {}
    for experts in (2, 8, 17, 32, 60, 64, 128, 200, 256, 512, 1000, 1024):
        logits = (torch.randn(3000, experts, generator=generator) * 3).cuda()
        got = router.decide(logits, 1, Drop.NONE, 0)
        gates = torch.softmax(logits, dim=1)
        want = gates.gather(1, got.expert_ids.long())
        if not torch.equal(got.weights, want):
            off = ulps(got.weights, want)
            wrong[experts] = f"{int((off > 0).sum())} of 3000 off by up to {int(off.max())} ulp"
        assert torch.equal(got.expert_ids[:, 0].long(), gates.argmax(dim=1)), experts
    assert not wrong, wrong


def test_extreme_logits(router: FusedRouter) -> None:
    """NaN counts as the greatest, as in torch; ids stay ids, and no expert comes twice."""
    for tokens, experts in ((40, 8), (150, 40), (300, 300)):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, experts, generator=generator)
        x[0], x[1], x[2, 3], x[3, 2] = float("nan"), float("-inf"), float("nan"), float("inf")
        x[4], x[4, 5] = float("-inf"), 1.0
        x[5], x[5, ::2] = 0.0, -0.0
        x[6], x[6, 1], x[7], x[8] = -200.0, 0.0, 1e30, -1e38
        logits = x.cuda()
        for k in (1, 2, 3, 8):
            for rule in (Rule(Drop.NONE), Rule(Drop.POSITION if k <= 2 else Drop.PROBABILITY, 5)):
                ours = router.decide(logits, k, rule.drop, rule.capacity)
                want = route_reference(logits, k, rule)
                assert torch.equal(ours.expert_ids, want.expert_ids), (tokens, k, rule)
                assert torch.equal(ours.weights.isnan(), want.weights.isnan()), (tokens, k, rule)
                assert ours.places is not None
                assert places_difference(ours.places, ours.expert_ids, experts) == ""


def test_one_hot_expert(router: FusedRouter) -> None:
    """All tokens want the same experts: long lists of candidates, and equal probabilities."""
    for tokens, experts, k, capacity in ((30000, 64, 8, 4711), (5000, 16, 3, 256), (60, 8, 4, 7)):
        for spread in (0.0, 1.0):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(tokens, experts, generator=generator) * spread
            logits = (x - 20 * torch.arange(experts)).cuda()
            rule = Rule(Drop.PROBABILITY, capacity)
            ours = router.decide(logits, k, rule.drop, rule.capacity)
            want = route_reference(logits, k, rule)
            assert reference_difference(ours, want) == "", (tokens, spread)
            assert ours.places is not None
            assert places_difference(ours.places, ours.expert_ids, experts) == ""


@pytest.mark.parametrize(("tokens", "experts", "k"), [(20, 16, 2), (3000, 64, 2), (4096, 128, 8)])
def test_the_same_bits_on_every_run(router: FusedRouter, tokens: int, experts: int, k: int) -> None:
    logits = Case(tokens, experts, k, True, seed=1).logits("cuda")
    drop, capacity = (Drop.POSITION if k <= 2 else Drop.PROBABILITY), tokens * k // experts
    first: Routing | None = None
    for _ in range(30):
        again = router.decide(logits, k, drop, capacity)
        first = first or again
        assert torch.equal(again.expert_ids, first.expert_ids)
        for one, other in ((again.weights, first.weights), (again.l_aux, first.l_aux)):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
        assert again.places is not None and first.places is not None
        rows = int(first.places.counts.sum())
        assert torch.equal(again.places.sources[:rows], first.places.sources[:rows])


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (7, 2), (7, 8), (1000, 1), (1000, 8)])
@pytest.mark.parametrize("drop", [False, True])
def test_graph_replays_with_new_logits(
    router: FusedRouter, tokens: int, k: int, drop: bool
) -> None:
    """Captured under the mode that refuses to wait for the device."""
    case = Case(tokens, 32, k, drop, factor=0.8)
    gate = case.gate("cuda")
    x = torch.empty(tokens, 32, device="cuda")
    start = torch.zeros(1, dtype=torch.int64, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        router.route(gate, x.fill_(0), start.data_ptr())  # loads what torch loads lazily
    side.synchronize()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured = router.route(gate, x, start.data_ptr())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    router.route(gate, torch.zeros(5000, 32, device="cuda"))  # grows the scratch in between
    before = 0
    for seed in range(5):
        logits = Case(tokens, 32, k, drop, seed=seed).logits("cuda")
        x.copy_(logits)
        captured.expert_ids.fill_(-7)
        graph.replay()
        want = route_reference(logits, k, rule_of(gate, tokens))
        assert reference_difference(captured, want) == ""
        assert captured.places is not None
        assert places_difference(captured.places, captured.expert_ids, 32) == ""
        assert int(start) > before
        before = int(start)


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "k"),
    [
        (1, 64, 8, 2),
        (256, 8192, 64, 2),
        (300, 72, 33, 1),
        (2000, 8192, 64, 2),
        (3000, 1024, 64, 2),
        (4096, 7168, 256, 8),
        (700, 2056, 1000, 4),
    ],
)
def test_logits_on_tensor_cores(tokens: int, hidden: int, experts: int, k: int) -> None:
    """``bf16x3``: about as near to the exact product as fp32, which is printed beside it, and the
    routes of the exact one wherever its logits are not nearly equal."""
    router = make_router(bf16x3=True)
    torch.manual_seed(tokens)
    x, gate = tokens_and_gate(tokens, hidden, experts, k)
    weight = gate.wg.weight
    exact = x.double() @ weight.double().t()
    made = router._split_logits(x, weight, None)
    assert made.shape[1:] == (tokens, 3, experts)
    ours = made.sum(dim=0).flip(1).sum(dim=1).double() - exact
    theirs = torch.nn.functional.linear(x.float(), weight).double() - exact
    for name, errors in (("bf16x3", ours), ("fp32", theirs)):
        rms, most = errors.pow(2).mean().sqrt().item(), errors.abs().max().item()
        print(f"error of a {name} logit: {rms:.1e} root mean square, {most:.1e} at most")
    assert ours.pow(2).mean().sqrt() <= 2.5e-7
    error = ours.abs().max().item()
    assert error <= 3e-6
    top = exact.topk(min(k + 1, experts), dim=1)
    gaps = (top.values[:, :-1] - top.values[:, 1:]).min(dim=1).values
    clear = gaps > 4 * error
    assert clear.float().mean() > 0.95
    routes = router.decide(made, k, Drop.NONE, 0).expert_ids
    assert torch.equal(routes[clear].long(), top.indices[clear, :k])


@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [(0, 8, 2), (1, 8, 1), (64, 128, 8), (65, 7, 3), (5000, 60, 16), (40000, 1024, 4)],
)
def test_places_of_given_routes(router: FusedRouter, tokens: int, experts: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    for dropped in (0.0, 0.3, 1.0):
        ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :topk]
        ids[torch.rand(tokens, ids.shape[1], generator=generator) < dropped] = -1
        ids = ids.int().contiguous().cuda()
        for scratch in router._scratch.values():
            scratch.fill_(0xEE)
        assert places_difference(router.places(ids, experts), ids, experts) == "", dropped


def test_a_token_that_names_an_expert_twice_has_one_row(router: FusedRouter) -> None:
    for tokens in (10, 200):
        ids = torch.tensor([[1, 1], [0, 1]] * (tokens // 2), dtype=torch.int32, device="cuda")
        places = router.places(ids, 3)
        assert places.counts.tolist() == [tokens // 2, tokens, 0]
        position = torch.arange(tokens, device="cuda")
        assert torch.equal(places.positions[:, 1].long(), position)
        assert torch.equal(places.positions[::2, 0].long(), position[::2])
        assert torch.equal(places.sources[tokens // 2 : tokens // 2 + tokens].long(), position)
