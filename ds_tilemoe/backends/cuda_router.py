"""The fused router on a GPU: DeepSpeed's logits, or the same product on tensor cores
(``router_logits``), and everything after them in our own kernels.

No call waits for the device, and all may be captured in a CUDA graph.

Shape letters: T tokens of this rank, K top-k, E experts of the group, H hidden.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_heap import lasting
from ds_tilemoe.backends.cuda_routes import FusedRouting, part_words
from ds_tilemoe.router_rules import MAX_EXPERTS, MAX_TOPK, rule_of
from ds_tilemoe.routing import GATE_TIMER, Places, Routing

_LEAST_SCRATCH = 1 << 14  # bytes
BF16X3_TOKENS = 256  # where fp32 takes as long; for fewer, less
_LOGIT_PARTS = 3  # as in csrc/router/split.h
_LOGIT_TILE = (128, 96)  # tokens and columns of one CTA: csrc/router/logits.cu
_LOGIT_DEPTH = 64  # of H that a CTA loads at a time
_LEAST_SLICE, _MOST_SLICES = 1024, 8  # of H, where there are fewer tiles than SMs
_NARROW = (torch.bfloat16, torch.float16)
_MOST_WIDE = 1 << 23  # numbers: 32 MiB


class PlacesParams(Structure):
    _fields_ = [
        ("expert_ids", c_void_p),
        ("positions", c_void_p),
        ("sources", c_void_p),
        ("counts", c_void_p),
        ("scratch", c_void_p),
        ("tokens", c_int32),
        ("topk", c_int32),
        ("experts", c_int32),
    ]


class RouterParams(Structure):
    _fields_ = [
        ("logits", c_void_p),
        ("expert_ids", c_void_p),
        ("weights", c_void_p),
        ("l_aux", c_void_p),
        ("exp_counts", c_void_p),
        ("places", PlacesParams),
        ("scratch", c_void_p),
        ("start_ns", c_void_p),
        ("drop", c_int32),
        ("capacity", c_int32),
        ("logit_parts", c_int32),
        ("logit_slices", c_int32),
    ]


class LogitsParams(Structure):
    _fields_ = [
        ("tokens", c_void_p),
        ("weights", c_void_p),
        ("parts", c_void_p),
        ("logits", c_void_p),
        ("num_tokens", c_int32),
        ("hidden", c_int32),
        ("experts", c_int32),
        ("slices", c_int32),
        ("sms", c_int32),
    ]


class Widening(Structure):
    _fields_ = [
        ("source", c_void_p),
        ("wide", c_void_p),
        ("count", c_int64),
        ("is_half", c_int32),
    ]


# Name -> (result, arguments), as in cuda_abi.py.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tilemoe_places_scratch_bytes": (c_int64, (c_int32, c_int32)),
    "tilemoe_router_scratch_bytes": (c_int64, (c_int32, c_int32, c_int32)),
    "tilemoe_router_load": (c_int32, ()),
    "tilemoe_places_launch": (c_int32, (POINTER(PlacesParams), c_void_p)),
    "tilemoe_router_launch": (c_int32, (POINTER(RouterParams), c_void_p)),
    "tilemoe_logits_launch": (c_int32, (POINTER(LogitsParams), c_void_p)),
    "tilemoe_widen_launch": (c_int32, (POINTER(Widening), POINTER(Widening), c_void_p)),
}


class FusedRouter:
    """The router of one device, which is the current one in each call. Calls share scratch and
    params, so that they run one after another.

    Scratch grows by powers of two and is never given back: captured graphs hold its addresses.

    Args:
        library: the loaded CUDA library; gets its prototypes here.
        device: the current device's kernels are loaded.
        sms: of the device.
        bf16x3: logits of 256 and more bfloat16 tokens are made on tensor cores, with the gate's
            weights as the sum of three bfloat16 matrices; else by DeepSpeed's own fp32 call.

    Raises:
        TileMoEError: the kernels cannot be loaded.
    """

    def __init__(
        self, library: ctypes.CDLL, device: torch.device, sms: int, *, bf16x3: bool = False
    ) -> None:
        self.device = device
        self._library, self._bf16x3 = library, bf16x3
        self._scratch: dict[int, Tensor] = {}
        self._params = RouterParams()  # of the last call: a launch takes a copy
        self._places = self._params.places  # a view of it
        self._logits = LogitsParams(sms=sms)
        self._widenings = (Widening(), Widening())  # of tokens and of the gate
        self._rooms: dict[int, Tensor] = {}  # fp32, by numbers
        self._wide: tuple[Tensor, Tensor] | None = None
        self._wide_sizes = (0, 0, 0)  # tokens, hidden and experts of it
        self._sizes = (0, 0, 0, False)  # tokens, topk and experts of it; whether all of the router
        self._part = 0  # words of a block's part, at these sizes
        for name, (result, arguments) in PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        with torch.cuda.device(device):
            check(library.tilemoe_router_load(), "loading the router")

    def route(
        self, gate: Any, x: Tensor, start_ns: int | None = None, stream: int | None = None
    ) -> Routing:
        """Routes and places of this rank's tokens; ``router_rules.uncovered(gate)`` must be "".

        Without bf16x3 the logits are those of ``TopKGate.forward``, by the same call. Its timer
        runs if the gate's ``wall_clock_breakdown`` is on (which waits for the device, as in
        DeepSpeed).

        Args:
            gate: a ``TopKGate``.
            x: [T, H] tokens on this device, any float dtype, with bf16x3 bfloat16; T may be 0, and
                then counts and l_aux are 0.
            start_ns: device address of a uint64 for the time when the router began, or None.
            stream: the current cudaStream_t, if it is at hand.

        Raises:
            AssertionError: too few tokens, as ``router_rules.rule_of`` says.
        """
        rule = rule_of(gate, x.shape[0])
        try:
            if gate.wall_clock_breakdown:
                gate.timers(GATE_TIMER).start()
            weight = gate.wg.weight
            if (
                self._bf16x3
                and x.shape[0] >= BF16X3_TOKENS
                and x.shape[1] == weight.shape[1]
                and x.device == weight.device == self.device
            ):
                logits = self._split_logits(x, weight.float(), stream)
            else:  # says what is wrong, too
                logits = F.linear(*self._widen(x, weight, stream), bias=None)
            routing = self.decide(logits, gate.k, rule.drop, rule.capacity, start_ns, stream)
            if gate.wall_clock_breakdown:
                gate.timers(GATE_TIMER).stop()
                gate.gate_time = gate.timers(GATE_TIMER).elapsed(reset=False)
        except BaseException:
            if gate.wall_clock_breakdown:
                gate.timers(GATE_TIMER).reset()  # left running, it would fail the next call
            raise
        return routing

    def decide(
        self,
        logits: Tensor,
        topk: int,
        drop: int,
        capacity: int,
        start_ns: int | None = None,
        stream: int | None = None,
    ) -> Routing:
        """What follows the logits.

        Args:
            logits: [T, E] float32, contiguous, on this device; or [slices, T, 3, E], to be added.
            topk: K, at most 16 and at most E; E is at most 1024.
            drop, capacity: of a ``router_rules.Rule``.
            start_ns, stream: as of :meth:`route`.

        Raises:
            ValueError: the logits are not like that.
        """
        self._check_tensor("logits", logits, torch.float32, (2, 4))
        slices, parts = 1, 1
        tokens, experts = logits.shape[0], logits.shape[-1]
        if logits.dim() == 4:
            slices, tokens, parts, _ = logits.shape
            if parts != _LOGIT_PARTS:
                raise ValueError(f"logits are in {parts} parts, wanted {_LOGIT_PARTS}")
        _check_sizes(topk, experts)
        if topk > experts:
            raise ValueError(f"topk is {topk}, wanted at most the {experts} experts")
        device = self.device
        self._resize(tokens, topk, experts, True)
        block = torch.empty(4 * self._part + experts, dtype=torch.int32, device=device)
        l_aux = torch.empty((), dtype=torch.float32, device=device)
        exp_counts = torch.empty(experts, dtype=torch.int64, device=device)
        routing = FusedRouting(block, self._part, tokens, topk, l_aux, exp_counts)
        at, params, places = routing.at, self._params, self._places
        params.logits, params.expert_ids = logits.data_ptr(), at.expert_ids
        params.weights, params.l_aux = at.weights, l_aux.data_ptr()
        params.exp_counts = exp_counts.data_ptr()
        params.start_ns, params.drop, params.capacity = start_ns, drop, capacity
        params.logit_parts, params.logit_slices = parts, slices
        places.expert_ids, places.positions = at.expert_ids, at.positions
        places.sources, places.counts = at.sources, at.counts
        if stream is None:
            stream = torch.cuda.current_stream(device).cuda_stream
        check(self._library.tilemoe_router_launch(params, stream), "the launch of the router")
        return routing

    def _widen(self, x: Tensor, weight: Tensor, stream: int | None) -> tuple[Tensor, Tensor]:
        """``x.float(), weight.float()``, by one kernel where both are of 16 bits and not large:
        there a launch costs more than the numbers. Of use until the next call.

        Args:
            x: [T, H]. weight: [E, H].
        """
        sizes = (x.shape[0], x.shape[1], weight.shape[0])
        if sizes != self._wide_sizes:
            self._place_wide(*sizes)
        source, gate_source = x.data_ptr(), weight.data_ptr()
        if (
            self._wide is None
            or x.device != self.device
            or weight.device != self.device
            or weight.shape[1] != x.shape[1]
            or x.dtype not in _NARROW
            or weight.dtype not in _NARROW
            or (source | gate_source) % 16 != 0
            or not (x.is_contiguous() and weight.is_contiguous())
        ):
            return x.float(), weight.float()
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        tokens, gate = self._widenings
        tokens.source, tokens.is_half = source, x.dtype is torch.float16
        gate.source, gate.is_half = gate_source, weight.dtype is torch.float16
        status = self._library.tilemoe_widen_launch(tokens, gate, stream)
        check(status, "the launch that widens tokens and the gate's weights")
        return self._wide

    @lasting
    def _place_wide(self, tokens: int, hidden: int, experts: int) -> None:
        """Room for a call's tokens and its gate in fp32, kept as scratch is."""
        self._wide_sizes, self._wide = (tokens, hidden, experts), None
        numbers = (tokens + experts) * hidden
        if hidden % 8 != 0 or numbers > _MOST_WIDE:
            return
        size = 1 << (numbers - 1).bit_length()
        if size not in self._rooms:
            self._rooms[size] = torch.empty(size, dtype=torch.float32, device=self.device)
        x, weight = self._rooms[size][:numbers].view(-1, hidden).split([tokens, experts])
        self._wide = (x, weight)
        for params, matrix in zip(self._widenings, self._wide, strict=True):
            params.wide, params.count = matrix.data_ptr(), matrix.numel()

    def _split_logits(self, x: Tensor, weight: Tensor, stream: int | None) -> Tensor:
        """Logits on tensor cores: each of the three parts of a weight by a token is exact in fp32.

        Args:
            x: [T, H] bfloat16, T at least 1. weight: [E, H] float32.

        Returns:
            [slices, T, 3, E] float32, to be added.
        """
        x, weight = _aligned(x), _aligned(weight)
        (experts, hidden), tokens = weight.shape, x.shape[0]
        slices = _slices_of(tokens, hidden, experts, self._logits.sms)
        parts = torch.empty(_LOGIT_PARTS, experts, hidden, dtype=x.dtype, device=self.device)
        shape = (slices, tokens, _LOGIT_PARTS, experts)
        logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        params = self._logits
        params.tokens, params.weights = x.data_ptr(), weight.data_ptr()
        params.parts, params.logits = parts.data_ptr(), logits.data_ptr()
        params.num_tokens, params.hidden = tokens, hidden
        params.experts, params.slices = experts, slices
        if stream is None:
            stream = torch.cuda.current_stream(self.device).cuda_stream
        check(self._library.tilemoe_logits_launch(params, stream), "the launch of the logits")
        return logits

    def places(self, expert_ids: Tensor, num_experts: int) -> Places:
        """Places of routes that DeepSpeed's gate has decided.

        Args:
            expert_ids: [T, K] int32, contiguous, on this device; -1 = dropped. K is at most 16.
            num_experts: E, at most 1024.

        Raises:
            ValueError: the ids are not like that.
        """
        self._check_tensor("expert_ids", expert_ids, torch.int32)
        _check_sizes(expert_ids.shape[1], num_experts)
        tokens, topk = expert_ids.shape
        self._resize(tokens, topk, num_experts, False)
        places = Places(
            positions=torch.empty_like(expert_ids),
            sources=torch.empty(tokens * topk, dtype=torch.int32, device=self.device),
            counts=torch.empty(num_experts, dtype=torch.int32, device=self.device),
        )
        params = self._places
        params.expert_ids, params.positions = expert_ids.data_ptr(), places.positions.data_ptr()
        params.sources, params.counts = places.sources.data_ptr(), places.counts.data_ptr()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        check(self._library.tilemoe_places_launch(params, stream), "the launch of the places")
        return places

    def _resize(self, tokens: int, topk: int, experts: int, for_router: bool) -> None:
        """Sizes and scratch of the params, where they differ from those of the call before."""
        if (tokens, topk, experts, for_router) == self._sizes:
            return
        params, sizes = self._places, (tokens, topk, experts)
        own_bytes = self._library.tilemoe_router_scratch_bytes(*sizes) if for_router else 0
        in_front = -(-own_bytes // 16) * 16
        needed = in_front + self._library.tilemoe_places_scratch_bytes(tokens, experts)
        scratch = self._scratch_of(needed).data_ptr()
        params.tokens, params.topk, params.experts = sizes
        self._params.scratch, params.scratch = scratch, scratch + in_front
        self._part = part_words(tokens * topk)
        self._sizes = (*sizes, for_router)

    @lasting
    def _scratch_of(self, needed: int) -> Tensor:
        size = max(_LEAST_SCRATCH, 1 << (needed - 1).bit_length())
        if size not in self._scratch:
            self._scratch[size] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._scratch[size]

    def _check_tensor(
        self, name: str, tensor: Tensor, dtype: torch.dtype, dims: tuple[int, ...] = (2,)
    ) -> None:
        if (
            tensor.dim() not in dims
            or tensor.dtype != dtype
            or tensor.device != self.device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides"
                f" {tensor.stride()}, wanted a contiguous matrix of {dtype} on {self.device}"
            )


def _check_sizes(topk: int, experts: int) -> None:
    if not (1 <= topk <= MAX_TOPK and 1 <= experts <= MAX_EXPERTS):
        raise ValueError(
            f"got top-{topk} of {experts} experts, wanted at most top-{MAX_TOPK} of {MAX_EXPERTS}"
        )


def _aligned(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous and at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _slices_of(tokens: int, hidden: int, experts: int, sms: int) -> int:
    """Into how many equal sums a logit is parted, each in a CTA of its own, so that few tokens do
    not leave SMs idle."""
    rows, columns = _LOGIT_TILE
    tiles = -(-tokens // rows) * -(-_LOGIT_PARTS * experts // columns)
    slices = max(1, min(_MOST_SLICES, hidden // _LEAST_SLICE, sms // tiles))
    while slices > 1 and hidden % (_LOGIT_DEPTH * slices):
        slices -= 1
    return slices
