"""JAX execution: bucket table to executables, device arena, sampling, mesh, compile cache."""

from resin.runtime.load import build_runner, load_runner
from resin.runtime.options import RunnerOptions
from resin.runtime.runner import ModelRunner

__all__ = ["ModelRunner", "RunnerOptions", "build_runner", "load_runner"]
