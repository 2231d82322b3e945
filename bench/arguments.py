"""Types of command-line arguments: what cannot work is said before any work begins."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def positive_int(text: str) -> int:
    """An integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: an integer above 0")
    return value


def positive_float(text: str) -> float:
    """A number above 0; infinity counts."""
    value = float(text)
    if math.isnan(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Integers above 0, comma-separated."""
    return tuple(positive_int(part) for part in text.split(","))


def input_file(text: str) -> Path:
    """A file that can be read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text}: it may not be read")
    return path


def output_file(text: str) -> Path:
    """A file that can be written, in a directory that can be made."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: a file, not a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent}: it cannot be made ({error.strerror})") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: it cannot be written")
    return path
