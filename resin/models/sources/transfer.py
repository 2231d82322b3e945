"""Fetches one file over HTTP: resumes after a cut, verifies, and renames only what is whole."""

import errno
import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resin.models.sources.cache import CachedFile, DownloadError, hash_file

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.5
# Worth another attempt: the server is busy or faltering, not refusing.
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What the hub promises about a file.

    Attributes:
        name: file name, for messages.
        address: where it is.
        size_bytes: its size.
        sha256: its checksum, or None.
        git_sha1: its git object id (a checksum over a short header and the bytes), or None.
    """

    name: str
    address: str
    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


def open_address(address: str, token: str | None, first_byte: int = 0) -> http.client.HTTPResponse:
    """Opens an address, from a byte on. The token is not sent on to another host after a redirect."""
    request = urllib.request.Request(address, headers={"User-Agent": "resin"})
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    if first_byte:
        request.add_header("Range", f"bytes={first_byte}-")
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    return response


def explain_status(status: int) -> str:
    """Says what an HTTP status means to somebody who wants a model."""
    if status in (401, 403):
        return f"access denied (HTTP {status}): accept the model's terms on the hub and set HF_TOKEN"
    if status == 404:
        return "not found (HTTP 404): check the name and the revision; a private model looks the same without HF_TOKEN"
    return f"the server answered HTTP {status}"


def transfer(
    remote: RemoteFile,
    target: Path,
    token: str | None,
    on_bytes: Callable[[int], None],
) -> CachedFile:
    """Makes `target` whole; a `.part` file of an earlier attempt is continued.

    Args:
        remote: the file.
        target: where it goes.
        token: access token, or None.
        on_bytes: called with the bytes of this file on disk so far.

    Raises:
        DownloadError: refused, cut too often, or the bytes are not the promised ones (they are deleted then).
    """
    part = target.with_name(target.name + ".part")
    if part.exists() and part.stat().st_size > remote.size_bytes:
        part.unlink()
    pause_s = _FIRST_PAUSE_S  # doubles from one attempt to the next
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _append(remote, part, token, on_bytes)
            break
        except urllib.error.HTTPError as error:
            status = error.code
            error.close()
            if status == 416:  # the server has fewer bytes than the part: start again
                part.unlink(missing_ok=True)
            elif status not in _PASSING_STATUSES:
                raise DownloadError(remote.name, explain_status(status)) from error
            reason: str = explain_status(status)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _DISK_FAULTS:
                raise DownloadError(remote.name, f"cannot be written: {error.strerror}") from error
            reason = f"the connection failed ({error})"
        if attempt == _ATTEMPTS:
            raise DownloadError(remote.name, f"{reason}, {_ATTEMPTS} times; what arrived is kept, run again to resume")
        time.sleep(pause_s)
        pause_s *= 2
    return _finish(remote, part, target)


def _append(remote: RemoteFile, part: Path, token: str | None, on_bytes: Callable[[int], None]) -> None:
    done = part.stat().st_size if part.exists() else 0
    if done == remote.size_bytes and part.exists():
        return
    with open_address(remote.address, token, done) as response:
        resumed = response.status == 206
        if resumed and not (response.headers.get("Content-Range") or "").startswith(f"bytes {done}-"):
            raise http.client.HTTPException(f"asked from byte {done}, got {response.headers.get('Content-Range')!r}")
        if not resumed:
            done = 0  # the server sends the whole file, whatever was asked
        with part.open("ab" if resumed else "wb") as output:
            while chunk := response.read(min(_CHUNK_BYTES, remote.size_bytes + 1 - done)):
                output.write(chunk)
                done += len(chunk)
                if done > remote.size_bytes:
                    break
                on_bytes(done)
    if done < remote.size_bytes:
        raise http.client.HTTPException(f"it ended after {done} of {remote.size_bytes} bytes")


def _finish(remote: RemoteFile, part: Path, target: Path) -> CachedFile:
    size = part.stat().st_size
    sha256 = hash_file(part).hexdigest()
    fault = None
    if size != remote.size_bytes:
        fault = f"more than the promised {remote.size_bytes} bytes arrived"
    elif remote.sha256 is not None and sha256 != remote.sha256:
        fault = f"sha256 is {sha256}, expected {remote.sha256}"
    elif remote.git_sha1 is not None and _git_sha1(part, size) != remote.git_sha1:
        fault = f"git object id is {_git_sha1(part, size)}, expected {remote.git_sha1}"
    if fault is not None:
        part.unlink()
        raise DownloadError(remote.name, f"{fault}; the bytes are deleted, run again to fetch them anew")
    part.replace(target)
    return CachedFile(size, sha256)


def _git_sha1(path: Path, size: int) -> str:
    def start() -> "hashlib._Hash":
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)

    return hash_file(path, start).hexdigest()
