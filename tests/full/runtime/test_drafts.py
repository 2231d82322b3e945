"""Drafts through the bodies of kernels, interpreted: tokens are those of steps without."""

from __future__ import annotations

import numpy as np

from resin import Engine, SamplingParams
from resin.conformance.drafts import Script
from resin.runtime import ModelRunner, build_runner
from tests.runtime.tiny_runner import tiny_checkpoint, tiny_options

PROMPTS = [np.random.default_rng(n).integers(3, 200, 12 + n).tolist() for n in range(2)]


def tokens(runner: ModelRunner) -> tuple[list[list[int]], int, int]:
    """The answers, and how many drafts were checked and held on the way."""
    params = SamplingParams(max_output_tokens=16, temperature=0, ignore_stop=True)
    with Engine(runner, overlap=1) as engine:
        requests = [engine.submit(prompt, sampling_params=params) for prompt in PROMPTS]
        while engine.has_work():
            engine.step()
        drafts = engine.scheduler.drafts
        return [request.take_result() for request in requests], int(drafts.tried.sum()), int(drafts.agreed.sum())


def test_kernels_check_drafts() -> None:
    """Attention to pages and states with copies; nothing is measured here, so that drafts cost nothing."""
    checkpoint = tiny_checkpoint("lfm2")
    options = {
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "kernels": "interpret",
        "max_sequences": 2,
        "decode_sequences": (2,),
        "prefill_tokens": (32,),
    }
    plain, _, _ = tokens(build_runner(checkpoint, tiny_options(**options)))
    script = Script(tuple(tuple(prompt + answer) for prompt, answer in zip(PROMPTS, plain, strict=True)))
    drafting = build_runner(checkpoint, tiny_options(draft_tokens=3, **options), drafter=script)
    drafted, tried, agreed = tokens(drafting)
    assert drafted == plain and 0 < agreed < tried
