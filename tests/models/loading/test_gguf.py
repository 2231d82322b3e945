"""GGUF files read as Hugging Face checkpoints, and every damaged file explained."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resin.models.declare import Placement
from resin.models.gpt_oss import GptOss, GptOssConfig
from resin.models.loading import CheckpointError, open_checkpoint_path
from resin.models.loading.gguf_config import fit_llama3_rope
from resin.models.registry import MODELS
from resin.models.weights import AbstractModel, check_tensors
from tests.models.loading.gguf_files import EXPERT_FFN, EXPERTS, HEADS, HIDDEN, KV_HEADS, GgufFile, permute
from tests.models.loading.gguf_makers import MAKERS, make_gpt_oss, make_llama, make_mixtral, make_qwen3

DATA = Path(__file__).parents[2] / "data"


def windows(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Thirds of each dimension that end within heads and blocks, and one that leaves later dimensions whole."""
    yield (slice(shape[0] // 3, shape[0]),)
    for place, size in enumerate(shape):
        whole = [slice(0, other) for other in shape]
        for part in (slice(0, max(size // 3, 1)), slice(size // 3, size)):
            yield (*whole[:place], part, *whole[place + 1 :])


@pytest.mark.parametrize("architecture", sorted(MAKERS))
def test_every_architecture_reads_back_as_hugging_face_tensors(tmp_path: Path, architecture: str) -> None:
    file = MAKERS[architecture]()
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf"))
    assert set(checkpoint.tensors) == set(file.expected)
    assert checkpoint.quantised == {}
    for name, expected in file.expected.items():
        found = checkpoint.read(name)
        assert checkpoint.tensors[name] == (expected.shape, "float32")
        assert found.flags.c_contiguous
        # Gemma's norms lose a bit to the 1 that is added and taken away.
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=3e-7 if architecture.startswith("gemma") else 0, err_msg=name
        )
        for window in windows(found.shape):
            np.testing.assert_array_equal(checkpoint.read(name, window), found[window], err_msg=name)


COMMON = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 50000.0}


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", {"model_type": "llama", "intermediate_size": 96, "tie_word_embeddings": True}),
        (
            "mixtral",
            {"model_type": "mixtral", "intermediate_size": 96, "num_local_experts": 3, "num_experts_per_tok": 2},
        ),
        ("olmo2", {"model_type": "olmo2", "intermediate_size": 96, "rope_parameters": DEFAULT_ROPE}),
        (
            "olmo3",
            {
                "model_type": "olmo3",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE},
            },
        ),
        ("smollm3", {"model_type": "smollm3", "no_rope_layer_interval": 4, "rope_parameters": DEFAULT_ROPE}),
        (
            "exaone4",
            {
                "model_type": "exaone4",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": DEFAULT_ROPE,
            },
        ),
        (
            "granite",
            {
                "model_type": "granite",
                "attention_multiplier": pytest.approx(0.2),
                "embedding_multiplier": 3.0,
                "residual_multiplier": pytest.approx(0.4),
                "logits_scaling": 8.0,
            },
        ),
        (
            "granitemoe",
            {"model_type": "granitemoe", "intermediate_size": 96, "num_local_experts": 3, "logits_scaling": 8.0},
        ),
        (
            "chatglm",
            {
                "model_type": "glm",
                "attention_bias": True,
                "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
            },
        ),
        ("glm4", {"model_type": "glm4", "attention_bias": True, "intermediate_size": 96}),
        (
            "glm4moe",
            {
                "model_type": "glm4_moe",
                "num_hidden_layers": 2,
                "num_nextn_predict_layers": 1,
                "n_routed_experts": 3,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
                "use_qk_norm": True,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.5,
                "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
            },
        ),
        (
            "qwen2moe",
            {
                "model_type": "qwen2_moe",
                "num_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 96,
                "norm_topk_prob": False,
            },
        ),
        ("qwen2", {"model_type": "qwen2", "intermediate_size": 96, "rope_parameters": DEFAULT_ROPE}),
        ("qwen3", {"model_type": "qwen3", "tie_word_embeddings": False, "rope_parameters": DEFAULT_ROPE}),
        (
            "qwen3moe",
            {
                "model_type": "qwen3_moe",
                "num_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
        ),
        (
            "gemma2",
            {
                "model_type": "gemma2",
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": DEFAULT_ROPE,
            },
        ),
        (
            "gemma3",
            {
                "model_type": "gemma3_text",
                "sliding_window": 8,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention"] * 2,
                "rope_parameters": {
                    "full_attention": DEFAULT_ROPE,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
        (
            "lfm2",
            {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"],
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                "intermediate_size": 96,
            },
        ),
        ("lfm2moe", {"model_type": "lfm2_moe", "num_dense_layers": 1, "num_experts": 3, "use_expert_bias": True}),
        (
            "gpt-oss",
            {
                "model_type": "gpt_oss",
                "intermediate_size": 32,
                "num_local_experts": 3,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50000.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                },
            },
        ),
    ],
)
def test_metadata_becomes_a_hugging_face_config(tmp_path: Path, architecture: str, expected: dict) -> None:
    config = open_checkpoint_path(MAKERS[architecture]().write(tmp_path / "model.gguf")).config
    wanted = COMMON | expected
    assert {name: config.get(name) for name in wanted} == wanted
    epsilon = config["norm_eps" if architecture.startswith("lfm2") else "rms_norm_eps"]
    assert epsilon == pytest.approx(1e-5)


BLOCK_KINDS = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.TQ2_0, Kind.MXFP4]


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_quantised_rows_are_dequantised_and_unpermuted(tmp_path: Path, kind: Kind) -> None:
    file = GgufFile("llama")
    width = 256
    file.metadata = make_llama().metadata | {"llama.embedding_length": width, "llama.block_count": 1}
    file.add("token_embd.weight", "model.embed_tokens.weight", 40, width)
    file.add("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", 64, width, change=permute(HEADS))
    file.add("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", 32, width, change=permute(KV_HEADS))
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf", dict.fromkeys(file.stored, kind)))
    for name, original in file.expected.items():
        found = checkpoint.read(name)
        expected = dequantize(quantize(original, kind), kind)  # rows are quantised one by one
        assert checkpoint.tensors[name] == (original.shape, found.dtype.name)
        wanted = {Kind.F16: np.dtype(np.float16), Kind.BF16: np.dtype(ml_dtypes.bfloat16)}
        assert found.dtype == wanted.get(kind, np.dtype(np.float32))
        np.testing.assert_array_equal(found.astype(np.float32), expected)
        for window in windows(found.shape):
            np.testing.assert_array_equal(checkpoint.read(name, window), found[window])


def test_float_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint_path(make_qwen3().write(tmp_path / "model.gguf"))
    found = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert not found.flags.owndata
    assert not found.flags.writeable
    checkpoint.close()
    assert np.isfinite(found).all()
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight': the checkpoint is closed"):
        checkpoint.read("model.embed_tokens.weight")


def test_experts_that_older_files_store_one_by_one_are_the_same(tmp_path: Path) -> None:
    file = make_mixtral(listed=True)
    assert "blk.0.ffn_gate.2.weight" in file.stored
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf"))
    assert set(checkpoint.tensors) == set(file.expected)
    for name, expected in file.expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected, err_msg=name)


def test_gpt_oss_experts_stay_packed_in_the_safetensors_layout(tmp_path: Path) -> None:
    file = make_gpt_oss()
    packed = {name: Kind.MXFP4 for name in file.stored if "_exps.weight" in name}
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf", packed))
    experts = "model.layers.1.mlp.experts."
    assert checkpoint.tensors[f"{experts}gate_up_proj_blocks"] == ((EXPERTS, 2 * EXPERT_FFN, HIDDEN // 32, 16), "uint8")
    assert checkpoint.tensors[f"{experts}down_proj_scales"] == ((EXPERTS, HIDDEN, EXPERT_FFN // 32), "uint8")
    assert checkpoint.read(f"{experts}down_proj_blocks").shape == (EXPERTS, HIDDEN, EXPERT_FFN // 32, 16)
    for name in ("gate_up_proj", "down_proj"):
        original = np.ascontiguousarray(file.expected[experts + name].swapaxes(1, 2))
        expected = dequantize(quantize(original, Kind.MXFP4), Kind.MXFP4).swapaxes(1, 2)
        found = checkpoint.read_dequantised(experts + name)
        parts = (f"{experts}{name}_blocks", f"{experts}{name}_scales")
        assert checkpoint.quantised[experts + name] == (found.shape, found.dtype.name, parts)
        np.testing.assert_array_equal(found.astype(np.float32), expected)
    bias = f"{experts}gate_up_proj_bias"
    np.testing.assert_array_equal(checkpoint.read_dequantised(bias), file.expected[bias])


@pytest.mark.parametrize("left_out", [None, "blk.1.ffn_down_exps.weight"])
def test_gpt_oss_is_loaded_packed_where_every_expert_is(tmp_path: Path, left_out: str | None) -> None:
    file = make_gpt_oss()
    packed = {name: Kind.MXFP4 for name in file.stored if "_exps.weight" in name and name != left_out}
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf", packed))
    config = GptOssConfig.from_hf(checkpoint.config)
    assert config.packed == (left_out is None)
    model = AbstractModel.of(GptOss(config, Placement()))
    check_tensors(model, checkpoint)
    assert any(item.dtype == "int32" for item in model.declarations) == config.packed


def test_parallel_reads_agree(tmp_path: Path) -> None:
    file = make_llama()
    kinds = {name: Kind.Q8_0 for name, values in file.stored.items() if values.ndim == 2}
    checkpoint = open_checkpoint_path(file.write(tmp_path / "model.gguf", kinds))
    names = list(checkpoint.tensors) * 3
    alone = {name: checkpoint.read(name) for name in checkpoint.tensors}
    with ThreadPoolExecutor(8) as pool:
        for name, found in zip(names, pool.map(checkpoint.read, names), strict=True):
            np.testing.assert_array_equal(found, alone[name])


def llama3_divisors(head: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    frequencies = theta ** (-np.arange(0, head, 2) / head)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / (smooth + (1 - smooth) / factor)).astype(np.float32)


@pytest.mark.parametrize(("head", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama3_rope_is_recovered_from_its_divisors(head: int, factor: float) -> None:
    found = fit_llama3_rope(llama3_divisors(head, 5e5, factor, 1.0, 4.0, 8192), 5e5)
    assert found == {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_divisors_of_a_file_reach_the_config_or_are_refused(tmp_path: Path) -> None:
    file = make_llama()
    file.stored["rope_freqs.weight"] = np.ones(8, np.float32)
    checkpoint = open_checkpoint_path(file.write(tmp_path / "ones.gguf"))
    assert checkpoint.config["rope_parameters"] == DEFAULT_ROPE
    assert "rope_freqs.weight" not in checkpoint.tensors
    file.stored["rope_freqs.weight"] = np.array([1, 3, 2, 5, 1, 8, 2, 1], np.float32)
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight': the divisors do not follow the llama3 rule"):
        open_checkpoint_path(file.write(tmp_path / "odd.gguf"))


def test_faults_name_file_tensor_and_reason(tmp_path: Path) -> None:
    path = make_llama().write(tmp_path / "model.gguf")
    whole = path.read_bytes()

    def open_bytes(raw: bytes) -> None:
        path.write_bytes(raw)
        open_checkpoint_path(path)

    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'blk\.1\.\w+\.weight': ends at byte .*truncated"):
        open_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"model\.gguf: .* needs \d+ bytes, the file has 100 \(truncated"):
        open_bytes(whole[:100])
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="GGUF version 50331648 is not supported"):
        open_bytes(whole[:4] + bytes([0, 0, 0, 3]) + whole[8:])
    with pytest.raises(CheckpointError, match="architecture 'lllll' is not supported"):
        open_bytes(whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lllll", 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file.stored.pop("token_embd.weight"), "'token_embd.weight': is missing"),
        (lambda file: file.stored.update(odd=np.ones(3, np.float32)), "'odd': is not known in a llama model"),
        (
            lambda file: file.stored.update({"blk.7.attn_q.weight": np.ones((4, 4), np.float32)}),
            "'blk.7.attn_q.weight': is not known",
        ),
        (lambda file: file.metadata.pop("llama.block_count"), "llama.block_count is missing"),
        (lambda file: file.metadata.update({"llama.block_count": "two"}), "llama.block_count is 'two'"),
        (lambda file: file.metadata.update({"llama.attention.head_count": 0}), "head_count is 0"),
        (
            lambda file: file.metadata.update({"llama.attention.head_count_kv": [1]}),
            "for each of block_count=2 layers",
        ),
        (lambda file: file.metadata.update({"llama.attention.head_count": 5}), "64 rows do not divide into 5 heads"),
        (
            lambda file: file.metadata.update({"llama.rope.scaling.type": "longrope"}),
            "scaling.type is 'longrope', expected one of",
        ),
        (lambda file: file.metadata.update({"llama.expert_count": 8}), "llama.expert_used_count is missing"),
        (lambda file: file.metadata.update({"general.alignment": 48}), "general.alignment=48 is not a power of two"),
    ],
)
def test_unusable_contents_are_refused(tmp_path: Path, change: object, reason: str) -> None:
    file = make_llama()
    change(file)  # type: ignore[operator]
    path = tmp_path / "model.gguf"
    if "general.alignment" in file.metadata:
        # The writer refuses it too: write a fair value and patch the bytes.
        file.metadata["general.alignment"] = 64
        raw = file.write(path).read_bytes()
        at = raw.index(b"general.alignment") + len(b"general.alignment") + 4
        path.write_bytes(raw[:at] + (48).to_bytes(4, "little") + raw[at + 4 :])
    else:
        file.write(path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint_path(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "lfm2"])
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_and_cut_bytes_never_raise_another_error(
    tmp_path: Path, architecture: str, data: st.DataObject
) -> None:
    path = tmp_path / f"{architecture}.gguf"
    if not path.exists():
        MAKERS[architecture]().write(path)
    raw = bytearray(path.read_bytes())
    header_bytes = 4096  # where damage has consequences
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, header_bytes))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    cut = data.draw(st.one_of(st.none(), st.integers(0, header_bytes), st.integers(0, len(raw))))
    damaged.write_bytes(raw[:cut])
    try:
        checkpoint = open_checkpoint_path(damaged)
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape
    except CheckpointError as error:
        assert error.reason


@pytest.mark.parametrize(
    ("model", "golden", "count", "name", "info"),
    [
        ("smollm2-135m", "smollm2_prompts.json", 272, "model.layers.29.self_attn.k_proj.weight", (192, 576)),
        ("gemma3-270m", "gemma3_prompts.json", 236, "model.layers.17.self_attn.q_proj.weight", (1024, 640)),
    ],
)
def test_real_files_have_the_reference_config(
    model: str, golden: str, count: int, name: str, info: tuple[int, int]
) -> None:
    path = MODELS[model].source.find()
    if path is None:
        pytest.skip(f"{model} is neither installed nor downloaded")
    checkpoint = open_checkpoint_path(path)
    config = json.loads((DATA / golden).read_text())["config"]
    assert {key: checkpoint.config.get(key) for key in config} == config
    assert len(checkpoint.tensors) == count
    assert checkpoint.tensors[name] == (info, "float32")
    assert np.isfinite(checkpoint.read(name)).all()
