"""Plan recordings: every step and its outputs in one compact file, readable up to the last whole record.

File: a line that names it, then records of a length (4 bytes) and a message of `resin.plan.wire`, compressed by zlib.
The first message holds the runner's config and the arena.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from resin.plan import ArenaSpec, BatchPlan, ForwardOutput, ResinError, RunnerConfig, StepPlan, wire

_NAME = b"resin-plans-"
VERSION = wire.VERSION
MAGIC = _NAME + b"%d\n" % VERSION
_LENGTH = struct.Struct("<I")


class BadRecording(ResinError):
    """A file that is not a plan recording, or a damaged one."""


class Step(NamedTuple):
    """One recorded step of one replica; `output` is None if the run ended before it was collected."""

    plan: BatchPlan
    output: ForwardOutput | None


class PlanRecorder:
    """Appends steps and outputs to a file as they happen."""

    def __init__(self, path: Path, config: RunnerConfig, arena: ArenaSpec) -> None:
        self._file = path.open("wb")
        self._file.write(MAGIC)
        self._write(wire.encode_config(config, arena))

    def write_step(self, step: StepPlan) -> None:
        self._write(wire.encode_step(step))

    def write_outputs(self, step: StepPlan, outputs: Sequence[ForwardOutput]) -> None:
        self._write(wire.encode_outputs(step.plans[0].step, outputs))

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        packed = zlib.compress(message, 1)
        self._file.write(_LENGTH.pack(len(packed)) + packed)
        self._file.flush()


class Recording:
    """A recorded run.

    Attributes:
        config, arena: what the engine ran with.
        steps: plans with their outputs, in dispatch order; of each step those of all replicas, in their order.

    Raises:
        BadRecording: the file is not a recording or is damaged before its last record.
    """

    def __init__(self, path: str | Path) -> None:
        messages = _read_messages(Path(path))
        steps: dict[int, StepPlan] = {}
        outputs: dict[int, tuple[ForwardOutput, ...]] = {}
        try:
            if (first := next(messages, None)) is None:
                raise BadRecording(f"{path}: no configuration record")
            self.config, self.arena = wire.decode_config(first)
            for message in messages:
                if wire.read_head(message).kind is wire.Kind.OUTPUTS:
                    number, found = wire.decode_outputs(message)
                    outputs[number] = found
                else:
                    step = wire.decode_step(message, self.config)
                    steps[step.plans[0].step] = step
        except wire.WireError as error:
            raise BadRecording(f"{path}: {error}") from error
        nothing = (None,) * self.config.replicas
        self.steps = [
            Step(plan, output)
            for number, step in steps.items()
            for plan, output in zip(step.plans, outputs.get(number, nothing), strict=True)
        ]


def _read_messages(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        if (start := file.read(len(MAGIC))) != MAGIC:
            if start.startswith(_NAME):
                other = start.removeprefix(_NAME).strip().decode(errors="replace")
                raise BadRecording(f"{path}: a plan recording of version {other}; this Resin reads version {VERSION}")
            raise BadRecording(f"{path}: not a plan recording (expected it to start with {MAGIC!r})")
        while len(length := file.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(length)
            if len(packed := file.read(size)) < size:
                return  # the run was cut while writing this record
            try:
                yield zlib.decompress(packed)
            except zlib.error as error:
                raise BadRecording(f"{path}: damaged record before byte {file.tell()}: {error}") from error
