"""What kernel bodies share."""

import numpy as np
import pytest

from resin.pallas_kernels.tiles import LOG2E, MASKED, NO_TOP


@pytest.mark.parametrize("factor", [*(width**-0.5 for width in (64, 80, 96, 128, 256)), 0.001, 30.0, 50.0])
def test_masked_scores_weigh_nothing_before_any_other(factor):
    """The exponent that a fused multiply-add gives a masked score in a row whose maximum has seen no real one."""
    scale = np.float32(factor * LOG2E)
    top = max(np.float32(NO_TOP), np.float32(MASKED) * scale)
    exponent = np.float64(np.float32(MASKED)) * np.float64(scale) - np.float64(top)  # exact product
    assert exponent < -1000
