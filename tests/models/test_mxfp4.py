from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.loading.quantised import dequantise_mxfp4
from resin.models.mxfp4 import unpack_mxfp4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_and_loader_decode_every_byte_and_scale_alike(dtype: str) -> None:
    # One row a scale that does not overflow; each row has all 256 bytes.
    blocks = np.tile(np.arange(256, dtype=np.uint8), (252, 1)).reshape(252, 16, 16)
    scales = np.repeat(np.arange(1, 253, dtype=np.uint8)[:, None], 16, axis=1)
    got = np.asarray(unpack_mxfp4(jnp.asarray(blocks), jnp.asarray(scales), jnp.dtype(dtype)), np.float32)
    expected = dequantise_mxfp4(blocks[None], scales[None])[0].astype(np.float32).T
    normal = np.abs(expected) >= np.finfo(np.float32).tiny  # devices may flush what is smaller
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert normal.mean() > 0.85


def test_the_low_nibble_comes_first() -> None:
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :2] = [0x21, 0xFA]
    values = unpack_mxfp4(jnp.asarray(blocks), jnp.full((1, 1), 128, jnp.uint8), jnp.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(values)[0, :5], [1.0, 2.0, -2.0, -12.0, 0.0])
