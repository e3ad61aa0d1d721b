"""A byte trigram model with interpolated Kneser-Ney smoothing: what the demo model has to beat."""

from __future__ import annotations

import math

import numpy as np

V = 256


class Trigram:
    """P(c | a, b) fitted to a text; every byte has a probability above zero.

    Each order gives up a discount from every count seen and hands it to the next shorter context;
    the shorter contexts count in how many places a byte was seen, not how often (Kneser and Ney,
    1995; Chen and Goodman, 1999, equation 25).

    Args:
        text: at least three bytes.
    """

    def __init__(self, text: bytes) -> None:
        data = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        if len(data) < 3:
            raise ValueError(f"a trigram model needs at least 3 bytes, got {len(data)}")
        codes = (data[:-2] * V + data[1:-1]) * V + data[2:]
        trigrams = np.bincount(codes, minlength=V**3).reshape(V, V, V)
        bigrams = (trigrams > 0).sum(axis=0)
        unigrams = (bigrams > 0).sum(axis=0)
        shorter = np.full(V, 1.0 / V)
        for counts in (unigrams, bigrams, trigrams):
            shorter = _smoothed(counts, shorter)
        self._probability = shorter

    def perplexity(self, text: bytes) -> float:
        """exp of the mean negative log probability of all bytes but the first two."""
        data = np.frombuffer(text, dtype=np.uint8)
        logs = np.log(self._probability[data[:-2], data[1:-1], data[2:]])
        return math.exp(-logs.mean())


def _smoothed(counts: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Counts [..., V] and the shorter context's P [..., V] -> P [..., V] of this context."""
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    # Where nothing was seen once, Good and Turing's estimate is zero, and so would be P of the new.
    discount = once / (once + 2.0 * twice) if once else 0.5
    total = counts.sum(axis=-1, keepdims=True)
    given_up = discount * (counts > 0).sum(axis=-1, keepdims=True)
    seen = np.maximum(total, 1)
    kept = np.maximum(counts - discount, 0.0) / seen
    return kept + np.where(total > 0, given_up / seen, 1.0) * shorter
