"""Picks the reader for a path."""

from os import PathLike
from pathlib import Path

from resin.models.loading.checkpoint import Checkpoint, CheckpointError
from resin.models.loading.converted import MANIFEST, ConvertedCheckpoint
from resin.models.loading.directory import open_directory, open_file, read_json_object
from resin.models.loading.text_part import open_text_part
from resin.plan.extras import require


def open_checkpoint_path(path: str | PathLike[str]) -> Checkpoint:
    """Opens weights on this machine.

    Args:
        path: a Hugging Face or a converted directory, a `.safetensors` file with `config.json` beside it, or a
            `.gguf` file (the first part of one in parts).

    Raises:
        CheckpointError: nothing there, a damaged file, or a form that is not supported.
        MissingPackage: a `.gguf` file, and no package that reads them.
    """
    path = Path(path)
    if path.is_dir():
        return ConvertedCheckpoint(path) if (path / MANIFEST).is_file() else open_text_part(open_directory(path))
    if not path.is_file():
        raise CheckpointError(path, "there is no such file or directory")
    if path.suffix == ".gguf":
        require("serve", "gguf")
        from resin.models.loading.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if path.suffix == ".safetensors":
        return open_text_part(open_file(path, read_json_object(path.parent / "config.json")))
    raise CheckpointError(path, "is not a form of weights that is read here (.gguf, .safetensors, or a directory)")
