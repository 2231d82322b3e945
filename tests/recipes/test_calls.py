"""Tool calls in JSON and in Python syntax."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resin.recipes.call_formats import _literal
from resin.recipes.calls import Call, read_json_calls, read_python_calls

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)


@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=4))
def test_python_calls_round_trip(name: str, arguments: dict[str, object]) -> None:
    text = f"[{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())}), g()]"
    calls = read_python_calls(text)
    assert calls is not None and [call.name for call in calls] == [name, "g"]
    assert json.loads(calls[0].arguments) == arguments


@given(arguments=st.dictionaries(st.text(), VALUES, max_size=4))
def test_json_calls_round_trip(arguments: dict[str, object]) -> None:
    calls = read_json_calls(json.dumps({"name": "f", "arguments": arguments}))
    assert calls is not None
    assert json.loads(calls[0].arguments) == arguments


@given(text=st.text(st.sampled_from("[](){}'\"\\=,:.;-+eEfx01 \n\ud800"), max_size=40))
def test_junk_never_raises(text: str) -> None:
    for calls in (read_python_calls(text), read_json_calls(text)):
        assert calls is None or all(isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (r"f(a='it\'s', b=" + r'"\u00e9\x41\n\q")', [Call("f", '{"a": "it\'s", "b": "éA\\n\\\\q"}')]),
        ("[a.b(x=1_000,), c()]", [Call("a.b", '{"x": 1000}'), Call("c", "{}")]),
        ("f(x=(1, 2), y={'k': [None, True, .5]})", [Call("f", '{"x": [1, 2], "y": {"k": [null, true, 0.5]}}')]),
        ("f(x=true, y=null)", [Call("f", '{"x": true, "y": null}')]),
    ],
)
def test_python_forms(text: str, calls: list[Call]) -> None:
    assert read_python_calls(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f",
        "f(",
        "f(1)",
        "f(a=)",
        "[f()",
        "f()]",
        "f(a=1) g()",
        "f(a=b)",
        "f(a=1e999)",
        "f(a=" + "[" * 500 + "]" * 500 + ")",
    ],
)
def test_python_faults(text: str) -> None:
    assert read_python_calls(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "1",
        '{"name": 1}',
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": NaN}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f"} x',
        "[" * 100_000,
        '{"name": "f", "arguments": {"a": 1e999}}',
    ],
)
def test_json_faults(text: str) -> None:
    assert read_json_calls(text) is None


def test_json_forms() -> None:
    assert read_json_calls('{"name": "f"}') == [Call("f", "{}")]
    assert read_json_calls('[{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]') == [Call("f", '{"a": 1}')]
    assert read_json_calls('{"name": "f"}; {"name": "g"}') == [Call("f", "{}"), Call("g", "{}")]
    assert read_json_calls('{"name": "f", "arguments": {"a": "\\ud83d"}}') == [Call("f", '{"a": "\\ud83d"}')]
