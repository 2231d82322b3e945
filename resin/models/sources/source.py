"""What every source of weights can do."""

from pathlib import Path
from typing import Protocol

from resin.models.sources.cache import Progress


class ModelSource(Protocol):
    """A place that weights come from."""

    def find(self) -> Path | None:
        """Returns the complete files on this machine, or None. Never touches the network."""
        ...

    def fetch(self, progress: Progress | None = None) -> Path:
        """Makes the files complete on this machine, resuming an earlier attempt; returns a file or a directory.

        Raises:
            DownloadError: they cannot be had, or are not what was promised.
        """
        ...
