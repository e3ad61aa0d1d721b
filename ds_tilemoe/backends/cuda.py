"""The kernels of csrc as a backend: dispatch beside GEMM 1, the return of rows beside GEMM 2.

Where dispatch is fused, a forward only launches: counts, plan, rows and sums stay on the device,
and nothing waits for it. Where it goes by the process group's all_to_all (nccl_dispatch.py), which
wants the counts on the host, each forward waits once, behind the count exchange. With the mover
copy_engine it waits once as well, while GEMM 1 runs (cuda_copy.py).

A rank that fails says so in its count exchange and raises. Its peers hear of it in page-locked
memory, their result is NaN, and the next forward or ``check()`` raises. The heap stays usable only
where all ranks are sure to be in step: see ``Caller.raise_before`` and ``Caller.settle``.

Shape letters: T tokens of this rank, K top-k, E experts of the group, W ranks, N output width.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_tilemoe.backends import cuda_abi as abi
from ds_tilemoe.backends import cuda_functions
from ds_tilemoe.backends.base import Expert, LayerShape, local_problem
from ds_tilemoe.backends.cuda_blocks import keep_for_graphs, open_heap, world_of
from ds_tilemoe.backends.cuda_call import NO_CONTEXT, Caller
from ds_tilemoe.backends.cuda_errors import too_many_tokens
from ds_tilemoe.backends.cuda_growth import NOTHING, Held, find_growth
from ds_tilemoe.backends.cuda_heap import CudaHeap
from ds_tilemoe.backends.cuda_layer import Call, CudaLayer
from ds_tilemoe.backends.cuda_limits import layer_obstacle, router_fault
from ds_tilemoe.backends.cuda_plan import (
    LAYOUTS,
    HeapNeeds,
    bounds_of,
    dispatch_ctas,
    needs_of,
    plan_params,
)
from ds_tilemoe.backends.cuda_records import Record
from ds_tilemoe.backends.cuda_router import FusedRouter
from ds_tilemoe.backends.cuda_routes import FusedRouting
from ds_tilemoe.backends.cuda_split import Splits
from ds_tilemoe.config import TileOverlapConfig
from ds_tilemoe.config_block import without_unused
from ds_tilemoe.cost_model import Choice
from ds_tilemoe.errors import ConfigError, TileMoEError
from ds_tilemoe.op_builder import CUDATileMoEBuilder
from ds_tilemoe.plan_abi import PlanParams
from ds_tilemoe.router_rules import uncovered
from ds_tilemoe.routing import Routing, route
from ds_tilemoe.stats import IterationStats
from ds_tilemoe.symmetric_heap import gather, in_step


class CudaBackend:
    """``Backend`` of one expert-parallel group on the current CUDA device.

    Args:
        group: the group; None for a group of one.
        config: the ``tile_overlap`` block.

    Attributes:
        mover: see ``Backend``. May be set between calls, on each rank alone.
    """

    name = "cuda"

    def __init__(self, group: dist.ProcessGroup | None, config: TileOverlapConfig) -> None:
        self.group = group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.config = config
        self.tile_m = abi.TILE_M
        self.mover: str = config.mover
        self.device = current_device()
        self._device_name, self._index = str(self.device), self.device.index
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._library = cuda_functions.bind(CUDATileMoEBuilder().load())
        cuda_functions.check(self._library.tilemoe_load(), "loading the kernels")
        self._router = FusedRouter(
            self._library, self.device, self.sms, bf16x3=config.router_logits == "bf16x3"
        )
        self._splits = Splits(config, self.sms, self.world)
        self._caller = Caller(group, self.rank, config, self._library, self.device, self._splits)
        self._heap: CudaHeap | None = None
        self._layers: dict[LayerShape, CudaLayer] = {}
        self._unread: list[Record] = []
        self._in_call = threading.Lock()

    def __del__(self) -> None:
        # Calls in flight still write into page-locked memory, which torch would give to others.
        with contextlib.suppress(Exception):
            if self._heap is not None and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(self.device)

    # -- heap -------------------------------------------------------------------------------

    @property
    def has_heap(self) -> bool:
        """See ``Backend.has_heap``."""
        return self._heap is not None

    def ensure(self, shapes: Sequence[LayerShape], max_tokens: int, together: bool = True) -> None:
        """See ``Backend.ensure``.

        Raises:
            ValueError: a layer that the kernels cannot run, before any rank waits for another.
        """
        for shape in shapes:
            if reason := layer_obstacle(shape, self.world):
                raise ValueError(f"layer {shape.name}: {reason}")
        meeting = world_of(self.group) if together else self.group
        held = in_step(self._held, meeting, "new buffers")
        wanted = find_growth(held, shapes, self._needs_at, max_tokens, meeting, together)
        if wanted is None:
            return
        self._layers.clear()
        self._heap = None  # the old memory, which nobody is at, goes before the new comes
        self._heap = open_heap(
            wanted, self._library, self.device, self.group, self.config.wait_timeout_s
        )
        self._splits.calibrate(self._heap)
        gather(None, self.group)  # it writes into the peers' memory

    def _held(self) -> Held:
        """What this rank has. Waits for the device."""
        usable, heap = not self.failure(), self._heap
        if heap is None:
            return NOTHING
        if heap.failures.unread is not None:
            usable = False  # the next forward would end its use
        return Held(heap.needs, usable, heap.is_captured)

    def _needs_at(self, shape: LayerShape, max_tokens: int) -> HeapNeeds:
        return needs_of(shape, bounds_of(shape, self._params(shape), max_tokens), max_tokens)

    @property
    def chosen(self) -> dict[str, object]:
        """The settings, with what "auto" stands for in every layer; tile_n depends on the layer's
        width, dispatch on its experts."""
        settled = {
            **self.config.model_dump(),
            "backend": self.name,
            "layout": LAYOUTS[self.config.layout].name.lower(),
            "tile_m": self.tile_m,
            "num_dispatch_ctas": dispatch_ctas(self.config, self.sms),
            **self._splits.chosen,
        }
        return without_unused(settled)

    # -- router -----------------------------------------------------------------------------

    def route(self, gate: Any, x: Tensor, used_token: Tensor | None = None) -> Routing:
        """By the fused router where the settings and the gate allow it, else by DeepSpeed's gate.

        Args:
            gate: a ``TopKGate``.
            x: [T, H] tokens on this device.
            used_token: as of ``routing.route``.

        Raises:
            ConfigError: ``router`` is "fused" or ``router_logits`` is "bf16x3", and it does not
                cover this call.
            TileMoEError: another thread is inside a layer of the group.
            Whatever the gate raises.
        """
        wanted = self.config.router
        why_not = "it is not wanted" if wanted == "deepspeed" else uncovered(gate, used_token)
        if fault := router_fault(self.config, why_not, x.dtype):
            raise ConfigError(fault)
        # Its params are one for all layers, as are those of the places.
        if not self._in_call.acquire(blocking=False):
            raise _two_threads("the router")
        try:
            with self._caller.range("router"), self._on_device():
                if why_not:
                    return route(gate, x, used_token)
                # Its scratch is that of the call before, which may have been on another stream.
                stream = self._caller.enter_stream()
                start = None if self._heap is None else self._heap.router_start_address
                return self._router.route(gate, x, start, stream)
        finally:
            self._in_call.release()

    # -- failures ---------------------------------------------------------------------------

    def failure(self) -> str:
        """See ``Backend.failure``. Waits for the device."""
        if self._heap is None:
            return ""
        with self._on_device():
            self._caller.settle(self._heap)
        return self._heap.failures.cause

    def check(self) -> None:
        """Raise what no forward has raised yet. Waits for the device.

        Raises:
            RankFailure, CapacityError: of a call on another rank; once. The heap stays usable where
                no call was launched behind it.
            DeadlineError: the heap has failed.
        """
        if self._heap is None:
            return
        with self._on_device():
            self._caller.settle(self._heap)
            self._heap.failures.raise_heard("ds_tilemoe.check")

    # -- records ----------------------------------------------------------------------------

    def poll_records(self, quickly: bool = False) -> list[Record]:
        """Calls that have ended since the last poll, oldest first. Does not wait.

        They are those of all layers of the group: ``layer_name`` says whose.

        Args:
            quickly: see ``RecordRing.poll_quickly``.
        """
        if self._heap is None:
            return []
        ring = self._heap.ring
        records = [*self._unread, *(ring.poll_quickly() if quickly else ring.poll())]
        self._unread = []
        self._splits.observe(records)
        return records

    def explain(self, record: Record) -> tuple[Choice | None, str]:
        """The split of a call, and why it was that."""
        return self._splits.explain(record)

    def layer_name(self, record: Record) -> str:
        """Name of the layer whose call it was; "" if it is not known."""
        return "" if self._heap is None else self._heap.names.get(record.layer, "")

    @property
    def last_stats(self) -> IterationStats | None:
        """See ``Backend.last_stats``."""
        if self.mover != "sequential" or self._heap is None or self._caller.stream is None:
            return None
        if torch.cuda.is_current_stream_capturing():  # nothing has run
            return None
        self._caller.stream.synchronize()
        self._heap.bring_record()
        records = self._heap.ring.poll()
        self._unread += records[:-1]
        return records[-1].iteration if records else None

    # -- one layer --------------------------------------------------------------------------

    def forward(
        self,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: Tensor,
        routing: Routing | Exception,
    ) -> Tensor:
        """See ``Backend.forward``. In order of the current stream."""
        if self._heap is None:
            raise TileMoEError(f"layer {shape.name}: the backend has no heap; call ensure() first")
        if not self._in_call.acquire(blocking=False):
            raise _two_threads(f"layer {shape.name}")
        try:
            with self._on_device():
                return self._forward(self._heap, shape, experts, x, routing)
        finally:
            self._in_call.release()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """The backend's device as the current one, which it mostly is."""
        if torch.cuda.current_device() == self._index:
            return NO_CONTEXT
        return torch.cuda.device(self.device)

    def _forward(
        self,
        heap: CudaHeap,
        shape: LayerShape,
        experts: Sequence[Expert],
        x: Tensor,
        routing: Routing | Exception,
    ) -> Tensor:
        caller = self._caller
        if not heap.failures.is_silent:
            caller.raise_before(heap, f"layer {shape.name}")
        capturing = torch.cuda.is_current_stream_capturing()
        stream = caller.enter_stream()
        layer = self._layers.get(shape)
        if layer is None or capturing:
            with caller.peers_hear(heap, shape.name, capturing):
                layer = self._layer(heap, shape, capturing)
        problem: BaseException | None = self._problem(heap, shape, x, routing)
        if problem is None:
            assert isinstance(routing, Routing)
            try:
                call = self._prepare(layer, x, experts, routing)
            except BaseException as error:
                problem = error
        if problem is not None:
            caller.withdraw(heap, layer, x.shape[0], problem, self.mover, stream, capturing)
        if capturing:
            layer.keep_operands()
            keep_for_graphs(heap, layer, self._router, self._splits)
        return caller.run(heap, layer, call, experts, self.mover, stream, capturing)

    def _problem(
        self, heap: CudaHeap, shape: LayerShape, x: Tensor, routing: Routing | Exception
    ) -> Exception | None:
        """Why this rank cannot take part."""
        is_sound = (
            isinstance(routing, FusedRouting)  # whose tensors nobody needs to ask for
            and x.shape == (routing.tokens, shape.hidden)
            and x.dtype == shape.dtype
            and x.device == self.device
            and routing.topk == shape.topk
        )
        problem = None if is_sound else local_problem(shape, x, routing, self._device_name)
        if problem is None and x.shape[0] > heap.needs.max_tokens:
            where = f"layer {shape.name}"
            problem = too_many_tokens(where, self.rank, x.shape[0], heap.needs.max_tokens)
        return problem

    def _prepare(
        self, layer: CudaLayer, x: Tensor, experts: Sequence[Expert], routing: Routing
    ) -> Call:
        if isinstance(routing, FusedRouting):
            return layer.prepare_fused(x, experts, routing)
        ids, places = routing.expert_ids, routing.places
        if ids.dtype != torch.int32 or not ids.is_contiguous():
            ids = ids.to(torch.int32).contiguous()
        if places is None:
            with self._caller.range("places"):
                places = self._router.places(ids, layer.shape.num_experts)
        return layer.prepare(x, experts, ids, routing.weights, places)

    def _layer(self, heap: CudaHeap, shape: LayerShape, capturing: bool) -> CudaLayer:
        layer = self._layers.get(shape)
        if layer is None:
            if capturing:
                raise TileMoEError(
                    f"layer {shape.name}: its first call cannot be captured in a CUDA graph; run"
                    " one forward before the capture"
                )
            params = self._params(shape)
            bounds = bounds_of(shape, params, heap.needs.max_tokens)
            layer = CudaLayer(shape, heap, params, bounds, self.config, self.sms)
            self._splits.prepare(layer)
            self._layers[shape] = layer
        if capturing and not layer.is_fused:
            raise TileMoEError(
                f"layer {shape.name}: its dispatch goes by NCCL, which waits for counts on the host"
                " and cannot be captured in a CUDA graph; wanted dispatch fused"
            )
        if capturing and self.mover == "copy_engine" and self.world > 1:
            raise ConfigError(
                f'tile_overlap.mover: got "copy_engine", and layer {shape.name} is being captured'
                ' in a CUDA graph, where no host can wait for counts; wanted "auto", "sm" or'
                ' "none"; fix: change it, or run without a graph'
            )
        return layer

    def _params(self, shape: LayerShape) -> PlanParams:
        return plan_params(shape, self.config, self.rank, self.world, self.sms)


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _two_threads(where: str) -> TileMoEError:
    """What is said where another thread has ``_in_call``, which guards what all layers share."""
    return TileMoEError(
        f"{where}: another thread is inside a layer of the same group; the layers of a group must"
        " run one after another"
    )
