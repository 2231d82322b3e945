"""Read-only memory maps of weight files."""

from pathlib import Path

import numpy as np

from resin.models.loading.checkpoint import CheckpointError


def map_file(path: Path) -> np.ndarray:
    """Maps a file read-only; returns uint8 `[size]`. The map lives as long as any view of it.

    Raises:
        CheckpointError: the file cannot be opened or is empty.
    """
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(path, "the file is empty")
        return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise CheckpointError(path, f"cannot be opened ({error.strerror or error})") from error
