"""``deepspeed.moe`` layers on our backends.

Shape letters: T tokens of this rank, H hidden.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.moe.sharded_moe import (
    FIRST_ALLTOALL_TIMER,
    MOE_TIMER,
    SECOND_ALLTOALL_TIMER,
    MOELayer,
)
from torch import Tensor

from ds_tilemoe.backends.base import Expert, LayerChange, LayerShape
from ds_tilemoe.errors import RankFailure, TileMoEError
from ds_tilemoe.layers.agreement import collective
from ds_tilemoe.layers.experts import AutocastExpert
from ds_tilemoe.layers.layer_state import LayerState, Situation
from ds_tilemoe.layers.meeting import decide, has_to_meet, refuse_capture
from ds_tilemoe.layers.recognise import DTYPES, dtype_name
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.router_rules import PLAIN
from ds_tilemoe.routing import Routing

# In the message of a RankFailure: not an end, but a call for another pre-flight.
CHANGED = "another pre-flight is wanted"
# Likewise (csrc/cpu/count_exchange.cpp): ranks that have gone back to different situations that
# they had agreed on before, or are in different layers. The pre-flight says which.
MISMATCH = "ranks run different layers in the same call: "
MEASURING = "sequential"  # the mover whose combine begins when the producer has ended


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable``, which imports dynamo (seconds), for those who have imported it.

    A traced layer would poll flags that the tracer takes for constants, and give wrong numbers.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return entry


class TileMOELayer(MOELayer):
    """DeepSpeed's MOELayer with the return all-to-all hidden behind the down projection.

    Made by ``ds_tilemoe.apply``, which changes the class of a layer in place; never constructed.
    Parameters, buffers, submodules and state-dict keys are those of MOELayer. So are the timers of
    ``wall_clock_breakdown``, but dispatch, GEMMs and combine are one call here: all of it is in
    ``2nd_a2a``, and ``1st_a2a`` is what precedes it.
    """

    _tile: LayerState | None

    @_never_compiled
    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:
        """As MOELayer.forward: ``input`` is (x [..., H], used_token or None); returns x's shape.

        With grad enabled, and where the group has so decided, this is DeepSpeed's own path. On CUDA
        it does not wait for the GPU: see ``ds_tilemoe.check``.

        Raises:
            RankFailure: the gate failed, or input and weights do not match, on any rank.
            CapacityError, DeadlineError: see ``backends.base.Backend.forward``; DeadlineError also
                where the ranks' meeting before a call, or a collective of DeepSpeed's own path, did
                not end.
            TileMoEError: the layer was unpickled or has no group; the ranks disagree.
        """
        state = self._tile
        if state is None:
            raise TileMoEError(
                "this MoE layer was loaded from a pickle, which holds no process groups; fix: set"
                " them (deepspeed.initialize, or set_deepspeed_parallelism of each MoE module),"
                " then call ds_tilemoe.apply again"
            )
        situation = state.situation(self)
        runtime = state.runtime(self)
        if runtime is None:
            raise TileMoEError(
                f"layer {state.name}: ep_size is {self.ep_size} and it has no expert-parallel"
                " group; fix: call deepspeed.initialize (or, before init_inference,"
                " set_deepspeed_parallelism of each MoE module)"
            )
        grad = torch.is_grad_enabled()
        # With grad enabled nothing is left to decide once the ranks have met.
        meet = not runtime.met if grad else has_to_meet(state, runtime, situation)
        while True:
            if meet:
                refuse_capture(state, runtime)
                situation, for_good = decide(self, state, runtime, situation, grad, input)
                if for_good:
                    release(self)  # as apply() would have done
            if grad or state.kept is not None:
                return _deepspeeds_path(self, state, runtime, input, kwargs)
            try:
                return self._overlapped(runtime, situation, input)
            except LayerChange:  # on every rank (CUDA)
                pass
            except RankFailure as failure:
                # On every rank of the group; on CUDA a failure may be that of an earlier call.
                # Ranks that have just met know all that a meeting could tell them.
                found = re.search(f"{CHANGED}|{MISMATCH}", str(failure))
                if runtime.device == "cuda" or meet or not found:
                    raise
            meet = True

    def _overlapped(self, runtime: Runtime, situation: Situation, input: tuple[Any, ...]) -> Tensor:
        state, backend = self._tile, runtime.backend
        assert state is not None and backend is not None
        start = time.perf_counter_ns()
        running: list[str] = []
        routing: Routing | Exception
        cause: Exception | None = None
        known = state.shapes.get(situation)
        # Any of the shapes carries the news that this rank's situation is a new one.
        shape = known or next(iter(state.shapes.values()))
        try:
            try:
                if known is None:
                    raise LayerChange(f"{CHANGED}: layer {state.name} is now {situation}")
                routing, rows, experts = self._inputs(runtime, situation, shape, input, running)
            except Exception as error:  # every rank has to hear of it, in the count exchange
                routing = cause = error
                weight = state.weight(self)
                device = "cpu" if weight is None else weight.device
                rows = torch.empty(0, shape.hidden, dtype=shape.dtype, device=device)
                experts = ()
            backend.mover = MEASURING if state.session.measuring else runtime.config.mover
            try:
                y = backend.forward(shape, experts, rows, routing)
            except RankFailure as failure:
                raise failure from cause
            assert isinstance(routing, Routing)
            # Past nn.Module.__setattr__, which looks for parameters of that name: 2 us each.
            self.__dict__.update(l_aux=routing.l_aux, exp_counts=routing.exp_counts)
            iteration = backend.last_stats  # None where the GPU would have to be waited for
            if iteration is not None and state.session.measuring:
                state.stats.add_alone(iteration)
            elif iteration is not None:
                state.stats.add(
                    iteration,
                    start,
                    time.perf_counter_ns(),
                    choice=backend.last_choice,
                    reason=backend.last_reason,
                )
            runtime.collect_sometimes(shape.name, state.stats)
            if self.wall_clock_breakdown:
                self._stop(SECOND_ALLTOALL_TIMER, "time_salltoall", running)
                self._stop(MOE_TIMER, "time_moe", running)
            x = input[0]
            return y if x.dim() == 2 else y.reshape(x.shape)
        finally:
            for name in running:
                self.timers(name).reset()  # left running, it would fail the next call

    def _inputs(
        self,
        runtime: Runtime,
        situation: Situation,
        shape: LayerShape,
        input: tuple[Any, ...],
        running: list[str],
    ) -> tuple[Routing, Tensor, Sequence[Expert]]:
        """What this rank brings to the call: where its rows go, the rows [T, H], its experts."""
        state, timed = self._tile, self.wall_clock_breakdown
        if timed:
            self._start(MOE_TIMER, running)
        x, used_token = input[0], input[1]
        _check_input(state.name, shape, situation, x, state.weight(self))
        autocast = torch.is_autocast_enabled(x.device.type)
        # Each operation of torch costs the host: none that would change nothing.
        tokens = x if x.dim() == 2 else x.reshape(-1, shape.hidden)
        routing = runtime.route(self._modules["gate"], tokens, used_token)
        if timed:
            self._start(FIRST_ALLTOALL_TIMER, running)
        rows = tokens if tokens.dtype == shape.dtype else tokens.to(shape.dtype)
        rows = rows.contiguous()
        experts: Sequence[Expert] = state.experts
        # Fused: weights have the dtype already, and the kernel's activations any.
        is_cast = shape.device == "cuda" and shape.dispatch == "fused"
        if autocast and not is_cast:
            experts = [AutocastExpert(cut, shape.dtype) for cut in experts]
        if timed:
            self._stop(FIRST_ALLTOALL_TIMER, "time_falltoall", running)
            self._start(SECOND_ALLTOALL_TIMER, running)
        return routing, rows, experts

    def _start(self, timer: str, running: list[str]) -> None:
        self.timers(timer).start()
        running.append(timer)

    def _stop(self, timer: str, attribute: str, running: list[str]) -> None:
        running.remove(timer)
        self.timers(timer).stop()
        setattr(self, attribute, self.timers(timer).elapsed(reset=False))

    def __copy__(self) -> TileMOELayer:
        twin = self.__class__.__new__(self.__class__)  # as of any module: all it has is shared
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TileMOELayer:
        for group in (self.ep_group, self.gate.ep_group):
            if group is not None:
                memo[id(group)] = group  # shared: a process group cannot be copied
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        for key, value in self.__dict__.items():
            twin.__dict__[key] = copy.deepcopy(value, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        gate = copy.copy(self.gate)
        gate.ep_group = None
        modules = {**self._modules, "gate": gate}
        return {**self.__dict__, "ep_group": None, "_tile": None, "_modules": modules}


def attach(layer: MOELayer, state: LayerState) -> None:
    """Swap in place: parameters, keys, engine lists and checkpoints keep pointing at ``layer``."""
    layer.__class__ = TileMOELayer
    layer._tile = state


def release(layer: MOELayer) -> None:
    """Undo :func:`attach`."""
    layer.__class__ = MOELayer
    layer.__dict__.pop("_tile", None)


def _deepspeeds_path(
    layer: MOELayer,
    state: LayerState,
    runtime: Runtime,
    input: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    grad = torch.is_grad_enabled()
    if grad:
        state.session.say_once(
            "grad is enabled: MoE layers take DeepSpeed's own path; wrap inference in"
            " torch.no_grad() on all ranks to overlap",
            runtime.group,
        )
    reason = "" if state.kept is None else f" (taken because of {state.kept[1]})"
    with collective(state.name, f"DeepSpeed's own path{reason}", grad):
        return MOELayer.forward(layer, *input, **kwargs)


def _check_input(
    name: str, shape: LayerShape, situation: Situation, x: Any, weight: Tensor | None
) -> None:
    """What DeepSpeed's own path finds out in its gate and GEMMs, also for a rank without tokens."""
    if type(x) not in PLAIN:
        raise TileMoEError(
            f"layer {name}: got a {type(x).__name__} as input; wanted a plain tensor"
            f" [..., {shape.hidden}]"
        )
    if x.dim() == 0 or x.layout != torch.strided:
        raise TileMoEError(
            f"layer {name}: got input {list(x.shape)} {x.layout}; wanted a dense tensor"
            f" [..., {shape.hidden}]"
        )
    if weight is not None and x.device != weight.device:
        raise TileMoEError(
            f"layer {name}: got input on {x.device}; wanted it on {weight.device}, as its experts"
        )
    if x.shape[-1] != shape.hidden:
        raise TileMoEError(
            f"layer {name}: got input of width {x.shape[-1]}; wanted its hidden size {shape.hidden}"
        )
    is_other = x.dtype != situation.dtype
    if x.dtype not in DTYPES or (is_other and not torch.is_autocast_enabled(x.device.type)):
        raise TileMoEError(
            f"layer {name}: got {dtype_name(x.dtype)} input, its experts have"
            f" {dtype_name(situation.weights)} weights; fix: cast one of them, or run under"
            " torch.autocast"
        )
