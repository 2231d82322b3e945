"""The kernels inside a whole step: the same model with the Triton bodies (interpreted) and with plain XLA."""

from __future__ import annotations

import numpy as np
import pytest

from resin.plan import SamplingParams
from tests.runtime.tiny_runner import build_tiny, builder_for

LOGPROBS = SamplingParams(temperature=0, logprobs=5)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [pytest.param("llama", None, marks=pytest.mark.slow), ("qwen3", None), ("qwen3", "float8_e4m3fn")],
)
def test_interpreted_kernels_agree_with_the_references(family: str, kv_dtype: str | None) -> None:
    prompts = [np.random.default_rng(n).integers(3, 256, n).tolist() for n in (5, 17)]
    results = []
    for kernels in ("reference", "interpret"):
        runner = build_tiny(
            family,
            dtype="bfloat16",
            cache_dtype="bfloat16" if kv_dtype is None else "uint16",
            kv_dtype=kv_dtype,
            kernels=kernels,
            max_sequences=2,
            decode_sequences=(2,),
            prefill_tokens=(32,),
        )
        assert ("interpret" in str(runner._spec.kernels().paged_decode)) == (kernels == "interpret")
        builder = builder_for(runner)
        sequences = [builder.sequence(slot, prompt, LOGPROBS) for slot, prompt in enumerate(prompts)]
        output = runner.forward(builder.prefill([(sequence, len(sequence.tokens)) for sequence in sequences]))
        columns = [output]
        for _ in range(3):
            for sequence, prompt in zip(sequences, prompts, strict=True):
                sequence.tokens.append(prompt[len(sequence.tokens) % len(prompt)])
            columns.append(runner.forward(builder.decode(sequences, from_slot=False)))
        results.append(columns)
    for reference, interpreted in zip(*results, strict=True):
        assert reference.top_logprobs is not None and interpreted.top_logprobs is not None
        # Steps of bfloat16 at the size of the logits behind them.
        assert np.allclose(reference.top_logprobs, interpreted.top_logprobs, rtol=0.015, atol=0.05)
        clear = reference.top_logprobs[:, 0] - reference.top_logprobs[:, 1] > 0.2
        assert np.array_equal(reference.token_ids[clear], interpreted.token_ids[clear])
