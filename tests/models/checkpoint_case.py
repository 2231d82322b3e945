"""One published checkpoint, and what the configs of many have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint.

    Attributes:
        name: as people call it; a hub id where it has one.
        config: what its config.json says, or the keys of a GGUF file without the architecture's name in front.
        billions: parameters where it loads.
        refused: what refuses it, as the error begins; None if it loads.
        architecture: of a GGUF file.
    """

    name: str
    config: Config = field(repr=False)
    billions: float | None = None
    refused: str | None = None
    architecture: str | None = None

    @property
    def kind(self) -> str:
        """What says which model it is."""
        return f"GGUF {self.architecture}" if self.architecture else str(self.config["model_type"])

    @property
    def result(self) -> str:
        """The last column."""
        return f"refused: `{self.refused}`" if self.refused else f"loads, {self.billions:.4g} B"


def shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


WRITTEN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}


def llama3(factor: float) -> dict[str, Any]:
    rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return {"rope_scaling": {**rope, "original_max_position_embeddings": 8192}}


def sliding_then_full(layers: int, period: int = 4) -> list[str]:
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def gemma3_vision(**text: Any) -> dict[str, Any]:
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "eos_token_id": [1, 106],
        "image_token_index": 262_144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **rope, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }


def packed(config: Config, method: str, **settings: Any) -> dict[str, Any]:
    return {**config, "quantization_config": {"quant_method": method, **settings}}


def compressed(kind: str, number: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors, as its files have them."""
    own = {"dynamic": False, "num_bits": bits, "observer": "minmax", "strategy": strategy, "symmetric": True}
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**own, "type": number, "block_structure": None, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def other(name: str, model_type: str, **settings: Any) -> Case:
    """A checkpoint of a family that is not computed."""
    return Case(name, {**WRITTEN, "model_type": model_type, **settings}, refused=f"model_type={model_type!r}")


def gguf(name: str, architecture: str, shape: Config, **keys: Any) -> Case:
    """A GGUF file of a published shape."""
    billions, refused = keys.pop("billions", None), keys.pop("refused", None)
    own = {
        "block_count": shape["num_hidden_layers"],
        "context_length": shape["max_position_embeddings"],
        "embedding_length": shape["hidden_size"],
        "feed_forward_length": shape["intermediate_size"],
        "attention.head_count": shape["num_attention_heads"],
        "attention.head_count_kv": shape["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.get("rope_theta", 10_000.0),
        "vocab_size": shape["vocab_size"],
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    return Case(name, own, billions, refused, architecture)
