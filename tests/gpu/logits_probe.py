"""What slices of a long sum are worth on tensor cores: a gate's logits by cuBLAS, us and errors.

The gate's fp32 weights are three bf16 matrices (csrc/router/split.cu). Their product with bf16
tokens is made over slices of the hidden width, each by tensor cores, which are added in fp32. One
GPU; the exact logits have the standard deviation 1. csrc/router/logits.cu adds slices in registers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from router_bench import LOGITS, graph_us

SLICES = (1, 2, 4, 8, 16, 32)
LEAST = 64  # of the hidden width, in a slice


def split(weight: Tensor) -> Tensor:
    """[3 * E, H] bfloat16, the largest part first."""
    parts, rest = [], weight
    for _ in range(3):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for tokens, hidden, experts, _ in LOGITS:
        weight = torch.randn(experts, hidden, device="cuda") * hidden**-0.5
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        exact, wide, parts = x.double() @ weight.double().t(), x.float(), split(weight)

        def errors(logits: Tensor, exact: Tensor = exact) -> str:
            error = logits.double() - exact
            return f"{error.abs().max():.1e} ({error.pow(2).mean().sqrt():.1e})"

        us, *_ = graph_us(lambda wide=wide, weight=weight: F.linear(wide, weight))
        print(f"{tokens}, {hidden}, {experts}: fp32 {us:.1f} us, {errors(F.linear(wide, weight))}")
        for slices in SLICES:
            if hidden // slices < LEAST:
                continue
            left = x.view(tokens, slices, -1).transpose(0, 1)
            right = parts.view(3 * experts, slices, -1).permute(1, 2, 0)

            def multiply(left: Tensor = left, right: Tensor = right) -> Tensor:
                return torch.bmm(left, right, out_dtype=torch.float32)

            made = multiply().view(slices, tokens, 3, experts)
            us, *_ = graph_us(multiply)
            added, *_ = graph_us(lambda made=made: made.sum((0, 2)))
            logits = made.sum(0).flip(1).sum(1)  # the smallest part first
            print(f"  {slices:2} slices {us:.1f} us, added in {added:.1f}, {errors(logits)}")


if __name__ == "__main__":
    main()
