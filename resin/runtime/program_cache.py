"""Compiled step programs on disk, shared between processes: a start that finds them neither traces nor compiles.

XLA's own cache (`compile_cache`) is keyed by the traced program, so that every start traces each program first, one at
a time because of the interpreter lock. Here the key is made of everything that a program of Resin's own models follows
from: the source of this package, model config, runner config, bucket, arena, devices, versions and flags. Models from
elsewhere are not kept, because nothing here can tell whether their source has changed. Neither are programs that XLA's
cache gave, which would not run when read again: where a change of source leaves a program as it was, XLA's cache is the
one that serves it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from resin.plan import ArenaSpec, Bucket
from resin.runtime.compile_cache import warn_not_kept
from resin.runtime.executable import StepSpec
from resin.runtime.program_kind import ProgramKind

OWN_MODELS = "resin.models."
SUFFIX = ".program"


@dataclass(frozen=True, slots=True)
class ProgramCache:
    """A directory of programs of one runner's kind.

    Attributes:
        directory: made when the first program is kept.
        max_bytes: when the directory outgrows it, the programs that were used longest ago go.
        owner: what all programs of the runner have in common, as a string.
        devices: that programs run on.
        is_writable: False reads only.
    """

    directory: Path
    max_bytes: int
    owner: str
    devices: tuple[jax.Device, ...]
    is_writable: bool = True

    @staticmethod
    def of(
        directory: Path,
        max_bytes: int,
        model_class: Any,
        model_config: Any,
        spec: StepSpec,
        *,
        is_writable: bool = True,
    ) -> ProgramCache | None:
        """The cache of a model's programs; None for a model that is not Resin's own."""
        if not model_class.__module__.startswith(OWN_MODELS):
            return None
        devices = tuple(spec.mesh.devices.flat)
        parts = (
            source_digest(),
            jax.__version__,
            metadata.version("jaxlib"),
            devices[0].client.platform_version,
            os.environ.get("XLA_FLAGS", ""),
            str(jax.numpy.result_type(float)),  # whether 64-bit types are on
            [(device.device_kind, device.id) for device in devices],
            dict(spec.mesh.shape),
            _host_features(devices[0]),
            f"{model_class.__module__}.{model_class.__qualname__}",
            model_config,
            spec.config,
            spec.dtype,
            spec.kernels().backend,
            spec.has_fresh_prefill,
            spec.drafter,
        )
        return ProgramCache(directory, max_bytes, "\n".join(map(repr, parts)), devices, is_writable)

    def load(self, bucket: Bucket, kind: ProgramKind, arena: ArenaSpec) -> jax.stages.Compiled | None:
        """The program, ready to run, or None if it is not there or cannot be read."""
        path = self._path(bucket, kind, arena)
        try:
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            program = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend=self.devices[0].client, execution_devices=self.devices
            )
            with contextlib.suppress(OSError):  # a disk that cannot be written is read all the same
                os.utime(path)
        except OSError:
            return None
        except Exception:  # another version's, a torn disk: it is compiled again and replaced
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return program

    def save(self, bucket: Bucket, kind: ProgramKind, arena: ArenaSpec, program: jax.stages.Compiled) -> None:
        """Keeps a program if the device's programs can be kept and the disk takes it, else says why not."""
        if not self.is_writable:
            return
        try:
            data = pickle.dumps(serialize_executable.serialize(program))
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.directory) as folder:
                file = Path(folder) / "program"
                file.write_bytes(data)
                os.replace(file, self._path(bucket, kind, arena))
            self._trim()
        except OSError as error:
            warn_not_kept(self.directory, error.strerror or str(error))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            return

    def _path(self, bucket: Bucket, kind: ProgramKind, arena: ArenaSpec) -> Path:
        key = "\n".join((self.owner, repr(bucket), kind.value, repr(arena)))
        return self.directory / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)

    def _trim(self) -> None:
        """Other processes may do the same at the same time: whoever comes second finds files gone."""
        held = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            held.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


@functools.cache
def source_digest() -> str:
    """A digest of every Python file of this package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _host_features(device: jax.Device) -> str:
    """What programs of a CPU follow from besides its kind: its instruction sets."""
    if device.platform != "cpu":
        return ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
