"""A mesh of one NVIDIA H200 that need not be here: XLA compiles whole programs for it with its CUDA plugin alone."""

from __future__ import annotations

import importlib.util

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# What XLA asks a device about itself, in the text form of its GpuTargetConfigProto.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
}
"""


def has_cuda_compiler() -> bool:
    """Whether XLA's CUDA plugin is installed; no device is needed."""
    return importlib.util.find_spec("jax_plugins") is not None and any(map(importlib.util.find_spec, PLUGINS))


def abstract_gpu_mesh() -> Mesh:
    """The mesh of one device that programs can be compiled for, not run on."""
    (device, *_) = topologies.get_topology_desc("one", "cuda", target_config=H200, topology="1x1x1").devices
    mesh = build_mesh(RunnerOptions())
    return Mesh(np.array([device]).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)
