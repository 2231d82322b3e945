"""How a model samples when nobody says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resin.models.loading import CheckpointError
from resin.models.sampling_defaults import SamplingDefaults, read_sampling_defaults
from resin.plan import InvalidRequest, SamplingParams
from tests.models.loading.gguf_files import GgufFile

ADVICE = SamplingDefaults(temperature=0.2, top_p=0.9, max_output_tokens=512, origin="advice")


def read(tmp_path: Path, stored: dict[str, Any], otherwise: SamplingDefaults | None = None) -> SamplingDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    return read_sampling_defaults(tmp_path, otherwise)


@pytest.mark.parametrize(
    ("stored", "temperature", "top_p", "top_k"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, 0.6, 0.9, 0),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, 0.6, 0.95, 20),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, 1.0, 0.95, 64),
        ({"do_sample": True}, 1.0, 1.0, 0),
        ({"do_sample": False, "temperature": 0.9}, 0.0, 1.0, 0),
        ({"temperature": 1, "top_p": None}, 1.0, 1.0, 0),
    ],
)
def test_a_checkpoint_that_speaks_of_sampling_is_believed(
    tmp_path: Path, stored: dict[str, Any], temperature: float, top_p: float, top_k: int
) -> None:
    found = read(tmp_path, stored, ADVICE)
    assert (found.temperature, found.top_p, found.top_k) == (temperature, top_p, top_k)
    assert found.origin == "generation_config.json"


def test_a_checkpoint_that_does_not_leaves_it_to_the_registry_and_then_to_resin(tmp_path: Path) -> None:
    for stored in ({}, {"eos_token_id": [2, 3], "max_length": 20}):
        assert read(tmp_path, stored, ADVICE) == ADVICE
        assert read(tmp_path, stored) == SamplingDefaults()
    assert read_sampling_defaults(tmp_path / "nothing" / "model.safetensors", ADVICE) == ADVICE
    assert read(tmp_path, {"max_new_tokens": 99}, ADVICE) == replace(ADVICE, max_output_tokens=99)


def test_gguf_files_say_it_in_their_header(tmp_path: Path) -> None:
    file = GgufFile("llama")
    file.metadata |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    path = file.write(tmp_path / "model.gguf")
    found = read_sampling_defaults(path, ADVICE)
    assert (found.temperature, found.top_p, found.top_k) == (0.5, 1.0, 40)
    assert str(found) == "temperature 0.5, top_p 1, top_k 40 (model.gguf)"


@pytest.mark.parametrize("stored", [{"temperature": "hot"}, {"top_p": 0.0}, {"top_k": 1.5}, {"max_new_tokens": 0}])
def test_values_out_of_range_name_the_file(tmp_path: Path, stored: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: (temperature|top_p|top_k|max_output_tokens)="):
        read(tmp_path, stored)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    for chosen in (ADVICE, SamplingDefaults(temperature=0.0, top_p=1.0, repetition_penalty=1.1)):
        chosen.save(tmp_path)
        found = read_sampling_defaults(tmp_path)
        assert (found.params(), found.max_output_tokens) == (chosen.params(), chosen.max_output_tokens)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [7]


def test_options_come_first_and_must_be_in_range() -> None:
    chosen = ADVICE.overridden(temperature=1.5, top_p=None)
    assert (chosen.temperature, chosen.top_p) == (1.5, 0.9)
    assert str(chosen) == "temperature 1.5, top_p 0.9 (advice, options)"
    assert ADVICE.overridden(temperature=None) is ADVICE
    SamplingParams(**chosen.params())
    with pytest.raises(InvalidRequest, match="temperature=-1"):
        ADVICE.overridden(temperature=-1)
