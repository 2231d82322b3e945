"""Plan recordings: every plan and output of a run in one compact file, readable up to the last whole record.

File: the magic, then records of `kind (1 byte), meta length (4), blob length (4), meta, blob`. Meta is JSON, the blob
zlib-compressed arrays one after another. The first record holds the runner's config and the arena.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from resin.plan import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    CacheGeometry,
    CacheGroup,
    ForwardOutput,
    GroupGeometry,
    HistoryGroup,
    Phase,
    Plane,
    ResinError,
    RunnerConfig,
    SlotLoad,
    StateGroup,
    WindowGroup,
    build_plan,
)

_NAME = b"resin-plans-"
VERSION = 2  # rises when the columns of a plan do not mean what they meant
MAGIC = _NAME + b"%d\n" % VERSION
_HEAD = struct.Struct("<BII")
_CONFIG, _PLAN, _OUTPUT = 0, 1, 2
_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (HistoryGroup, WindowGroup, StateGroup)}


class BadRecording(ResinError):
    """A file that is not a plan recording, or a damaged one."""


class Step(NamedTuple):
    """One recorded step; `output` is None if the run ended before it was collected."""

    plan: BatchPlan
    output: ForwardOutput | None


class PlanRecorder:
    """Appends plans and outputs to a file as they happen."""

    def __init__(self, path: Path, config: RunnerConfig, arena: ArenaSpec) -> None:
        self._file = path.open("wb")
        self._file.write(MAGIC)
        meta = {"config": dataclasses.asdict(config), "arena": dataclasses.asdict(arena)}
        meta["config"]["groups"] = [
            {"kind": type(group).__name__, **dataclasses.asdict(group)} for group in config.groups
        ]
        self._write(_CONFIG, meta, [])

    def write_plan(self, plan: BatchPlan, replica: int = 0) -> None:
        loads = [
            {"slot": load.slot, "count_row": load.count_row, "prompt_tokens": load.prompt_tokens}
            for load in plan.slot_loads
        ]
        meta = {
            "step": plan.step,
            "replica": replica,
            "bucket": [int(plan.phase), plan.bucket.sequences, plan.bucket.tokens, list(plan.bucket.row_pages)],
            "live": [plan.num_sequences, plan.num_tokens, plan.top_logprobs],
            "requests": list(plan.request_ids),
            "loads": loads,
        }
        arrays = {"buffer": plan.buffer}
        if plan.allowed_masks is not None:
            arrays["masks"] = plan.allowed_masks
        for i, load in enumerate(plan.slot_loads):
            arrays |= {f"{name}:{i}": getattr(load, name) for name in _LOAD_ARRAYS}
        self._write_arrays(_PLAN, meta, arrays)

    def write_output(self, plan: BatchPlan, output: ForwardOutput, replica: int = 0) -> None:
        arrays = {
            field.name: np.asarray(value)
            for field in dataclasses.fields(output)
            if (value := getattr(output, field.name)) is not None
        }
        self._write_arrays(_OUTPUT, {"step": plan.step, "replica": replica}, arrays)

    def close(self) -> None:
        self._file.close()

    def _write_arrays(self, kind: int, meta: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        meta["arrays"] = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        self._write(kind, meta, [np.ascontiguousarray(array) for array in arrays.values()])

    def _write(self, kind: int, meta: dict[str, Any], arrays: list[np.ndarray]) -> None:
        text = json.dumps(meta, separators=(",", ":")).encode()
        blob = zlib.compress(b"".join(array.tobytes() for array in arrays), 1)
        self._file.write(_HEAD.pack(kind, len(text), len(blob)) + text + blob)
        self._file.flush()


_LOAD_ARRAYS = ("token_ids", "bias_ids", "bias_values", "stop_ids")


class Recording:
    """A recorded run.

    Attributes:
        config, arena: what the engine ran with.
        steps: plans with their outputs, in dispatch order; of each step those of all replicas, in their order.

    Raises:
        BadRecording: the file is not a recording or its first record is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        records = _read_records(Path(path))
        kind, meta, _ = next(records, (-1, {}, {}))
        if kind != _CONFIG:
            raise BadRecording(f"{path}: no configuration record")
        self.config = _config_from(meta["config"])
        self.arena = ArenaSpec(**meta["arena"])
        plans: dict[tuple[int, int], BatchPlan] = {}
        outputs: dict[tuple[int, int], ForwardOutput] = {}
        for kind, meta, arrays in records:
            key = meta["step"], meta.get("replica", 0)
            if kind == _PLAN:
                plans[key] = self._plan_from(meta, arrays)
            elif kind == _OUTPUT:
                outputs[key] = ForwardOutput(**arrays)
        self.steps = [Step(plan, outputs.get(key)) for key, plan in plans.items()]

    def _plan_from(self, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> BatchPlan:
        phase, sequences, tokens, row_pages = meta["bucket"]
        bucket = Bucket(Phase(phase), sequences, tokens, tuple(row_pages))
        loads = tuple(
            SlotLoad(
                slot=load["slot"],
                count_row=load["count_row"],
                prompt_tokens=load["prompt_tokens"],
                **{name: arrays[f"{name}:{i}"] for name in _LOAD_ARRAYS},
            )
            for i, load in enumerate(meta["loads"])
        )
        return build_plan(
            self.config,
            bucket,
            arrays["buffer"].copy(),
            step=meta["step"],
            slot_loads=loads,
            allowed_masks=arrays.get("masks"),
            request_ids=tuple(meta["requests"]),
        )


def _read_records(path: Path) -> Iterator[tuple[int, dict[str, Any], dict[str, np.ndarray]]]:
    with path.open("rb") as file:
        if (start := file.read(len(MAGIC))) != MAGIC:
            if start.startswith(_NAME):
                other = start.removeprefix(_NAME).strip().decode(errors="replace")
                raise BadRecording(f"{path}: a plan recording of version {other}; this Resin reads version {VERSION}")
            raise BadRecording(f"{path}: not a plan recording (expected it to start with {MAGIC!r})")
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, meta_bytes, blob_bytes = _HEAD.unpack(head)
            text, blob = file.read(meta_bytes), file.read(blob_bytes)
            if len(text) + len(blob) < meta_bytes + blob_bytes:
                return  # the run was cut while writing this record
            try:
                meta = json.loads(text)
                yield kind, meta, _arrays_from(meta, zlib.decompress(blob))
            except (ValueError, KeyError, zlib.error) as error:
                raise BadRecording(f"{path}: damaged record before byte {file.tell()}: {error}") from error


def _arrays_from(meta: dict[str, Any], blob: bytes) -> dict[str, np.ndarray]:
    arrays, offset = {}, 0
    for name, dtype, shape in meta.get("arrays", ()):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(blob, dtype, count, offset).reshape(shape)
        offset += count * np.dtype(dtype).itemsize
    return arrays


def _config_from(meta: dict[str, Any]) -> RunnerConfig:
    geometry = meta.pop("geometry")
    groups = tuple(GroupGeometry(**group) for group in geometry.pop("groups"))
    meta["buckets"] = tuple(
        Bucket(Phase(bucket["phase"]), bucket["sequences"], bucket["tokens"], tuple(bucket["row_pages"]))
        for bucket in meta["buckets"]
    )
    meta["groups"] = tuple(_group_from(group) for group in meta["groups"])
    return RunnerConfig(geometry=CacheGeometry(groups=groups, **geometry), **meta)


def _group_from(meta: dict[str, Any]) -> CacheGroup:
    planes = tuple(Plane(**plane) for plane in meta.pop("planes"))
    group: CacheGroup = _KINDS[meta.pop("kind")](planes=planes, **meta)
    return group
