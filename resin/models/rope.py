"""Rotary position embedding: frequencies with every scaling that published models use, and the rotation itself.

Half-split pairs: dimension i turns with dimension i + D/2, by the angle position * f_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotation: a frequency for each pair of dimensions, and a factor on cos and sin (1 but for YaRN)."""

    frequencies: tuple[float, ...]
    factor: float = 1.0

    @staticmethod
    def from_parameters(parameters: Mapping[str, Any], width: int) -> Rope:
        """Builds a rotation from `rope_parameters` (`rope_theta`, `rope_type` or `type`, and the kind's own fields).

        Raises:
            InvalidRequest: unknown kind, or a field that the kind needs is absent.
        """
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        build = _KINDS.get(kind)
        if build is None:
            raise InvalidRequest("rope_type", kind, f"one of {sorted(_KINDS)}")
        try:
            return build(parameters, width)
        except (KeyError, TypeError) as error:
            raise InvalidRequest("rope_parameters", dict(parameters), f"every field of kind {kind!r}") from error

    def rotation(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 `[T, D/2]`."""
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(self.frequencies, jnp.float32)[None, :]
        return jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `[T, heads, D]` by `rotation`, in the dtype of x."""
    cos, sin = (part.astype(x.dtype)[:, None, :] for part in rotation)
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _plain(parameters: Mapping[str, Any], width: int) -> np.ndarray:
    return float(parameters["rope_theta"]) ** -(np.arange(0, width, 2, dtype=np.float64) / width)


def _default(parameters: Mapping[str, Any], width: int) -> Rope:
    rotated = int(width * float(parameters.get("partial_rotary_factor", 1.0)))
    if rotated != width:
        raise InvalidRequest("partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    return Rope(tuple(_plain(parameters, width).tolist()))


def _linear(parameters: Mapping[str, Any], width: int) -> Rope:
    return Rope(tuple((_plain(parameters, width) / float(parameters["factor"])).tolist()))


def _llama3(parameters: Mapping[str, Any], width: int) -> Rope:
    plain = _plain(parameters, width)
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    # Turns that a pair makes within the original context: few turns are slowed by the factor, many are left alone.
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope(tuple(((1 - kept) * plain / factor + kept * plain).tolist()))


def _yarn(parameters: Mapping[str, Any], width: int) -> Rope:
    plain = _plain(parameters, width)
    factor, original = float(parameters["factor"]), float(parameters["original_max_position_embeddings"])
    theta = float(parameters["rope_theta"])

    def edge(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = edge(float(parameters.get("beta_fast") or 32)), edge(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slowed = np.clip((np.arange(width // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return Rope(tuple((plain / factor * slowed + plain * (1 - slowed)).tolist()), _yarn_factor(parameters, factor))


def _yarn_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(float(parameters["mscale"])) / mscale(float(parameters["mscale_all_dim"]))
    return mscale(1.0)


def _proportional(parameters: Mapping[str, Any], width: int) -> Rope:
    turning = int(float(parameters.get("partial_rotary_factor", 1.0)) * width // 2)
    plain = _plain(parameters, width) / float(parameters.get("factor") or 1.0)
    plain[turning:] = 0.0
    return Rope(tuple(plain.tolist()))


_KINDS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
