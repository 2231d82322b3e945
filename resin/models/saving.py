"""From the weights that the devices hold back to a checkpoint in the Hugging Face layout, for trained models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from resin.models.assemblies import whole
from resin.models.declare import Declaration
from resin.models.loading.checkpoint import CheckpointError, TensorInfo
from resin.models.loading.safetensors_writer import stream_safetensors
from resin.models.packed import Units
from resin.models.tying import HEAD, TABLE, tied_spellings
from resin.models.weights import AbstractModel

WEIGHTS_FILE = "model.safetensors"


def save_checkpoint(
    directory: str | Path, model: AbstractModel, weights: Sequence[jax.Array], config: Mapping[str, Any]
) -> Path:
    """Writes `config.json` and one safetensors file with the tensors that the model's declarations name.

    Every loader of such checkpoints reads them. Values keep the dtype that they have on the devices. One weight at a
    time is in the host's memory, three times over.

    Args:
        directory: where to; made if it does not exist, files in it are replaced.
        model: the declarations, `runner.model`.
        weights: in the order of `model.declarations`, such as `runner.weights` or what a training step returned.
        config: the Hugging Face config that the model was built from, `checkpoint.config`.

    Returns:
        The directory.

    Raises:
        ValueError: weights of another number or shape than the declarations.
        CheckpointError: a weight that has no form in the layout: packed codes, or copies that no longer agree.
    """
    directory = Path(directory)
    for declaration, array in zip(model.declarations, weights, strict=True):
        expected = declaration.shape if (mesh := _mesh_of(array)) is None else declaration.placed_shape(mesh)
        if array.shape != expected:
            raise ValueError(f"weights: {declaration.sources} has shape {array.shape}, expected {expected}")
    for declaration, array in zip(model.declarations, weights, strict=True):
        if isinstance(declaration.assembly, Units) and not (np.asarray(array) == 1).all():
            raise CheckpointError("weights", "have scales that were shifted to fit", declaration.sources[0])
    owners: dict[str, int] = {}
    infos: dict[str, TensorInfo] = {}
    for index, declaration in enumerate(model.declarations):
        shapes = declaration.assembly.source_shapes(declaration.shape)
        for name, shape in zip(declaration.sources, shapes, strict=True):
            owners.setdefault(name, index)
            infos.setdefault(name, TensorInfo(shape, declaration.stored_dtype or weights[index].dtype.name))
    held: dict[int, dict[str, np.ndarray]] = {}

    def read(name: str) -> np.ndarray:
        index = owners[name]
        if index not in held:
            held.clear()
            held[index] = take_apart(model.declarations[index], np.asarray(weights[index]))
        return held[index].pop(name)

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_settings(config, infos), indent=1), encoding="utf-8")
    partial = directory / f"{WEIGHTS_FILE}.partial"
    try:
        stream_safetensors(partial, infos, read)
        partial.replace(directory / WEIGHTS_FILE)
    finally:
        partial.unlink(missing_ok=True)
    return directory


def _mesh_of(array: jax.Array) -> Mesh | None:
    mesh = getattr(array.sharding, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def _settings(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The config, made to say what the tensors are: tied or not, packed or decoded."""
    settings = dict(config)
    if TABLE in infos:
        settings |= dict.fromkeys(tied_spellings(config), HEAD not in infos)
    if all(info.dtype != "uint8" for info in infos.values()):
        settings.pop("quantization_config", None)
    return settings


def take_apart(declaration: Declaration, values: np.ndarray) -> dict[str, np.ndarray]:
    """The checkpoint tensors of which the declaration's assembly makes these values.

    An assembly moves numbers and leaves them as they are, unless it knows how to `take_apart` what it fills. So it is
    asked where each comes from, by having it fill an array of places from tensors of places, and asked again whether
    the result gives the values.

    Args:
        declaration: of the weight.
        values: the weight, or what a mesh holds of it with copies of its KV heads.

    Raises:
        CheckpointError: it does more than that, or copies of a number have come to differ.
    """
    shapes = declaration.assembly.source_shapes(declaration.shape)
    if (inverse := getattr(declaration.assembly, "take_apart", None)) is not None:
        return dict(zip(declaration.sources, inverse(values), strict=True))
    ends = np.cumsum([0, *(prod(shape) for shape in shapes)])
    dtype = np.int32 if ends[-1] < 2**31 else np.int64
    places = np.empty(values.shape, dtype)
    pieces = list(zip(ends.tolist(), ends[1:].tolist(), shapes, strict=False))
    numbered = [np.arange(start, end, dtype=dtype).reshape(shape) for start, end, shape in pieces]
    _fill(declaration, places, numbered)
    flat = np.zeros(ends[-1], values.dtype)
    flat[places] = values
    tensors = [flat[start:end].reshape(shape) for start, end, shape in pieces]
    again = np.empty_like(values)
    _fill(declaration, again, tensors)
    is_used = np.zeros(ends[-1], np.bool_)
    is_used[places] = True
    if not is_used.all() or again.tobytes() != values.tobytes():
        raise CheckpointError("weights", "cannot be written back to the checkpoint's layout", declaration.sources[0])
    return dict(zip(declaration.sources, tensors, strict=True))


def _fill(declaration: Declaration, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
    for piece in declaration.pieces(out.shape, whole(out.shape)):
        declaration.assembly.fill(out[piece.share], tensors, piece.weight)
