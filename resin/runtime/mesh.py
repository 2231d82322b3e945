"""The one device mesh: axes dp, cp, tp, ep, any of them 1."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

from resin.plan import InvalidRequest
from resin.runtime.options import RunnerOptions

AXES = ("dp", "cp", "tp", "ep")


def build_mesh(options: RunnerOptions) -> Mesh:
    """A mesh over the first devices of this process.

    Raises:
        InvalidRequest: there are fewer devices than the axes ask for.
    """
    shape = (options.dp, options.cp, options.tp, options.ep)
    count = options.dp * options.cp * options.tp * options.ep
    devices = jax.local_devices()
    if count > len(devices):
        raise InvalidRequest("tp", options.tp, f"at most the {len(devices)} devices of this process")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[:count])


def platform_of(mesh: Mesh) -> str:
    """ "cpu" or "gpu"."""
    return mesh.devices.flat[0].platform
