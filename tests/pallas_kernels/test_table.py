"""The table picks references on CPU and kernel bodies elsewhere, and both compute the same."""

import numpy as np
import pytest

from resin.pallas_kernels.dense_small import dense_small_ref
from resin.pallas_kernels.paged_decode import paged_decode_attention_ref
from resin.pallas_kernels.table import DENSE_KERNEL_ROWS, Backend, pick_kernels


def test_platforms():
    assert pick_kernels("cpu").paged_decode is paged_decode_attention_ref
    assert pick_kernels("cuda").backend is pick_kernels("gpu").backend is Backend.TRITON
    assert pick_kernels("tpu").backend is Backend.REFERENCE
    assert pick_kernels("cpu", backend=Backend.INTERPRET).backend is Backend.INTERPRET


def test_attention_without_pages_is_there_beside_kernel_bodies():
    assert pick_kernels("cpu").fresh_prefill is None
    for backend, implementation in ((Backend.TRITON, "cudnn"), (Backend.INTERPRET, "xla")):
        assert pick_kernels("cpu", backend=backend).fresh_prefill.keywords == {"implementation": implementation}
        assert pick_kernels("cpu", backend=backend, has_fresh_prefill=False).fresh_prefill is None


@pytest.mark.parametrize("rows", [3, DENSE_KERNEL_ROWS + 1])
def test_interpreted_table_agrees_with_the_reference(rows):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 64), (64, 128)))
    out, _ = pick_kernels("cpu", backend=Backend.INTERPRET).dense(x, weight)
    np.testing.assert_allclose(out, dense_small_ref(x, weight)[0], rtol=0, atol=1e-4)
