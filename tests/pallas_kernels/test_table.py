"""The table picks references and XLA products on CPU, and kernel bodies elsewhere."""

import numpy as np
import pytest

from resin.pallas_kernels.paged_ref import paged_decode_attention_ref
from resin.pallas_kernels.table import Backend, pick_kernels, takes_dense_kernel, takes_heads_kernel, takes_route_kernel


def test_platforms():
    assert pick_kernels("cpu").paged_decode is paged_decode_attention_ref
    assert pick_kernels("cpu").products is None
    assert pick_kernels("cuda").backend is pick_kernels("gpu").backend is Backend.TRITON
    assert pick_kernels("tpu").backend is Backend.REFERENCE
    assert pick_kernels("cpu", backend=Backend.INTERPRET).backend is Backend.INTERPRET


def test_attention_without_pages_is_there_beside_kernel_bodies():
    assert pick_kernels("cpu").fresh_prefill is None
    for backend, implementation in ((Backend.TRITON, "cudnn"), (Backend.INTERPRET, "xla")):
        assert pick_kernels("cpu", backend=backend).fresh_prefill.keywords == {"implementation": implementation}
        assert pick_kernels("cpu", backend=backend, has_fresh_prefill=False).fresh_prefill is None


@pytest.mark.parametrize("rows", [3, 33])
def test_interpreted_products_are_right(rows):
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, 64), (64, 128)))
    out, _ = pick_kernels("cpu", backend=Backend.INTERPRET).products.dense(x, weight)
    np.testing.assert_allclose(out, x @ weight, rtol=0, atol=1e-4)


ROWS = (1, 16, 32, 64, 128, 256)
LARGE, SMALL = 4096 * 4096, 2048 * 1024


def test_products_of_many_rows_are_xlas():
    def taken(weights: int, **options: bool) -> list[int]:
        return [rows for rows in ROWS if takes_dense_kernel(rows, weights, **options)]

    assert taken(LARGE, is_gated=False, has_residual=False) == [1, 16]
    assert taken(LARGE, is_gated=True, has_residual=False) == [1, 16, 32]
    assert taken(LARGE, is_gated=False, has_residual=True) == [1, 16, 32, 64, 128]
    assert taken(SMALL, is_gated=False, has_residual=True) == [1, 16]
    assert [rows for rows in ROWS if takes_heads_kernel(rows, LARGE)] == [1, 16, 32]
    assert [rows for rows in ROWS if takes_heads_kernel(rows, SMALL)] == [1, 16]


def test_routers_of_many_tokens_are_xlas():
    assert [rows for rows in ROWS if takes_route_kernel(rows, 128)] == [1, 16, 32, 64]
    assert [rows for rows in ROWS if takes_route_kernel(rows, 200)] == [1, 16, 32]
    assert [rows for rows in ROWS if takes_route_kernel(rows, 32)] == [1, 16, 32, 64, 128]
    assert takes_route_kernel(16, 512) and not takes_route_kernel(1, 513)
