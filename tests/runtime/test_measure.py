"""Steps are measured once the runner is warm, and leave nothing behind."""

from __future__ import annotations

import numpy as np

from resin import Engine, SamplingParams
from resin.plan import empty_plan
from resin.runtime import ModelRunner, build_runner
from resin.runtime.program_kind import ProgramKind
from tests.runtime.tiny_runner import tiny_checkpoint, tiny_options


def build(family: str = "llama") -> ModelRunner:
    return build_runner(tiny_checkpoint(family), tiny_options())


def test_warm_up_measures_every_bucket_and_leaves_no_trace() -> None:
    """A model with experts, whose programs every arena of a size shares."""
    runner, tokens = build("lfm2_moe"), []
    for is_warm in (False, True):
        with Engine(runner) as engine:
            if is_warm:
                assert runner.step_times() is None
                runner.warm_up()
                times = runner.step_times()
                assert times is not None and engine.resolved.decode_step_s == times.decode_s > 0
                assert [size for size, _ in times.prefill_s] == list(engine.resolved.prefill_buckets)
                assert all(seconds > 0 for _, seconds in times.prefill_s) and times.read_back_s >= 0
                assert runner.observations()["compilations_after_ready"] == 0
            params = SamplingParams(max_output_tokens=6, temperature=0, repetition_penalty=1.3)
            request = engine.submit([1, 2, 3, 4, 5], sampling_params=params)
            while engine.has_work():
                engine.step()
            tokens.append(request.take_result())
    assert tokens[0] == tokens[1]


def test_an_empty_plan_is_padding() -> None:
    config = build().config
    for bucket in config.buckets:
        plan = empty_plan(config, bucket)
        assert plan.num_sequences == plan.num_tokens == 0 and plan.bucket == bucket
        assert (plan.layout.view(plan.buffer, "slots") == config.max_sequences).all()
        assert not np.any(plan.layout.view(plan.buffer, "token_ids"))


def test_a_runner_says_what_it_runs_with() -> None:
    facts = build().facts()
    kinds = facts.pop("programs").split("+")
    assert facts == {"dtype": "float32", "cache": "float32", "kernels": "reference", "mesh": "one device"}
    assert kinds and set(kinds) <= {kind.value for kind in ProgramKind}
