"""The sweep end to end on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from bench.cases import Case
from bench.model_setup import ModelChoice, build_setup
from bench.plot import decode_point, plot_results, prefill_point
from bench.resident import fill_with_noise
from bench.results import read_results
from bench.step_check import CheckFailed, PlainForward, check_tokens
from bench.sweep import build_cases, main, parse_arguments
from resin import InvalidRequest, Phase
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
from resin.runtime import RunnerOptions


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny",
        random_checkpoint({**TINY_CONFIGS["llama"], "num_hidden_layers": 1}, seed=5),
    )


@pytest.fixture(scope="module")
def results(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("results") / "tiny.jsonl"
    arguments = f"--model {model_directory} --context-lengths 24 --batch-sizes 2 --phases decode,prefill --engine"
    timing = f"--engine-steps 3 --rounds 2 --burst-s 0.001 --commit abc --output {output}"
    assert main([*arguments.split(), *timing.split()]) == 0
    return output


def test_every_row_says_what_it_is(results: Path) -> None:
    decode, prefill = read_results(results)
    for row in (decode, prefill):
        assert (row["model"], row["commit"], row["dtype"], row["device"]) == ("tiny", "abc", "float32", "cpu")
        assert row["jax"] == jax.__version__
        assert len(row["ms_rounds"]) == 2
        assert min(row["ms_rounds"]) <= row["ms"] <= max(row["ms_rounds"])
        assert row["limit_fraction"] == pytest.approx(row["limit_ms"] / row["ms"])
        assert row["limit_fraction"] == pytest.approx(max(row["bandwidth_fraction"], row["matmul_fraction"]))
        assert 0 <= row["check_error"] < 2e-3
        assert row["kernels"] > 10
        assert row["host_call_ms"] > 0
    assert decode["tokens_per_s_per_user"] == pytest.approx(1000 / decode["ms"])
    assert decode["tokens_per_s_per_gpu"] == pytest.approx(2000 / decode["ms"])
    assert prefill["tokens_per_s_per_gpu"] == pytest.approx(48_000 / prefill["ms"])
    ratios = np.divide(decode["engine_ms_rounds"], decode["engine_bare_ms_rounds"])
    assert decode["engine_ratio"] == pytest.approx(np.median(ratios))
    assert "engine_ms" not in prefill


def test_charts_have_a_file_a_phase(results: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need the plot extra")
    prefill, decode = plot_results(results)
    assert (prefill.name, decode.name) == ("tiny.prefill.png", "tiny.decode.png")
    assert prefill.read_bytes()[:4] == decode.read_bytes()[:4] == b"\x89PNG"
    row = {"sequences": 4, "context_tokens": 100}
    assert prefill_point(row, 20.0) == (20_000, 20.0)
    assert decode_point(row, 20.0) == (200, 50)


def spoil_all(name: str, array: jax.Array) -> jax.Array:
    return array * 1.05


def spoil_one_expert(name: str, array: jax.Array) -> jax.Array:
    """The first of eight experts of the last layer gets another's matrix."""
    return array.at[0].set(array[1]) if name == "layers.2.mlp.down.weight" else array


@pytest.mark.parametrize(
    ("family", "dtype", "spoil"),
    [
        ("llama", "float32", spoil_all),
        ("qwen3_moe", "float32", spoil_one_expert),
        ("llama", "bfloat16", spoil_all),
        ("qwen3_moe", "bfloat16", spoil_one_expert),
    ],
)
def test_a_wrong_model_is_not_timed(
    family: str, dtype: str, spoil: Callable[[str, jax.Array], jax.Array], tmp_path: Path
) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS[family], seed=5)
    directory = write_checkpoint(tmp_path / family, checkpoint)
    case = Case(Phase.DECODE, 2, 48)
    setup = build_setup(ModelChoice(str(directory)), [case], RunnerOptions(dtype=dtype))
    fill_with_noise(setup.runner)
    model = setup.spec.model
    plain = PlainForward(model, setup.weights, setup.spec.dtype)
    right = check_tokens(case, setup.runner, plain, setup.num_pages)
    assert (right.engine[:2] <= (0.1 if dtype == "bfloat16" else 2e-3)).all()
    spoiled = tuple(map(spoil, model.names, setup.weights))
    assert any(new is not old for new, old in zip(spoiled, setup.weights, strict=True))
    wrong = PlainForward(model, spoiled, setup.spec.dtype)
    with pytest.raises(CheckFailed, match="off by"):
        check_tokens(case, setup.runner, wrong, setup.num_pages)


def test_cases_that_are_too_large_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--model m --phases prefill --context-lengths 512,4096 --batch-sizes 1,4 --max-prefill-tokens 4096"
    cases = build_cases(parse_arguments(given.split()))
    assert [str(case) for case in cases] == ["prefill 1x512", "prefill 4x512", "prefill 1x4096"]
    assert "prefill 4x4096" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="max_prefill_tokens"):
        build_cases(parse_arguments([*given.split()[:-1], "256"]))


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--model m --plot",
        "--model m --dummy --checkpoint c",
        "--model m --phases verify",
        "--model m --batch-sizes 0",
    ],
)
def test_arguments_that_make_no_sense(arguments: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())


def test_shapes_have_no_weights() -> None:
    with pytest.raises(InvalidRequest, match="--dummy"):
        main(["--shape", "qwen3-0.6b"])


def test_a_class_needs_a_config() -> None:
    with pytest.raises(InvalidRequest, match="model"):
        main(["--model", "resin.models.llama:Llama", "--dummy"])


def test_a_bad_result_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"model": "m", "phase": "decode"}) + "\n")
    with pytest.raises(InvalidRequest, match=r"bad\.jsonl:1"):
        read_results(path)
