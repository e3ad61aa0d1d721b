"""The CUDA backend's own work on two ranks without a GPU: values, operands, routers."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from cuda_layer_case import FFN, HIDDEN, STEADY, Layer, fake, raised_by, rows
from cuda_library_fake import NoWaits
from moe_models import dense_experts, own_routing, raised, same_everywhere
from torch import Tensor, nn

from ds_tilemoe import reference
from ds_tilemoe.backends.cuda_limits import fused_obstacle
from ds_tilemoe.errors import ConfigError, RankFailure, TileMoEError
from ds_tilemoe.layers.experts import AutocastExpert
from ds_tilemoe.testing import RankContext, case, rank_tests


@case(kind=["mlp", "swiglu", "megatron", "plain"], layout=["compact", "aligned"])
def values(ctx: RankContext, kind: str, layout: str) -> None:
    """By GEMM 1's kernel, and by NCCL, where the front is torch's or the kernel's own."""
    for dtype, k in ((torch.bfloat16, 2), (torch.float16, 1)):
        results = []
        for by in ("fused", "nccl")[kind == "plain" :]:
            with fake() as (library, _):
                layer = Layer(kind, dtype, k=k, layout=layout, by=by).open()
                results.append(layer.check(rows(40, dtype=dtype)))
                layer.check(rows((0, 7)[ctx.rank], seed=1, dtype=dtype))
                log = [word for word in library.log if word != "waits"]
                front = {"fused": ["dispatch and front"], "nccl": ["front"]}[by]
                assert log == 2 * ["router", "exchange", *(front if kind != "plain" else []), "SM"]
        assert all(torch.equal(result, results[0]) for result in results)


@case
def a_steady_forward_waits_for_nothing(ctx: RankContext) -> None:
    for kind, k in (("mlp", 1), ("swiglu", 2), ("mlp", 8)):
        with fake() as (library, _):
            layer = Layer(kind, k=k).open()
            layer(rows(40))
            library.log.clear()
            with NoWaits(library):
                for count in (40, 40, (0, 3)[ctx.rank]):
                    layer(rows(count))
                    layer.backend.poll_records()
            assert library.log == 3 * STEADY
    with fake() as (library, _):
        layer = Layer(router="deepspeed").open()
        layer.check(rows(40))
        words = [word for word in library.log if word != "waits"]
        assert words == ["places", *STEADY[1:]], "DeepSpeed's gate has no places"
    with fake() as (library, _):
        layer = Layer(by="nccl").open()
        layer(rows(40))
        with NoWaits(library):
            assert "tolist waits" in str(raised_by(layer, rows(40))), "the mode finds what waits"


@case
def gated_in_one_matrix_and_other_fronts(ctx: RankContext) -> None:
    class Fused(nn.Module):
        def __init__(self, gate_first: bool) -> None:
            super().__init__()
            self.up = nn.Linear(HIDDEN, 2 * FFN)
            self.down = nn.Linear(FFN, HIDDEN)
            self.gate_first = gate_first

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.up(x).chunk(2, dim=-1)
            pair = (first, second) if self.gate_first else (second, first)
            return self.down(nn.functional.silu(pair[0]) * pair[1])

    tanh = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.Tanh(), nn.Linear(FFN, HIDDEN))
    for expert, by_kernel in ((Fused(True), True), (Fused(False), True), (tanh, False)):
        with fake() as (library, _):
            Layer(expert).open().check(rows(30))
            assert ("dispatch and front" in library.log) is by_kernel


@case
def under_autocast(ctx: RankContext) -> None:
    """fp32 weights are cast in each call, so their addresses differ from call to call."""
    with fake() as (library, _):
        layer = Layer(dtype=torch.float32)
        assert "autocast" in str(fused_obstacle(layer.experts, torch.bfloat16))
        layer.shape = dataclasses.replace(layer.shape, dtype=torch.bfloat16, dispatch="nccl")
        layer.experts = [AutocastExpert(cut, torch.bfloat16) for cut in layer.experts]
        layer.open()
        x = rows(30)
        routing = own_routing(layer.moe, x.float())
        want = reference.moe(x.float(), routing, dense_experts(layer.moe))
        for _ in range(2):
            y = layer.backend.forward(layer.shape, layer.experts, x, routing)
            assert ((y.float() - want).norm(dim=1) <= 1.2e-2 * want.norm(dim=1)).all()
        assert "front" not in library.log, "the activation is autocast's"


@case
def weights_that_move(ctx: RankContext) -> None:
    with fake():
        layer = Layer().open()
        want = layer.check(rows(20))
        for cut in layer.experts:
            for linear in (cut.expert[0], cut.expert[2]):
                odd = torch.empty(linear.weight.numel() + 1, dtype=torch.bfloat16)[1:]
                odd.copy_(linear.weight.data.flatten())  # from no multiple of 16 bytes on
                linear.weight.data = odd.view(linear.weight.shape)
        assert torch.equal(layer(rows(20)), want)
        with torch.no_grad():
            for cut in layer.experts:
                cut.expert[2].weight.mul_(2)
                cut.expert[2].bias.mul_(2)
        assert torch.equal(layer(rows(20)), 2 * want)


@case
def weights_of_another_dtype(ctx: RankContext) -> None:
    """Of the same addresses, or of others: they are not read as if they were what they were."""
    with fake():
        layer = Layer().open()
        want = layer.check(rows(20))
        expert = layer.experts[3].expert
        for what, linear, name in (("weight", expert[0], "weight"), ("bias", expert[2], "bias")):
            parameter = getattr(linear, name)
            kept = parameter.data
            for dtype in (torch.float32, torch.float16):
                parameter.data = kept.to(dtype)
                error = raised(layer, rows(20))
                assert type(error) is TileMoEError
                text = same_everywhere(str(error))
                said = f"layer moe, {what} of local expert 3: got {dtype}; wanted torch.bfloat16"
                assert text.startswith(said)
                assert "; fix: " in text
                layer.backend.check()
            parameter.data = kept
            assert torch.equal(layer(rows(20)), want)
        if ctx.rank == 1:
            layer.moe.float()
            assert type(raised(layer, rows(20))) is TileMoEError
            layer.moe.bfloat16()
        else:
            assert layer(rows(20)).isnan().all()
            assert isinstance(raised(layer.backend.check), RankFailure)
        assert torch.equal(layer(rows(20)), want)


@case
def two_threads_in_a_group(ctx: RankContext) -> None:
    """The second is refused, by the router too: the params of its launch are one for all."""
    with fake(None) as (library, _):
        layer = Layer(ep_size=1).open()
        want = layer.check(rows(20))
        gate, launch = layer.moe.deepspeed_moe.gate, library.tilemoe_router_launch
        routing = layer.backend.route(gate, rows(20))
        refused: list[Exception] = []

        def meanwhile(*arguments: Any) -> int:
            library.tilemoe_router_launch = launch
            with ThreadPoolExecutor(1) as other:
                for function, given in (
                    (layer.backend.route, (gate, rows(20))),
                    (layer.backend.forward, (layer.shape, layer.experts, rows(20), routing)),
                ):
                    refused.append(other.submit(raised, function, *given).result())
            return launch(*arguments)

        library.tilemoe_router_launch = meanwhile
        assert torch.equal(layer(rows(20)), want)
        names = [str(error).partition(": another thread is inside")[0] for error in refused]
        assert names == ["the router", "layer moe"]
        assert all(type(error) is TileMoEError for error in refused)
        assert torch.equal(layer(rows(20)), want), "whoever was refused holds nothing"


@case
def what_the_kernels_cannot_run(ctx: RankContext) -> None:
    """It is refused before any memory is made, and the heap that there is stays."""
    with fake() as (_, link):
        layer = Layer()
        for change, words in (
            ({"hidden": 130, "out": 130}, "hidden width is 130; on CUDA it has to be a multiple"),
            ({"ffn": 33}, "ffn width is 33; on CUDA it has to be a multiple of 8"),
            ({"dtype": torch.float32}, "give float32; on CUDA only bfloat16 and float16"),
            ({"num_experts": 2048}, "2048 experts on 2 ranks; on CUDA at most 1024"),
        ):
            bad = dataclasses.replace(layer.shape, name="odd", **change)
            error = raised(layer.backend.ensure, [layer.shape, bad], 64)
            assert isinstance(error, ValueError)
            text = same_everywhere(str(error))
            assert text.startswith("layer odd: ")
            assert words in text
        assert link.sizes == []
        want = layer.open().check(rows(20))
        assert isinstance(raised(layer.backend.ensure, [bad], 64), ValueError)
        assert torch.equal(layer(rows(20)), want)


@case
def routers(ctx: RankContext) -> None:
    x = rows(50)
    with fake() as (library, _):
        layer = Layer(router="fused").open()
        own = own_routing(layer.moe, x)
        gate = layer.moe.deepspeed_moe.gate
        routing = layer.backend.route(gate, x)
        assert torch.equal(routing.expert_ids, own.expert_ids)
        assert torch.allclose(routing.weights, own.weights, atol=1e-6)
        assert routing.places is not None
        layer.check(x)
        gate.noisy_gate_policy = "Jitter"
        gate.train()
        error = raised(layer.backend.route, gate, x)
        assert isinstance(error, ConfigError)
        assert "noisy_gate_policy is Jitter" in str(error)
        library.log.clear()
        auto = Layer(router="auto")
        assert auto.backend.route(gate, x).places is None
        assert library.log == []


test_ranks = rank_tests(__file__, world=2, timeout_s=300)
