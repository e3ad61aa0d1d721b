"""The demo model: a byte-level causal transformer whose feed-forwards are ``deepspeed.moe`` layers.

Shape letters: B batch, T tokens of this call, S keys, H hidden, A heads, D = H / A, V = 256 bytes.
"""

from __future__ import annotations

import torch
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

from demo.model_config import ModelConfig

VOCAB = 256


class KVCache:
    """Keys and values of the tokens read so far.

    Args:
        config: the model's sizes.
        batch: B.
        capacity: the most tokens it will hold.
        like: a tensor with the model's dtype and device.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, like: torch.Tensor) -> None:
        shape = (config.layers, 2, batch, config.heads, capacity, config.hidden // config.heads)
        self.buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.window = config.window
        self.capacity = capacity
        self.length = 0

    def extend(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Store [2, B, A, T, D] of one layer; return [2, B, A, S, D], the keys still in reach."""
        end = self.length + kv.shape[3]
        self.buffer[layer, :, :, :, self.length : end] = kv
        return self.buffer[layer, :, :, :, max(0, self.length - self.window + 1) : end]


class Attention(nn.Module):
    """Causal self-attention over the last ``window`` tokens, with rotary positions.

    Queries and keys are normalised: bounded scores keep rounding errors small, so that two ways to
    compute the same logits can be told from two different results.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.query_norm = nn.RMSNorm(config.hidden // config.heads)
        self.key_norm = nn.RMSNorm(config.hidden // config.heads)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: KVCache | None,
        layer: int,
    ) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]; ``mask`` is bool [T, S], True where a key is seen."""
        b, t, h = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        q, k = _rotate(self.query_norm(q), rotation), _rotate(self.key_norm(k), rotation)
        kv = torch.stack((k, v))
        if cache is not None:
            kv = cache.extend(layer, kv)
        y = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, h))


class Block(nn.Module):
    """Pre-norm attention and a mixture of experts, each with a residual connection."""

    def __init__(self, config: ModelConfig, ep_size: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = nn.LayerNorm(config.hidden)
        expert = nn.Sequential(
            nn.Linear(config.hidden, config.ffn), nn.GELU(), nn.Linear(config.ffn, config.hidden)
        )
        # DeepSpeed's gate draws random numbers in eval mode by default; a text must not depend on
        # them, nor on which other tokens an expert received.
        self.moe = MoE(
            config.hidden,
            expert,
            num_experts=config.num_experts,
            ep_size=ep_size,
            k=config.topk,
            min_capacity=0,  # else top-1 refuses a single token
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )


class ByteMoE(nn.Module):
    """A causal language model over bytes.

    Args:
        config: sizes.
        ep_size: ranks that share the experts; divides ``config.num_experts`` and the world size.
    """

    def __init__(self, config: ModelConfig, ep_size: int = 1) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCAB, config.hidden)
        self.blocks = nn.ModuleList(Block(config, ep_size) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(
        self, tokens: torch.Tensor, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the byte after each token.

        Args:
            tokens: [B, T] int64 bytes.
            cache: tokens read before; extended in place.

        Returns:
            ([B, T, V] logits in the model's dtype, the layers' mean load-balancing loss).

        Raises:
            ValueError: the tokens do not fit into the cache or the model's positions.
        """
        start = cache.length if cache is not None else 0
        end = start + tokens.shape[1]
        limit = cache.capacity if cache is not None else self.config.max_positions
        if end > limit:
            raise ValueError(f"{end} tokens; there is room for {limit}")
        x = self.embedding(tokens)
        rotation = self._rotation(start, end, x)
        mask = self._mask(start, end, cache is not None, x.device)
        l_aux = torch.zeros((), device=x.device)
        for index, block in enumerate(self.blocks):
            x = x + block.attention(block.attention_norm(x), rotation, mask, cache, index)
            y, block_l_aux, _ = block.moe(block.moe_norm(x))
            x = x + y
            l_aux = l_aux + block_l_aux / len(self.blocks)
        if cache is not None:
            cache.length = end
        return F.linear(self.norm(x), self.embedding.weight), l_aux

    def _rotation(self, start: int, end: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, D / 2] of positions start to end - 1."""
        half = self.config.hidden // self.config.heads // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        positions = torch.arange(start, end, device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.config.rope_base**-steps
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def _mask(
        self, start: int, end: int, cached: bool, device: torch.device
    ) -> torch.Tensor | None:
        """Bool [T, S], or None where every query sees every key."""
        if end - start == 1:
            return None
        first = max(0, start - self.config.window + 1) if cached else 0
        queries = torch.arange(start, end, device=device)[:, None]
        distance = queries - torch.arange(first, end, device=device)
        return (distance >= 0) & (distance < self.config.window)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the halves of x [B, A, T, D] by the angles of ``rotation``."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
