"""Weights that are on this machine already."""

from dataclasses import dataclass
from pathlib import Path

from resin.models.sources.cache import DownloadError, Progress


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A GGUF file, a safetensors file or a Hugging Face directory."""

    path: Path

    def find(self) -> Path | None:
        return self.path if self.path.exists() else None

    def fetch(self, progress: Progress | None = None) -> Path:
        if not self.path.exists():
            raise DownloadError(str(self.path), "there is no such file or directory")
        return self.path
