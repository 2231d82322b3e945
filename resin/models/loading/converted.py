"""A converted checkpoint: weights as the devices hold them, saved by `resin convert`.

A directory with `config.json`, the tokenizer's files, `weights/` in Orbax's format, and `resin.json`, which is written
last and so marks the rest as complete. The weights fit one dtype and any mesh; `resin.models.conversion` saves and
restores them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from resin.models.loading.checkpoint import CheckpointError, PackedInfo, TensorInfo, Window
from resin.models.loading.directory import read_json_object

MANIFEST = "resin.json"
WEIGHTS = "weights"
FORMAT = 2  # 1 held weights as one number of devices shares them


class ConvertedCheckpoint:
    """A converted directory as a `Checkpoint` without tensors: its weights can only be restored as a whole.

    Attributes:
        dtype: of weights that have none of their own.
        weights: shape and dtype of every weight by its path in the model.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.location = str(directory)
        self.config: Mapping[str, Any] = read_json_object(directory / "config.json")
        self.tensors: Mapping[str, TensorInfo] = {}
        self.quantised: Mapping[str, PackedInfo] = {}
        self.notes: tuple[str, ...] = ()
        manifest = read_json_object(directory / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(directory, f"has format {manifest.get('format')!r}, expected {FORMAT}: convert again")
        try:
            self.dtype = str(manifest["dtype"])
            self.weights = {
                name: TensorInfo(tuple(info["shape"]), info["dtype"]) for name, info in manifest["weights"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(directory / MANIFEST, f"is damaged ({error!r})") from error

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        raise CheckpointError(self.location, "a converted checkpoint has no single tensors", name)

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        return self.read(name)

    def close(self) -> None:
        pass
