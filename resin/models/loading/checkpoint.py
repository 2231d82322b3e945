"""What every weight file looks like to the rest of the library: Hugging Face names, shapes and config."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from resin.models.config_reader import some
from resin.plan import ResinError


class CheckpointError(ResinError, ValueError):
    """A weight file that is missing, damaged or of a form that is not supported.

    Attributes:
        location: the file or directory.
        tensor: name of the offending tensor, or None when the fault is not in one tensor.
        reason: what is wrong with it.
    """

    def __init__(self, location: object, reason: str, tensor: str | None = None) -> None:
        where = f"{location}: tensor {tensor!r}" if tensor is not None else f"{location}"
        super().__init__(f"{where}: {reason}")
        self.location = str(location)
        self.tensor = tensor
        self.reason = reason


Window = tuple[slice, ...]
"""Part of an array: a slice with start and stop for each of its first dimensions."""


def cut(array: np.ndarray, window: Window) -> np.ndarray:
    """A view of a window."""
    return array[window] if window else array


def refuse_misfits(location: object, what: str, *faults: Sequence[str]) -> None:
    """Raises a CheckpointError that counts what does not fit a model and names the first few of each kind."""
    mixed = [fault for row in zip_longest(*faults) for fault in row if fault is not None]
    if mixed:
        raise CheckpointError(location, f"{len(mixed)} {what} do not fit the model: {some(mixed, '; ')}")


class TensorInfo(NamedTuple):
    """Shape and NumPy (or ml_dtypes) dtype name of the array that a read returns."""

    shape: tuple[int, ...]
    dtype: str


class PackedInfo(NamedTuple):
    """Shape and dtype of a packed tensor once it is decoded, and the stored tensors that it is made of."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]


class Checkpoint(Protocol):
    """Read access to one set of weights. Reads may run in parallel threads.

    Attributes:
        location: file or directory, for messages.
        config: the model's settings in the style of a Hugging Face `config.json`.
        tensors: every stored tensor under its Hugging Face name, with the shape that Hugging Face stores
            (a linear's weight is `[out, in]`); packed parts such as `*_blocks` and `*_scales` included.
        quantised: tensors that exist only in packed form.
        notes: what a user should know before it is served, a line each.
    """

    @property
    def location(self) -> str: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def quantised(self) -> Mapping[str, PackedInfo]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        """Returns one entry of `tensors`, or a window of it, which may be a read-only view of the mapped file.

        Raises:
            CheckpointError: there is no such tensor, or its bytes cannot be used.
        """
        ...

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        """Returns one entry of `quantised` as floats, or a window of it; any other name reads as `read` does.

        Raises:
            CheckpointError: there is no such tensor, or its bytes cannot be used.
        """
        ...

    def close(self) -> None:
        """Lets go of the mapped files. Arrays handed out before stay valid."""
        ...
