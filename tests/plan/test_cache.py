"""Page geometry of the cache groups of real models, and of odd ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from resin import CacheGeometry, CacheGroup, HistoryGroup, InvalidRequest, Plane, StateGroup, WindowGroup, plan_geometry
from resin.plan.cache import ITEMSIZE, GroupGeometry, entry_bytes, fp8_scales, pages_of_sequence, with_kv_dtype


def kv(layers: int, heads: int, width: int) -> tuple[Plane]:
    return (Plane("kv", layers * 2 * heads, width),)


def conv(rows: int, width: int) -> StateGroup:
    return StateGroup("conv", (Plane("state", rows, width),))


# Layers, heads and widths as in the models' configurations; states in float32 where the models keep them so.
MODELS: dict[str, tuple[CacheGroup, ...]] = {
    "LFM2-350M": (HistoryGroup("history", kv(6, 8, 64)), conv(10 * 2, 1024)),
    "LFM2-1.2B": (HistoryGroup("history", kv(6, 8, 64)), conv(10 * 2, 2048)),
    "LFM2-8B-A1B": (HistoryGroup("history", kv(6, 8, 64)), conv(18 * 2, 2048)),
    "LFM3-1.7B": (HistoryGroup("history", kv(6, 4, 128)), WindowGroup("window", kv(5, 4, 128), 256), conv(78, 2048)),
    "SmolLM2-135M": (HistoryGroup("history", kv(30, 3, 64)),),
    "Llama-3.1-8B": (HistoryGroup("history", kv(32, 8, 128)),),
    "Llama-3.2-1B": (HistoryGroup("history", kv(16, 8, 64)),),
    "Qwen3-0.6B": (HistoryGroup("history", kv(28, 8, 128)),),
    "Qwen3-8B": (HistoryGroup("history", kv(36, 8, 128)),),
    "Qwen3-30B-A3B": (HistoryGroup("history", kv(48, 4, 128)),),
    "Gemma3-270m": (HistoryGroup("history", kv(3, 1, 256)), WindowGroup("window", kv(15, 1, 256), 512)),
    "gpt-oss-20b": (HistoryGroup("history", kv(12, 8, 64)), WindowGroup("window", kv(12, 8, 64), 128)),
    "gpt-oss-120b": (HistoryGroup("history", kv(18, 8, 64)), WindowGroup("window", kv(18, 8, 64), 128)),
    "DeepSeek-V4-Flash": (
        HistoryGroup("csa", (Plane("latent", 21, 512), Plane("index", 21, 128)), 4),
        HistoryGroup("hca", (Plane("latent", 20, 512),), 128),
        WindowGroup("window", (Plane("kv", 43, 512),), 128),
        StateGroup("sums", (Plane("hca", 20, 1536, "float32"), Plane("csa", 21, 3840, "float32"))),
    ),
    "DeepSeek-V4.1-Flash": (
        HistoryGroup("pairs", (Plane("latent", 3, 512), Plane("index", 3, 128)), 2),
        HistoryGroup("tokens", (Plane("latent", 1, 512), Plane("index", 1, 128))),
        WindowGroup("window", (Plane("kv", 40, 512),), 128),
        StateGroup("pending", (Plane("sums", 3, 1280, "float32"),)),
    ),
    "GLM-5": (HistoryGroup("history", (Plane("latent", 78, 512), Plane("rope", 78, 64), Plane("index", 78, 128))),),
    "GLM-5.2": (HistoryGroup("history", (Plane("latent", 78, 576), Plane("index", 21, 128))),),
    "GLM-4.7-Flash": (HistoryGroup("history", (Plane("latent", 47, 576),)),),
    "GLM-5.3-Flash": (
        HistoryGroup("latent", (Plane("latent", 11, 512),)),
        HistoryGroup("index", (Plane("index", 11, 128),), 4),
        StateGroup("kda", (Plane("conv", 34 * 3, 24_576), Plane("state", 34 * 64 * 128, 128, "float32")), 4096),
    ),
}
CONTEXT_TOKENS = 4096


def check(groups: Sequence[CacheGroup], geometry: CacheGeometry, dtype: str) -> None:
    """What every geometry must satisfy, computed from the groups alone."""
    assert geometry.page_bytes % ITEMSIZE[dtype] == 0
    spans, spacings = [], []
    for group, fill in zip(groups, geometry.groups, strict=True):
        size = 0
        for plane in group.planes:
            vector = plane.width * ITEMSIZE[plane.dtype or dtype]
            assert geometry.page_bytes % vector == 0, "rows of a plane must tile the arena"
            assert size * fill.page_entries % vector == 0, "planes must start on a row of theirs"
            size += plane.rows * vector
        assert size == entry_bytes(group, dtype)
        if isinstance(group, StateGroup):
            pages = -(-size // geometry.page_bytes)
            assert (fill.page_entries, fill.span_tokens, fill.pages_per_state) == (1, 0, pages)
            assert fill.waste == pytest.approx(1 - size / (pages * geometry.page_bytes))
            spacings.append(group.checkpoint_tokens)
            continue
        assert fill.pages_per_state == 0 and fill.page_entries * size <= geometry.page_bytes
        assert fill.span_tokens == fill.page_entries * group.tokens_per_entry
        assert fill.waste == pytest.approx(1 - fill.page_entries * size / geometry.page_bytes)
        spans.append(fill.span_tokens)
    assert geometry.align_tokens == (math.lcm(*spans) if spans else max(spacings))
    assert geometry.checkpoint_tokens % geometry.align_tokens == 0
    if spacings:
        assert 0 <= geometry.checkpoint_tokens - max(spacings) < geometry.align_tokens
    else:
        assert geometry.checkpoint_tokens == geometry.align_tokens


@pytest.mark.parametrize("name", sorted(MODELS))
def test_real_models_waste_little_and_align_often(name: str) -> None:
    groups = MODELS[name]
    geometry = plan_geometry(groups, arena_dtype="bfloat16")
    check(groups, geometry, "bfloat16")
    needed = leased = 0.0
    for group, fill in zip(groups, geometry.groups, strict=True):
        size = entry_bytes(group, "bfloat16")
        if isinstance(group, StateGroup):
            needed, pages = needed + 2 * size, 2 * fill.pages_per_state
        elif isinstance(group, WindowGroup):
            needed, pages = needed + size * group.window_tokens, -(-group.window_tokens // fill.span_tokens) + 1
        else:
            needed, pages = (
                needed + size * CONTEXT_TOKENS / group.tokens_per_entry,
                -(-CONTEXT_TOKENS // fill.span_tokens),
            )
            assert fill.waste <= 0.25
        leased += pages * geometry.page_bytes
        assert fill.span_tokens == 0 or fill.span_tokens >= 16, "short runs are slow to read"
    assert leased <= 1.25 * needed
    assert geometry.align_tokens <= (4096 if "DeepSeek" in name else 256)
    assert geometry.checkpoint_tokens <= 4096


def test_sizes_that_the_models_are_known_for() -> None:
    """Bytes a token, a window and a state, as their publications give them."""

    def size(name: str, index: int) -> float:
        group = MODELS[name][index]
        return entry_bytes(group, "bfloat16") / getattr(group, "tokens_per_entry", 1)

    assert size("Llama-3.1-8B", 0) == 131_072 and size("SmolLM2-135M", 0) == 23_040
    assert size("DeepSeek-V4-Flash", 0) + size("DeepSeek-V4-Flash", 1) == 6_880
    assert size("GLM-5", 0) == 109_824 and size("GLM-4.7-Flash", 0) == 54_144
    assert size("LFM2-350M", 1) == 40_960 and size("LFM3-1.7B", 2) == 319_488
    assert size("GLM-5.3-Flash", 2) == 34 * (4_194_304 + 147_456)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_the_page_size_can_be_told(page_tokens: int) -> None:
    for name in ("Llama-3.1-8B", "gpt-oss-20b", "LFM3-1.7B"):
        geometry = plan_geometry(MODELS[name], arena_dtype="bfloat16", page_tokens=page_tokens)
        check(MODELS[name], geometry, "bfloat16")
        assert geometry.groups[0].span_tokens == page_tokens


def test_a_page_that_holds_no_entry_is_refused() -> None:
    for groups, page_tokens in (
        (MODELS["DeepSeek-V4.1-Flash"], 16),  # a page of 8 pairs is smaller than a Window entry
        ((HistoryGroup("h", (Plane("a", 1, 8),), 128),), 64),
    ):
        with pytest.raises(InvalidRequest, match="page_tokens"):
            plan_geometry(groups, arena_dtype="bfloat16", page_tokens=page_tokens)


@pytest.mark.parametrize("size_bytes", [40_000, 147_456, 1 << 20, 140 << 20])
def test_states_of_any_size_alone_and_beside_history(size_bytes: int) -> None:
    state = StateGroup("state", (Plane("s", size_bytes // 16, 4, "float32"),))
    for groups in ((state,), (HistoryGroup("history", kv(6, 8, 64)), state)):
        geometry = plan_geometry(groups, arena_dtype="bfloat16")
        check(groups, geometry, "bfloat16")
        assert geometry.page_bytes <= 4 << 20
        assert geometry.checkpoint_tokens == 512


def test_several_states_share_the_widest_spacing() -> None:
    groups = (StateGroup("a", (Plane("s", 4, 4),), 100), StateGroup("b", (Plane("s", 64, 4),), 300))
    geometry = plan_geometry(groups, arena_dtype="float32")
    check(groups, geometry, "float32")
    assert geometry.align_tokens == geometry.checkpoint_tokens == 300


def test_no_groups() -> None:
    assert plan_geometry((), arena_dtype="float32") == CacheGeometry(0, (), 1, 1)


PLANE = (Plane("p", 1, 1),)


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (HistoryGroup("h", ()), "h.planes"),
        (HistoryGroup("h", (Plane("p", 0, 4),)), "h.p"),
        (HistoryGroup("h", (Plane("p", 4, 0),)), "h.p"),
        (HistoryGroup("h", (Plane("p", 4, 4, "int4"),)), "h.p.dtype"),
        (HistoryGroup("h", PLANE, 0), "h.tokens_per_entry"),
        (WindowGroup("w", PLANE, 0), "w.window_tokens"),
        (WindowGroup("w", PLANE, 8, 0), "w.tokens_per_entry"),
        (StateGroup("s", PLANE, 0), "s.checkpoint_tokens"),
        (StateGroup("s", (Plane("narrow", 3, 4), Plane("wide", 3, 8))), "s.planes"),
    ],
)
def test_groups_that_cannot_be_laid_out_are_refused(group: CacheGroup, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        plan_geometry((group,), arena_dtype="float32")
    assert error.value.field == field


@st.composite
def group_mixes(draw: Any) -> tuple[CacheGroup, ...]:
    def planes(most: int = 3) -> tuple[Plane, ...]:
        widths = st.sampled_from((1, 3, 33, 64, 100, 128, 257, 512, 576))
        dtypes = st.sampled_from((None, "float32", "uint8", "float8_e4m3fn"))
        count = draw(st.integers(1, most))
        return tuple(Plane(f"p{i}", draw(st.integers(1, 60)), draw(widths), draw(dtypes)) for i in range(count))

    groups: list[CacheGroup] = []
    for i in range(draw(st.integers(1, 4))):
        kind, ratio = draw(st.integers(0, 2)), draw(st.sampled_from((1, 2, 4, 128)))
        if kind == 0:
            groups.append(HistoryGroup(f"h{i}", planes(), ratio))
        elif kind == 1:
            groups.append(WindowGroup(f"w{i}", planes(), draw(st.integers(1, 5000)), ratio))
        else:
            groups.append(StateGroup(f"s{i}", planes(1), draw(st.integers(1, 5000))))
    return tuple(groups)


@given(groups=group_mixes(), dtype=st.sampled_from(("float32", "bfloat16", "uint16")))
@settings(max_examples=80, deadline=None)
def test_any_mix_of_odd_groups_is_laid_out_soundly(groups: tuple[CacheGroup, ...], dtype: str) -> None:
    check(groups, plan_geometry(groups, arena_dtype=dtype), dtype)


def test_planes_whose_entries_do_not_divide_are_padded_to_where_they_do() -> None:
    """Three rows of 32 values before rows of 64: an even number of entries puts the second plane on a whole row."""
    group = HistoryGroup("h", (Plane("narrow", 3, 32), Plane("wide", 1, 64)))
    for page_tokens in (15, 16, 17, None):
        geometry = plan_geometry((group,), arena_dtype="bfloat16", page_tokens=page_tokens)
        check((group,), geometry, "bfloat16")
        assert geometry.groups[0].page_entries % 2 == 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_pages_are_filled(name: str) -> None:
    """No group leaves room for twice the entries; the one that set the page size leaves no more than its rounding."""
    groups = MODELS[name]
    geometry = plan_geometry(groups, arena_dtype="bfloat16")
    paged = [fill for fill in geometry.groups if fill.span_tokens]
    assert all(fill.waste < 0.5 for fill in paged)
    assert min(fill.waste for fill in paged) < 0.1


@pytest.mark.parametrize(("arena", "ratio"), [("uint16", 2), ("float32", 4)])
def test_narrow_planes_shrink_pages_and_leave_states_alone(arena: str, ratio: int) -> None:
    """8-bit planes: entries take 1 / ratio of the bytes, pages stay whole elements, declared dtypes stay."""
    kept = Plane("index", 2, 64, "uint8")
    groups = (
        HistoryGroup("h", (Plane("kv", 4, 64), kept)),
        WindowGroup("w", (Plane("kv", 8, 64),), 100),
        StateGroup("s", (Plane("conv", 3, 64),)),
    )
    narrow = with_kv_dtype(groups, "float8_e4m3fn", scale=0.5, arena_dtype=arena)
    assert [plane.dtype for group in narrow for plane in group.planes] == [
        "float8_e4m3fn",
        "uint8",
        "float8_e4m3fn",
        None,
    ]
    assert narrow[0].planes[1] == kept and narrow[2] == groups[2]
    assert fp8_scales(narrow) == {"h": 0.5, "w": 0.5} and fp8_scales(groups) == {}
    assert entry_bytes(groups[1], arena) == ratio * entry_bytes(narrow[1], arena)
    check(narrow, plan_geometry(narrow, arena_dtype=arena), arena)


def test_vectors_of_broken_elements_are_refused() -> None:
    groups = (HistoryGroup("h", (Plane("kv", 4, 66),)),)
    assert with_kv_dtype(groups, "float8_e4m3fn", scale=1.0, arena_dtype="uint16")
    with pytest.raises(InvalidRequest, match=r"h\.kv\.width=66: .*float32 elements"):
        with_kv_dtype(groups, "float8_e4m3fn", scale=1.0, arena_dtype="float32")
    with pytest.raises(InvalidRequest, match=r"kv\.scale"):
        plan_geometry((HistoryGroup("h", (Plane("kv", 4, 64, "float8_e4m3fn", scale=0.0),)),), arena_dtype="uint16")


@pytest.mark.parametrize("span", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 33])
def test_pages_of_a_sequence_are_those_that_its_new_tokens_see(span: int, window: int) -> None:
    history, fill = HistoryGroup("h", (Plane("kv", 1, 4),)), GroupGeometry(span, span, 0, 0.0)
    cyclic = WindowGroup("w", (Plane("kv", 1, 4),), window)
    for tokens in range(1, 80):
        for new in range(1, min(tokens, 24) + 1):
            starts = range(tokens - new + 1)
            seen = max((start + new - 1) // span - max(start - window + 1, 0) // span + 1 for start in starts)
            bound = pages_of_sequence(cyclic, fill, tokens, new)
            assert seen <= bound <= seen + 1
            assert pages_of_sequence(history, fill, tokens, new) == -(-tokens // span)
    assert pages_of_sequence(StateGroup("s", (Plane("s", 1, 4),)), GroupGeometry(1, 0, 3, 0.0), 9) == 3
