"""Cache groups: what a model keeps per token or per sequence, and how that fills pages.

One arena of `num_pages` equal pages serves every group. Inside a page a group stores its planes one after
another, each as `[rows, page_entries, width]`, so element `(row, entry, w)` of a plane lies at
`plane_offset + (row * page_entries + entry) * width + w` of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resin.plan.errors import InvalidRequest

FP8_DTYPE = "float8_e4m3fn"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint16": 2, FP8_DTYPE: 1, "uint8": 1, "int32": 4}

# Page geometry is chosen for a sequence of this length (the median Mooncake conversation is 6.9k tokens, a chat 1k).
REFERENCE_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Plane:
    """One array behind a group's page row: `rows` vectors of `width` values an entry.

    Attributes:
        name: how models address it, for example "kv" or "latent".
        rows: vectors an entry, usually layers * 2 * kv_heads.
        width: values a vector, usually head_dim.
        dtype: dtype of the values; None takes the arena's. A wider or narrower one is bitcast on gathered rows.
        scale: 8-bit floats are stored as value / scale.
    """

    name: str
    rows: int
    width: int
    dtype: str | None = None
    scale: float = 1.0

    def bytes_per_entry(self, arena_dtype: str) -> int:
        return self.rows * self.vector_bytes(arena_dtype)

    def vector_bytes(self, arena_dtype: str) -> int:
        return self.width * ITEMSIZE[self.dtype or arena_dtype]


@dataclass(frozen=True, slots=True)
class HistoryGroup:
    """Entries for every token of the sequence; grows on demand.

    Attributes:
        tokens_per_entry: tokens that one entry stands for (1, 2, 4 or 128 in known models); only complete
            entries are written and visible.
    """

    name: str
    planes: tuple[Plane, ...]
    tokens_per_entry: int = 1


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Entries for the last `window_tokens` tokens, the current one included; bounded cyclic storage."""

    name: str
    planes: tuple[Plane, ...]
    window_tokens: int
    tokens_per_entry: int = 1


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One recurrent state a sequence, stored as one entry in a whole number of pages.

    Attributes:
        checkpoint_tokens: distance between states that the prefix cache keeps; rounded up to the
            alignment of the other groups.
        copies: states that a sequence holds side by side: one for each token of a decode plan's row, since only the
            step itself finds out how many of its drafts hold. Which of them is true, the device's slot knows.
    """

    name: str
    planes: tuple[Plane, ...]
    checkpoint_tokens: int = 512
    copies: int = 1


CacheGroup = HistoryGroup | WindowGroup | StateGroup


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """How one group fills pages.

    Attributes:
        page_entries: entries a page holds (1 for a State).
        span_tokens: tokens a page stands for (0 for a State).
        pages_per_state: pages that one sequence's State takes, copies included (0 for other groups).
        waste: share of the page bytes that the group never uses.
    """

    page_entries: int
    span_tokens: int
    pages_per_state: int
    waste: float


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Page size and per-group fill, in the order of the groups.

    Attributes:
        page_bytes: bytes of one page on one device.
        groups: one GroupGeometry a group.
        align_tokens: a prefix that ends on a multiple of this is aligned for every History and Window group.
        checkpoint_tokens: distance of State checkpoints, a multiple of align_tokens; equals it without a State.
    """

    page_bytes: int
    groups: tuple[GroupGeometry, ...]
    align_tokens: int
    checkpoint_tokens: int


def plan_geometry(groups: Sequence[CacheGroup], *, arena_dtype: str, page_tokens: int | None = None) -> CacheGeometry:
    """Chooses the page size that wastes least over a reference sequence, and each group's fill.

    Args:
        groups: the model's cache groups; may be empty (a runner that keeps its own cache).
        arena_dtype: dtype of the arena's elements.
        page_tokens: tokens a page of the first History or Window group; None searches 16 to 128 entries.

    Raises:
        InvalidRequest: a group cannot be laid out (no planes, bad sizes or order, or a page too small for it).
    """
    for group in groups:
        _check_group(group, arena_dtype)
    if not groups:
        return CacheGeometry(page_bytes=0, groups=(), align_tokens=1, checkpoint_tokens=1)
    # Pages are whole vectors of every plane, and planes start on whole vectors: one index addresses a row.
    unit = math.lcm(
        *(plane.vector_bytes(arena_dtype) for group in groups for plane in group.planes), ITEMSIZE[arena_dtype]
    )
    best: tuple[float, int, CacheGeometry] | None = None
    for page_bytes in _candidates(groups, arena_dtype, page_tokens, unit):
        for power_of_two in (False, True):
            geometry = _fill(groups, arena_dtype, page_bytes, power_of_two)
            if geometry is None:
                continue
            cost = _reference_cost(groups, geometry)
            if best is None or (cost, page_bytes) < best[:2]:
                best = (cost, page_bytes, geometry)
    if best is None:
        raise InvalidRequest("page_tokens", page_tokens, "a page that holds at least one entry of every group")
    return best[2]


def pages_of_sequence(group: CacheGroup, fill: GroupGeometry, tokens: int, new_tokens: int = 1) -> int:
    """Pages of a group that a plan sees of one sequence at most.

    Args:
        group, fill: the group and its geometry.
        tokens: length of the sequence, the new tokens included.
        new_tokens: how many of them the plan computes.
    """
    if isinstance(group, StateGroup):
        return fill.pages_per_state
    whole = -(-tokens // fill.span_tokens)
    if isinstance(group, WindowGroup):
        # What the first new token sees, the new tokens, and a page cut at either end.
        return min(whole, (group.window_tokens + new_tokens - 2) // fill.span_tokens + 2)
    return whole


def with_kv_dtype(
    groups: Sequence[CacheGroup], dtype: str, *, scale: float, arena_dtype: str
) -> tuple[CacheGroup, ...]:
    """The groups with the planes of History and Window groups in another dtype; planes that declare one keep it.

    Args:
        dtype: an 8-bit float.
        scale: values are stored as value / scale.
        arena_dtype: dtype of the arena's elements, of which a vector must fill a whole number.

    Raises:
        InvalidRequest: a vector does not.
    """

    def change(group: CacheGroup) -> CacheGroup:
        if isinstance(group, StateGroup):
            return group
        planes = [
            plane if plane.dtype is not None else replace(plane, dtype=dtype, scale=scale) for plane in group.planes
        ]
        for plane in planes:
            if plane.vector_bytes(arena_dtype) % ITEMSIZE[arena_dtype]:
                raise InvalidRequest(
                    f"{group.name}.{plane.name}.width",
                    plane.width,
                    f"{dtype} vectors of whole {arena_dtype} elements of the arena",
                )
        return replace(group, planes=tuple(planes))

    return tuple(map(change, groups))


def fp8_scales(groups: Sequence[CacheGroup]) -> dict[str, float]:
    """The scale of each group that keeps 8-bit floats, by its name."""
    return {group.name: plane.scale for group in groups for plane in group.planes if plane.dtype == FP8_DTYPE}


def entry_bytes(group: CacheGroup, arena_dtype: str) -> int:
    """Bytes of one entry (for a State: of the whole state)."""
    return sum(plane.bytes_per_entry(arena_dtype) for plane in group.planes)


def _entry_step(group: CacheGroup, arena_dtype: str) -> int:
    """Every plane of a page starts on a whole vector if the page holds a multiple of this many entries."""
    step, before = 1, 0
    for plane in group.planes:
        vector = plane.vector_bytes(arena_dtype)
        step = math.lcm(step, vector // math.gcd(vector, before))
        before += plane.bytes_per_entry(arena_dtype)
    return step


def _check_group(group: CacheGroup, arena_dtype: str) -> None:
    if not group.planes:
        raise InvalidRequest(f"{group.name}.planes", group.planes, "at least one plane")
    for plane in group.planes:
        if plane.rows < 1 or plane.width < 1:
            raise InvalidRequest(
                f"{group.name}.{plane.name}", (plane.rows, plane.width), "rows and width of at least 1"
            )
        if not 0 < plane.scale < math.inf:
            raise InvalidRequest(f"{group.name}.{plane.name}.scale", plane.scale, "a finite number above 0")
        if plane.dtype is not None and plane.dtype not in ITEMSIZE:
            raise InvalidRequest(f"{group.name}.{plane.name}.dtype", plane.dtype, f"one of {sorted(ITEMSIZE)}")
    if not isinstance(group, StateGroup) and group.tokens_per_entry < 1:
        raise InvalidRequest(f"{group.name}.tokens_per_entry", group.tokens_per_entry, "at least 1")
    if isinstance(group, WindowGroup) and group.window_tokens < 1:
        raise InvalidRequest(f"{group.name}.window_tokens", group.window_tokens, "at least 1")
    if isinstance(group, StateGroup) and group.checkpoint_tokens < 1:
        raise InvalidRequest(f"{group.name}.checkpoint_tokens", group.checkpoint_tokens, "at least 1")
    if isinstance(group, StateGroup) and group.copies < 1:
        raise InvalidRequest(f"{group.name}.copies", group.copies, "at least 1")
    if isinstance(group, StateGroup) and _entry_step(group, arena_dtype) > 1:
        widths = [plane.vector_bytes(arena_dtype) for plane in group.planes]
        raise InvalidRequest(f"{group.name}.planes", widths, "an order in which each plane starts on a whole vector")


def _candidates(groups: Sequence[CacheGroup], arena_dtype: str, page_tokens: int | None, unit: int) -> list[int]:
    paged = [group for group in groups if not isinstance(group, StateGroup)]
    sizes: set[int] = set()
    for group in paged[:1] if page_tokens else paged:
        step = _entry_step(group, arena_dtype)
        counts = [page_tokens // group.tokens_per_entry] if page_tokens else [step << power for power in range(8)]
        for count in counts:
            if count and (page_tokens or count * group.tokens_per_entry >= 16):
                sizes.add(-(-count * entry_bytes(group, arena_dtype) // unit) * unit)
    if not paged:
        # Pure State models: one page a state, up to 4 MiB, so that large states share the pool with small ones.
        sizes.add(-(-min(max(entry_bytes(group, arena_dtype) for group in groups), 4 << 20) // unit) * unit)
    return sorted(sizes)


def _fill(groups: Sequence[CacheGroup], arena_dtype: str, page_bytes: int, power_of_two: bool) -> CacheGeometry | None:
    filled: list[GroupGeometry] = []
    for group in groups:
        size = entry_bytes(group, arena_dtype)
        if isinstance(group, StateGroup):
            pages = -(-size // page_bytes)
            filled.append(GroupGeometry(1, 0, pages * group.copies, 1 - size / (pages * page_bytes)))
            continue
        step = _entry_step(group, arena_dtype)
        steps = page_bytes // size // step
        if steps == 0:
            return None
        # Powers of two keep the common alignment of all groups small, at the price of some waste.
        if power_of_two:
            steps = 1 << (steps.bit_length() - 1)
        entries = steps * step
        filled.append(GroupGeometry(entries, entries * group.tokens_per_entry, 0, 1 - entries * size / page_bytes))
    spans = [geometry.span_tokens for geometry in filled if geometry.span_tokens]
    spacings = [group.checkpoint_tokens for group in groups if isinstance(group, StateGroup)]
    align = math.lcm(*spans) if spans else max(spacings)
    checkpoint = -(-max(spacings) // align) * align if spacings else align
    return CacheGeometry(page_bytes, tuple(filled), align, checkpoint)


def _reference_cost(groups: Sequence[CacheGroup], geometry: CacheGeometry) -> float:
    """Page bytes that a reference sequence leases, weighted by half an alignment of lost prefix reuse.

    Pages of less than 16 tokens (short contiguous runs for kernels, long rows for the host) count double.
    """
    pages = 0.0
    for group, fill in zip(groups, geometry.groups, strict=True):
        if isinstance(group, StateGroup):
            pages += 2 * fill.pages_per_state
        elif isinstance(group, WindowGroup):
            pages += group.window_tokens / fill.span_tokens + 1
        else:
            pages += REFERENCE_CONTEXT_TOKENS / fill.span_tokens + 0.5
    lost_reuse = 1 + geometry.align_tokens / 2 / REFERENCE_CONTEXT_TOKENS
    short = 2 if any(0 < fill.span_tokens < 16 for fill in geometry.groups) else 1
    return pages * geometry.page_bytes * lost_reuse * short
