"""Work counted from declarations equals work counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import roofline
from bench.cases import Case, resident_plan
from bench.cpu_limits import last_level_cache_bytes, product_rate, read_rate, reading_arrays, usable_cores
from bench.model_setup import BalancedModel
from bench.roofline import CeilingProbe, Ceilings, Work, WorkCounter
from bench.shapes import SHAPES, shape_checkpoint
from resin import InvalidRequest, Phase, SamplingParams
from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.forward import dense_pass
from resin.models.testing import TINY_CONFIGS
from resin.models.weights import AbstractModel
from resin.runtime import RunnerOptions
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh
from tests.bench.tiny_setup import tiny_spec

PARAMS = SamplingParams(temperature=0)


def count(family: str, case: Case) -> Work:
    spec = tiny_spec(family, [case])
    plan = resident_plan(case, spec.config, 1 + case.pages(spec.config), PARAMS)
    return WorkCounter(spec.model, spec.config).count(plan)


def test_decode_of_a_llama_by_hand() -> None:
    config = TINY_CONFIGS["llama"]
    hidden, ffn, layers, vocab = 64, 128, 2, 256
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (hidden, ffn, layers)
    qkv, output = hidden * (4 + 2 * 2) * 16, 64 * hidden
    matrices = layers * (qkv + output + 3 * hidden * ffn) + hidden * vocab
    norms = (2 * layers + 1) * hidden
    work = count("llama", Case(Phase.DECODE, 3, 50))
    assert work.weight_bytes == 4 * (matrices + norms)
    entry = layers * 2 * 2 * 16 * 4
    assert (work.cache_read_bytes, work.cache_write_bytes) == (3 * 49 * entry, 3 * entry)
    assert work.flops == 3 * (2 * matrices + layers * 4 * 4 * 16 * 50)


def test_prefill_multiplies_the_head_once_a_sequence() -> None:
    layers, hidden, vocab = 2, 64, 256
    work = count("llama", Case(Phase.PREFILL, 2, 40))
    matrices = layers * (hidden * 128 + 64 * hidden + 3 * hidden * 128)
    pairs = 2 * 40 * 41 // 2
    assert work.flops == 2 * (80 * matrices + 2 * hidden * vocab) + layers * 4 * 4 * 16 * pairs
    assert work.cache_read_bytes == 0
    assert work.cache_write_bytes == 80 * layers * 2 * 2 * 16 * 4


def test_a_window_bounds_what_is_read() -> None:
    # gemma3_text: 4 sliding layers of 8 tokens, 2 full ones; one KV head of 32.
    work = count("gemma3_text", Case(Phase.DECODE, 1, 50))
    assert work.cache_read_bytes == (4 * 7 + 2 * 49) * 2 * 32 * 4
    assert work.cache_write_bytes == 6 * 2 * 32 * 4


def test_states_are_read_and_written_whole() -> None:
    # lfm2: three short filters with 2 inputs of 64 each, two attention layers with 2 KV heads of 16.
    work = count("lfm2", Case(Phase.DECODE, 2, 20))
    state = 2 * 3 * 2 * 64 * 4
    assert work.cache_read_bytes == state + 2 * 2 * 19 * 2 * 2 * 16 * 4
    assert work.cache_write_bytes == state + 2 * 2 * 2 * 2 * 16 * 4


def test_tokens_read_the_experts_that_somebody_takes() -> None:
    spec = tiny_spec("qwen3_moe", [Case(Phase.DECODE, 2, 20)])
    experts = [item for item in spec.model.declarations if item.token_share == 2 / 8]
    assert len(experts) == 2 * 2  # two layers of experts, two matrices each
    held = sum(item.nbytes for item in experts)
    counts = {}
    for sequences in (1, 2, 64):
        case = Case(Phase.DECODE, sequences, 20)
        spec = tiny_spec("qwen3_moe", [case])
        plan = resident_plan(case, spec.config, 1 + case.pages(spec.config), PARAMS)
        for balanced in (False, True):
            work = WorkCounter(spec.model, spec.config, balanced=balanced).count(plan)
            counts[sequences, balanced] = work.weight_bytes
    assert counts[1, False] == counts[1, True]
    assert counts[2, True] - counts[1, True] == pytest.approx(held / 4, rel=0.05)  # and one more row of the table
    assert counts[2, False] - counts[1, False] == pytest.approx(held * 3 / 16, rel=0.05)
    assert counts[64, True] - counts[1, True] == pytest.approx(held * 3 / 4, rel=0.5)


def test_the_limit_is_the_slower_of_the_two() -> None:
    ceilings = Ceilings(copy_bytes_per_s=100.0, matmul_flops_per_s=1000.0)
    assert Work(50, 30, 20, 100).limit_s(ceilings) == 1.0
    assert Work(5, 3, 2, 5000).limit_s(ceilings) == 5.0


def test_ceilings_are_the_best_that_a_cpu_has_shown_and_the_median_of_a_gpu() -> None:
    probe = CeilingProbe("float32", copy_bytes=1 << 20, matmul_size=64)
    seen = [probe.measure(0.001) for _ in range(3)]
    copies = sorted(ceilings.copy_bytes_per_s for ceilings in seen)
    assert copies[0] > 0
    assert probe.settled().copy_bytes_per_s == copies[2]
    probe._host = None
    assert probe.settled().copy_bytes_per_s == copies[1]


def test_a_cpu_copies_in_place_and_takes_the_best_that_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy to new memory measures how fast pages are handed out, a few times slower than memory itself.
    probe = CeilingProbe("float32", copy_bytes=1 << 20, matmul_size=64)
    compiled = probe.copy.lower(jax.ShapeDtypeStruct((1 << 18,), jnp.uint32)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 1 << 20
    monkeypatch.setattr(roofline, "read_rate", lambda arrays: 1e15)
    monkeypatch.setattr(roofline, "product_rate", lambda left, right: 1e18)
    assert probe.measure(0.001) == Ceilings(1e15, 1e18)
    monkeypatch.setattr(roofline, "read_rate", lambda arrays: 1.0)
    monkeypatch.setattr(roofline, "product_rate", lambda left, right: 1.0)
    seen = probe.measure(0.001)
    assert 1.0 < seen.copy_bytes_per_s < 1e15 and 1.0 < seen.matmul_flops_per_s < 1e18


def test_arrays_are_larger_than_every_cache_and_read_whole() -> None:
    arrays = reading_arrays(3, 3 << 20)
    assert sum(array.nbytes for array in arrays) == pytest.approx(3 << 20, rel=1e-4)
    assert read_rate(arrays) > 0 and product_rate(np.ones((8, 8)), np.ones((8, 8))) > 0
    assert last_level_cache_bytes() >= 1 << 16 and usable_cores() >= 1


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model(name: str) -> None:
    config = shape_checkpoint(name).config
    model_class = find_model_class(config)
    model = AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement("bfloat16")))
    billions = {"smollm2-135m": 0.135, "llama-3.2-1b": 1.24, "llama-3.1-8b": 8.03, "qwen3-0.6b": 0.596}
    if name in billions:
        assert model.nbytes / 2e9 == pytest.approx(billions[name], rel=0.01)
    assert 0 < model.flops_per_token <= 2 * 2 * model.nbytes


def test_an_8b_decode_step_reads_what_is_published() -> None:
    # 15.01 GB of weights without the embedding table, 134 MB of keys and values at 1024 tokens.
    case = Case(Phase.DECODE, 1, 1024)
    config = SHAPES["llama-3.1-8b"]
    model_class = find_model_class(config)
    options = RunnerOptions(dtype="bfloat16", cache_dtype="bfloat16", max_context_tokens=1025)
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, build_mesh(options))
    plan = resident_plan(case, spec.config, 1 + case.pages(spec.config), PARAMS)
    work = WorkCounter(spec.model, spec.config).count(plan)
    assert work.nbytes / 1e9 == pytest.approx(15.01 + 0.134, abs=0.01)


def test_balanced_experts_need_experts() -> None:
    balanced = BalancedModel(find_model_class(TINY_CONFIGS["llama"]))
    with pytest.raises(InvalidRequest, match="balanced_experts"):
        balanced(balanced.Config.from_hf(TINY_CONFIGS["llama"]), Placement())


def test_balanced_routers_take_experts_in_turn() -> None:
    balanced = BalancedModel(find_model_class(TINY_CONFIGS["qwen3_moe"]))
    model = AbstractModel.of(balanced(balanced.Config.from_hf(TINY_CONFIGS["qwen3_moe"]), Placement()))
    rng = np.random.default_rng(0)
    built = model.merge([rng.standard_normal(item.shape, np.float32) for item in model.declarations])
    run, x = dense_pass(jnp.zeros(5, jnp.int32)), jnp.asarray(rng.standard_normal((5, 64), np.float32))
    _, experts, weights = built.layers[0].mlp.router(run, x)
    assert experts.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    np.testing.assert_allclose(np.asarray(weights).sum(axis=1), 1.0, rtol=1e-5)
