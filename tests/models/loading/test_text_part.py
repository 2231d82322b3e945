"""Checkpoints of text and images: the language model is read out of them, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import read_config, read_model
from resin.models.loading import CheckpointError, open_checkpoint_path
from resin.models.loading.text_part import WRAPPERS
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, fp8_checkpoint, random_checkpoint, write_checkpoint
from resin.models.weights import AbstractModel, check_tensors
from resin.plan import InvalidRequest

# How files of before transformers 4.52 name the parts, and how newer ones do.
OLDER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "images": ""}
NEWER = {"model.": "model.language_model.", "lm_head.": "lm_head.", "images": "model."}
IMAGES = ("vision_tower.patch_embedding.weight", "multi_modal_projector.linear_1.bias")


def wrapped(model_type: str, names: dict[str, str], text: MemoryCheckpoint | None = None) -> MemoryCheckpoint:
    """A tiny model of text within one of images."""
    text = text or random_checkpoint(TINY_CONFIGS[WRAPPERS[model_type].model_type])
    arrays = {names["images"] + name: np.ones((2, 3), np.float32) for name in IMAGES}
    for name, array in text.arrays.items():
        own = next(prefix for prefix in ("model.", "lm_head.") if name.startswith(prefix))
        arrays[names[own] + name.removeprefix(own)] = array
    inner = {name: value for name, value in text.config.items() if name != "quantization_config"}
    outer = {name: value for name, value in text.config.items() if name == "quantization_config"}
    config = {"model_type": model_type, "text_config": inner, "vision_config": {"hidden_size": 8}, **outer}
    return MemoryCheckpoint(config, arrays)


@pytest.mark.parametrize("names", [OLDER, NEWER], ids=["older", "newer"])
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_text_is_read_out_of_it(tmp_path: Path, model_type: str, names: dict[str, str]) -> None:
    text = random_checkpoint(TINY_CONFIGS[WRAPPERS[model_type].model_type])
    checkpoint = open_checkpoint_path(write_checkpoint(tmp_path / "model", wrapped(model_type, names)))
    assert checkpoint.tensors == text.tensors
    assert read_model(checkpoint) == read_model(text)
    model_class, config = read_model(checkpoint)
    check_tensors(AbstractModel.of(model_class(config, Placement())), checkpoint)
    for name, array in text.arrays.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)
        np.testing.assert_array_equal(checkpoint.read(name, (slice(1, 3),)), array[1:3])
    assert checkpoint.notes == (f"2 tensors of images are left alone: {model_type} is served as text",)
    with pytest.raises(CheckpointError, match="is not in the checkpoint"):
        checkpoint.read(IMAGES[0])


def test_packed_text_is_decoded_out_of_it(tmp_path: Path) -> None:
    text = fp8_checkpoint(random_checkpoint(TINY_CONFIGS["mistral"]))
    checkpoint = open_checkpoint_path(write_checkpoint(tmp_path / "model", wrapped("mistral3", OLDER, text)))
    assert checkpoint.quantised == text.quantised and checkpoint.quantised
    for name in text.quantised:
        np.testing.assert_array_equal(checkpoint.read_dequantised(name), text.read_dequantised(name))


def test_tensors_of_neither_are_not_passed_over(tmp_path: Path) -> None:
    whole = wrapped("gemma3", OLDER)
    whole.arrays["audio_tower.weight"] = np.ones(3, np.float32)
    checkpoint = open_checkpoint_path(write_checkpoint(tmp_path / "model", whole))
    model_class, config = read_model(checkpoint)
    with pytest.raises(CheckpointError, match=r"extra audio_tower\.weight"):
        check_tensors(AbstractModel.of(model_class(config, Placement())), checkpoint)


def test_settings_beside_those_of_text_are_obeyed_or_refused() -> None:
    config = wrapped("gemma3", OLDER).config
    assert read_config({**config, "eos_token_id": [1, 106]})[1].eos_token_ids == (1, 106)
    assert not read_config({**config, "tie_word_embeddings": False})[1].tied  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="attention_chunk_size=4"):
        read_config({**config, "attention_chunk_size": 4})
    with pytest.raises(InvalidRequest, match="model_type='no_such'"):
        read_config({**config, "text_config": {**config["text_config"], "model_type": "no_such"}})


@pytest.mark.parametrize("text_config", [None, 5, ["a"]])
def test_settings_of_text_must_be_there(text_config: Any) -> None:
    with pytest.raises(InvalidRequest, match="text_config="):
        read_config({"model_type": "gemma3", "text_config": text_config})


def test_what_gemma_files_leave_out_is_the_familys() -> None:
    """As google/gemma-3-4b-it says it: neither vocabulary nor heads."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    _, config = read_config({"model_type": "gemma3", "text_config": {**text, **rope}})
    assert (config.vocab_size, config.heads, config.kv_heads) == (262_208, 8, 4)  # type: ignore[attr-defined]
