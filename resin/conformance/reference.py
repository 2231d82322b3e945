"""Our numbers against another implementation's: whole-sequence logits, and logprobs of each step through the Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from resin import SamplingParams
from resin.conformance.equalities import Found
from resin.conformance.generation import Job, difference_of, forced, generate
from resin.conformance.kit import ConformanceKit
from resin.conformance.plain import TOP, score_logits


def reference_checks(reference: Mapping[str, np.ndarray] | None) -> dict[str, Callable[[ConformanceKit], Found]]:
    """The checks against a reference, if there is one."""
    if reference is None:
        return {}
    return {
        "reference logits": partial(reference_logits, reference=reference),
        "reference steps": partial(reference_steps, reference=reference),
    }


def _found(kit: ConformanceKit, share: float) -> Found:
    allowed = kit.reference_tolerance
    return share <= allowed, f"largest difference {share:.1e} of the deviation, allowed {allowed:.1e}"


def reference_logits(kit: ConformanceKit, *, reference: Mapping[str, np.ndarray]) -> Found:
    """Logits of the plain forward; the difference is a share of the reference's standard deviation."""
    expected = reference["logits"]
    got = kit.plain.logits(reference["token_ids"])
    share = difference_of(got, expected) / float(expected.std())
    return _found(kit, share)


def reference_steps(kit: ConformanceKit, *, reference: Mapping[str, np.ndarray]) -> Found:
    """Logprobs of a third of the tokens as a prompt, and of the rest decoded one by one along the reference's ids."""
    ids, logits = np.asarray(reference["token_ids"], np.int32), np.asarray(reference["logits"], np.float32)
    prompt = max(len(ids) // 3, 1)
    params = SamplingParams(
        max_output_tokens=len(ids) - prompt,
        temperature=0,
        logprobs=TOP,
        prompt_logprobs=TOP,
        allowed_tokens=forced(ids[prompt:].tolist(), kit.vocab_size),
        ignore_stop=True,
    )
    with kit.engine() as engine:
        trace = generate(engine, [Job(ids[:prompt], params)])[0]
    expected = score_logits(logits, ids)
    held = trace.request.prompt_logprobs
    assert held is not None
    got = np.concatenate([held.logprobs, trace.logprobs])
    got_top = np.concatenate([held.top_logprobs, np.stack(trace.top)])
    differences = difference_of(got, expected.following), difference_of(got_top, expected.top)
    share = float(np.max(differences) / logits.std())
    return _found(kit, share)
