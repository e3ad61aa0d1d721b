"""``deepspeed.moe`` layers on our backends.

Shape letters: T tokens of this rank, H hidden.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from deepspeed.moe.sharded_moe import (
    FIRST_ALLTOALL_TIMER,
    MOE_TIMER,
    SECOND_ALLTOALL_TIMER,
    MOELayer,
)
from torch import Tensor

from ds_tilemoe.backends.base import Expert, LayerShape
from ds_tilemoe.errors import RankFailure, TileMoEError
from ds_tilemoe.layers.agreement import Offer
from ds_tilemoe.layers.experts import AutocastExpert
from ds_tilemoe.layers.layer_state import LayerState, Situation, weights_dtype
from ds_tilemoe.layers.recognise import DTYPES
from ds_tilemoe.layers.runtime import Runtime
from ds_tilemoe.routing import Routing, route

# In the message of a RankFailure: not an end, but a call for another pre-flight.
CHANGED = "another pre-flight is wanted"
RANDOM = "dropout is active: training mode with p > 0"
MEASURING = "sequential"  # the mover whose combine begins when the producer has ended


class TileMOELayer(MOELayer):
    """DeepSpeed's MOELayer with the return all-to-all hidden behind the down projection.

    Made by ``ds_tilemoe.apply``, which changes the class of a layer in place; never constructed.
    Parameters, buffers, submodules and state-dict keys are those of MOELayer. So are the timers of
    ``wall_clock_breakdown``, but dispatch, GEMMs and combine are one call here: all of it is in
    ``2nd_a2a``, and ``1st_a2a`` is what precedes it.
    """

    _tile: LayerState | None

    def forward(self, *input: Tensor, **kwargs: Any) -> Tensor:
        """As MOELayer.forward: ``input`` is (x [..., H], used_token or None); returns x's shape.

        With grad enabled, and where the pre-flight said so, this is DeepSpeed's own path.

        Raises:
            RankFailure: the gate failed, or input and weights do not match, on any rank.
            CapacityError, DeadlineError: see ``backends.base.Backend.forward``.
            TileMoEError: the layer was unpickled or has no group; the ranks disagree.
        """
        state = self._tile
        if state is None:
            raise TileMoEError(
                "this MoE layer was loaded from a pickle, which holds no process groups; fix: set"
                " them (deepspeed.initialize, or set_deepspeed_parallelism of each MoE module),"
                " then call ds_tilemoe.apply again"
            )
        runtime = state.runtime(self)
        if runtime is None:
            raise TileMoEError(
                f"layer {state.name}: ep_size is {self.ep_size} and it has no expert-parallel"
                " group; fix: call deepspeed.initialize (or, before init_inference,"
                " set_deepspeed_parallelism of each MoE module)"
            )
        x = input[0]
        situation = state.situation(self, x.device)
        grad = torch.is_grad_enabled()
        # With grad enabled nothing is left to decide once the ranks have met.
        if self._is_undecided(runtime, situation) if not grad else not runtime.met:
            situation = self._preflight(runtime, situation, grad, x)
        while True:
            decision = state.decisions.get(situation)
            if grad or isinstance(decision, str):
                if grad:
                    state.session.say_once(
                        "grad is enabled: MoE layers take DeepSpeed's own path; wrap inference in"
                        " torch.no_grad() on all ranks to overlap"
                    )
                elif not situation.is_random:
                    release(self)
                return MOELayer.forward(self, *input, **kwargs)
            try:
                return self._overlapped(runtime, decision, situation, x, input[1])
            except RankFailure as failure:
                if CHANGED not in str(failure):
                    raise
            situation = self._preflight(runtime, situation, grad, x)

    def _is_undecided(self, runtime: Runtime, situation: Situation) -> bool:
        """Whether the group has to meet before this call; equal on all ranks in step."""
        assert self._tile is not None
        decisions = self._tile.decisions
        if situation in decisions:
            return isinstance(decisions[situation], LayerShape) and not runtime.is_open
        # Another dtype or mode than before on this rank. If peers may be on the backend, the news
        # goes through it (_overlapped), as it may be this rank alone that has changed.
        return not (runtime.is_open and any(isinstance(d, LayerShape) for d in decisions.values()))

    def _preflight(
        self, runtime: Runtime, situation: Situation, grad: bool, x: Tensor
    ) -> Situation:
        """Decide about this call with the group; the situation that was decided."""
        state = self._tile
        assert state is not None
        offer = state.offer(self, situation.dtype)
        situation = state.situation(self, x.device)  # the offer has looked at the experts anew
        if situation.is_random and not isinstance(offer.outcome, str):
            offer = Offer(state.name, RANDOM)
        tokens = x.numel() // x.shape[-1] if x.shape[-1] else 0
        (decision,) = runtime.preflight([offer], grad, tokens, str(situation))
        state.decisions[situation] = decision
        state.stats.settings = runtime.settings()
        if isinstance(decision, str):
            state.session.say_once(f"layer {state.name} keeps DeepSpeed's path: {decision}")
        return situation

    def _overlapped(
        self,
        runtime: Runtime,
        shape: LayerShape | None,
        situation: Situation,
        x: Tensor,
        used_token: Tensor | None,
    ) -> Tensor:
        state, backend = self._tile, runtime.backend
        assert state is not None and backend is not None
        start = time.perf_counter_ns()
        running: list[str] = []
        cause: Exception | None = None
        rows: Tensor = x.new_zeros(0, self.gate.wg.in_features)
        experts: list[Expert] = []
        routing: Routing | Exception
        try:
            self._start(MOE_TIMER, running)
            try:
                if shape is None:
                    raise TileMoEError(f"{CHANGED}: layer {state.name} is now {situation}")
                _check_input(state.name, shape, situation, x, weights_dtype(self))
                tokens = x.reshape(-1, x.shape[-1])
                routing = route(self.gate, tokens, used_token)
                self._start(FIRST_ALLTOALL_TIMER, running)
                rows = tokens.to(shape.dtype).contiguous()
                experts = list(state.experts)
                if torch.is_autocast_enabled(x.device.type):
                    experts = [AutocastExpert(cut, shape.dtype) for cut in state.experts]
            except Exception as error:  # every rank has to hear of it, in the count exchange
                routing = cause = error
            if shape is None:
                shape = next(d for d in state.decisions.values() if isinstance(d, LayerShape))
            self.time_falltoall = self._stop(FIRST_ALLTOALL_TIMER, running, self.time_falltoall)
            self._start(SECOND_ALLTOALL_TIMER, running)
            try:
                y = backend.forward(shape, experts, rows.to(shape.dtype), routing)
            except RankFailure as failure:
                raise failure from cause
            self.time_salltoall = self._stop(SECOND_ALLTOALL_TIMER, running, self.time_salltoall)
            assert isinstance(routing, Routing)
            self.l_aux, self.exp_counts = routing.l_aux, routing.exp_counts
            if backend.mover == MEASURING:
                state.stats.add_alone(backend.last_stats)
            else:
                state.stats.add(backend.last_stats, start, time.perf_counter_ns())
            self.time_moe = self._stop(MOE_TIMER, running, self.time_moe)
            return y.reshape(x.shape)
        finally:
            for name in running:
                self.timers(name).reset()  # left running, it would fail the next call

    def _start(self, timer: str, running: list[str]) -> None:
        if self.wall_clock_breakdown:
            self.timers(timer).start()
            running.append(timer)

    def _stop(self, timer: str, running: list[str], before: float) -> float:
        if timer not in running:
            return before
        running.remove(timer)
        self.timers(timer).stop()
        return self.timers(timer).elapsed(reset=False)

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


def _check_input(
    name: str, shape: LayerShape, situation: Situation, x: Tensor, weights: torch.dtype
) -> None:
    """What DeepSpeed's own path finds out in its gate and GEMMs, also for a rank without tokens."""
    if x.shape[-1] != shape.hidden:
        raise TileMoEError(
            f"layer {name}: got input of width {x.shape[-1]}; wanted its hidden size {shape.hidden}"
        )
    under_autocast = torch.is_autocast_enabled(x.device.type)
    if x.dtype not in DTYPES or (x.dtype != situation.dtype and not under_autocast):
        raise TileMoEError(
            f"layer {name}: got {str(x.dtype).removeprefix('torch.')} input, its experts have"
            f" {str(weights).removeprefix('torch.')} weights; fix: cast one of them, or run under"
            " torch.autocast"
        )
