"""Reading and continuing a text with the demo model, all ranks in step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from demo.model import KVCache
from demo.model_config import ModelConfig

PREFILL_CHUNK = 1024


@dataclass
class Reading:
    """What one rank read and wrote.

    Attributes:
        logits: [read + steps, V] fp32 on the CPU: one row a token that went through the model.
        nll: summed negative log likelihood of the bytes that follow another one in the text.
        predicted: how many those are.
        written: the continuation.
        prefill_s, decode_s: wall time.
        steps: forwards of one token, one less than bytes written.
    """

    logits: torch.Tensor
    nll: float
    predicted: int
    written: bytes
    prefill_s: float
    decode_s: float
    steps: int


def read_and_write(
    engine: nn.Module,
    config: ModelConfig,
    text: bytes,
    max_new_tokens: int,
    after_forward: Callable[[int], None] = lambda tokens: None,
    given: bytes | None = None,
) -> Reading:
    """Read ``text`` in chunks, then continue it with the KV cache: greedily, or as ``given``.

    Every rank must pass a text of the same length, so that all make the same forwards.

    Args:
        engine: DeepSpeed engine (or model) of a :class:`demo.model.ByteMoE` in eval mode.
        config: the model's sizes.
        text: at least one byte.
        max_new_tokens: bytes to write; may be zero.
        after_forward: called with the number of tokens after each forward.
        given: [max_new_tokens] bytes to write whatever the logits say, to make the same forwards as
            another run; None for the most likely ones.
    """
    device = next(engine.parameters()).device
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)[None]
    steps = max(0, max_new_tokens - 1)
    like = next(engine.parameters())
    cache = KVCache(config, 1, len(text) + steps, like)
    rows: list[torch.Tensor] = []

    def forward(piece: torch.Tensor) -> None:
        logits, _ = engine(piece, cache=cache)
        rows.append(logits[0].float().cpu())  # waits for the device, so the clock is right
        after_forward(piece.shape[1])

    with torch.no_grad():
        begun = time.perf_counter()
        for start in range(0, len(text), PREFILL_CHUNK):
            forward(tokens[:, start : start + PREFILL_CHUNK])
        read = time.perf_counter()
        written: list[int] = []
        while len(written) < max_new_tokens:
            if written:
                forward(torch.tensor([[written[-1]]], device=device))
            most_likely = int(rows[-1][-1].argmax())
            written.append(most_likely if given is None else given[len(written)])
        done = time.perf_counter()

    logits = torch.cat(rows)
    nll = F.cross_entropy(logits[: len(text) - 1], tokens[0, 1:].cpu(), reduction="sum").item()
    return Reading(logits, nll, len(text) - 1, bytes(written), read - begun, done - read, steps)


def perplexity(engine: nn.Module, text: bytes) -> float:
    """exp of the mean negative log likelihood of all bytes of ``text`` but the first."""
    reading = read_and_write(engine, engine.module.config, text, 0)
    return math.exp(reading.nll / reading.predicted)
