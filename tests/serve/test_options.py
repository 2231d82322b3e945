"""What the commands' options reach, and what their help says."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import pytest

from resin import Policy
from resin.runtime import RunnerOptions
from resin.runtime.load import DEFAULTS
from resin.settings import SETTINGS
from serve.cli import build_parser
from serve.commands.options import policy, runner_options

# Without a flag: axes that are not implemented, the seed of random weights.
WITHOUT_FLAG = {"cp", "seed"}


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    [actions] = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    yield from actions.choices.items()


@pytest.mark.parametrize("command", ["chat", "serve", "generate"])
def test_every_runner_option_has_a_flag(command: str) -> None:
    parser = dict(parsers())[command]
    required = ["--input", "a", "--output", "b"] if command == "generate" else []
    flags = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(RunnerOptions):
        if field.name in WITHOUT_FLAG:
            continue
        action = flags[field.name]
        value = action.choices[0] if action.choices else "3"
        args = parser.parse_args([*required, action.option_strings[0], *([] if action.nargs == 0 else [str(value)])])
        assert getattr(runner_options(args), field.name) != field.default or field.name == "fresh_attention"
    untouched = runner_options(parser.parse_args(required))
    assert untouched == RunnerOptions(max_sequences=1 if command == "chat" else None)


@pytest.mark.parametrize("command", ["chat", "serve", "generate"])
def test_scheduling_buckets_and_overlap_have_flags(command: str) -> None:
    parser = dict(parsers())[command]
    required = ["--input", "a", "--output", "b"] if command == "generate" else []
    untouched = parser.parse_args(required)
    assert policy(untouched) == Policy() and untouched.overlap is None
    given = ["--decode-wait-ms", "20", "--prefill-streak-tokens", "64", "--aging-s", "3", "--overlap", "0"]
    args = parser.parse_args([*required, *given, "--decode-buckets", "1,8", "--prefill-buckets", "16,256"])
    assert policy(args) == Policy(decode_wait_s=0.02, prefill_streak_tokens=64, aging_s=3) and args.overlap == 0
    options = runner_options(args)
    assert (options.decode_sequences, options.prefill_tokens) == ((1, 8), (16, 256))
    with pytest.raises(SystemExit):
        parser.parse_args([*required, "--decode-buckets", "1,many"])


def test_every_option_with_a_value_says_its_default() -> None:
    silent = [
        f"{name} {action.option_strings[0]}"
        for name, parser in parsers()
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and not action.required
        # A class, a conversation format, a file: without it there is none.
        if action.dest not in ("model", "record", "reference") and "default" not in (action.help or "")
    ]
    assert silent == []


def test_the_defaults_in_the_help_are_the_real_ones() -> None:
    text = " ".join(dict(parsers())["serve"].format_help().split())
    for platform, word in (("cpu", "CPU"), ("gpu", "GPU")):
        chosen = DEFAULTS[platform]
        assert f"{chosen['dtype']} on a {word}" in text
        assert f"{chosen['context']} on a {word}" in text
        assert f"{chosen['plan_tokens']} on a {word}" in text
    fields = {field.name: field.default for field in dataclasses.fields(RunnerOptions)}
    assert f"default {fields['prefill_sequences']}" in text
    assert fields["compile_cache_bytes"] == 4 << 30 and "default 4 GiB" in text


def test_the_environment_is_part_of_the_help() -> None:
    for name, parser in parsers():
        if name in ("chat", "serve", "generate"):
            assert all(setting.name in parser.format_help() for setting in SETTINGS)
