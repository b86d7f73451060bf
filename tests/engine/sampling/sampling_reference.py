"""Sampling as the documentation tells it, one row at a time in float64, with sorting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxserve.sched.request import SamplingParams


def threefry(key: tuple[int, int], count: int, size: int) -> np.ndarray:
    """First words of the Threefry-2x32 blocks (count, 0), (count, 1), ..., in Python's integers."""
    out = []
    for block in range(size):
        keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
        a, b = (count + keys[0]) % 2**32, (block + keys[1]) % 2**32
        for i in range(20):
            by = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
            a = (a + b) % 2**32
            b = ((b << by | b >> (32 - by)) % 2**32) ^ a
            if i % 4 == 3:
                g = i // 4 + 1
                a, b = (a + keys[g % 3]) % 2**32, (b + keys[(g + 1) % 3] + g) % 2**32
        out.append(a)
    return np.array(out, np.uint64)


def gumbel(key: tuple[int, int], count: int, size: int) -> np.ndarray:
    uniform = (threefry(key, count, size) + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


def adjusted(
    logits: np.ndarray,
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: Sequence[int],
) -> np.ndarray:
    scores = np.array(logits, np.float64)
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, times in Counter(output).items():
        scores[token] -= times * sampling.frequency_penalty + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        scores[[*eos_ids, *sampling.stop_token_ids]] = -np.inf
    return scores


def kept(scores: np.ndarray, sampling: SamplingParams) -> tuple[np.ndarray, float]:
    """Which tokens may be drawn, and how far the probability held by the top_p set and by the next
    smaller one is from top_p (nearer than rounding, either is right)."""
    x = (scores - scores.max()) / sampling.temperature
    keep = np.exp(x) >= sampling.min_p
    if 0 < sampling.top_k < keep.sum():
        keep &= x >= np.sort(np.where(keep, x, -np.inf))[-sampling.top_k]
    margin = np.inf
    if sampling.top_p < 1:
        mass = np.where(keep, np.exp(x), 0)
        mass /= mass.sum()
        values = np.unique(x[keep])[::-1]
        within = np.array([mass[x >= value].sum() for value in values])
        last = int(np.argmax(within >= sampling.top_p))
        margin = float(np.abs(within - sampling.top_p).min())
        keep &= x >= values[last]
    return keep, margin


def draw(
    scores: np.ndarray, sampling: SamplingParams, key: tuple[int, int], count: int
) -> tuple[int, float]:
    """The token, and how clearly it (or what may be drawn) was decided."""
    if sampling.temperature == 0:
        return int(scores.argmax()), np.inf
    keep, margin = kept(scores, sampling)
    noisy = np.where(keep, scores / sampling.temperature, -np.inf)
    noisy = noisy + gumbel(key, count, len(scores))
    ahead = np.diff(np.sort(noisy)[-2:])[0]
    return int(noisy.argmax()), min(margin, float(ahead))
