"""The language model in a checkpoint of text and images: its settings and its tensors; the rest is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import Checkpoint, CheckpointError, PackedInfo, TensorInfo, Window


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What a checkpoint's `model_type` says of the model in it.

    Attributes:
        model_type: of the language model whose settings do not say.
        defaults: what its absent settings mean, where they are not its family's own.
        media: settings beside `text_config` that say nothing about it.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[str, ...] = ()


WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        "gemma3_text",
        {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
        ("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    ),
    "lfm2_vl": Wrapper(
        "lfm2",
        media=(
            *("do_image_splitting", "downsample_factor", "encoder_patch_size", "image_token_id", "image_token_index"),
            *("max_image_tokens", "max_num_patches", "max_pixels_tolerance", "max_tiles", "min_image_tokens"),
            *("min_tiles", "projector_bias", "projector_hidden_act", "projector_hidden_size"),
            *("projector_use_layernorm", "tile_size", "use_image_special_tokens", "use_thumbnail"),
            "vision_feature_layer",
        ),
    ),
    "mistral3": Wrapper(
        "mistral",
        media=(
            *("image_token_id", "image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
            *("spatial_merge_size", "vision_feature_layer"),
        ),
    ),
}
# Where the language model's tensors are, of older files and of newer ones, and what its own files call them.
_TEXT = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_MEDIA = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, with those beside `text_config` that do not tell of images.

    Of these `eos_token_id` and its like win: text within a checkpoint of text and images ends as the whole does.

    Raises:
        InvalidRequest: `text_config` is missing.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return config
    given = ConfigReader.of(config)
    inner = given.section("text_config")
    if inner is None:
        given.refuse("text_config", None, "an object of settings")
    left = {*wrapper.media, "model_type", "text_config", "vision_config"}
    beside = {name: value for name, value in config.items() if name not in left and value is not None}
    return {"model_type": wrapper.model_type, **wrapper.defaults, **inner, **beside}


def open_text_part(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint of text and images as one of its language model; any other as it is."""
    if str(checkpoint.config.get("model_type")) not in WRAPPERS:
        return checkpoint
    return TextPart(checkpoint)


class TextPart:
    """A `Checkpoint` of the language model in another one."""

    def __init__(self, whole: Checkpoint) -> None:
        self._whole = whole
        self.location = whole.location
        self.config = text_config(whole.config)
        named = {name: _text_name(name) for name in {**whole.tensors, **whole.quantised}}
        self._stored = {own: name for name, own in named.items() if own is not None}
        self.tensors: Mapping[str, TensorInfo] = {
            own: whole.tensors[name] for own, name in self._stored.items() if name in whole.tensors
        }
        packed = {own: whole.quantised[name] for own, name in self._stored.items() if name in whole.quantised}
        self.quantised: Mapping[str, PackedInfo] = {
            own: info._replace(parts=tuple(_text_name(part) or part for part in info.parts))
            for own, info in packed.items()
        }
        left = len(whole.tensors) - len(self.tensors)
        about = f"{left} tensors of images are left alone: {whole.config['model_type']} is served as text"
        self.notes: tuple[str, ...] = (*whole.notes, about)

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        return self._whole.read(self._find(name), window)

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        return self._whole.read_dequantised(self._find(name), window)

    def _find(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(self.location, "is not in the checkpoint", name)
        return self._stored[name]

    def close(self) -> None:
        self._whole.close()


def _text_name(name: str) -> str | None:
    """What the language model's own files call a tensor; None for one of images."""
    for prefix, own in _TEXT:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None if name.startswith(_MEDIA) else name
