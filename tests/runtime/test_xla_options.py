"""Which programs are compiled with other than XLA's own choices."""

import jax
import jax.numpy as jnp
import pytest

from resin.pallas_kernels.table import Backend
from resin.plan import Bucket, Phase
from resin.runtime.xla_options import step_options


@pytest.mark.parametrize(
    ("phase", "tokens", "backend", "has_options"),
    [
        (Phase.PREFILL, 8192, Backend.TRITON, True),
        (Phase.PREFILL, 1024, Backend.TRITON, True),
        (Phase.PREFILL, 512, Backend.TRITON, False),
        (Phase.DECODE, 1024, Backend.TRITON, False),
        (Phase.PREFILL, 8192, Backend.REFERENCE, False),
    ],
)
def test_only_long_prefill_on_a_gpu_leaves_products_to_the_library(phase, tokens, backend, has_options):
    sequences = tokens if phase is Phase.DECODE else 1
    options = step_options(Bucket(phase, sequences, tokens, (8,)), backend)
    assert bool(options) == has_options
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)  # XLA knows them all
