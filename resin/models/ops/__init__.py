"""The operations of a device: one protocol, in plain XLA and as kernels."""

from __future__ import annotations

from resin.models.ops.protocol import Ops
from resin.models.ops.triton import TritonOps
from resin.models.ops.xla import XlaOps
from resin.pallas_kernels.table import Kernels


def pick_ops(kernels: Kernels) -> Ops:
    """The operations of one pass on a device with these kernels."""
    return XlaOps() if kernels.products is None else TritonOps(kernels.products)
