"""Saving weights as the model uses them, and restoring them on any mesh without work on the host (Orbax)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from resin.models.assemblies import Same
from resin.models.declare import Declaration, Placement
from resin.models.families import read_model
from resin.models.loading.checkpoint import Checkpoint, CheckpointError, TensorInfo, refuse_misfits
from resin.models.loading.converted import FORMAT, MANIFEST, WEIGHTS, ConvertedCheckpoint
from resin.models.tying import settled_settings
from resin.models.weights import AbstractModel, Progress, load_weights, place_weight
from resin.plan import InvalidRequest
from resin.plan.extras import require

# What describes a model beside its weights.
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


def convert_checkpoint(
    checkpoint: Checkpoint,
    directory: Path,
    mesh: Mesh,
    *,
    dtype: str = "bfloat16",
    model: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Loads a checkpoint onto a mesh and saves it, in shapes that no mesh shows in.

    Args:
        checkpoint: any checkpoint but a converted one.
        directory: where to; must not exist, or be empty.
        mesh: devices that hold the weights meanwhile.
        dtype: of weights that have none of their own.
        model: "package.module:Name"; None finds it by `model_type`.
        progress: called while weights load.

    Returns:
        The directory; `resin.json` in it is written last.

    Raises:
        InvalidRequest: the directory is in use.
        CheckpointError: the weights cannot be read or written; what was written is removed.
    """
    require("serve", "orbax.checkpoint")
    import orbax.checkpoint as ocp

    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidRequest("directory", str(directory), "a directory that is empty or does not exist yet")
    if isinstance(checkpoint, ConvertedCheckpoint):
        raise InvalidRequest("model", checkpoint.location, "a checkpoint that is not converted already")
    model_class, config = read_model(checkpoint, model)
    abstract = AbstractModel.of(model_class(config, Placement(dtype)))
    weights = load_weights(abstract.without_copies(mesh), checkpoint, mesh, progress=progress)
    directory.mkdir(parents=True, exist_ok=True)
    settings = _plain(dict(checkpoint.config)) | settled_settings(config, checkpoint.config)
    try:
        (directory / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / WEIGHTS, dict(zip(abstract.names, weights, strict=True)))
        manifest = {"format": FORMAT, "dtype": dtype, "weights": _describe(abstract)}
        (directory / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        # Half a conversion is of no use, and would be in the way of the next attempt.
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(directory, f"cannot be written ({error})") from error
    return directory


def copy_side_files(source: Path, directory: Path) -> None:
    """Copies tokenizer, chat template and generation settings of a Hugging Face directory."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, directory / name)


def restore_weights(
    model: AbstractModel,
    checkpoint: ConvertedCheckpoint,
    mesh: Mesh,
    *,
    dtype: str,
    progress: Progress | None = None,
) -> tuple[jax.Array, ...]:
    """Reads converted weights straight to their devices.

    Raises:
        InvalidRequest: they were converted to another dtype.
        CheckpointError: they do not fit the model or cannot be read.
    """
    require("serve", "orbax.checkpoint")
    import orbax.checkpoint as ocp

    check_converted(model, checkpoint, dtype=dtype)
    targets = dict(zip(model.names, model.without_copies(mesh).arguments(mesh), strict=True))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(checkpoint.directory.absolute() / WEIGHTS, targets)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(checkpoint.directory / WEIGHTS, f"cannot be restored ({error})") from error
    if progress is not None:
        progress("restored", model.nbytes, model.nbytes)
    return tuple(
        _with_copies(item, arrays.pop(name), mesh) for name, item in zip(model.names, model.declarations, strict=True)
    )


def _with_copies(declaration: Declaration, array: jax.Array, mesh: Mesh) -> jax.Array:
    """The weight as the mesh holds it, where more devices share its KV heads than there are."""
    if declaration.placed_shape(mesh) == declaration.shape:
        return array

    return place_weight(replace(declaration, assembly=Same()), [np.asarray(array)], mesh)


def check_converted(model: AbstractModel, checkpoint: ConvertedCheckpoint, *, dtype: str) -> None:
    """Holds the declarations against what was converted.

    Raises:
        InvalidRequest: weights converted to another dtype.
        CheckpointError: they do not fit the model.
    """
    if checkpoint.dtype != dtype:
        raise InvalidRequest("dtype", dtype, f"{checkpoint.dtype}, which these weights were converted to")
    expected = {name: TensorInfo(tuple(info["shape"]), info["dtype"]) for name, info in _describe(model).items()}
    held = checkpoint.weights
    missing = [f"missing {name} {list(expected[name].shape)}" for name in expected if name not in held]
    extra = [f"extra {name} {list(held[name].shape)}" for name in held if name not in expected]
    misshapen = [
        f"misshapen {name} {held[name].dtype} {list(held[name].shape)}, expected {info.dtype} {list(info.shape)}"
        for name, info in expected.items()
        if name in held and held[name] != info
    ]
    refuse_misfits(checkpoint.location, "weights", missing, extra, misshapen)


def _describe(model: AbstractModel) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(declaration.shape), "dtype": declaration.dtype}
        for name, declaration in zip(model.names, model.declarations, strict=True)
    }


def _plain(value: Any) -> Any:
    """Settings as JSON has them: GGUF metadata may hold NumPy numbers."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") else value
