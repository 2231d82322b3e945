"""SamplingParams: every field refuses what it cannot mean, by name, and keeps what it is given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from resin import InvalidRequest, SamplingParams
from resin.plan.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKENS

NAN, INF = math.nan, math.inf
INTEGERS = {
    # field: (lowest, highest)
    "max_output_tokens": (1, 2**31 - 1),
    "min_output_tokens": (0, 128),
    "top_k": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
REALS = {
    # field: (lowest, highest, lowest is allowed)
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 10.0, False),
}
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")


def refused(field: str, value: Any, name: str | None = None) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.field == (name or field)
    assert str(error.value).startswith(f"{name or field}=") and "expected" in str(error.value)


def test_the_tables_of_this_test_name_every_field() -> None:
    rest = {"stop_token_ids", "logit_bias", "ignore_stop", "allowed_tokens"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {*INTEGERS, *REALS, *rest}


@pytest.mark.parametrize("field", sorted(INTEGERS))
def test_integers(field: str) -> None:
    low, high = INTEGERS[field]
    for value in (low, high, np.int64(low), np.uint64(max(low, 0))):
        kept = getattr(SamplingParams(**{field: value}), field)
        assert kept == value
    for value in (low - 1, high + 1, 1.0, NAN, "1", True, np.float32(1), [1], 1j, np.array([1])):
        refused(field, value)
    if field in OPTIONAL:
        assert getattr(SamplingParams(**{field: None}), field) is None
    else:
        refused(field, None)


@pytest.mark.parametrize("field", sorted(REALS))
def test_reals(field: str) -> None:
    low, high, closed = REALS[field]
    inside = (low + high) / 2
    for value in (high, inside, np.float32(high), np.float64(inside), int(high), *([low] if closed else [])):
        assert getattr(SamplingParams(**{field: value}), field) == value
    below = np.nextafter(low, -INF) if closed else low
    for value in (below, np.nextafter(high, INF), low - 1, high + 1, NAN, INF, -INF, np.float32("nan"), 10**400):
        refused(field, value)
    for value in ("0.5", None, True, [0.5], 0.5j, np.array(0.5)):
        refused(field, value)


def test_min_output_tokens_stay_below_the_limit() -> None:
    SamplingParams(max_output_tokens=5, min_output_tokens=5)
    with pytest.raises(InvalidRequest, match=r"min_output_tokens=6.*\[0, 5\]"):
        SamplingParams(max_output_tokens=5, min_output_tokens=6)


def test_stop_tokens() -> None:
    params = SamplingParams(stop_token_ids=np.arange(MAX_STOP_TOKENS))  # type: ignore[arg-type]
    assert params.stop_token_ids == tuple(range(MAX_STOP_TOKENS))
    assert all(type(token) is int for token in params.stop_token_ids)
    refused("stop_token_ids", tuple(range(MAX_STOP_TOKENS + 1)))
    for value in (5, None, "ab", (-1,), (2**31,), (1.5,), (None,), ((1,),), (True,)):
        refused("stop_token_ids", value)


def test_logit_bias() -> None:
    given = {np.int32(3): np.float32(1.5), 0: -INF, 7: 1e9}
    params = SamplingParams(logit_bias=given)
    given[9] = 1.0
    assert dict(params.logit_bias) == {3: 1.5, 0: -INF, 7: 1e9}
    assert all(type(token) is int and type(bias) is float for token, bias in params.logit_bias.items())
    with pytest.raises(TypeError):
        params.logit_bias[1] = 1.0  # type: ignore[index]
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    refused("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    for value in (None, [1], 5, "ab", {-1: 1.0}, {2**31: 1.0}, {"1": 1.0}, {1.0: 1.0}, {True: 1.0}):
        refused("logit_bias", value)
    for bias in (NAN, INF, 2e9, "1", None, True):
        refused("logit_bias", {4: bias}, "logit_bias[4]")


def test_ignore_stop_and_allowed_tokens() -> None:
    for value in (1, 0, None, "no"):
        refused("ignore_stop", value)
    assert SamplingParams(ignore_stop=True).ignore_stop
    for value in (1, "mask", np.ones(3)):
        refused("allowed_tokens", value)
    assert SamplingParams(allowed_tokens=lambda output: None).allowed_tokens is not None


def test_frozen_and_without_shared_state() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert params == SamplingParams() and params.logit_bias is not SamplingParams().logit_bias


@pytest.mark.parametrize(
    ("settings", "penalties", "load"),
    [
        ({}, False, False),
        ({"presence_penalty": 0.5}, True, True),
        ({"frequency_penalty": -0.5}, True, True),
        ({"repetition_penalty": 1.1}, True, True),
        ({"logit_bias": {1: 0.0}}, False, True),
        ({"min_output_tokens": 1}, False, True),
        ({"logprobs": 3, "top_k": 2, "seed": 1, "ignore_stop": True}, False, False),
    ],
)
def test_what_a_policy_needs_on_the_device(settings: dict[str, Any], penalties: bool, load: bool) -> None:
    params = SamplingParams(**settings)
    assert params.has_penalties == penalties and params.needs_slot_load == load


def test_ids_outside_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=(9,), logit_bias={9: 1.0}).check_vocab(10)
    for settings, field in (({"stop_token_ids": (3, 10)}, "stop_token_ids"), ({"logit_bias": {10: 1.0}}, "logit_bias")):
        with pytest.raises(InvalidRequest, match=r"\[0, 9\]") as error:
            SamplingParams(**settings).check_vocab(10)  # type: ignore[arg-type]
        assert error.value.field == field
