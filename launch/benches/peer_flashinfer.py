"""FlashInfer's expert-parallel layer: its MoE kernels for Hopper, bf16 SwiGLU experts, rows pushed
over NVLink (``sm90_bf16_bf16_bf16_push_cake`` of ``flashinfer.moe_ep``, from 0.7 on).

It needs the packages flashinfer-python and apache-tvm-ffi, one GPU of compute capability 9.0 a rank
of one host, and nvcc, since it compiles its kernels at first use (minutes on few cores). It has no
router: :meth:`FlashInferMoE.route` is plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benches.peers import route


class FlashInferMoE:
    """As ``peers.TorchMoE``. A collective.

    Args:
        group: of all ranks; None for one.
        gate: [E, H], bf16, on a GPU.
        ups: [E_l, F, H] each: (gate, up). Copied, as ``down`` is.
        down: [E_l, H, F].
        activation: of the first of ``ups``.
        topk: K.
        tokens: most of a call.

    Raises:
        ValueError: other experts than bf16 SwiGLU, or no GPU.
        Exception: what FlashInfer says of sizes, GPUs or its compiler.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        gate: Tensor,
        ups: tuple[Tensor, ...],
        down: Tensor,
        activation: Callable[[Tensor], Tensor],
        topk: int,
        tokens: int,
    ) -> None:
        _need(gate, ups, activation)
        import flashinfer
        from flashinfer import moe_ep

        _forbid_multicast()
        self.version = str(flashinfer.__version__)
        self._gate, self._topk, self._tensors = gate, topk, moe_ep.MoEEpTensors
        self._layer = moe_ep.MoEEpLayer(
            moe_ep.BootstrapConfig(
                world_size=1 if group is None else dist.get_world_size(group),
                rank=0 if group is None else dist.get_rank(group),
                process_group=group,
                device=gate.device.index,
            ),
            moe_ep.FleetParams(
                num_experts=gate.shape[0],
                max_tokens_per_rank=tokens,
                token_hidden_size=gate.shape[1],
            ),
            moe_ep.MoEWeightPack(torch.cat(ups, dim=1), down),
            backend=moe_ep.MegaConfig(
                megakernel=moe_ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(
                    intermediate_size=down.shape[2], top_k=topk
                )
            ),
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids in int32 and weights in fp32, [T, K] each."""
        weights, ids = route(x, self._gate, self._topk)
        return ids.int(), weights

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self._layer.forward(
            self._tensors(hidden_states=x, topk_ids=ids, topk_weights=weights)
        )

    def close(self) -> None:
        """Free its memory. A collective, with no call under way."""
        self._layer.destroy()


def _need(gate: Tensor, ups: tuple[Tensor, ...], activation: Callable[[Tensor], Tensor]) -> None:
    if len(ups) != 2 or activation is not F.silu:
        name = getattr(activation, "__name__", activation)
        got = f"experts of {len(ups) + 1} matrices with {name}"
        raise ValueError(f"got {got}, wanted SwiGLU (3 with silu)")
    if gate.device.type != "cuda" or gate.dtype != torch.bfloat16:
        raise ValueError(f"got {gate.dtype} on {gate.device}, wanted torch.bfloat16 on a GPU")


def _forbid_multicast() -> None:
    """NVLink multicast stays off, whatever a later version of FlashInfer defaults to."""
    from flashinfer.comm import mnnvl

    def refuse(*args: Any) -> NoReturn:
        raise RuntimeError("an NVLink multicast object was asked for; wanted none")

    mnnvl.cuda.cuMulticastCreate = refuse
