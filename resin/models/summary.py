"""What a model is before a single weight is read: its weights, its cache, and what fits into a given memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh

from resin.models.declare import Declaration, Placement
from resin.models.families import read_config
from resin.models.weights import AbstractModel
from resin.plan import CacheGeometry, CacheGroup, HistoryGroup, StateGroup, plan_geometry
from resin.plan.cache import entry_bytes, pages_of_sequence
from resin.topology import MESH_AXES, MeshShape


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Weights of the same kind in all layers.

    Attributes:
        name: path in the model, layer numbers as "*".
        count: how many there are.
        shape, dtype: of each.
        sources: checkpoint tensors of the first.
        nbytes: of all.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache group as one device sees it.

    Attributes:
        name, kind: of the group.
        entry_nbytes: bytes of an entry, or of a whole State.
        page_entries: entries that a page holds; pages of a State are counted by `pages_per_state`.
        pages_per_state: 0 for other groups.
        waste: share of its pages that it never uses.
        token_nbytes: page bytes that each token of a sequence adds.
        sequence_nbytes: page bytes that a sequence needs whatever its length, windows full.
    """

    name: str
    kind: str
    entry_nbytes: int
    page_entries: int
    pages_per_state: int
    waste: float
    token_nbytes: float
    sequence_nbytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Everything that can be known from the config.

    Attributes:
        family: class that computes the model.
        config: the model's own Config.
        parameters: numbers in the model; packed weights count what they decode to.
        weight_nbytes: of all weights.
        flops_per_token: of all products with weights.
        weights: by kind.
        page_bytes: of one cache page.
        cache: one row a group.
        mesh: what it is cut over; pages and cache are of one device.
        device_nbytes: of the weights that one device holds.
    """

    family: str
    config: Any
    parameters: int
    weight_nbytes: int
    flops_per_token: int
    weights: tuple[WeightRow, ...]
    page_bytes: int
    cache: tuple[CacheRow, ...]
    mesh: MeshShape
    device_nbytes: int

    @property
    def token_nbytes(self) -> float:
        """Cache bytes that each token of a sequence adds."""
        return sum(row.token_nbytes for row in self.cache)

    @property
    def sequence_nbytes(self) -> int:
        """Cache bytes that a sequence needs whatever its length."""
        return sum(row.sequence_nbytes for row in self.cache)

    def context_that_fits(self, memory_bytes: int, sequences: int = 1) -> int:
        """Tokens that each of a replica's sequences can have beside the weights; 0 if not even the weights fit.

        Temporaries of the programs are not counted; the ledger that a runner prints at start has them.
        """
        left = memory_bytes - self.device_nbytes - sequences * self.sequence_nbytes
        if left < 0:
            return 0
        longest = int(self.config.max_context_tokens)
        return min(longest, int(left / sequences / self.token_nbytes)) if self.token_nbytes else longest


def summarise(
    config: Mapping[str, Any],
    *,
    model: str | None = None,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    mesh: MeshShape = MeshShape(),  # noqa: B008 (frozen)
) -> ModelSummary:
    """Summarises a model on one device, or cut over a mesh of devices that need not be here.

    Args:
        config: Hugging Face style config.
        model: "package.module:Name"; None finds it by `model_type`.
        dtype: of weights that have no dtype of their own.
        cache_dtype: of the arena; None takes dtype.
        mesh: devices along each axis.

    Raises:
        InvalidRequest: the config does not describe a model that can be built, or not one that the mesh divides.
    """
    model_class, parsed = read_config(config, model)
    placement = Placement(dtype, mesh)
    devices: Any = AbstractMesh(tuple(mesh.along(axis) for axis in MESH_AXES), MESH_AXES)
    abstract = AbstractModel.of(model_class(parsed, placement))
    groups = model_class.cache_groups(parsed, placement)
    geometry = plan_geometry(groups, arena_dtype=cache_dtype or dtype)
    return ModelSummary(
        family=getattr(model_class, "__name__", str(model_class)),
        config=parsed,
        parameters=sum(count_parameters(item) for item in abstract.declarations),
        weight_nbytes=abstract.nbytes,
        flops_per_token=abstract.flops_per_token,
        weights=_weight_rows(abstract),
        page_bytes=geometry.page_bytes,
        cache=_cache_rows(groups, geometry, cache_dtype or dtype),
        mesh=mesh,
        device_nbytes=abstract.device_nbytes(devices),
    )


def count_parameters(declaration: Declaration) -> int:
    """Numbers behind a weight."""
    return int(np.prod(declaration.shape)) if declaration.parameters is None else declaration.parameters


def _weight_rows(abstract: AbstractModel) -> tuple[WeightRow, ...]:
    kinds: dict[tuple[str, tuple[int, ...]], list[Declaration]] = {}
    for name, declaration in zip(abstract.names, abstract.declarations, strict=True):
        kinds.setdefault((re.sub(r"\.\d+\.", ".*.", name), declaration.shape), []).append(declaration)
    return tuple(
        WeightRow(
            name, len(items), shape, items[0].dtype, items[0].sources, sum(declaration.nbytes for declaration in items)
        )
        for (name, shape), items in kinds.items()
    )


def _cache_rows(groups: tuple[CacheGroup, ...], geometry: CacheGeometry, dtype: str) -> tuple[CacheRow, ...]:
    rows = []
    for group, fill in zip(groups, geometry.groups, strict=True):
        token, sequence = 0.0, 0
        if isinstance(group, HistoryGroup):
            token = geometry.page_bytes / fill.span_tokens
        elif isinstance(group, StateGroup):
            sequence = fill.pages_per_state * geometry.page_bytes
        else:
            sequence = pages_of_sequence(group, fill, group.window_tokens + 2 * fill.span_tokens) * geometry.page_bytes
        rows.append(
            CacheRow(
                name=group.name,
                kind=type(group).__name__.removesuffix("Group"),
                entry_nbytes=entry_bytes(group, dtype),
                page_entries=fill.page_entries,
                pages_per_state=fill.pages_per_state,
                waste=fill.waste,
                token_nbytes=token,
                sequence_nbytes=sequence,
            )
        )
    return tuple(rows)
