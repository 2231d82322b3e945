"""Every key of every architecture: obeyed, or refused by name where it would change what is computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import read_model
from resin.models.loading import CheckpointError, open_checkpoint_path
from resin.models.loading.gguf_config import translate_gguf_config
from resin.models.loading.gguf_header import GgufHeader, parse_gguf_header
from resin.models.loading.mapped import map_file
from resin.models.weights import AbstractModel, check_tensors
from resin.plan import InvalidRequest
from tests.models.loading.gguf_files import FFN, HEAD
from tests.models.loading.gguf_makers import MAKERS, make_llama, make_phi3_long

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 5, 2**31, 2**63 - 1, 0.0, 0.5, -1.5, 1e30, float("nan"), float("inf")),
    *("", "4", "linear", "yarn", [], [1], [1, 1], [0, 0], [1, 2], ["a"], [-1, 2], [True, False]),
)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufHeader]:
    """One header an architecture, of the files that the other tests read."""
    directory = tmp_path_factory.mktemp("headers")
    paths = {name: maker().write(directory / f"{name}.gguf") for name, maker in MAKERS.items()}
    return {name: parse_gguf_header(map_file(path), str(path)) for name, path in paths.items()}


def translate(header: GgufHeader, **keys: Any) -> dict[str, Any]:
    architecture = header.metadata["general.architecture"]
    own = {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return translate_gguf_config(GgufHeader(header.location, {**header.metadata, **own}, header.tensors))


@pytest.mark.parametrize("architecture", sorted(MAKERS))
def test_files_load_as_models(tmp_path: Path, architecture: str) -> None:
    file = MAKERS[architecture]()
    if architecture == "llama":  # the file has biases, to show that they are read; no published one has
        file.stored = {name: values for name, values in file.stored.items() if not name.endswith(".bias")}
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf"))
    model_class, config = read_model(checkpoint)
    check_tensors(AbstractModel.of(model_class(config, Placement())), checkpoint)


# What an architecture computes that others refuse.
_SCALES = ("attention__scale", "embedding_scale", "logit_scale", "residual_scale")
COMPUTED = {
    "rope__dimension_count": {"phi3", "chatglm", "glm4", "glm4moe"},
    "expert_shared_count": {"glm4moe"},
    "nextn_predict_layers": {"glm4moe"},
    **{key: {"granite", "granitemoe"} for key in _SCALES},
    "logit_scale": {"granite", "granitemoe", "command-r", "cohere2"},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention__scale", 0.5),
        ("attention__causal", False),
        ("attention__clamp_kqv", 8.0),
        ("attention__max_alibi_bias", 8.0),
        ("attention__value_length", 2 * HEAD),
        ("attn_logit_softcapping", -50.0),
        ("embedding_scale", 12.0),
        ("expert_shared_count", 1),
        ("expert_group_count", 8),
        ("expert_gating_func", 4),
        ("logit_scale", 0.25),
        ("nextn_predict_layers", 1),
        ("no_such_key", 1),
        ("pooling_type", 1),
        ("residual_scale", 0.22),
        ("rope__dimension_count", HEAD // 2),
        ("rope__dimension_sections", [1, 2, 3, 4]),
        ("rope__scaling__attn_factor", -1.0),
        ("rope__scaling__type", "longrope"),
        ("rope__scaling__yarn_ext_factor", 0.5),
        ("rope__scaling__yarn_log_multiplier", 0.1),
        ("ssm__state_size", 16),
        ("swiglu_clamp_exp", [7.0, 7.0]),
        ("use_parallel_residual", True),
    ],
)
def test_what_is_not_computed_is_refused_by_name(headers: dict[str, GgufHeader], key: str, value: Any) -> None:
    for architecture in set(MAKERS) - COMPUTED.get(key, set()):
        with pytest.raises(CheckpointError) as caught:
            translate(headers[architecture], **{key: value})
        written = headers[architecture].metadata["general.architecture"]
        assert f"metadata {written}.{key.replace('__', '.')} is {value!r}, expected " in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"attention__sliding_window": 128},
        {"final_logit_softcapping": 30.0},
        {"rope__scaling__attn_factor": 2.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 2.0},
        {"rope__scaling__type": "yarn"},
        {"expert_weights_scale": 2.5},
        {"attention__head_count": [4, 2]},
        {"attention__head_count_kv": [2, 4]},
        {"feed_forward_length": [96, 64]},
    ],
)
def test_a_plain_architecture_refuses_what_others_compute(
    headers: dict[str, GgufHeader], architecture: str, keys: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=f"metadata {architecture}"):
        translate(headers[architecture], **keys)


LINEAR = {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 50000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope__scale_linear": 4.0}, LINEAR),
        ({"rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, LINEAR),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, LINEAR),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, DEFAULT),
        ({"rope__scale_linear": 1.0, "rope__scaling__attn_factor": 1.0, "rope__dimension_count": HEAD}, DEFAULT),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, YARN),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5},
            {**YARN, "attention_factor": pytest.approx(0.5 * (0.1 * math.log(4) + 1))},
        ),
    ],
)
def test_every_way_to_scale_positions_is_obeyed(
    headers: dict[str, GgufHeader], architecture: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = translate(headers[architecture], **keys)["rope_parameters"]
    assert (found["full_attention"] if architecture == "gemma3" else found) == expected


def test_factors_of_zero_are_none(headers: dict[str, GgufHeader]) -> None:
    plain = translate(headers["granite"], **dict.fromkeys(_SCALES, 0.0))
    factors = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    assert [plain[name] for name in factors] == [1, 1, 1, HEAD**-0.5]


def test_a_granite_without_positions_is_refused(headers: dict[str, GgufHeader]) -> None:
    with pytest.raises(CheckpointError, match=r"granite\.rope\.scaling\.finetuned is False"):
        translate(headers["granite"], rope__scaling__finetuned=False)


def test_widths_that_older_files_leave_out(headers: dict[str, GgufHeader]) -> None:
    header = headers["qwen2moe"]
    left_out = ("qwen2moe.expert_feed_forward_length", "qwen2moe.expert_shared_feed_forward_length")
    metadata = {key: value for key, value in header.metadata.items() if key not in left_out}
    config = translate_gguf_config(GgufHeader(header.location, metadata, header.tensors))
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (FFN // 2, FFN)


def test_windows_that_a_file_leaves_out(headers: dict[str, GgufHeader]) -> None:
    assert translate(headers["olmo3"], attention__sliding_window=0)["model_type"] == "olmo2"
    plain = translate(headers["exaone4"], attention__sliding_window=0)
    assert plain["sliding_window"] is None and "layer_types" not in plain
    base = translate(headers["olmo3"], rope__freq_base_swa=3e4)["rope_parameters"]
    assert (base["full_attention"]["rope_theta"], base["sliding_attention"]["rope_theta"]) == (5e4, 3e4)


def test_keys_that_models_compute_are_obeyed(headers: dict[str, GgufHeader]) -> None:
    assert translate(headers["qwen3moe"], expert_weights_norm=False)["norm_topk_prob"] is False
    assert translate(headers["lfm2moe"], expert_weights_norm=False)["norm_topk_prob"] is False
    assert translate(headers["lfm2moe"], expert_weights_scale=2.5)["routed_scaling_factor"] == 2.5
    assert translate(headers["gemma3"], final_logit_softcapping=30.0)["final_logit_softcapping"] == 30.0
    uncapped = translate(headers["gemma2"], attn_logit_softcapping=0.0, final_logit_softcapping=0.0)
    assert (uncapped["attn_logit_softcapping"], uncapped["final_logit_softcapping"]) == (None, None)
    largest = {"block_count": 46, "embedding_length": 4608, "attention__head_count": 32}
    tensors = {f"blk.{layer}.attn_norm.weight": None for layer in range(46)} | dict(headers["gemma2"].tensors)
    header = GgufHeader("gemma2", headers["gemma2"].metadata, tensors)
    assert translate(header, **largest)["query_pre_attn_scalar"] == 144  # of Gemma 2 27B; its heads are 128 wide
    kinds = ["full_attention", "sliding_attention"]
    assert translate(headers["gemma3"], attention__sliding_window_pattern=[False, True])["layer_types"] == kinds
    assert translate(headers["gpt-oss"], attention__sliding_window_pattern=[0, 1])["layer_types"] == kinds
    assert translate(headers["gemma3"], attention__sliding_window_pattern=2)["layer_types"] == kinds[::-1]


def test_what_changes_nothing_is_let_pass(headers: dict[str, GgufHeader]) -> None:
    neutral = {
        "attention__causal": True,
        "expert_count": 0,
        "expert_used_count": 0,
        "logit_scale": 1.0,
        "rope__scaling__finetuned": True,
        "rope__scaling__original_context_length": 64,
        "tensor_data_layout": "Meta AI original pth",
        "vocab_size": 40,
    }
    assert translate(headers["llama"], **neutral) == translate(headers["llama"])


@pytest.mark.parametrize("architecture", sorted(MAKERS))
def test_every_edit_loads_or_is_refused_by_name(headers: dict[str, GgufHeader], architecture: str) -> None:
    header = headers[architecture]
    architecture = header.metadata["general.architecture"]
    known = [key for key in header.metadata if key.startswith(f"{architecture}.")]
    known += [f"{architecture}.{key}" for key in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear")]
    known += [f"{architecture}.attention.sliding_window", f"{architecture}.attention.sliding_window_pattern"]
    loaded = 0
    for key in known:
        for value in WRONG:
            edited = GgufHeader(header.location, {**header.metadata, key: value}, header.tensors)
            try:
                checkpoint = _Described(translate_gguf_config(edited))
                read_model(checkpoint)  # type: ignore[arg-type]
                loaded += 1
            except CheckpointError as error:
                assert ": metadata " in str(error) and key.removeprefix(f"{architecture}.") in str(error)
            except InvalidRequest as error:
                assert ": expected " in str(error)
    assert loaded > len(known)


class _Described:
    """A checkpoint that is only a config."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.tensors: dict[str, Any] = {}


@pytest.mark.parametrize("kind", ["adapter", "imatrix", "mmproj", 3])
def test_other_things_than_models_are_refused(headers: dict[str, GgufHeader], kind: Any) -> None:
    header = headers["llama"]
    with pytest.raises(CheckpointError, match=r"general\.type is"):
        translate_gguf_config(GgufHeader(header.location, {**header.metadata, "general.type": kind}, header.tensors))


def test_longrope_and_a_partial_rotation_are_obeyed(tmp_path: Path) -> None:
    file = make_phi3_long()
    _, config = read_model(open_checkpoint_path(file.write(tmp_path / "model.gguf")))
    assert (config.layer_types, config.window_tokens) == (("sliding_attention",) * 2, 8)
    assert config.rope.factor == 1.25 and config.rope.long is not None and config.rope.long.above_tokens == 64
    plain = 50_000.0 ** -(np.arange(6) / 6)
    short, long = config.rope.frequencies, config.rope.long.frequencies
    np.testing.assert_allclose(short, [*(plain / np.linspace(1, 2, 6)), 0, 0], rtol=1e-6)
    np.testing.assert_allclose(long, [*(plain / np.linspace(1, 4, 6)), 0, 0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["long", "short"])
def test_divisors_of_longrope_that_do_not_fit_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name = f"rope_factors_{kind}.weight"
    file = make_phi3_long()
    file.stored[name] = np.ones(HEAD // 2, np.float32)
    with pytest.raises(CheckpointError, match=r"is not one divisor a pair") as caught:
        open_checkpoint_path(file.write(tmp_path / "shape.gguf"))
    assert caught.value.tensor == name
    del file.stored[name]
    with pytest.raises(CheckpointError, match="is missing") as caught:
        open_checkpoint_path(file.write(tmp_path / "missing.gguf"))
    assert caught.value.tensor == name


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_rope_divisors_are_obeyed_or_refused(tmp_path: Path, architecture: str) -> None:
    file = MAKERS[architecture]()
    file.stored["rope_freqs.weight"] = np.ones(HEAD // 2, np.float32)
    open_checkpoint_path(file.write(tmp_path / "ones.gguf"))
    file.stored["rope_freqs.weight"] = np.full(HEAD // 2, 8.0, np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_checkpoint_path(file.write(tmp_path / "scaled.gguf"))
    file.stored["rope_freqs.weight"] = np.ones(HEAD // 2 + 1, np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*is not one divisor a pair"):
        open_checkpoint_path(file.write(tmp_path / "long.gguf"))


def test_rope_divisors_beside_a_scaling_are_refused(tmp_path: Path) -> None:
    file = make_llama()
    file.key(rope__scale_linear=4.0)
    file.stored["rope_freqs.weight"] = np.linspace(1, 8, HEAD // 2, dtype=np.float32)
    with pytest.raises(CheckpointError, match=r"without rope\.scaling alone"):
        open_checkpoint_path(file.write(tmp_path / "model.gguf"))
