"""`python -m bench kernels`: checks each kernel against its XLA reference, then times it.

Times are the GPU's own, from the profiler, with caches emptied before each run; beside each stands the fraction of the
physical limit: bytes at the copy rate or operations at the matmul rate, whichever takes longer, both measured in the
same run. Without a GPU the bodies run in Pallas' interpreter on toy shapes and are only checked.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.arguments import output_file
from bench.device_time import DeviceTimer
from bench.kernel_cases import KernelCase, build_cases
from bench.provenance import describe_run
from bench.roofline import CeilingProbe, Ceilings
from resin.pallas_kernels.gpu import Gpu
from resin.pallas_kernels.table import Backend, Kernels, pick_kernels


def main(argv: Sequence[str]) -> int:
    """Prints a table; returns 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description="check and time each kernel")
    parser.add_argument("--only", help="kernels whose name contains this")
    parser.add_argument("--output", type=output_file, help="append rows to this JSON-lines file")
    options = parser.parse_args(argv)
    device = jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")
    kernels = pick_kernels(
        device.platform,
        gpu=Gpu.of(device),
        backend=Backend.TRITON if on_gpu else Backend.INTERPRET,
    )
    ceilings, timer = (measure_ceilings(), DeviceTimer()) if on_gpu else (None, None)
    if ceilings is not None:
        print(
            f"copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
        )
    run, wrong = describe_run(), 0
    for case in build_cases(small=not on_gpu):
        if options.only and options.only not in case.kernel:
            continue
        row = run_case(case, kernels, ceilings, timer)
        wrong += not row["correct"]
        print(describe(row), flush=True)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run | row) + "\n")
    return int(wrong > 0)


def measure_ceilings() -> Ceilings:
    """Medians of five bursts of each."""
    probe = CeilingProbe("bfloat16")
    for _ in range(5):
        probe.measure()
    return probe.settled()


def run_case(
    case: KernelCase, kernels: Kernels, ceilings: Ceilings | None, timer: DeviceTimer | None
) -> dict[str, Any]:
    """Checks the case and, with a timer, times it."""
    reference = pick_kernels("cpu", backend=Backend.REFERENCE)
    compiled = compile_call(case, getattr(kernels, case.kernel), case.arguments)
    arguments = jax.device_put(case.arguments, jax.devices("cpu")[0]) if case.host_reference else case.arguments
    expected = compile_call(case, getattr(reference, case.kernel), arguments)(*arguments)
    error = relative_error(compiled(*case.arguments), jax.device_put(expected, jax.devices()[0]))
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "shape": case.shape,
        "error": error,
        "correct": error <= case.tolerance,
    }
    if timer is None or ceilings is None or not row["correct"]:
        return row
    seconds = timer.median_s(lambda: compiled(*case.arguments), case.device_names)
    bytes_s = case.nbytes / ceilings.copy_bytes_per_s
    flops_s = case.flops / ceilings.matmul_flops_per_s
    limit = "copy" if bytes_s >= flops_s else "matmul"
    return row | {"us": seconds * 1e6, "limit": limit, "fraction": max(bytes_s, flops_s) / seconds}


def compile_call(case: KernelCase, function: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    return jax.jit(lambda *arguments: case.call(function, *arguments)).lower(*arguments).compile()


def relative_error(out: jax.Array, expected: jax.Array) -> float:
    """Frobenius norm of the difference over the expected one's; tokens: the share that differs."""
    if jnp.issubdtype(out.dtype, jnp.integer):
        return float(np.mean(np.asarray(out) != np.asarray(expected)))
    difference = jnp.linalg.norm((out.astype(jnp.float32) - expected.astype(jnp.float32)).ravel())
    return float(difference / jnp.linalg.norm(expected.astype(jnp.float32).ravel()))


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    line = f"{row['kernel']:14} {row['shape']:36} error {row['error']:.1e}"
    if not row["correct"]:
        return line + "  WRONG"
    if "us" not in row:
        return line + "  checked"
    return line + f"  {row['us']:9.1f} us  {row['fraction']:.2f} of the {row['limit']} rate"
