"""How a model samples when nobody says: by its checkpoint's own account, else the registry's, else Resin's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.directory import read_json_object
from resin.models.loading.gguf_header import parse_gguf_header
from resin.models.loading.mapped import map_file
from resin.plan import InvalidRequest, SamplingParams

GENERATION_CONFIG = "generation_config.json"
# A checkpoint's words -> ours.
_HUGGING_FACE = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_output_tokens",
}
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say how to sample; the same for HTTP, chat, page and files of requests.

    Attributes:
        temperature, top_p, top_k, min_p, repetition_penalty: as in SamplingParams.
        max_output_tokens: longest answer in the terminal and on the page, reasoning included; small models may never
            come to an end. Over HTTP an answer may take what fits.
        origin: who says so.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_output_tokens: int = 4096
    origin: str = "Resin's own"

    def __post_init__(self) -> None:
        SamplingParams(max_output_tokens=self.max_output_tokens, **self.params())

    def params(self) -> dict[str, Any]:
        """The fields of SamplingParams that say how to sample."""
        return {name: value for name, value in asdict(self).items() if name not in ("max_output_tokens", "origin")}

    def overridden(self, **chosen: Any) -> SamplingDefaults:
        """With what a user chose; None leaves a field as it is.

        Raises:
            InvalidRequest: a value out of its range.
        """
        given = {name: value for name, value in chosen.items() if value is not None}
        return replace(self, **given, origin=f"{self.origin}, options") if given else self

    def save(self, directory: Path) -> None:
        """Adds them to a directory's generation settings, so that they are read from there."""
        path = directory / GENERATION_CONFIG
        stored = read_json_object(path) if path.is_file() else {}
        said = {theirs: getattr(self, ours) for theirs, ours in _HUGGING_FACE.items()}
        path.write_text(json.dumps({**stored, "do_sample": self.temperature > 0, **said}), encoding="utf-8")

    def __str__(self) -> str:
        neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        said = (f"{name} {value:g}" for name, value in self.params().items() if value != neutral.get(name))
        return f"{', '.join(said)} ({self.origin})"


# What a checkpoint that speaks of sampling leaves unsaid changes nothing.
_NEUTRAL = SamplingDefaults(temperature=1.0, top_p=1.0)


def read_sampling_defaults(files: Path, otherwise: SamplingDefaults | None = None) -> SamplingDefaults:
    """The defaults of a checkpoint.

    Args:
        files: a directory, a file in one, or a GGUF file.
        otherwise: for a checkpoint that says nothing of sampling; None takes Resin's own.

    Raises:
        CheckpointError: values out of their range.
    """
    if files.suffix == ".gguf":
        location = files
        stored = parse_gguf_header(map_file(files), str(files)).metadata
        found = _translate(stored, _GGUF)
    else:
        location = (files if files.is_dir() else files.parent) / GENERATION_CONFIG
        stored = read_json_object(location) if location.is_file() else {}
        found = _translate(stored, _HUGGING_FACE)
        if stored.get("do_sample") is False:
            found = {**found, "temperature": 0.0}
        elif stored.get("do_sample") is True:
            found = {"temperature": 1.0, **found}
    lengths = {name: found.pop(name) for name in ("max_output_tokens",) if name in found}
    base = _NEUTRAL if found else otherwise or SamplingDefaults()
    if not found and not lengths:
        return base
    try:
        return replace(base, **found, **lengths, origin=location.name if found else base.origin)
    except InvalidRequest as error:
        raise CheckpointError(location, str(error)) from error


def _translate(stored: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    kinds = {field.name: type(field.default) for field in fields(SamplingDefaults)}
    found: dict[str, Any] = {}
    for theirs, ours in names.items():
        value = stored.get(theirs)
        if value is None:
            continue
        # JSON writes 1 for 1.0; the header of a GGUF file holds NumPy numbers.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        found[ours] = float(value) if is_number and kinds[ours] is float else value
    return found
