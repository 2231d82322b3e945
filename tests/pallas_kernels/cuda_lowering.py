"""Lowers kernels for CUDA on any machine, and compiles the Triton IR that comes out where Triton is installed."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

NVIDIA = {90: ("NVIDIA H200", 132), 100: ("NVIDIA B200", 148)}


@dataclass(frozen=True)
class TritonModule:
    """One kernel as it reaches the compiler."""

    name: str
    ir: bytes  # MLIR bytecode
    num_warps: int
    num_stages: int


def lower_for_cuda(function: Callable[..., Any], *args: Any, arch: int = 90) -> list[TritonModule]:
    """Every Pallas kernel of `function` on these arguments (arrays or shape structs), lowered as on that GPU."""
    return [_triton_module(op) for op in _operations(function, args, arch) if _is_call(op, "triton")]


def mosaic_kernels(function: Callable[..., Any], *args: Any, arch: int = 90) -> int:
    """How many kernels Mosaic GPU lowers; it compiles them where they run."""
    return sum(_is_call(op, "mosaic_gpu") for op in _operations(function, args, arch))


def _operations(function: Callable[..., Any], args: tuple[Any, ...], arch: int) -> list[Any]:
    with warnings.catch_warnings(), _abstract_gpu(arch):
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return list(_walk(lowered.compiler_ir("stablehlo").operation))


@contextlib.contextmanager
def _abstract_gpu(arch: int) -> Iterator[None]:
    name, cores = NVIDIA[arch]
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        yield  # jax 0.10 lowers without a device
        return
    mesh = AbstractMesh((1,), ("one",), abstract_device=AbstractDevice(name, cores, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _walk(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _walk(op.operation)


def _is_call(op: Any, target: str) -> bool:
    return op.name == "stablehlo.custom_call" and target in str(op.attributes["call_target_name"])


def _triton_module(op: Any) -> TritonModule:
    config = op.attributes["mhlo.backend_config"]
    return TritonModule(
        name=config["name"].value,
        ir=config["ir"].value_bytes,
        num_warps=config["num_warps"].value,
        num_stages=config["num_stages"].value,
    )


@dataclass(frozen=True)
class CompiledKernel:
    """What a kernel needs of one multiprocessor."""

    shared_bytes: int
    registers: int
    spilled_bytes: int
    asm: dict[str, Any]


def compile_for_gpu(module: TritonModule, arch: int) -> CompiledKernel:
    """Compiles with the installed Triton (3.8 reads this IR) for `sm_<arch>`; needs no GPU."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    options = {"num_warps": module.num_warps, "num_stages": module.num_stages}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{module.name}.ttir"
        path.write_bytes(module.ir)
        context = ir.context()
        ir.load_dialects(context)
        parsed = ir.parse_mlir_module(str(path), context)
        # A file of Triton IR counts as optimised already, so the first stage has to be run by hand.
        backend = make_backend(target)
        parsed.context = context
        parsed = backend.make_ttir(parsed, {}, backend.parse_options(options), arch)
        path.write_text(str(parsed))
        kernel = triton.compile(str(path), target=target, options=options)
    return CompiledKernel(kernel.metadata.shared, *_ptxas_report(kernel.asm["ptx"], arch), kernel.asm)


def _ptxas_report(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread and spilled bytes, as ptxas reports them."""
    import re
    import subprocess

    from triton import knobs

    tool = knobs.nvidia.ptxas if arch < 100 else knobs.nvidia.ptxas_blackwell
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool.path, "-v", f"-arch=sm_{arch}a", str(path), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", report))
    return registers, spills
