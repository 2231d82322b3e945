"""Sampling of one row in NumPy float64, by sorting: what the device must agree with."""

from __future__ import annotations

import numpy as np

from resin.plan import SamplingParams


def adjusted(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits after penalties, bias and stop suppression."""
    out = logits.astype(np.float64)
    if params.has_penalties:
        for token in set(prompt) | set(output):
            out[token] *= params.repetition_penalty ** (-1 if out[token] > 0 else 1)
        for token in set(output):
            out[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if len(output) < params.min_output_tokens:
        out[list(params.stop_token_ids)] = -np.inf
    return out


def kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool [V], what top_k, then top_p, then min_p leave of tempered logits."""
    order = np.argsort(-logits, kind="stable")
    probabilities = np.exp(logits - logits.max())
    alive = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        mass = np.cumsum(probabilities[alive]) / probabilities[alive].sum()
        alive = alive[: int(np.searchsorted(mass, params.top_p)) + 1]
    alive = alive[probabilities[alive] >= params.min_p]
    out = np.zeros(len(logits), bool)
    out[alive] = True
    return out


def noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise of every token."""
    low, high = np.array([seed & (2**64 - 1)], np.uint64).view(np.uint32)
    with np.errstate(over="ignore"):
        key = _mix(np.uint32(low) + np.uint32(0x9E3779B9))
        key = _mix(key ^ _mix(np.uint32(high) + np.uint32(0x7F4A7C15)))
        key = _mix(key ^ _mix(np.uint32(position) + np.uint32(0x85EBCA77)))
        bits = _mix(_mix(key ^ (np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1))) + key)
    uniform = np.minimum((bits.astype(np.float32).astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
