"""Steps and outputs as bytes: what ranks send each other, and what recordings keep.

A message is a head of 16 bytes, a description in JSON, and arrays one after another, each at a multiple of 8 bytes. A
reader gets views of the message: nothing is copied but what a runner changes. Nothing in a message is ever executed.

    magic "RW" | version, uint16 | kind, uint8 | 3 bytes 0 | description bytes, uint32 | array bytes, uint32
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from resin.plan.batch import SlotLoad, build_plan
from resin.plan.buckets import Bucket, Phase
from resin.plan.cache import (
    CacheGeometry,
    CacheGroup,
    GroupGeometry,
    HistoryGroup,
    Plane,
    StateGroup,
    WindowGroup,
)
from resin.plan.config import ArenaSpec, RunnerConfig
from resin.plan.errors import ResinError
from resin.plan.layout import plan_layout
from resin.plan.output import ForwardOutput
from resin.plan.step import StepPlan

VERSION = 3
"""Rises when a message or a column of a plan does not mean what it meant."""

HEAD_BYTES = 16

_T = TypeVar("_T")
_MAGIC = b"RW"
_HEAD = struct.Struct("<2sHB3xII")
_MOST_BYTES = 2**32 - 1
_PLACE = 8  # arrays start at a multiple of so many bytes, so that views of them are aligned
_LOAD_ARRAYS = ("token_ids", "bias_ids", "bias_values", "stop_ids")
_GROUPS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (HistoryGroup, WindowGroup, StateGroup)}
_OUTPUT_FIELDS = tuple(field.name for field in dataclasses.fields(ForwardOutput))


class WireError(ResinError):
    """Bytes that are no message, are of another version, or are damaged."""


class Kind(enum.IntEnum):
    """What a message says."""

    CONFIG = 0
    """A runner's config and the arena: first of all."""
    STEP = 1
    OUTPUTS = 2
    """What became of a step, an output for each replica."""


class Head(NamedTuple):
    """What the first HEAD_BYTES of a message tell: its kind, and how many bytes follow, in two parts."""

    kind: Kind
    description_bytes: int
    array_bytes: int

    @property
    def rest_bytes(self) -> int:
        """Bytes of the message after its head."""
        return self.description_bytes + self.array_bytes


def read_head(data: bytes | memoryview) -> Head:
    """Reads the first HEAD_BYTES of a message.

    Raises:
        WireError: not a message, or one of another version.
    """
    if len(data) < HEAD_BYTES:
        raise WireError(f"a message begins with {HEAD_BYTES} bytes, here are {len(data)}")
    magic, version, kind, description_bytes, array_bytes = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise WireError(f"not a message: it begins with {bytes(data[:2])!r}, not {_MAGIC!r}")
    if version != VERSION:
        raise WireError(f"a message of version {version}; this Resin reads version {VERSION}")
    try:
        return Head(Kind(kind), description_bytes, array_bytes)
    except ValueError:
        raise WireError(f"a message of an unknown kind, {kind}") from None


# -- what is said -----------------------------------------------------------------------------------------------------


def encode_config(config: RunnerConfig, arena: ArenaSpec) -> bytes:
    """A message that lets its reader make plans of later ones."""
    told = {"config": dataclasses.asdict(config), "arena": dataclasses.asdict(arena)}
    told["config"]["groups"] = [{"kind": type(group).__name__, **dataclasses.asdict(group)} for group in config.groups]
    return _message(Kind.CONFIG, told, ())


def encode_step(step: StepPlan) -> bytes:
    """A message of the plans of all replicas, with their masks, slot loads and request ids."""
    bucket = step.bucket
    arrays: list[np.ndarray] = []
    plans = []
    for plan in step.plans:
        loads = [[int(load.slot), int(load.count_row), int(load.prompt_tokens)] for load in plan.slot_loads]
        plans.append([plan.step, plan.allowed_masks is not None, loads])
        arrays += [plan.buffer, np.asarray(plan.request_ids, np.int64)]
        if plan.allowed_masks is not None:
            arrays.append(plan.allowed_masks)
        arrays += [getattr(load, name) for load in plan.slot_loads for name in _LOAD_ARRAYS]
    told = {"bucket": [int(bucket.phase), bucket.sequences, bucket.tokens, list(bucket.row_pages)], "plans": plans}
    return _message(Kind.STEP, told, arrays)


def encode_outputs(step: int, outputs: Sequence[ForwardOutput]) -> bytes:
    """A message of what all replicas return for the step of that number."""
    names: list[list[str]] = []
    arrays: list[np.ndarray] = []
    for output in outputs:
        given = {name: value for name in _OUTPUT_FIELDS if (value := getattr(output, name)) is not None}
        names.append(list(given))
        arrays += [np.asarray(value) for value in given.values()]
    return _message(Kind.OUTPUTS, {"step": step, "outputs": names}, arrays)


# -- what is understood -----------------------------------------------------------------------------------------------


def decode_config(data: bytes | memoryview) -> tuple[RunnerConfig, ArenaSpec]:
    """What `encode_config` said.

    Raises:
        WireError: the message is damaged or of another kind.
    """
    return _read(Kind.CONFIG, data, lambda told, _: (_config_from(told["config"]), ArenaSpec(**told["arena"])))


def decode_step(data: bytes | memoryview, config: RunnerConfig) -> StepPlan:
    """What `encode_step` said, for a runner of this config; the plans' arrays are views of the message.

    Raises:
        WireError: the message is damaged, of another kind, or of a plan that the config does not know.
    """
    return _read(Kind.STEP, data, lambda told, arrays: _step_from(config, told, arrays))


def decode_outputs(data: bytes | memoryview) -> tuple[int, tuple[ForwardOutput, ...]]:
    """The number of a step and what `encode_outputs` said of it; arrays are views of the message.

    Raises:
        WireError: the message is damaged or of another kind.
    """
    return _read(Kind.OUTPUTS, data, _outputs_from)


def _step_from(config: RunnerConfig, told: dict[str, Any], arrays: list[np.ndarray]) -> StepPlan:
    phase, sequences, tokens, row_pages = told["bucket"]
    bucket = Bucket(Phase(phase), sequences, tokens, tuple(row_pages))
    if config.buckets and bucket not in config.buckets:
        raise ValueError(f"{bucket} is none of the runner's buckets")
    if len(told["plans"]) != config.replicas:
        raise ValueError(f"{len(told['plans'])} plans for {config.replicas} replicas")
    words = plan_layout(bucket, config.groups, config.geometry).words
    left = iter(arrays)
    plans = []
    for number, has_masks, loads in told["plans"]:
        buffer, request_ids = _array(left, "i4", 1), _array(left, "i8", 1)
        if len(buffer) != words:
            raise ValueError(f"a buffer of {len(buffer)} words where {bucket} has {words}")
        masks = _array(left, "i4", 2) if has_masks else None
        made = tuple(
            SlotLoad(slot, count_row, _array(left, "i4", 1), prompt, *(_array(left, kind, 1) for kind in _LOAD_KINDS))
            for slot, count_row, prompt in loads
        )
        ids = tuple(request_ids.tolist())
        plans.append(
            build_plan(config, bucket, buffer, step=number, slot_loads=made, allowed_masks=masks, request_ids=ids)
        )
    if next(left, None) is not None:
        raise ValueError("more arrays than its plans have")
    return StepPlan(bucket, tuple(plans))


_LOAD_KINDS = ("i4", "f4", "i4")  # of bias_ids, bias_values and stop_ids


def _array(left: Any, kind: str, rank: int) -> np.ndarray:
    array: np.ndarray | None = next(left, None)
    if array is None or array.dtype != np.dtype("<" + kind) or array.ndim != rank:
        found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise ValueError(f"{found} where an array of rank {rank} of {kind} belongs")
    return array


def _outputs_from(told: dict[str, Any], arrays: list[np.ndarray]) -> tuple[int, tuple[ForwardOutput, ...]]:
    left = iter(arrays)
    outputs = tuple(ForwardOutput(**{name: next(left) for name in names}) for names in told["outputs"])
    return int(told["step"]), outputs


def _config_from(told: dict[str, Any]) -> RunnerConfig:
    geometry = told.pop("geometry")
    fills = tuple(GroupGeometry(**group) for group in geometry.pop("groups"))
    told["buckets"] = tuple(
        Bucket(Phase(bucket["phase"]), bucket["sequences"], bucket["tokens"], tuple(bucket["row_pages"]))
        for bucket in told["buckets"]
    )
    told["groups"] = tuple(_group_from(group) for group in told["groups"])
    return RunnerConfig(geometry=CacheGeometry(groups=fills, **geometry), **told)


def _group_from(told: dict[str, Any]) -> CacheGroup:
    planes = tuple(Plane(**plane) for plane in told.pop("planes"))
    group: CacheGroup = _GROUPS[told.pop("kind")](planes=planes, **told)
    return group


# -- messages ---------------------------------------------------------------------------------------------------------


def _message(kind: Kind, told: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    told["arrays"] = [[array.dtype.newbyteorder("<").str, array.shape] for array in arrays]
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PLACE)
    parts: list[bytes | memoryview] = []
    size = 0
    for array in arrays:
        content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        padding = -len(content) % _PLACE
        parts += [content, bytes(padding)]
        size += len(content) + padding
    assert max(len(text), size) <= _MOST_BYTES, "a step is far below 4 GiB"
    return b"".join((_HEAD.pack(_MAGIC, VERSION, kind, len(text), size), text, *parts))


def _read(kind: Kind, data: bytes | memoryview, read: Callable[[dict[str, Any], list[np.ndarray]], _T]) -> _T:
    head = read_head(data)
    if head.kind is not kind:
        raise WireError(f"a message of kind {head.kind.name} where one of kind {kind.name} belongs")
    if len(data) != HEAD_BYTES + head.rest_bytes:
        raise WireError(f"a message of {HEAD_BYTES + head.rest_bytes} bytes has {len(data)}")
    try:
        told = json.loads(bytes(data[HEAD_BYTES : HEAD_BYTES + head.description_bytes]))
        arrays = _arrays_from(told["arrays"], data, HEAD_BYTES + head.description_bytes)
        return read(told, arrays)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise WireError(f"a damaged message of kind {kind.name}: {error}") from error


def _arrays_from(described: list[Any], data: bytes | memoryview, offset: int) -> list[np.ndarray]:
    arrays = []
    for text, shape in described:
        dtype = np.dtype(text)
        if dtype.kind not in "iufb":
            raise ValueError(f"an array of {text}")
        count = math.prod(shape)
        array = np.frombuffer(data, dtype, count, offset).reshape(shape)
        array.flags.writeable = False
        arrays.append(array)
        offset += count * dtype.itemsize
        offset += -offset % _PLACE
    if offset != len(data):
        raise ValueError(f"{len(data) - offset} bytes after the last array")
    return arrays
