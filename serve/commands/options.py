"""The arguments of every command that runs a model, and what they choose."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resin.models.registry import DEFAULT_MODEL
from resin.plan.cache import FP8_DTYPE
from resin.recipes import NATIVE_RECIPES
from resin.sched.policy import Policy
from resin.settings import SETTINGS

if TYPE_CHECKING:
    from resin.runtime import RunnerOptions


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers, comma-separated."""
    return tuple(int(part) for part in text.split(","))


# Flags of RunnerOptions' fields: the field, the flag where it has another name, the value's type, placeholder and
# meaning. `--help` must not wait for JAX, so that defaults of the platform are words here.
_RUNNER_FLAGS: tuple[tuple[str, str, Callable[[str], Any], str, str], ...] = (
    (
        "max_context_tokens",
        "context-length",
        int,
        "TOKENS",
        "longest sequence, prompt and answer; default: the model's own limit, at most 4096 on a CPU and 32768 on a GPU",
    ),
    (
        "max_sequences",
        "max-sequences",
        int,
        "N",
        "sequences that run at once; default: 1 in resin chat, else 16 on a CPU, and as many as memory holds on a GPU "
        "(256 at most)",
    ),
    (
        "max_penalised",
        "max-penalised",
        int,
        "N",
        "of these, sequences with penalties; default: those whose tokens 32 MiB count",
    ),
    (
        "decode_sequences",
        "decode-buckets",
        sizes,
        "N,N,...",
        "sequences that decode steps are compiled for, rising; default: a table up to --max-sequences",
    ),
    (
        "prefill_tokens",
        "prefill-buckets",
        sizes,
        "N,N,...",
        "tokens that prefill steps are compiled for, rising; default: a table up to --max-plan-tokens",
    ),
    (
        "max_plan_tokens",
        "max-plan-tokens",
        int,
        "TOKENS",
        "tokens of the largest prefill step; default: 512 on a CPU, 8192 on a GPU",
    ),
    ("prefill_sequences", "prefill-sequences", int, "N", "sequences that one prefill step packs at most; default 16"),
    (
        "draft_tokens",
        "draft-tokens",
        int,
        "N",
        "guesses at a sequence's next tokens, from what followed the same words before, that a step checks at most, "
        "where that is the faster way; 0 to 7; default 0",
    ),
    (
        "cache_bytes",
        "cache-bytes",
        int,
        "BYTES",
        "size of the cache pool on each device; default: 1 GiB on a CPU, nine tenths of what is free on a GPU",
    ),
    ("kv_scale", "kv-scale", float, "X", "of 8-bit keys and values: stored as value / X; default 1"),
    ("page_tokens", "page-tokens", int, "TOKENS", "tokens a page; default: what wastes least"),
    (
        "checkpoint_tokens",
        "checkpoint-tokens",
        int,
        "TOKENS",
        "distance of the states that the prefix cache keeps, for models that have states; default: the model's own",
    ),
    ("tp", "tp", int, "N", "devices to split the model over; default 1"),
    ("dp", "dp", int, "N", "replicas of attention, each with sequences and a cache of its own; default 1"),
    ("compile_threads", "compile-threads", int, "N", "programs compiled at once; default: the CPU count, at most 8"),
    ("compile_cache", "compile-cache", Path, "DIRECTORY", "of compiled programs; default: programs in RESIN_CACHE"),
    (
        "compile_cache_bytes",
        "compile-cache-bytes",
        int,
        "BYTES",
        "size at which the oldest programs are dropped, 0 to keep none; default 4 GiB",
    ),
)
_RUNNER_CHOICES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "dtype",
        ("float32", "bfloat16"),
        "of weights and activations; default: what a converted checkpoint has, else "
        "float32 on a CPU and bfloat16 on a GPU",
    ),
    (
        "cache_dtype",
        ("float32", "bfloat16", "uint16"),
        "of the cache pool; default: float32 on a CPU, bfloat16 on a GPU, uint16 beside --kv-dtype",
    ),
    ("kv_dtype", (FP8_DTYPE,), "keep keys and values in 8 bits; default: in the pool's dtype"),
    ("kernels", ("triton", "reference", "interpret"), "default: triton on a GPU, reference (plain XLA) on a CPU"),
    ("fresh_attention", ("cudnn", "paged"), "what long new prompts attend with on a GPU; default: cudnn"),
)


_POLICY: dict[str, Any] = {field.name: field.default for field in fields(Policy)}


def environment_epilog() -> str:
    """The environment variables, for the end of a help text."""
    return "environment:\n" + "\n".join(f"  {setting.name:14} {setting.meaning}" for setting in SETTINGS)


def add_model_arguments(parser: argparse.ArgumentParser, *, max_sequences: int | None = None) -> None:
    """The arguments that `load_model` reads."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n\n".join(part for part in (parser.epilog, environment_epilog()) if part)
    parser.add_argument(
        "source",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"registered name, local path (directory or GGUF file) or hub id; default {DEFAULT_MODEL}",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="model class from outside this package")
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"conversation format: {', '.join(NATIVE_RECIPES)}, or package.module:Name; default: the model's own",
    )
    group.add_argument("--dummy", action="store_true", help="random weights, for measurements")
    for field, choices, meaning in _RUNNER_CHOICES:
        group.add_argument(f"--{field.replace('_', '-')}", dest=field, choices=choices, help=meaning)
    for field, flag, kind, metavar, meaning in _RUNNER_FLAGS:
        group.add_argument(f"--{flag}", dest=field, type=kind, metavar=metavar, help=meaning)
    parser.set_defaults(max_sequences=max_sequences)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse what is cached of a prompt's beginning, as of earlier turns; default: on",
    )
    group.add_argument(
        "--overlap",
        type=int,
        metavar="N",
        help="plans in flight while the next is made, 0 to wait for each; default: 1, or 2 where a measurement at the "
        "start finds steps shorter than reading one back",
    )
    group.add_argument(
        "--decode-wait-ms",
        type=float,
        default=1e3 * _POLICY["decode_wait_s"],
        metavar="MS",
        help="prefill that answers under way wait for between two of their tokens, as measured at the start; "
        "default %(default)g",
    )
    group.add_argument(
        "--prefill-streak-tokens",
        type=int,
        metavar="TOKENS",
        help="the same in tokens of the prefill buckets, whatever was measured; default: by --decode-wait-ms",
    )
    group.add_argument(
        "--aging-s",
        type=float,
        default=_POLICY["aging_s"],
        metavar="SECONDS",
        help="waiting that is worth one level of priority; default %(default)g",
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="write every plan and its tokens, for python -m bench replay FILE"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How to sample where nothing else says; read by `load_model`."""
    whose = "default: the model's own, or"
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, metavar="T", help=f"0 is greedy; {whose} 0.7")
    group.add_argument("--top-p", type=float, metavar="P", help=f"{whose} 0.95")
    group.add_argument("--top-k", type=int, metavar="K", help=f"0 keeps all; {whose} 0")


def chosen_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What the arguments say about sampling, None for what they leave."""
    return {name: getattr(args, name, None) for name in ("temperature", "top_p", "top_k", "max_output_tokens")}


def policy(args: argparse.Namespace) -> Policy:
    """What the arguments say about scheduling."""
    return Policy(
        aging_s=args.aging_s,
        decode_wait_s=args.decode_wait_ms / 1e3,
        prefill_streak_tokens=args.prefill_streak_tokens,
    )


def runner_options(args: argparse.Namespace) -> RunnerOptions:
    """What the arguments say about execution."""
    from resin.runtime import RunnerOptions

    fields = [*(flag[0] for flag in _RUNNER_FLAGS), *(choice[0] for choice in _RUNNER_CHOICES)]
    given = {name: getattr(args, name) for name in fields if getattr(args, name) is not None}
    return RunnerOptions(dummy=args.dummy, **given)
