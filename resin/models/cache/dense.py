"""The cache of one whole sequence that is computed at once: what is kept lives as long as the pass."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from resin.models.cache.attended import Attended, merge
from resin.models.cache.protocol import Attend, Heads, PlaneRef
from resin.pallas_kernels.fp8 import round_fp8
from resin.plan import InvalidRequest


class DenseCache:
    """One sequence from its start to its end.

    Args:
        positions: int32 [T], of its tokens.
        fp8_scales: by cache group; what it keeps is rounded as a cache of 8-bit floats would round it.
    """

    def __init__(self, positions: jax.Array, fp8_scales: Mapping[str, float]) -> None:
        self._positions = positions
        self._fp8_scales = fp8_scales
        self._entries: dict[PlaneRef, jax.Array] = {}
        self._states: dict[PlaneRef, jax.Array] = {}

    def append(self, plane: PlaneRef, vectors: jax.Array) -> None:
        if (scale := self._fp8_scales.get(plane.group)) is not None:
            vectors = (round_fp8(vectors, scale).astype(jnp.float32) * scale).astype(vectors.dtype)
        self._entries[plane] = vectors

    def target(self, plane: PlaneRef, how: Attend, sinks: jax.Array | None) -> None:
        return None

    def append_heads(self, plane: PlaneRef, heads: Heads) -> None:
        assert heads.key is not None and heads.value is not None
        for part, vectors in zip(plane.halves(), (heads.key, heads.value), strict=True):
            self.append(part, vectors)

    def attend(
        self,
        query: jax.Array,
        keys: PlaneRef,
        values: PlaneRef,
        how: Attend,
        *,
        sinks: jax.Array | None = None,
        with_lse: bool = False,
    ) -> Attended:
        tokens, heads, width = query.shape
        key, value = self._held(keys), self._held(values)
        grouped = query.reshape(tokens, keys.rows, heads // keys.rows, width)
        scores = jnp.einsum("tkgd,skd->kgts", grouped, key, preferred_element_type=jnp.float32) * how.scale
        if how.softcap is not None:
            scores = how.softcap * jnp.tanh(scores / how.softcap)
        distance = self._positions[:, None] - self._positions[None, :]
        seen = distance >= 0
        if how.window is not None:
            seen &= distance < how.window
        scores = jnp.where(seen, scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)
        out = jnp.einsum("kgts,skd->tkgd", weights, value).reshape(tokens, heads, -1)
        attended = Attended(out, lse.reshape(heads, tokens).T)
        return attended if sinks is None else merge([attended], sinks)

    def _held(self, ref: PlaneRef) -> jax.Array:
        """The vectors of some rows of what was appended.

        Raises:
            InvalidRequest: no layer before has appended these rows.
        """
        for held, vectors in self._entries.items():
            start = ref.row - held.row
            is_same = (held.group, held.plane, held.width) == (ref.group, ref.plane, ref.width)
            if is_same and 0 <= start and start + ref.rows <= held.rows:
                return vectors[:, start : start + ref.rows]
        raise InvalidRequest("plane", ref, "rows that a layer has appended before")

    def read_state(self, state: PlaneRef, dtype: jax.typing.DTypeLike) -> jax.Array:
        held = self._states.get(state)
        return jnp.zeros((1, state.rows, state.width), dtype) if held is None else held.astype(dtype)

    def write_state(self, state: PlaneRef, value: jax.Array) -> None:
        self._states[state] = value

    def shift_state(self, state: PlaneRef, x: jax.Array) -> list[jax.Array]:
        padded = jnp.pad(x, ((state.rows, 0), (0, 0)))
        return [padded[age : age + x.shape[0]] for age in range(state.rows)]
