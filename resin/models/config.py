"""Reading Hugging Face configs: every spelling that published files use for one thing, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import REQUIRED, ConfigReader
from resin.models.loading.quantised import DECODED, METHODS
from resin.models.rope import Rope

MOST_LAYERS = 4096
# Settings of published files that say nothing about the computation of a decoder: of training, of classification heads
# and of generation, and what transformers writes about itself.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _flash_attn_2_enabled
    _from_model_config _name_or_path architectures attention_dropout attn_implementation auto_map
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward cross_attention_hidden_size
    custom_pipelines decoder_start_token_id dtype embd_pdrop embedding_dropout experts_implementation
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout
    hidden_dropout_prob id2label initializer_range is_decoder keys_to_ignore_at_inference label2id license
    max_sequence_length mlp_dropout model_max_length model_type name_or_path num_labels output_attentions
    output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type quantization_config
    resid_pdrop return_dict router_aux_loss_coef sep_token_id suppress_tokens task_specific_params tf_legacy_loss
    tie_encoder_decoder tokenizer_class tokenizer_model_max_length tokenizer_padding_side torch_dtype torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache

    bad_words_ids constraint_mode decoder_input_ids diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length max_new_tokens
    min_length min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    penalty_alpha remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate temperature
    top_k top_p typical_p
    """.split()
)


# Settings of transformers that make any family something else than a causal decoder with plain weights.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "use_bidirectional_attention": (False,),
}


def check_quantisation(given: ConfigReader, supported: Sequence[str]) -> None:
    """Refuses packed weights of another method than the supported ones, by name.

    Raises:
        InvalidRequest: of another method, or with settings that are not understood.
    """
    # How older compressed-tensors and how MLX call it.
    given.only("compression_config", None)
    given.only("quantization", None)
    packed = given.section("quantization_config")
    if packed is None:
        return
    method = str(packed.get("quant_method"))
    if method not in supported:
        packed.refuse(
            "quant_method", packed.get("quant_method"), f"one of {sorted(supported)}, or weights that are not quantised"
        )
    packed.ignore("modules_to_not_convert", "ignored_layers")
    if method in METHODS:
        METHODS[method](packed)
    packed.refuse_unread(f"quant_method {method!r}")


def head_dim_of(given: ConfigReader, default: Any = None) -> int:
    """`head_dim`, or the default, or the hidden size shared evenly over the heads."""
    size = given.integer("head_dim", default=default)
    if size is not None:
        return size
    hidden, heads = given.integer("hidden_size"), given.integer("num_attention_heads")
    if hidden % heads:
        given.refuse("num_attention_heads", heads, f"a divisor of hidden_size={hidden}, or head_dim given")
    return hidden // heads


def eos_ids_of(given: ConfigReader) -> tuple[int, ...]:
    """`eos_token_id`, which is a number, a list or absent."""
    if isinstance(given.get("eos_token_id"), list | tuple):
        return given.integers("eos_token_id") or ()
    value = given.integer("eos_token_id", default=None, low=0)
    return () if value is None else (value,)


def rope_of(
    config: Mapping[str, Any],
    width: int,
    label: str | None = None,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """The rotation that a config describes, read as transformers 5 does.

    `rope_scaling` (its kind under `rope_type` or `type`) wins over `rope_parameters`, which is one object, or one a
    label such as "full_attention"; a `rope_theta` inside wins over the one beside it. The length before scaling is
    `original_max_position_embeddings` beside a rotation without a label, else the one inside, else
    `max_position_embeddings`.

    Args:
        config: the model's config.
        width: head size that the rotation acts on.
        label: which of several rotations.
        theta: what an absent `rope_theta` means.
        partial, interleaved: as `Rope.from_parameters` takes them.

    Raises:
        InvalidRequest: the scaling is of an unknown kind, or lacks a field, or has one that its kind does not know.
    """
    given = ConfigReader.of(config)
    older, section = given.section("rope_scaling"), given.section("rope_parameters")
    name = "rope_scaling" if older else "rope_parameters"
    section = older or section
    if section is not None and label is not None and label in section:
        section, name = section.section(label), f"{name}.{label}"
    else:
        label = None
    values: dict[str, Any] = {key: value for key, value in (section or {}).items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        values.setdefault(key, given.get(key))
    if values["rope_theta"] is None:
        values["rope_theta"] = theta
    beside = given.integer("original_max_position_embeddings", default=None)
    if beside is not None and label is None:
        values["original_max_position_embeddings"] = beside
    longest = given.integer("max_position_embeddings", default=None)
    values.setdefault("original_max_position_embeddings", longest)
    original = values["original_max_position_embeddings"]
    if "longrope" in (values.get("rope_type"), values.get("type")) and longest and type(original) is int and original:
        values.setdefault("factor", longest / original)
    reader = ConfigReader(values, path=f"{name}.")
    return Rope.from_parameters(reader, width, partial=partial, interleaved=interleaved)


def layer_types_of(config: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one of the known kinds for each of `num_hidden_layers`.

    Raises:
        InvalidRequest: absent, of another length, or with an unknown kind.
    """
    return ConfigReader.of(config).words("layer_types", allowed=known, count="num_hidden_layers")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of one model: what every family's config says. A model's own Config adds its twist.

    Attributes:
        quantised_as: packed forms of its checkpoints that load, as `quantization_config.quant_method` names them.
        hidden: width of the residual stream.
        layers: their number.
        heads, kv_heads, head_dim: of attention.
        vocab_size: tokens.
        norm_eps: of every norm.
        rope: rotation of queries and keys; of the full layers where others have their own.
        tied: one table embeds tokens and makes logits.
        max_context_tokens: longest sequence.
        eos_token_ids: tokens that end a text.
    """

    quantised_as: ClassVar[tuple[str, ...]] = DECODED

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tied: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], defaults: Mapping[str, Any], **own: Any) -> Self:
        """Builds the Config that `own` completes.

        Args:
            config: a Hugging Face config; null is the same as absent.
            defaults: what the family's absent settings mean, under their names in the config.
            own: fields that the model's Config adds, and common ones that it reads in another way.

        Raises:
            InvalidRequest: a setting is missing, of a wrong type, out of its range, or contradicts another.
        """
        given = ConfigReader.of(config)
        if "norm_eps" not in own:
            own["norm_eps"] = given.number("rms_norm_eps", default=defaults.get("rms_norm_eps", REQUIRED), low=0)
        if "tied" not in own:
            own["tied"] = given.flag("tie_word_embeddings", default=defaults.get("tie_word_embeddings", REQUIRED))
        longest = defaults.get("max_position_embeddings", REQUIRED)
        common = {
            "hidden": given.integer("hidden_size"),
            "layers": given.integer("num_hidden_layers", high=MOST_LAYERS),
            "heads": given.integer("num_attention_heads"),
            "kv_heads": given.integer("num_key_value_heads", "num_attention_heads"),
            "head_dim": head_dim_of(given, defaults.get("head_dim")),
            "vocab_size": given.integer("vocab_size"),
            "max_context_tokens": given.integer("max_position_embeddings", default=longest),
            "eos_token_ids": eos_ids_of(given),
        }
        values = {**common, **own}
        if values["heads"] % values["kv_heads"]:
            given.refuse(
                "num_key_value_heads", values["kv_heads"], f"a divisor of num_attention_heads={values['heads']}"
            )
        if "rope" not in own:
            values["rope"] = rope_of(
                given,
                values["head_dim"],
                theta=defaults.get("rope_theta", 10000.0),
                partial=defaults.get("partial_rotary_factor"),
            )
        return cls(**values)


def place_of(layer_types: tuple[str, ...], index: int) -> int:
    """Layers of the same kind before layer `index`: its place in the cache group of its kind."""
    return layer_types[:index].count(layer_types[index])
