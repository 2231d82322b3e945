"""What crosses boundaries as a frozen value can be compared, hashed, pickled and copied like one."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

import resin
from resin import (
    ArenaSpec,
    Bucket,
    HistoryGroup,
    InvalidRequest,
    MediaSpan,
    Phase,
    Plane,
    Policy,
    PrefixAudit,
    SamplingParams,
    StateGroup,
    WindowGroup,
    plan_geometry,
)
from tests.fakes import fake_config, history_group


def allow_everything(output: Any) -> None:
    """A hook at the top of a module, which pickles by name."""


PLANES = (Plane("kv", 2, 4),)
VALUES: list[Any] = [
    ArenaSpec(4, 64, "float32"),
    Bucket(Phase.DECODE, 2, 2, (3,)),
    HistoryGroup("h", PLANES),
    WindowGroup("w", PLANES, 4),
    StateGroup("s", PLANES),
    PLANES[0],
    plan_geometry((HistoryGroup("h", PLANES),), arena_dtype="float32"),
    fake_config((history_group(),)),
    MediaSpan(2, 3, b"digest"),
    Policy(max_plan_tokens=7),
    PrefixAudit(3, 5, {"evicted": 2}),
    SamplingParams(),
    SamplingParams(
        logit_bias={3: 1.5, 4: -2.0}, stop_token_ids=[1, 2], seed=2**64 - 1, allowed_tokens=allow_everything
    ),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_a_value(value: Any) -> None:
    copies = [copy.copy(value), copy.deepcopy(value), replace(value)]
    copies += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert other == value and hash(other) == hash(value) and type(other) is type(value)
        assert repr(other) == repr(value)
    assert len({value, *copies}) == 1


def test_every_public_value_is_tried() -> None:
    public = {cls for name in resin.__all__ if is_dataclass(cls := getattr(resin, name))}
    values = {cls for cls in public if cls.__dataclass_params__.frozen and cls.__dataclass_params__.eq}
    assert values == {type(value) for value in VALUES}
    for cls in public - values:  # they hold arrays or stand for one thing: equal to themselves alone
        assert cls.__hash__ is object.__hash__ and cls.__eq__ is object.__eq__, cls
        assert any("ndarray" in str(field.type) or "Request" in str(field.type) for field in fields(cls)), cls


def test_policies_that_differ_in_a_bias_differ() -> None:
    one, other = SamplingParams(logit_bias={1: 1.0}), SamplingParams(logit_bias={1: 2.0})
    assert one != other and one == SamplingParams(logit_bias={1: 1.0})
    assert one.logit_bias == {1: 1.0} and dict(one.logit_bias) == {1: 1.0}
    given = {1: 1.0}
    frozen = SamplingParams(logit_bias=given)
    given[2] = 3.0
    assert frozen.logit_bias == {1: 1.0}
    with pytest.raises(TypeError):
        frozen.logit_bias[1] = 5.0  # type: ignore[index]


def test_an_error_about_a_value_that_cannot_be_pickled_can() -> None:
    error = InvalidRequest("hook", lambda: np.zeros(3), "a callable")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is InvalidRequest and str(other) == str(error) and other.field == "hook"
