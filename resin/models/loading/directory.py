"""Finds the files of a Hugging Face checkpoint: config.json, and safetensors alone or behind an index."""

import json
from pathlib import Path
from typing import Any

from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.safetensors import SafetensorsCheckpoint, SafetensorsFile

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
        CheckpointError: no such file, or something else in it.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value


def open_directory(directory: Path) -> SafetensorsCheckpoint:
    """Opens a Hugging Face directory.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are in a form that is not supported.
    """
    config = read_json_object(directory / "config.json")
    if (directory / _INDEX).is_file():
        return SafetensorsCheckpoint(directory, config, _open_shards(directory / _INDEX))
    single = directory / _SINGLE
    if not single.is_file():
        others = sorted(directory.glob("*.safetensors"))
        if len(others) != 1:
            pickles = any(directory.glob("*.bin"))
            hint = " (pickled weights are not read: convert them to safetensors)" if pickles else ""
            raise CheckpointError(directory, f"has neither {_SINGLE} nor {_INDEX}{hint}")
        single = others[0]
    return open_file(single, config)


def open_file(path: Path, config: dict[str, Any]) -> SafetensorsCheckpoint:
    """Opens one safetensors file as a whole checkpoint."""
    file = SafetensorsFile(path)
    return SafetensorsCheckpoint(path, config, dict.fromkeys(file.entries, file))


def _open_shards(index_path: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index_path, "has no weight_map")
    files: dict[str, SafetensorsFile] = {}
    places: dict[str, SafetensorsFile] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(index_path, f"shard name {name!r} is not a plain file name", tensor)
        if name not in files:
            files[name] = SafetensorsFile(index_path.parent / name)
        if tensor not in files[name].entries:
            raise CheckpointError(index_path, f"is not in {name}, where the index says it is", tensor)
        places[tensor] = files[name]
    return places
