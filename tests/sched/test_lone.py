"""Whatever `submit` lets in can run alone: any page spans, the smallest pools, every prompt length, small chunks."""

from __future__ import annotations

import pytest

from resin import CacheGroup, Engine, FinishedEvent, FinishReason, InvalidRequest, RunnerConfig, SamplingParams
from resin.sched.cache import CacheManager, OutOfPages
from tests.fakes import (
    VOCAB,
    OverlapFake,
    PagedFake,
    expected_tokens,
    fake_config,
    history_group,
    state_group,
    window_group,
)


def uneven(history: int, windows: dict[int, int], *, context: int, chunk: int, checkpoint: int = 0) -> RunnerConfig:
    """Pages of `history` tokens beside Window pages of other spans (span -> window tokens), perhaps with a State."""
    groups: list[CacheGroup] = [
        history_group(),
        *(window_group(tokens, f"w{span}") for span, tokens in windows.items()),
    ]
    spans = [history, *windows]
    if checkpoint:
        groups.append(state_group(checkpoint))
        spans.append(0)
    return fake_config(tuple(groups), spans=spans, max_context_tokens=context, max_plan_tokens=chunk, buckets=False)


def least_pages(config: RunnerConfig, *, prefix_cache: bool) -> int:
    """The smallest arena, scratch included, that the Engine accepts."""
    cache = CacheManager(config.groups, config.geometry, 0, prefix_cache=prefix_cache)
    return 1 + cache.pages_needed(config.max_context_tokens, 1)


def run_alone(
    config: RunnerConfig, prompt_tokens: int, pages: int, *, prefix_cache: bool, overlap: int, outputs: int = 10**6
) -> None:
    """One request, to its end or that of the context, and with its exact tokens."""
    runner = (OverlapFake if overlap else PagedFake)(config)
    prompt = [(7 * i + prompt_tokens) % VOCAB for i in range(prompt_tokens)]
    with Engine(runner, cache_pages=pages, prefix_cache=prefix_cache, overlap=overlap) as engine:
        request = engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=outputs, temperature=0))
        while engine.has_work():
            engine.step()
        engine.scheduler.check_integrity()
    assert request.finish_reason is FinishReason.LENGTH, f"{prompt_tokens} tokens on {pages} pages: {request.error}"
    assert request.take_result() == expected_tokens(config, prompt, request.max_outputs)


SPANS: dict[str, tuple[int, dict[int, int]]] = {
    "5 and 2": (5, {2: 7}),
    "15 and 7": (15, {7: 20}),
    "2 and 5": (2, {5: 9}),
    "3, 4 and 7": (3, {4: 5, 7: 17}),
    "4 and 4": (4, {4: 6}),
}


@pytest.mark.parametrize("spans", sorted(SPANS))
def test_every_prompt_length_runs_in_the_smallest_pools(spans: str) -> None:
    history, windows = SPANS[spans]
    for chunk in (1, 3, 16):
        config = uneven(history, windows, context=30, chunk=chunk)
        least = least_pages(config, prefix_cache=False)
        with pytest.raises(InvalidRequest, match="context_length"):
            Engine(PagedFake(config), cache_pages=least - 1)
        for prompt_tokens in range(1, 30):
            cached, overlap, spare = prompt_tokens % 2 > 0, prompt_tokens % 3, prompt_tokens % 5
            run_alone(config, prompt_tokens, least + spare, prefix_cache=cached, overlap=overlap, outputs=6)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("spans", sorted(SPANS))
def test_every_prompt_length_runs_in_every_small_pool(spans: str, chunk: int, overlap: int, prefix_cache: bool) -> None:
    history, windows = SPANS[spans]
    config = uneven(history, windows, context=36, chunk=chunk)
    least = least_pages(config, prefix_cache=prefix_cache)
    for pages in range(least, least + 6):
        for prompt_tokens in range(1, 36):
            run_alone(config, prompt_tokens, pages, prefix_cache=prefix_cache, overlap=overlap)


@pytest.mark.parametrize("prompt_tokens", [88, 150, 177, 263])
def test_the_spans_of_gemma_3_run_alone(prompt_tokens: int) -> None:
    config = uneven(88, {16: 40}, context=270, chunk=64)
    least = least_pages(config, prefix_cache=False)
    for spare in (0, 1, 3):
        run_alone(config, prompt_tokens, least + spare, prefix_cache=False, overlap=spare, outputs=12)


@pytest.mark.parametrize("overlap", [0, 2])
def test_spans_that_do_not_divide_run_alone_beside_a_state(overlap: int) -> None:
    config = uneven(5, {2: 7}, context=44, chunk=16, checkpoint=10)
    least = least_pages(config, prefix_cache=True)
    for prompt_tokens in range(1, 44, 2):
        run_alone(config, prompt_tokens, least, prefix_cache=True, overlap=overlap, outputs=12)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_without_room_ends_alone_and_says_why(overlap: int) -> None:
    """No request that was let in gets there; should one, the others must not pay for it."""
    config = uneven(5, {2: 7}, context=40, chunk=16)
    runner = (OverlapFake if overlap else PagedFake)(config)
    with Engine(runner, cache_pages=least_pages(config, prefix_cache=False), overlap=overlap) as engine:
        assert engine.scheduler.replicas[0].cache.pool.try_reserve(8) is not None  # gone, and nobody gives them back
        params = SamplingParams(max_output_tokens=30, temperature=0)
        large = engine.submit([1] * 20, sampling_params=params)
        small = engine.submit([2, 3], sampling_params=SamplingParams(max_output_tokens=4, temperature=0))
        events = []
        while engine.has_work():
            events += engine.step()
        assert large.finish_reason is FinishReason.ERROR
        assert isinstance(large.error, OutOfPages) and "pages" in str(large.error)
        assert small.take_result() == expected_tokens(config, [2, 3], 4)
        assert sum(isinstance(event, FinishedEvent) for event in events) == 2
        again = engine.submit([2, 3], sampling_params=SamplingParams(max_output_tokens=4, temperature=0))
        while engine.has_work():
            engine.step()
        assert again.take_result() == small.take_result()


def test_pages_of_a_chunk_go_to_those_who_wait() -> None:
    """A long prompt leaves a Window row as wide as its last chunk, which decoding alone gives up much later."""
    config = uneven(64, {4: 5}, context=80, chunk=32)
    with Engine(PagedFake(config), cache_pages=15, overlap=0) as engine:
        long = engine.submit([1] * 32, sampling_params=SamplingParams(max_output_tokens=30, temperature=0))
        short = engine.submit([2] * 20, sampling_params=SamplingParams(max_output_tokens=2, temperature=0))
        while not short.is_finished:
            engine.step()
        assert len(long.output_ids) <= 4, "it waited for the other to end, or to cross a page"
