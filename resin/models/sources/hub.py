"""Weights on a Hugging Face style hub, by repository id and revision."""

import http.client
import json
import re
import urllib.error
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from resin.models.sources.cache import CachedFile, DownloadError, Progress, is_complete, locked, write_marker
from resin.models.sources.transfer import RemoteFile, explain_status, open_address, transfer
from resin.settings import CACHE_DIRECTORY, HUB_ENDPOINT, HUB_TOKEN

UNPINNED_REVISION = "main"
_WANTED = ("*.safetensors", "*.json", "*.jinja")
_SHARDS = "model*.safetensors"
_COMMIT = re.compile(r"[0-9a-f]{40}")


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
        return CACHE_DIRECTORY.read() / "hub" / self.repository.replace("/", "--")

    def find(self) -> Path | None:
        commit = self._known_commit()
        return self.directory / commit if commit is not None and is_complete(self.directory / commit) else None

    def fetch(self, progress: Progress | None = None) -> Path:
        found = self.find()
        if found is not None:
            return found
        commit, files = self._list_files()
        with locked(self.directory):
            snapshot = self.directory / commit
            if not is_complete(snapshot):
                self._transfer_all(snapshot, files, progress)
            if not self.is_pinned:
                (self.directory / "refs").mkdir(exist_ok=True)
                ref = self._ref()
                part = ref.with_name(ref.name + ".part")
                part.write_text(commit, encoding="utf-8")
                part.replace(ref)
            return snapshot

    def fetch_config(self) -> dict[str, Any]:
        """The repository's config.json alone, asked from the hub; nothing is kept.

        Raises:
            DownloadError: it cannot be had.
        """
        return self._ask(f"{HUB_ENDPOINT.read()}/{self.repository}/resolve/{quote(self.revision, safe='')}/config.json")

    def _ref(self) -> Path:
        return self.directory / "refs" / quote(self.revision, safe="")

    def _known_commit(self) -> str | None:
        if self.is_pinned:
            return self.revision
        try:
            commit = self._ref().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def _transfer_all(self, snapshot: Path, files: list[RemoteFile], progress: Progress | None) -> None:
        snapshot.mkdir(exist_ok=True)
        total = sum(file.size_bytes for file in files)
        done, finished = 0, {}
        token = HUB_TOKEN.read()

        def report(size_bytes: int) -> None:
            if progress is not None:
                progress(self.repository, done + size_bytes, total)

        for file in files:
            target = snapshot / file.name
            # Only a finished transfer renames to this name, so a whole file of an earlier attempt is taken as it is.
            if target.is_file() and target.stat().st_size == file.size_bytes and file.sha256 is not None:
                finished[file.name] = CachedFile(file.size_bytes, file.sha256)
            else:
                finished[file.name] = transfer(file, target, token, report)
            done += file.size_bytes
            report(0)
        write_marker(snapshot, finished)

    def _list_files(self) -> tuple[str, list[RemoteFile]]:
        endpoint = HUB_ENDPOINT.read()
        listing = self._ask(
            f"{endpoint}/api/models/{self.repository}/revision/{quote(self.revision, safe='')}?blobs=true"
        )
        commit, siblings = listing.get("sha"), listing.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit) or not isinstance(siblings, list):
            raise DownloadError(self.repository, "the hub's answer names no commit or no files")
        if self.is_pinned and commit != self.revision:
            raise DownloadError(self.repository, f"asked for commit {self.revision}, the hub offers {commit}")
        address = f"{endpoint}/{self.repository}/resolve/{commit}"
        files = [_remote_file(sibling, address) for sibling in siblings]
        chosen = _choose([file for file in files if file is not None])
        if not any(file.name.endswith(".safetensors") for file in chosen):
            raise DownloadError(self.repository, "holds no safetensors weights at its top level")
        return commit, chosen

    def _ask(self, address: str) -> dict[str, Any]:
        try:
            with open_address(address, HUB_TOKEN.read()) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            error.close()
            raise DownloadError(self.repository, explain_status(error.code)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise DownloadError(self.repository, f"the hub cannot be reached ({reason})") from error
        except ValueError as error:
            raise DownloadError(self.repository, f"the hub's answer is not JSON ({error})") from error
        return answer if isinstance(answer, dict) else {}


def _remote_file(sibling: Any, address: str) -> RemoteFile | None:
    """Returns a listed file when it is wanted and safe to store under its name."""
    if not isinstance(sibling, dict):
        return None
    name, size, lfs = sibling.get("rfilename"), sibling.get("size"), sibling.get("lfs")
    if not isinstance(name, str) or "/" in name or "\\" in name or name.startswith("."):
        return None
    if not isinstance(size, int) or size < 0 or not any(fnmatch(name, pattern) for pattern in _WANTED):
        return None
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    # For large files the git object is only a pointer, so its id says nothing about the bytes.
    git_sha1 = sibling.get("blobId") if sha256 is None else None
    return RemoteFile(name, f"{address}/{quote(name)}", size, sha256, git_sha1)


def _choose(files: list[RemoteFile]) -> list[RemoteFile]:
    """Leaves out second copies of the weights under other names."""
    if not any(fnmatch(file.name, _SHARDS) for file in files):
        return files
    return [file for file in files if not file.name.endswith(".safetensors") or fnmatch(file.name, _SHARDS)]
