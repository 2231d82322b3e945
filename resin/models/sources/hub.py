"""Weights on a Hugging Face style hub, by repository id and revision: `huggingface_hub` fetches and keeps them."""

import errno
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from resin.models.sources.cache import DownloadError, Progress
from resin.plan.extras import require
from resin.settings import CACHE_DIRECTORY, HUB_ENDPOINT, HUB_TOKEN

UNPINNED_REVISION = "main"
_BESIDE_WEIGHTS = ("*.json", "*.jinja")
# Some repositories hold second copies of the weights under other names.
_WEIGHTS = ("model*.safetensors", "*.safetensors")
_NOT_AT_THE_TOP = ("*/*", ".*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the hub. Only files at its top level are wanted: weights, settings, tokenizer, template.

    Attributes:
        repository: `owner/name`.
        revision: a commit (40 hex digits) pins the files; a branch such as "main" is whatever it is at the first
            fetch, and stays that on this machine.
    """

    repository: str
    revision: str = UNPINNED_REVISION

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def directory(self) -> Path:
        """Where the hub's library keeps repositories."""
        return CACHE_DIRECTORY.read() / "hub"

    def find(self) -> Path | None:
        require("serve", "huggingface_hub")
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return self._snapshot(local_files_only=True)
        except (LocalEntryNotFoundError, HFValidationError, DownloadError):
            return None

    def fetch(self, progress: Progress | None = None) -> Path:
        require("serve", "huggingface_hub")
        found = self.find()
        if found is not None:
            return found
        stopped = threading.Event()
        bar = _bar_class(self.repository, progress, stopped)
        # In a thread: an interrupt then reaches this one, which tells the transfers to end.
        with self._explained(), ThreadPoolExecutor(1, thread_name_prefix="resin-fetch") as pool:
            try:
                return pool.submit(self._snapshot, tqdm_class=bar).result()
            finally:
                stopped.set()

    def fetch_config(self) -> dict[str, Any]:
        """The repository's config.json alone, asked from the hub; nothing is kept.

        Raises:
            DownloadError: it cannot be had.
        """
        bar = _bar_class(self.repository, None, threading.Event())
        with self._explained(), TemporaryDirectory() as directory:
            snapshot = self._download(Path(directory), ["config.json"], tqdm_class=bar)
            answer = json.loads((snapshot / "config.json").read_bytes())
        return answer if isinstance(answer, dict) else {}

    def _snapshot(self, **options: Any) -> Path:
        """The directory of the wanted files."""
        for weights in _WEIGHTS:
            directory = self._download(self.directory, [*_BESIDE_WEIGHTS, weights], **options)
            if any(directory.glob("*.safetensors")):
                return directory
        raise DownloadError(self.repository, "holds no safetensors weights at its top level")

    def _download(self, cache: Path, wanted: list[str], **options: Any) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.repository,
                revision=self.revision,
                cache_dir=cache,
                endpoint=HUB_ENDPOINT.read(),
                token=HUB_TOKEN.read(),
                allow_patterns=wanted,
                ignore_patterns=list(_NOT_AT_THE_TOP),
                **options,
            )
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the hub's library raises into what a user can do about it."""
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, XetDownloadError
        from huggingface_hub.errors import HTTPError as ConnectionFault  # type: ignore[attr-defined]

        try:
            yield
        except HfHubHTTPError as error:
            raise DownloadError(self.repository, explain_status(error.response.status_code)) from error
        except LocalEntryNotFoundError as error:
            cause = error.__cause__
            if isinstance(cause, HfHubHTTPError):
                raise DownloadError(self.repository, explain_status(cause.response.status_code)) from error
            raise DownloadError(self.repository, f"the hub cannot be reached ({cause or error})") from error
        except (ConnectionFault, XetDownloadError) as error:
            reason = f"the connection failed ({error}); what arrived is kept, run again to resume"
            raise DownloadError(self.repository, reason) from error
        except OSError as error:
            what = "cannot be written" if error.errno in _DISK_FAULTS else "cannot be fetched"
            raise DownloadError(self.repository, f"{what}: {error.strerror or error}") from error
        except ValueError as error:
            raise DownloadError(self.repository, f"cannot be fetched: {error}") from error


def explain_status(status: int) -> str:
    """Says what an HTTP status means to somebody who wants a model."""
    if status in (401, 403):
        return f"access denied (HTTP {status}): accept the model's terms on the hub and set HF_TOKEN"
    if status == 404:
        return "not found (HTTP 404): check the name and the revision; a private model looks the same without HF_TOKEN"
    return f"the server answered HTTP {status}"


def _bar_class(repository: str, progress: Progress | None, stopped: threading.Event) -> type[Any]:
    """A progress bar of the hub's library that shows nothing and passes on bytes; it ends transfers once stopped."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.counts_bytes = name == "huggingface_hub.snapshot_download"

        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise InterruptedError("the transfer was stopped")
            if self.counts_bytes:
                with self.get_lock():
                    self.n += n or 0
                    if progress is not None:
                        progress(repository, int(self.n), int(self.total))

    return Bar
