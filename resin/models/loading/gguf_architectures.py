"""What each GGUF architecture's own keys say, as settings of its family's Hugging Face config."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from resin.models.loading.gguf_metadata import Metadata

Config = dict[str, Any]

# Numbers under expert_gating_func.
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3


def _llama(metadata: Metadata, config: Config) -> None:
    config |= {"model_type": "llama", "hidden_act": "silu"}
    if any(metadata.integer(key, default=0, low=0) for key in ("expert_count", "expert_used_count")):
        # Older files have the expert's width under feed_forward_length alone.
        width = metadata.integer("expert_feed_forward_length", default=config.get("intermediate_size"))
        metadata.only("expert_gating_func", 0, _SOFTMAX)
        config |= {
            "model_type": "mixtral",
            "intermediate_size": width,
            "num_local_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
        }


def _window(metadata: Metadata) -> int | None:
    """The window, or None, and then nothing is said about it."""
    window = metadata.integer("attention.sliding_window", default=0, low=0)
    if window == 0:
        metadata.ignore("attention.sliding_window_pattern", "rope.freq_base_swa")
    return window or None


def _olmo2(metadata: Metadata, config: Config) -> None:
    """OLMo 2, or OLMo 3 where there is a window, whose layers turn by a rotation of their own."""
    config |= {"model_type": "olmo2", "hidden_act": "silu"}
    window = _window(metadata)
    if window is None:
        return
    rope = config["rope_parameters"]
    theta = metadata.number("rope.freq_base_swa", default=rope["rope_theta"], above=1)
    config |= {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(metadata, config["num_hidden_layers"], 4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _smollm3(metadata: Metadata, config: Config) -> None:
    config |= {"model_type": "smollm3", "hidden_act": "silu", "no_rope_layer_interval": 4}


def _exaone4(metadata: Metadata, config: Config) -> None:
    window = _window(metadata)
    config |= {"model_type": "exaone4", "hidden_act": "silu", "sliding_window": window}
    if window is not None:
        config["layer_types"] = _layer_types(metadata, config["num_hidden_layers"], 4)


def _granite(metadata: Metadata, config: Config) -> None:
    # Files of relatives without positions say so by this key.
    metadata.only("rope.scaling.finetuned", True)

    def factor(key: str, absent: float = 1.0) -> float:
        """A factor of 0 is none."""
        return metadata.number(key, default=0.0, low=0) or absent

    config |= {
        "model_type": "granite",
        "hidden_act": "silu",
        "attention_multiplier": factor("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": factor("embedding_scale"),
        "residual_multiplier": factor("residual_scale"),
        "logits_scaling": factor("logit_scale"),
    }


def _granitemoe(metadata: Metadata, config: Config) -> None:
    _granite(metadata, config)
    metadata.only("expert_gating_func", 0, _SOFTMAX)
    config |= {
        "model_type": "granitemoe",
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _qwen2(metadata: Metadata, config: Config) -> None:
    config |= {"model_type": "qwen2", "hidden_act": "silu"}


def _glm(metadata: Metadata, config: Config) -> None:
    config |= {
        "model_type": "glm" if metadata.architecture == "chatglm" else "glm4",
        "hidden_act": "silu",
        "attention_bias": _has(metadata, ".attn_q.bias", ".attn_qkv.bias"),
    }


def _glm4moe(metadata: Metadata, config: Config) -> None:
    """Its last layers guess further tokens."""
    layers, drafts = config["num_hidden_layers"], metadata.integer("nextn_predict_layers", default=0, low=0)
    if drafts >= layers:
        metadata.refuse("nextn_predict_layers", drafts, f"less than block_count={layers}")
    config |= _experts(metadata, _SIGMOID)
    config |= {
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "attention_bias": _has(metadata, ".attn_q.bias"),
        "use_qk_norm": _has(metadata, ".attn_q_norm.weight"),
        "num_hidden_layers": layers - drafts,
        "num_nextn_predict_layers": drafts,
        "n_routed_experts": config.pop("num_experts"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", default=0, low=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", default=0.0, low=0) or 1.0,
    }


def _has(metadata: Metadata, *endings: str) -> bool:
    """Whether a tensor's name ends so."""
    return any(name.endswith(endings) for name in metadata.header.tensors)


def _qwen2moe(metadata: Metadata, config: Config) -> None:
    metadata.only("expert_gating_func", 0, _SOFTMAX)
    ffn, top_k = config.get("intermediate_size", 0), metadata.integer("expert_used_count")
    config |= {
        "model_type": "qwen2_moe",
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length", default=ffn // top_k or None),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length", default=ffn or None),
    }
    config.setdefault("intermediate_size", config["moe_intermediate_size"])  # no layer is without experts


def _qwen3(metadata: Metadata, config: Config) -> None:
    config |= {"model_type": "qwen3", "hidden_act": "silu"}


def _experts(metadata: Metadata, gating: int) -> Config:
    """What mixtures of experts share: llama.cpp scores by the architecture, a file may only agree."""
    metadata.only("expert_gating_func", 0, gating)
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", default=True),
    }


def _qwen3moe(metadata: Metadata, config: Config) -> None:
    config |= {"model_type": "qwen3_moe", "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []}
    config |= _experts(metadata, _SOFTMAX)
    config.setdefault("intermediate_size", config["moe_intermediate_size"])  # no layer is without experts


# The 27B of either Gemma scales its queries by hidden/heads instead of the head size, and no key says so: the layer
# count does.
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_GEMMA2_PATTERN_LAYERS = 2
_GEMMA3_PATTERN_LAYERS = 6
_COHERE2_PATTERN_LAYERS = 4


def _gemma(metadata: Metadata, config: Config, *, layers_of_27b: int, pattern_layers: int) -> None:
    """What the Gemmas share."""
    layers = config["num_hidden_layers"]
    is_27b = layers == layers_of_27b
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
        ),
        "layer_types": _layer_types(metadata, layers, pattern_layers),
    }


def _gemma2(metadata: Metadata, config: Config) -> None:
    _gemma(metadata, config, layers_of_27b=_GEMMA2_27B_LAYERS, pattern_layers=_GEMMA2_PATTERN_LAYERS)
    config |= {
        "model_type": "gemma2",
        "sliding_window": metadata.integer("attention.sliding_window", default=4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", default=50.0, low=0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", default=30.0, low=0) or None,
    }


def _gemma3(metadata: Metadata, config: Config) -> None:
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    _gemma(metadata, config, layers_of_27b=_GEMMA3_27B_LAYERS, pattern_layers=_GEMMA3_PATTERN_LAYERS)
    local_theta = metadata.number("rope.freq_base_swa", default=10000.0, above=1)
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.only(key, head_dim)
    softcap = metadata.number("final_logit_softcapping", default=0.0, low=0)
    config |= {
        "model_type": "gemma3_text",
        "sliding_window": metadata.integer("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "final_logit_softcapping": softcap or None,
        "attn_logit_softcapping": None,
    }


def _layer_types(metadata: Metadata, layers: int, period: int) -> list[str]:
    """Every `period`-th layer sees everything, unless a list says which layers have a window."""
    key = "attention.sliding_window_pattern"
    given = metadata.get(key)
    if isinstance(given, list):
        if len(given) != layers or not all(item in (0, 1) for item in given):
            metadata.refuse(key, given, f"true or false for each of block_count={layers} layers")
        return ["sliding_attention" if item else "full_attention" for item in given]
    period = metadata.integer(key, default=period)
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _phi3(metadata: Metadata, config: Config) -> None:
    config |= {
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": metadata.integer("attention.sliding_window", default=0, low=0) or None,
        "original_max_position_embeddings": config["rope_parameters"].get("original_max_position_embeddings"),
    }


def _command_r(metadata: Metadata, config: Config) -> None:
    names = metadata.header.tensors
    config |= {
        "model_type": "cohere",
        "hidden_act": "silu",
        "layer_norm_eps": config.pop("rms_norm_eps"),
        "logit_scale": metadata.number("logit_scale", above=0),
        "use_qk_norm": any(".attn_q_norm." in name for name in names),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
    }


def _cohere2(metadata: Metadata, config: Config) -> None:
    _command_r(metadata, config)
    config |= {
        "model_type": "cohere2",
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config["num_hidden_layers"], _COHERE2_PATTERN_LAYERS),
    }


def _lfm2(metadata: Metadata, config: Config) -> None:
    kv_heads = metadata.per_layer("attention.head_count_kv", config["num_hidden_layers"])
    config |= {
        "model_type": "lfm2",
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is the final width already
    }


def _lfm2moe(metadata: Metadata, config: Config) -> None:
    _lfm2(metadata, config)
    config |= _experts(metadata, _SIGMOID)
    config |= {
        "model_type": "lfm2_moe",
        "num_dense_layers": metadata.integer("leading_dense_block_count", low=0),
        "use_expert_bias": any(".exp_probs_b" in name for name in metadata.header.tensors),
        "routed_scaling_factor": metadata.number("expert_weights_scale", default=0.0, low=0) or 1.0,
    }


def _gpt_oss(metadata: Metadata, config: Config) -> None:
    metadata.only("expert_gating_func", 0, _SOFTMAX_OF_CHOSEN)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    config |= {
        "model_type": "gpt_oss",
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": _layer_types(metadata, config["num_hidden_layers"], 2),
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


# Architectures whose rotation may turn the first dimensions of a head alone.
TURN_A_PART = frozenset({"chatglm", "glm4", "glm4moe", "phi3"})
ARCHITECTURES: Mapping[str, Callable[[Metadata, Config], None]] = MappingProxyType(
    {
        "llama": _llama,
        "olmo2": _olmo2,
        "smollm3": _smollm3,
        "exaone4": _exaone4,
        "granite": _granite,
        "granitemoe": _granitemoe,
        "qwen2moe": _qwen2moe,
        "chatglm": _glm,
        "glm4": _glm,
        "glm4moe": _glm4moe,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3moe,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "command-r": _command_r,
        "cohere2": _cohere2,
        "phi3": _phi3,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2moe,
        "gpt-oss": _gpt_oss,
    }
)
