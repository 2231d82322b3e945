"""Key ids: prompts with equal placeholder ids share cached pages as far as the contents behind them are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resin import Engine, InvalidRequest, MediaSpan, Request, SamplingParams
from resin.sched.keys import prompt_keys
from tests.fakes import PagedFake, fake_config, history_group, state_group, window_group

MIXES = {
    "history": (history_group(),),
    "window": (window_group(9),),
    "all": (history_group(), window_group(6), state_group(8)),
}
PLACEHOLDER, TOKENS = 7, 96


@st.composite
def spans(draw: Any) -> list[tuple[int, int, int]]:
    """(start, tokens, digest) of up to four spans within the prompt; few digests, so that contents repeat."""
    cuts = sorted(draw(st.sets(st.integers(0, TOKENS - 2), min_size=2, max_size=8)))
    return [(start, stop - start, draw(st.integers(0, 2))) for start, stop in zip(cuts[::2], cuts[1::2], strict=False)]


def media(found: list[tuple[int, int, int]], changed: int = -1) -> list[MediaSpan]:
    """The spans; the content of span `changed` is another."""
    return [
        MediaSpan(start, tokens, bytes([digest + 100 * (i == changed)]))
        for i, (start, tokens, digest) in enumerate(found)
    ]


def prompt_of(found: list[tuple[int, int, int]]) -> list[int]:
    prompt = [(11 * i) % 251 for i in range(TOKENS)]
    for start, tokens, _ in found:
        prompt[start : start + tokens] = [PLACEHOLDER] * tokens
    return prompt


def serve(engine: Engine, prompt: list[int], contents: list[MediaSpan]) -> Request:
    params = SamplingParams(max_output_tokens=3, temperature=0)
    request = engine.submit(prompt, sampling_params=params, media=contents)
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
    return request


@pytest.mark.parametrize("mix", sorted(MIXES))
@settings(max_examples=25, deadline=None)
@given(found=spans(), data=st.data())
def test_equal_placeholders_share_what_their_contents_share(
    mix: str, found: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    prompt = prompt_of(found)
    config = fake_config(MIXES[mix], max_context_tokens=128, max_plan_tokens=32)
    with Engine(PagedFake(config), prefix_cache=True) as engine:
        cache = engine.scheduler.replicas[0].cache
        step = cache.checkpoint_tokens if cache.state_pages else cache.prefixes.align_tokens
        first = serve(engine, prompt, media(found))
        changed = data.draw(st.integers(0, len(found) - 1))
        common = found[changed][0]
        other = serve(engine, prompt, media(found, changed))
        # Nothing from the page on in which the contents begin to differ; the audit does not count it as lost either.
        assert other.prefix_audit is not None
        assert other.prefix_hit_tokens <= common and other.prefix_audit.ceiling_tokens <= common
        if mix == "history":
            assert other.prefix_hit_tokens == common // step * step
        again = serve(engine, prompt, media(found))
        assert again.prefix_hit_tokens == (TOKENS - 1) // step * step
        text = serve(engine, prompt, [])
        assert text.prefix_hit_tokens <= found[0][0]
        assert first.prompt_ids.tolist() == other.prompt_ids.tolist() == prompt, "the model gets the ids as they are"


def test_a_key_names_content_and_place_within_it() -> None:
    ids = np.full(12, PLACEHOLDER, np.int32)
    keys = prompt_keys(ids, [MediaSpan(1, 4, b"a"), MediaSpan(5, 4, b"a"), MediaSpan(9, 2, b"b")])
    assert keys[[0, 11]].tolist() == [PLACEHOLDER] * 2
    assert keys[1:5].tolist() == keys[5:9].tolist() and (keys[1:11] < 0).all()
    assert len(set(keys[1:5].tolist()) | set(keys[9:11].tolist())) == 6
    assert keys[1] == -5817975226614482880, "the same in every process"


def test_keys_of_prompt_and_output() -> None:
    ids = np.full(5, PLACEHOLDER, np.int32)
    request = Request(0, ids, SamplingParams(), seed=0, max_outputs=4, output_ids=[3, 4])
    assert request.key_ids(0, 7).tolist() == [*ids, 3, 4]
    request.prompt_keys = prompt_keys(ids, [MediaSpan(2, 2, b"a")])
    whole = [*request.prompt_keys.tolist(), 3, 4]
    for start in range(8):
        for stop in range(start, 8):
            assert request.key_ids(start, stop).tolist() == whole[start:stop]


@pytest.mark.parametrize(
    ("field", "given_media"),
    [
        ("media[0]", 5),
        ("media[0]", ["picture"]),
        ("media[0].digest", [MediaSpan(0, 2, b"")]),
        ("media[0].digest", [MediaSpan(0, 2, bytes(1025))]),
        ("media[0].digest", [MediaSpan(0, 2, "a")]),  # type: ignore[arg-type]
        ("media[0].start", [MediaSpan(-1, 2, b"a")]),
        ("media[0].start", [MediaSpan(8, 1, b"a")]),
        ("media[0].tokens", [MediaSpan(0, 0, b"a")]),
        ("media[0].tokens", [MediaSpan(6, 3, b"a")]),
        ("media[1].start", [MediaSpan(0, 3, b"a"), MediaSpan(2, 2, b"a")]),
    ],
)
def test_spans_that_cannot_be_are_refused(field: str, given_media: Any) -> None:
    with Engine(PagedFake(fake_config(MIXES["history"])), prefix_cache=True) as engine:
        with pytest.raises(InvalidRequest) as error:
            engine.submit([PLACEHOLDER] * 8, media=given_media)
        assert error.value.field == field
        assert not engine.has_work()
