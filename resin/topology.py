"""Topology: the device mesh and who stands where on it: devices, processes, and the groups that talk along each axis.

Devices are numbered over the mesh in row-major order, `dp` outermost and `tp` innermost, so that the devices that talk
most lie side by side. Each process drives as many of them as every other, in order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from resin.plan import InvalidRequest

MESH_AXES = ("dp", "cp", "tp")
"""Replicas of attention, context of long sequences, tensors; the outermost first."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Devices along each axis of the mesh.

    Attributes:
        dp: replicas; each has sequences and a cache of its own.
        cp: devices that share the cache of each sequence by its pages.
        tp: devices that share heads, feed-forward layers and the vocabulary.

    Raises:
        InvalidRequest: an axis without a device.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            if not isinstance(self.along(name), int) or self.along(name) < 1:
                raise InvalidRequest(name, self.along(name), "an integer of at least 1")

    def along(self, *axes: str) -> int:
        """Devices along these axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.dp * self.cp * self.tp

    def split(self, field: str, count: int, axes: Sequence[str] = ("tp",)) -> int:
        """`count` over the devices along `axes`.

        Args:
            field: what is counted, as a model's config names it.

        Raises:
            InvalidRequest: they do not divide it.
        """
        devices = self.along(*axes)
        if count % devices:
            wide = [axis for axis in axes if self.along(axis) > 1]
            raise InvalidRequest(" x ".join(wide), devices, f"a divisor of {field}={count}")
        return count // devices

    def split_kv(self, kv_heads: int) -> int:
        """KV heads that one device holds: an even share, or one that several devices hold a copy of.

        Raises:
            InvalidRequest: neither tp nor kv_heads divides the other.
        """
        if kv_heads % self.tp and self.tp % kv_heads:
            raise InvalidRequest("tp", self.tp, f"a divisor or a multiple of num_key_value_heads={kv_heads}")
        return max(kv_heads // self.tp, 1)

    def __str__(self) -> str:
        wide = [f"{axis} {self.along(axis)}" for axis in MESH_AXES if self.along(axis) > 1]
        return " x ".join(wide) or "one device"


class Place(NamedTuple):
    """Where a device stands on the mesh."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes of one program, and which of them this one is.

    Attributes:
        processes: their number.
        rank: this one's, from 0; rank 0 plans and serves.
        coordinator: "HOST:PORT" where they find each other; None for a single process.
        local_rank: place among the processes of this machine.
        local_processes: of this machine; None where the launcher does not say.
        launcher: what started them.

    Raises:
        InvalidRequest: a rank that there is not, or several processes without a coordinator.
    """

    processes: int = 1
    rank: int = 0
    coordinator: str | None = None
    local_rank: int = 0
    local_processes: int | None = None
    launcher: str = "options"

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise InvalidRequest("nodes", self.processes, "an integer of at least 1")
        if self.rank not in range(self.processes):
            raise InvalidRequest("node_rank", self.rank, f"0 to {self.processes - 1}")
        if self.processes > 1 and self.coordinator is None:
            raise InvalidRequest("coordinator", None, "HOST:PORT of rank 0 for several processes")
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
                raise InvalidRequest("coordinator", self.coordinator, "HOST:PORT")

    @classmethod
    def detect(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        nodes: int | None = None,
        node_rank: int | None = None,
        coordinator: str | None = None,
    ) -> Launch:
        """What the options say, and for the rest the launcher's environment: torchrun's, Slurm's or Kubernetes'.

        Of Kubernetes, a LeaderWorkerSet says everything, and an indexed Job the rank alone.

        Args:
            environment: the process's own if None.

        Raises:
            InvalidRequest: a variable that holds no number, or what is known does not fit together.
        """
        found = _launched(_Variables(os.environ if environment is None else environment))
        return cls(
            processes=found.get("processes", 1) if nodes is None else nodes,
            rank=found.get("rank", 0) if node_rank is None else node_rank,
            coordinator=coordinator or found.get("coordinator"),
            local_rank=found.get("local_rank", 0),
            local_processes=found.get("local_processes"),
            launcher=found.get("launcher", "options"),
        )

    def __str__(self) -> str:
        if self.processes == 1:
            return "one process"
        return f"process {self.rank} of {self.processes} by {self.launcher}, coordinator {self.coordinator}"


# Where several processes of one launcher meet when it names a machine and no port.
COORDINATOR_PORT = 6765


class _Variables:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __contains__(self, name: str) -> bool:
        return bool(self._environment.get(name))

    def text(self, name: str) -> str | None:
        return self._environment.get(name) or None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is not None and not text.isdecimal():
            raise InvalidRequest(name, text, "a whole number")
        return None if text is None else int(text)


def _launched(given: _Variables) -> dict[str, Any]:
    """What the launcher says, as fields of Launch; empty without one."""
    found: dict[str, Any] = {}
    if "RANK" in given and "WORLD_SIZE" in given:
        host, port = given.text("MASTER_ADDR"), given.number("MASTER_PORT")
        # The launcher's own store listens at this port: the processes meet at the next one.
        address = None if host is None else f"{host}:{COORDINATOR_PORT if port is None else port + 1}"
        found = {
            "launcher": "torchrun",
            "processes": given.number("WORLD_SIZE"),
            "rank": given.number("RANK"),
            "coordinator": address,
            "local_rank": given.number("LOCAL_RANK"),
            "local_processes": given.number("LOCAL_WORLD_SIZE"),
        }
    elif "SLURM_PROCID" in given and "SLURM_NTASKS" in given:
        host = first_host(given.text("SLURM_STEP_NODELIST") or given.text("SLURM_JOB_NODELIST") or "")
        found = {
            "launcher": "slurm",
            "processes": given.number("SLURM_NTASKS"),
            "rank": given.number("SLURM_PROCID"),
            "coordinator": f"{host}:{COORDINATOR_PORT}" if host else None,
            "local_rank": given.number("SLURM_LOCALID"),
        }
    elif "LWS_GROUP_SIZE" in given and "LWS_WORKER_INDEX" in given:
        host = given.text("LWS_LEADER_ADDRESS") or ""
        found = {
            "launcher": "kubernetes",
            "processes": given.number("LWS_GROUP_SIZE"),
            "rank": given.number("LWS_WORKER_INDEX"),
            "coordinator": f"{host}:{COORDINATOR_PORT}" if host else None,
        }
    elif "JOB_COMPLETION_INDEX" in given:
        found = {"launcher": "kubernetes", "rank": given.number("JOB_COMPLETION_INDEX")}
    return {name: value for name, value in found.items() if value is not None}


def first_host(nodes: str) -> str:
    """The first machine of a Slurm list such as "gpu[07-09,12],cpu1"."""
    name, bracket, rest = nodes.partition("[")
    if not bracket or "," in name:
        return nodes.partition(",")[0]
    numbers, _, suffix = rest.partition("]")
    return name + numbers.partition(",")[0].partition("-")[0] + suffix.partition(",")[0]


@dataclass(frozen=True, slots=True)
class Topology:
    """A mesh laid over the devices of all processes.

    Attributes:
        mesh: devices along each axis.
        launch: the processes.

    Raises:
        InvalidRequest: processes cannot have equal shares of the devices, or `tp` begins in the middle of one.
    """

    mesh: MeshShape
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        if self.mesh.size % self.launch.processes:
            raise InvalidRequest("nodes", self.launch.processes, f"a divisor of the {self.mesh.size} devices")
        held = self.devices_per_process
        if held % self.mesh.tp and self.mesh.tp % held:
            raise InvalidRequest("tp", self.mesh.tp, f"a divisor or a multiple of the {held} devices of a process")

    @property
    def devices_per_process(self) -> int:
        return self.mesh.size // self.launch.processes

    def place(self, device: int) -> Place:
        """Where a device stands."""
        return Place(*map(int, np.unravel_index(device, (self.mesh.dp, self.mesh.cp, self.mesh.tp))))

    def process_of(self, device: int) -> int:
        """The rank that drives a device."""
        return device // self.devices_per_process

    def devices_of(self, rank: int) -> range:
        """What a process drives."""
        return range(rank * self.devices_per_process, (rank + 1) * self.devices_per_process)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The replicas that a process has devices of."""
        return tuple(sorted({self.place(device).dp for device in self.devices_of(rank)}))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Devices whose places differ along these axes alone: those that take part in a collective over them."""
        for axis in axes:
            if axis not in MESH_AXES:
                raise InvalidRequest("axis", axis, f"one of {MESH_AXES}")
        shape = self.mesh.dp, self.mesh.cp, self.mesh.tp
        kept = [place for place, axis in enumerate(MESH_AXES) if axis not in axes]
        moved = [place for place, axis in enumerate(MESH_AXES) if axis in axes]
        devices = np.arange(self.mesh.size).reshape(shape).transpose(kept + moved)
        rows = devices.reshape(-1, self.mesh.along(*(MESH_AXES[place] for place in moved)))
        return tuple(map(tuple, rows.tolist()))

    def group_of(self, device: int, *axes: str) -> tuple[int, ...]:
        """The group of these axes that a device is in."""
        return next(group for group in self.groups(*axes) if device in group)

    def spans_processes(self, *axes: str) -> bool:
        """Whether collectives over these axes leave a process."""
        return any(len(set(map(self.process_of, group))) > 1 for group in self.groups(*axes))

    def __str__(self) -> str:
        lines = [f"{self.mesh.size} devices: {self.mesh}; {self.launch}"]
        for rank in range(self.launch.processes):
            places = ", ".join(
                f"{device}: " + " ".join(f"{axis}{at}" for axis, at in zip(MESH_AXES, self.place(device), strict=True))
                for device in self.devices_of(rank)
            )
            lines.append(f"process {rank}: {places}")
        return "\n".join(lines)
