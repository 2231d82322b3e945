"""The one device mesh, with the axes of `resin.topology`."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from resin.plan import InvalidRequest
from resin.runtime.options import RunnerOptions
from resin.topology import MESH_AXES, MeshShape


def build_mesh(options: RunnerOptions) -> Mesh:
    """A mesh over the first devices of this process, or over those of all processes.

    Raises:
        InvalidRequest: there are fewer devices than the axes ask for, or those of several processes are more.
    """
    shape, devices = options.mesh, jax.devices()
    processes = jax.process_count()
    if processes > 1:
        if shape.dp > 1:
            raise InvalidRequest("dp", shape.dp, "1 over several processes")
        if shape.size != len(devices):
            raise InvalidRequest("tp", shape.tp, f"the {len(devices)} devices of all {processes} processes")
    if shape.size > len(devices):
        raise InvalidRequest(
            "tp" if shape.size == shape.tp else "mesh",
            str(shape),
            f"at most the {len(devices)} devices of this process",
        )
    sizes = [shape.along(axis) for axis in MESH_AXES]
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices[: shape.size])


def shape_of(mesh: Mesh) -> MeshShape:
    """Devices along each axis."""
    return MeshShape(**{axis: mesh.shape[axis] for axis in MESH_AXES})


def local_device(mesh: Mesh) -> jax.Device:
    """The first device of the mesh that this process drives."""
    device: jax.Device = mesh.local_devices[0]
    return device


def platform_of(mesh: Mesh) -> str:
    """ "cpu" or "gpu"."""
    return mesh.devices.flat[0].platform
