"""What every packed tensor looks like to a checkpoint, and every set of files that holds some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Protocol

import numpy as np

from resin.models.loading.checkpoint import TensorInfo, Window

Tensors = Mapping[str, TensorInfo]
FLOATS = ("float16", "bfloat16", "float32")


class PackedFault(ValueError):
    """Parts of a packed tensor that hold what cannot be."""


class Read(Protocol):
    """Reads a stored tensor, or a window of it."""

    def __call__(self, name: str, window: Window = ()) -> np.ndarray: ...


class PackedTensor(Protocol):
    """A tensor that a checkpoint holds in parts."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Stored tensors that it is made of, or that only tell of it; its values first."""
        ...

    @property
    def info(self) -> TensorInfo:
        """After decoding."""
        ...

    @property
    def about(self) -> str:
        """The format, for people."""
        ...

    def fault(self, tensors: Tensors) -> str | None:
        """What is wrong with the parts, or None."""
        ...

    def decode(self, read: Read, window: Window) -> np.ndarray:
        """A window of the numbers; what lies outside it is not read, as far as the format allows.

        Raises:
            PackedFault: parts that fit each other hold what cannot be.
        """
        ...


class Packing(Protocol):
    """How a checkpoint's settings say that its tensors are packed."""

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale, where the scales of FP8 matrices are a grid."""
        ...

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        """Names and packed tensors, as unpacked files would have them."""
        ...


def bounds(window: Window, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and stop in every dimension."""
    given = [(part.start, part.stop) for part in window]
    return given + [(0, size) for size in shape[len(given) :]]


def fault_of_part(
    tensors: Tensors, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...], sized: int | None = None
) -> str | None:
    """What is wrong with one part: missing, of another dtype, or of another shape (or size)."""
    info = tensors.get(name)
    if info is None:
        return f"{name} is missing"
    if info.dtype not in dtypes:
        return f"{name} is {info.dtype}, expected {' or '.join(dtypes)}"
    if sized is not None and prod(info.shape) != sized:
        return f"{name} has {prod(info.shape)} numbers, expected {sized}"
    if shapes and info.shape not in shapes:
        return f"{name} has shape {info.shape}, expected {' or '.join(map(str, shapes))}"
    return None
