"""The fused router's Python side on the CPU: the ABI's bytes, what kernels are told, refusals."""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_fake_router import play_logits
from deepspeed.moe.sharded_moe import TopKGate
from moe_models import fill
from torch import Tensor

from ds_tilemoe import reference
from ds_tilemoe.backends import cuda_router
from ds_tilemoe.backends.cuda_router import (
    PROTOTYPES,
    FusedRouter,
    LogitsParams,
    PlacesParams,
    RouterParams,
    Widening,
)
from ds_tilemoe.backends.cuda_routes import FusedRouting
from ds_tilemoe.errors import BuildError, TileMoEError
from ds_tilemoe.op_builder import base, toolkit
from ds_tilemoe.op_builder.jit import find_compiler
from ds_tilemoe.router_rules import MAX_EXPERTS, MAX_TOPK, Drop, Rule, route_reference
from ds_tilemoe.routing import GATE_TIMER, Places, Routing, route

HEADERS = ("router/router.h", "router/split.h", "router/logits.h", "router/widen.h")
CPU = torch.device("cpu")
SMS = 132


def test_structs_enums_and_limits_are_those_of_the_header(
    tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    compiler = find_compiler()
    try:
        if compiler is None:
            raise BuildError("there is no C++ compiler")
        include = toolkit.find_toolkit(compiler).libraries.parent / "include"
    except BuildError as error:
        if request.config.getoption("--require-cuda-build"):
            pytest.fail(str(error))
        pytest.skip(f"needs the headers of a CUDA toolkit: {error}")
    wanted = {"kMaxTopk": MAX_TOPK, "kMaxRouterExperts": MAX_EXPERTS}
    for drop in Drop:
        wanted[f"static_cast<int>(Drop::{drop.name.lower()})"] = drop
    for kind in (PlacesParams, RouterParams, LogitsParams, Widening):
        wanted[f"sizeof({kind.__name__})"] = ctypes.sizeof(kind)
        for name, _ in kind._fields_:
            field = getattr(kind, name)
            wanted[f"offsetof({kind.__name__}, {name})"] = field.offset
            wanted[f"sizeof({kind.__name__}::{name})"] = field.size
    source = tmp_path / "check.cpp"
    checks = "\n".join(f"static_assert({what} == {value});" for what, value in wanted.items())
    included = "\n".join(f'#include "{header}"' for header in HEADERS)
    source.write_text(f"#include <cstddef>\n{included}\nusing namespace tilemoe;\n{checks}\n")
    command = [*compiler, "-std=c++17", "-fsyntax-only", f"-I{base.csrc_root()}", f"-I{include}"]
    built = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stderr


def test_every_field_and_function_of_the_header_is_mirrored() -> None:
    text = "".join((base.csrc_root() / header).read_text() for header in HEADERS)
    text = re.sub(r"//[^\n]*", "", text)
    assert f"kLogitParts = {cuda_router._LOGIT_PARTS};" in text
    for kind in (PlacesParams, RouterParams, LogitsParams, Widening):
        body = re.search(rf"\bstruct {kind.__name__} {{(.*?)\n}};", text, re.DOTALL)
        assert body is not None
        assert re.findall(r"\b(\w+);", body[1]) == [name for name, _ in kind._fields_]
    declared = dict(re.findall(r"\b(tilemoe_\w+)\(([^)]*)\);", text))
    assert set(declared) == set(PROTOTYPES)
    for name, (_, arguments) in PROTOTYPES.items():
        assert len([part for part in declared[name].split(",") if part.strip()]) == len(arguments)


def memory(address: int | None, dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address or 0)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


class PlayedLibrary:
    """The router's C ABI played by the reference; it reads all it knows from the params."""

    def __init__(self) -> None:
        self.status = 0
        self.seen: list[RouterParams] = []
        self.widened = 0
        self.tilemoe_router_load = lambda: self.status
        self.tilemoe_logits_launch = lambda params, stream: self._make_logits(params)
        self.tilemoe_widen_launch = lambda *arguments: self._widen(*arguments)
        self.tilemoe_places_scratch_bytes = lambda tokens, experts: 4 * experts
        self.tilemoe_router_scratch_bytes = lambda tokens, topk, experts: 8 * tokens * topk + 4
        self.tilemoe_places_launch = lambda params, stream: self._places(params)
        self.tilemoe_router_launch = lambda params, stream: self._route(params)
        for name in PROTOTYPES:
            setattr(self, name, PlayedFunction(getattr(self, name)))

    def _widen(self, *halves: Any) -> int:
        *matrices, _ = halves
        for m in matrices:
            dtype = torch.float16 if m.is_half else torch.bfloat16
            memory(m.wide, torch.float32, m.count).copy_(memory(m.source, dtype, m.count))
        self.widened += 1
        return self.status

    def _places(self, p: PlacesParams) -> int:
        assert p.scratch % 16 == 0
        memory(p.scratch, torch.uint8, 4 * p.experts).fill_(0xEE)
        ids = memory(p.expert_ids, torch.int32, p.tokens, p.topk)
        positions = reference.places_in_runs(ids)
        memory(p.positions, torch.int32, p.tokens, p.topk).copy_(positions)
        order = torch.where(ids < 0, p.experts, ids).flatten().sort(stable=True).indices
        memory(p.sources, torch.int32, p.tokens * p.topk).copy_(order // p.topk)
        counts = reference.counts(ids, p.experts)
        memory(p.counts, torch.int32, p.experts).copy_(counts)
        return self.status

    def _make_logits(self, p: LogitsParams) -> int:
        play_logits(p)
        return self.status

    def _route(self, p: RouterParams) -> int:
        self.seen.append(p)
        places = p.places
        tokens, topk, experts = places.tokens, places.topk, places.experts
        assert places.expert_ids == p.expert_ids
        assert p.scratch % 16 == 0
        own = memory(p.scratch, torch.uint8, 8 * tokens * topk + 4).fill_(0xAA)
        shape = (p.logit_slices, tokens, p.logit_parts, experts)
        parts = memory(p.logits, torch.float32, *shape).sum(dim=0)
        logits = parts.flip(1).sum(dim=1)  # the smallest first
        routing = route_reference(logits, topk, Rule(Drop(p.drop), p.capacity))
        memory(p.expert_ids, torch.int32, tokens, topk).copy_(routing.expert_ids)
        memory(p.weights, torch.float32, tokens, topk).copy_(routing.weights)
        memory(p.l_aux, torch.float32, 1).copy_(routing.l_aux)
        memory(p.exp_counts, torch.int64, experts).copy_(routing.exp_counts)
        status = self._places(places)
        assert (own == 0xAA).all(), "the scratch of the places lies in the router's"
        return status


class PlayedFunction:
    def __init__(self, call: Any) -> None:
        self.call = call
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        return self.call(*arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(cuda_router.torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cuda_router.torch.cuda, "device", lambda d: contextlib.nullcontext())
    return PlayedLibrary()


def gate_of(k: int, **options: Any) -> Any:
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, **options}
    gate = TopKGate(16, 8, k=k, **options).eval()
    fill(gate, 0)
    return gate.requires_grad_(False)


def tokens(count: int) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(count))


def assert_same(ours: Routing, theirs: Routing) -> None:
    assert torch.equal(ours.expert_ids, theirs.expert_ids)
    assert torch.allclose(ours.weights, theirs.weights, rtol=1e-6)
    assert torch.allclose(ours.l_aux, theirs.l_aux, rtol=1e-5)
    assert torch.equal(ours.exp_counts, theirs.exp_counts)
    for ours_one, theirs_one in ((ours.l_aux, theirs.l_aux), (ours.exp_counts, theirs.exp_counts)):
        assert (ours_one.shape, ours_one.dtype) == (theirs_one.shape, theirs_one.dtype)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [21, 0])
def test_route_is_the_gates(library: PlayedLibrary, k: int, training: bool, count: int) -> None:
    gate = gate_of(k, capacity_factor=0.3, eval_capacity_factor=0.6, min_capacity=1).train(training)
    router = FusedRouter(library, CPU, SMS)
    x = tokens(count).to(torch.bfloat16)
    routing = router.route(gate, x, start_ns=4096)
    assert_same(routing, route(gate, x))
    (params,) = library.seen
    assert params.drop == (Drop.POSITION if k == 2 else Drop.PROBABILITY)
    assert params.start_ns == 4096
    assert isinstance(routing.places, Places)
    kept = routing.expert_ids >= 0
    assert bool((~kept).any()) == (count > 0)
    found = router.places(routing.expert_ids, 8)
    for places in (routing.places, found):
        assert torch.equal(places.counts.long(), reference.counts(routing.expert_ids, 8))
        want = reference.places_in_runs(routing.expert_ids)
        assert torch.equal(places.positions[kept].long(), want[kept])
        assert places.sources.shape == (count * k,)
        for tensor in (places.positions, places.sources, places.counts):
            assert tensor.dtype == torch.int32


@pytest.mark.parametrize("count", [21, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_and_weights_of_16_bits_are_widened_in_one_launch(
    library: PlayedLibrary, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    gate = gate_of(2).to(dtype)
    router, x = FusedRouter(library, CPU, SMS), tokens(count).to(dtype)
    assert_same(router.route(gate, x), route(gate, x))
    assert library.widened == 1
    apart = torch.empty(21 * 16 + 1, dtype=dtype)[1:].view(21, 16)
    apart.copy_(tokens(21))
    assert_same(router.route(gate, apart), route(gate, apart))  # not at a multiple of 16 bytes
    assert library.widened == 1
    monkeypatch.setattr(cuda_router, "_MOST_WIDE", 16 * (5 + 8))
    for few, launches in ((5, 2), (6, 2)):
        assert_same(router.route(gate, tokens(few).to(dtype)), route(gate, tokens(few).to(dtype)))
        assert library.widened == launches
    library.status = 1
    with pytest.raises(TileMoEError, match="widens tokens"):
        router.route(gate, tokens(4).to(dtype))


@pytest.mark.parametrize("bf16x3", [False, True])
@pytest.mark.parametrize("what", ["device", "width"])
def test_no_kernel_reads_tokens_and_weights_that_do_not_fit(
    library: PlayedLibrary, what: str, bf16x3: bool
) -> None:
    """torch's own product refuses them; a kernel would read what is not there."""
    gate, x = gate_of(2).to(torch.bfloat16), tokens(300).to(torch.bfloat16)
    if what == "device":
        x = x.to("meta")
    else:
        gate.wg.weight = torch.nn.Parameter(gate.wg.weight[:, :8].contiguous())
    library.tilemoe_logits_launch.call = lambda *_: pytest.fail("a kernel has read them")
    with pytest.raises((RuntimeError, ValueError)):
        FusedRouter(library, CPU, SMS, bf16x3=bf16x3).route(gate, x)
    assert library.widened == 0
    assert not library.seen


@pytest.mark.parametrize(("count", "k"), [(0, 2), (1, 3), (21, 2), (64, 8)])
def test_parts_of_a_block_are_apart(library: PlayedLibrary, count: int, k: int) -> None:
    """Kernels are told the addresses of what the tensors show, and no call those of another."""
    router, gate = FusedRouter(library, CPU, SMS), gate_of(k, drop_tokens=False)
    routings = [router.route(gate, tokens(count)) for _ in range(2)]
    spans = []
    for routing in routings:
        assert isinstance(routing, FusedRouting)
        for name, address in routing.at._asdict().items():
            tensor = getattr(routing, name)
            assert tensor.is_contiguous()
            assert address % 16 == 0
            if tensor.numel():
                assert tensor.data_ptr() == address
            spans.append((address, address + 4 * tensor.numel()))
        assert routing.places is routing
        assert routing.weights.dtype == torch.float32
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("slices", [1, 2])
def test_weights_in_three_parts_give_the_same_routes(
    library: PlayedLibrary, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    """Two parts or one would give others: 16 bits of a weight are too few for fp32's logits."""
    monkeypatch.setattr(cuda_router, "_slices_of", lambda *sizes: slices)
    gate, x = gate_of(2, drop_tokens=False), tokens(500).bfloat16()
    routing = FusedRouter(library, CPU, SMS, bf16x3=True).route(gate, x)
    seen = library.seen[-1]
    assert (seen.logit_parts, seen.logit_slices) == (3, slices)
    assert_same(routing, FusedRouter(library, CPU, SMS).route(gate, x))
    seen = library.seen[-1]
    assert (seen.logit_parts, seen.logit_slices) == (1, 1)
    odd = x.flatten()[1:-127].view(-1, x.shape[1])  # at no multiple of 16 bytes
    assert odd.data_ptr() % 16
    ours = FusedRouter(library, CPU, SMS, bf16x3=True).route(gate, odd)
    assert_same(ours, FusedRouter(library, CPU, SMS).route(gate, odd))
    for few in (0, 255):
        ours = FusedRouter(library, CPU, SMS, bf16x3=True).route(gate, x[:few])
        assert ours.expert_ids.shape == (few, 2)
        assert library.seen[-1].logit_parts == 1, "fp32 is faster"


def test_logits_are_sliced_where_tiles_are_few() -> None:
    assert cuda_router._slices_of(8192, 8192, 64, SMS) == 1, "128 tiles for 132 SMs"
    assert cuda_router._slices_of(4096, 4096, 64, SMS) == 2
    assert cuda_router._slices_of(4096, 1024, 64, SMS) == 1, "too short for two"
    assert cuda_router._slices_of(256, 8192, 64, SMS) == 8
    for hidden in range(8, 20000, 8):
        slices = cuda_router._slices_of(300, hidden, 8, SMS)
        assert 1 <= slices <= 8
        assert slices == 1 or hidden % (64 * slices) == 0
    text = (base.csrc_root() / "router/logits.cu").read_text()
    sizes = (*cuda_router._LOGIT_TILE, cuda_router._LOGIT_DEPTH)
    assert f"Shape<{', '.join(f'Int<{size}>' for size in sizes)}>" in text


def test_scratch_is_made_once_a_size(library: PlayedLibrary) -> None:
    router = FusedRouter(library, CPU, SMS)
    seen = []
    for count in (5, 2000, 6, 2040, 5, 5000):
        router.route(gate_of(2, drop_tokens=False), tokens(count))
        seen.append(library.seen[-1].scratch)
        assert library.seen[-1].start_ns is None
    small, middle, _, _, _, large = seen
    assert seen == [small, middle, small, middle, small, large]
    assert len({small, middle, large}) == 3


def test_the_gates_timer_runs_if_it_is_wanted(library: PlayedLibrary) -> None:
    gate = gate_of(2)
    router = FusedRouter(library, CPU, SMS)
    router.route(gate, tokens(3))
    assert gate.gate_time == 0
    gate.wall_clock_breakdown = True
    router.route(gate, tokens(3))
    assert gate.gate_time > 0
    library.status = 1
    with pytest.raises(TileMoEError, match="the launch of the router gave cudaError 1"):
        router.route(gate, tokens(3))
    assert not gate.timers(GATE_TIMER).started_


def test_too_few_tokens_are_said_before_a_launch(library: PlayedLibrary) -> None:
    gate = gate_of(1, min_capacity=4)
    gate.wall_clock_breakdown = True
    with pytest.raises(AssertionError, match="min_capacity"):
        FusedRouter(library, CPU, SMS).route(gate, tokens(3))
    assert library.seen == []
    assert not gate.timers(GATE_TIMER).started_


def test_a_router_that_cannot_be_loaded_says_so(library: PlayedLibrary) -> None:
    library.status = 209
    with pytest.raises(TileMoEError, match="loading the router gave cudaError 209"):
        FusedRouter(library, CPU, SMS)


@pytest.mark.parametrize(
    ("logits", "topk", "said"),
    [
        (torch.zeros(3, 4, dtype=torch.bfloat16), 2, "bfloat16"),
        (torch.zeros(4, 3).t(), 2, "contiguous"),
        (torch.zeros(3), 2, r"\[3\]"),
        (torch.zeros(3, 4), 5, "topk is 5, wanted at most the 4 experts"),
        (torch.zeros(3, 40), 17, "top-17 of 40 experts"),
        (torch.zeros(1, 1025), 2, "top-2 of 1025 experts"),
        (torch.zeros(1, 4), 0, "top-0"),
        (torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16), 2, "bfloat16"),
        (torch.zeros(2, 5, 3, 8)[..., :4], 2, "contiguous"),
        (torch.zeros(2, 5, 2, 4), 2, "in 2 parts, wanted 3"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(
    library: PlayedLibrary, logits: Tensor, topk: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        FusedRouter(library, CPU, SMS).decide(logits, topk, Drop.NONE, 0)
    assert library.seen == []


def test_ids_that_are_no_matrix_of_int32_are_refused(library: PlayedLibrary) -> None:
    router = FusedRouter(library, CPU, SMS)
    for ids in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)):
        with pytest.raises(ValueError, match="expert_ids is"):
            router.places(ids, 4)
    with pytest.raises(ValueError, match="of 1025"):
        router.places(torch.zeros(3, 2, dtype=torch.int32), 1025)
