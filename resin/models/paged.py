"""The forward pass of a plan: many sequences packed, keys and values in the arena's pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from resin.models.context import AttentionLayer, Context
from resin.pallas_kernels.paged_decode import paged_decode_attention_ref
from resin.pallas_kernels.paged_prefill import paged_prefill_attention_ref
from resin.plan import CacheGeometry, CacheGroup, GroupGeometry, InvalidRequest, Phase, StateGroup


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """Where a plane lies in a page, counted in vectors of its width.

    Attributes:
        rows_per_page: vectors a page.
        first_row: vectors before the plane.
        page_entries: entries a page, the stride between two rows of the plane.
    """

    rows_per_page: int
    first_row: int
    page_entries: int


class PagedContext(Context):
    """A plan's columns, unpacked, and the arena as it changes from layer to layer.

    Attributes:
        phase: prefill or decode (one token a sequence).
        columns: the plan's columns by name, as `plan_layout` names them.
        arena: [num_pages, page_elements]; replaced by each write.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        columns: Mapping[str, jax.Array],
        arena: jax.Array,
        groups: Sequence[CacheGroup],
        geometry: CacheGeometry,
        token_ids: jax.Array,
        tp: int = 1,
    ) -> None:
        super().__init__(token_ids, columns["positions"], tp)
        self.phase = phase
        self.columns = columns
        self.arena = arena
        self._groups = {group.name: (group, fill) for group, fill in zip(groups, geometry.groups, strict=True)}

    def plane_rows(self, group_name: str, plane_name: str) -> PlaneRows:
        """Where a plane lies.

        Raises:
            InvalidRequest: the model declared no such group or plane.
        """
        if group_name not in self._groups:
            raise InvalidRequest("group", group_name, f"one of {sorted(self._groups)}")
        group, fill = self._groups[group_name]
        return _plane_rows(group, fill, plane_name, self.arena.shape[1])

    def attend(
        self,
        layer: AttentionLayer,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        rows = self.plane_rows(layer.group, layer.plane)
        stride = layer.kv_heads * rows.page_entries
        key_row = rows.first_row + layer.index * 2 * stride
        self._append(layer, rows, key_row, jnp.concatenate([key, value], axis=1))
        columns = self.columns
        shared = {
            "kv_heads": layer.kv_heads,
            "page_entries": rows.page_entries,
            "scale": layer.scale,
            "window": layer.window,
            "sinks": sinks,
            "softcap": layer.softcap,
        }
        page_indptr, page_ids = columns[f"page_indptr:{layer.group}"], columns[f"page_ids:{layer.group}"]
        seq_lens, first_position = columns["seq_lens"], columns[f"first_position:{layer.group}"]
        if self.phase is Phase.DECODE:
            out, _ = paged_decode_attention_ref(
                query, self.arena, page_indptr, page_ids, seq_lens, first_position, key_row, key_row + stride, **shared
            )
            return out
        return paged_prefill_attention_ref(
            query,
            self.arena,
            page_indptr,
            page_ids,
            columns["query_indptr"],
            seq_lens,
            first_position,
            key_row,
            key_row + stride,
            **shared,
        )

    def _append(self, layer: AttentionLayer, rows: PlaneRows, key_row: int, vectors: jax.Array) -> None:
        """Writes `[T, 2 K, D]` vectors, keys then values, to the tokens' append destinations."""
        with jax.named_scope("append"):
            pages = self.columns[f"append_pages:{layer.group}"]
            offsets = self.columns[f"append_offsets:{layer.group}"]
            heads = key_row + rows.page_entries * jnp.arange(2 * layer.kv_heads, dtype=jnp.int32)
            index = (pages * rows.rows_per_page + offsets)[:, None] + heads[None, :]
            flat = self.arena.reshape(-1, layer.head_dim)
            flat = flat.at[index].set(vectors.astype(flat.dtype), mode="promise_in_bounds")
            self.arena = flat.reshape(self.arena.shape)


def _plane_rows(group: CacheGroup, fill: GroupGeometry, plane_name: str, page_elements: int) -> PlaneRows:
    if isinstance(group, StateGroup):
        raise InvalidRequest("group", group.name, "a History or Window group")
    before = 0
    for plane in group.planes:
        if plane.name == plane_name:
            return PlaneRows(page_elements // plane.width, before // plane.width, fill.page_entries)
        before += plane.rows * fill.page_entries * plane.width
    raise InvalidRequest("plane", plane_name, f"one of {[plane.name for plane in group.planes]}")
