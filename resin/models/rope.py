"""Rotary position embedding: frequencies with every scaling that published models use, and the rotation itself.

Half-split pairs: dimension i turns with dimension i + D/2, by the angle position * f_i. Models that turn a part of each
head, or neighbouring dimensions, do so too: the lanes of queries and keys are put in another order where weights are
loaded, which no score can tell, and pairs that stand still have the frequency 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resin.models.config_reader import ConfigReader
from resin.plan import InvalidRequest


class Long(NamedTuple):
    """Frequencies of sequences that may be longer than `above_tokens`."""

    above_tokens: int
    frequencies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotation.

    Attributes:
        frequencies: of each pair of dimensions; 0 for one that stands still.
        factor: on cos and sin of pairs that turn (1 but for YaRN and LongRoPE).
        lanes: which dimension of the checkpoint's heads each of the model's is; None where they are the same.
        long: what takes the place of the frequencies where long sequences are served; None for nothing.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    lanes: tuple[int, ...] | None = None
    long: Long | None = None

    @staticmethod
    def still(width: int) -> Rope:
        """Of layers without positions."""
        return Rope((0.0,) * (width // 2))

    @staticmethod
    def from_parameters(
        parameters: Mapping[str, Any], width: int, *, partial: float | None = None, interleaved: bool = False
    ) -> Rope:
        """Builds a rotation from `rope_parameters` (`rope_theta`, `rope_type` or `type`, and the kind's own fields).

        Args:
            parameters: as the config has them.
            width: head size.
            partial: what an absent `partial_rotary_factor` means, of a family that turns the first dimensions of a
                head; None for one that turns them all.
            interleaved: whether neighbouring dimensions turn together, not those that are half of them apart.

        Raises:
            InvalidRequest: unknown kind, a field that the kind needs is absent, or one that it does not know.
        """
        given = ConfigReader.of(parameters)
        if width < 2 or width % 2:
            raise InvalidRequest("head_dim", width, "an even number: a rotation turns pairs")
        kind = given.choice("rope_type", "type", allowed=_KINDS, default="default")
        turning = width
        if partial is not None and kind != "proportional":
            share = given.number("partial_rotary_factor", default=partial, above=0, high=1)
            turning = int(width * share)
            if turning < 2 or turning % 2:
                given.refuse("partial_rotary_factor", share, f"a share of head_dim={width} that is an even number")
        elif kind != "proportional":
            given.only("partial_rotary_factor", 1)
        rope = _KINDS[kind](given, turning).within(width, interleaved)
        given.refuse_unread(f"rope_type={kind!r}", ("original_max_position_embeddings", "finetuned"))
        return rope

    def within(self, width: int, interleaved: bool) -> Rope:
        """The same turn of the first dimensions of heads that are `width` wide; their pairs may be neighbours."""
        half, turning = width // 2, 2 * len(self.frequencies)
        if turning == width and not interleaved:
            return self
        pairs = np.arange(turning).reshape((-1, 2) if interleaved else (2, -1))
        firsts, seconds = (pairs[:, 0], pairs[:, 1]) if interleaved else pairs
        still = range(turning, width)
        rest = half - turning // 2
        lanes = (*firsts.tolist(), *still[:rest], *seconds.tolist(), *still[rest:])
        still_pairs = (0.0,) * rest
        long = self.long and Long(self.long.above_tokens, self.long.frequencies + still_pairs)
        return replace(self, frequencies=self.frequencies + still_pairs, lanes=lanes, long=long)

    def rotation(self, positions: jax.Array, context_tokens: int = 0) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 `[T, D/2]`.

        Args:
            positions: int32 [T].
            context_tokens: longest sequence that is served, which all sequences turn alike for: keys stay in the cache
                while theirs grows, and others begin with them.
        """
        is_long = self.long is not None and context_tokens > self.long.above_tokens
        frequencies = np.array(self.long.frequencies if self.long is not None and is_long else self.frequencies)
        factors = jnp.asarray(np.where(frequencies == 0, 1.0, self.factor), jnp.float32)[None, :]
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
        return jnp.cos(angles) * factors, jnp.sin(angles) * factors


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `[T, heads, D]` by `rotation`, in float32, and rounds once."""
    cos, sin = (part[:, None, :] for part in rotation)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _plain(given: ConfigReader, width: int) -> np.ndarray:
    return given.number("rope_theta", above=1, high=1e12) ** -(np.arange(0, width, 2, dtype=np.float64) / width)


def _default(given: ConfigReader, width: int) -> Rope:
    return Rope(tuple(_plain(given, width).tolist()))


def _dynamic(given: ConfigReader, width: int) -> Rope:
    """Scaled beyond `max_position_embeddings` alone, and so never here: no sequence is longer."""
    given.number("factor", low=1, high=1e6)
    return _default(given, width)


def _linear(given: ConfigReader, width: int) -> Rope:
    return Rope(tuple((_plain(given, width) / given.number("factor", low=1, high=1e6)).tolist()))


def _llama3(given: ConfigReader, width: int) -> Rope:
    plain = _plain(given, width)
    factor, original = given.number("factor", low=1, high=1e6), given.integer("original_max_position_embeddings")
    low = given.number("low_freq_factor", above=0, high=1e6)
    high = given.number("high_freq_factor", above=low, high=1e6)
    # Turns that a pair makes within the original context: few turns are slowed by the factor, many are left alone.
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope(tuple(((1 - kept) * plain / factor + kept * plain).tolist()))


def _yarn(given: ConfigReader, width: int) -> Rope:
    plain = _plain(given, width)
    factor, original = given.number("factor", low=1, high=1e6), given.integer("original_max_position_embeddings")
    theta = given.number("rope_theta", above=1, high=1e12)

    def edge(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = edge(given.number("beta_fast", default=32.0, above=0, high=1e6))
    high = edge(given.number("beta_slow", default=1.0, above=0, high=1e6))
    if given.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slowed = np.clip((np.arange(width // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    return Rope(tuple((plain / factor * slowed + plain * (1 - slowed)).tolist()), _yarn_factor(given, factor))


def _yarn_factor(given: ConfigReader, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    explicit = given.number("attention_factor", default=None, above=0, high=1e3)
    weight, all_weight = (given.number(name, default=0.0, low=0, high=1e3) for name in ("mscale", "mscale_all_dim"))
    if explicit is not None:
        return explicit
    return mscale(weight) / mscale(all_weight) if weight and all_weight else mscale(1.0)


def _longrope(given: ConfigReader, width: int) -> Rope:
    plain = _plain(given, width)
    original = given.integer("original_max_position_embeddings", low=2)
    factor = given.number("factor", above=0, high=1e6)
    attention = given.number("attention_factor", default=None, above=0, high=1e3)
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    what = "pair of head_dim (or hidden_size / num_attention_heads) * partial_rotary_factor"
    short, long = (
        tuple((plain / given.numbers(name, count=width // 2, what=what, above=0, high=1e6)).tolist())
        for name in ("short_factor", "long_factor")
    )
    return Rope(short, attention, long=Long(original, long))


def _proportional(given: ConfigReader, width: int) -> Rope:
    turning = int(given.number("partial_rotary_factor", default=1.0, low=0, high=1) * width // 2)
    plain = _plain(given, width) / given.number("factor", default=1.0, low=1, high=1e6)
    plain[turning:] = 0.0
    return Rope(tuple(plain.tolist()))


_KINDS = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
