"""Models whose caches never grow, or keep nothing, are as right as others: what they cannot show is left out."""

from __future__ import annotations

from typing import Any

import pytest

from resin.conformance import Settings, verify
from resin.models.testing import TINY_CONFIGS, random_checkpoint

CONV, SLIDING, FULL = "conv", "sliding_attention", "full_attention"
PREFIXES, RETRACTED = ("prefix hit", "conversation"), ("retracted",)


@pytest.mark.parametrize(
    ("family", "changes", "absent"),
    [
        ("lfm2", {"layer_types": [CONV] * 2}, RETRACTED),
        ("gemma3_text", {"layer_types": [SLIDING] * 2, "sliding_window": 1}, PREFIXES + RETRACTED),
        pytest.param("gemma3_text", {"layer_types": [SLIDING] * 2, "sliding_window": 2}, (), marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"layer_types": [SLIDING, FULL], "sliding_window": 1}, (), marks=pytest.mark.slow),
        pytest.param("lfm2", {"layer_types": [FULL] * 2}, (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_passes_every_check_that_applies(family: str, changes: dict[str, Any], absent: tuple[str, ...]) -> None:
    config = TINY_CONFIGS[family] | changes | {"num_hidden_layers": 2}
    report = verify(random_checkpoint(config, seed=5), settings=Settings(buckets=False, output_tokens=6, kernels=False))
    assert report.passed, f"\n{report}"
    assert {check.name for check in report.checks if check.passed is None} == {"buckets", *absent}, f"\n{report}"
