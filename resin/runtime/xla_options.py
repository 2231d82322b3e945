"""XLA's options: the one place that sets them. docs/xla-options.md has what each was measured to do."""

from __future__ import annotations

from resin.pallas_kernels.table import Backend
from resin.plan import Bucket, Phase

# Products of at least this many rows are the library's alone: XLA then adds residuals inside them, and compiles sooner.
# Prompts of 8B's shape on an H200: 1 to 2% of a step.
LIBRARY_PRODUCT_TOKENS = 1024


def step_options(bucket: Bucket, backend: Backend) -> dict[str, str | bool]:
    """Compiler options of a bucket's programs."""
    if backend is Backend.TRITON and bucket.phase is Phase.PREFILL and bucket.tokens >= LIBRARY_PRODUCT_TOKENS:
        return {"xla_gpu_enable_triton_gemm": False}
    return {}
