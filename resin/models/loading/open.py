"""Picks the reader for a path."""

from os import PathLike
from pathlib import Path

from resin.models.loading.checkpoint import Checkpoint, CheckpointError
from resin.models.loading.gguf import GgufCheckpoint


def open_checkpoint_path(path: str | PathLike[str]) -> Checkpoint:
    """Opens weights on this machine.

    Args:
        path: a GGUF file.

    Raises:
        CheckpointError: nothing there, a damaged file, or a form that is not supported.
    """
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        return GgufCheckpoint(path)
    raise CheckpointError(path, "is not a GGUF file")
