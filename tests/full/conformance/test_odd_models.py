"""A carry of two arrays, layers that share a cache, one softmax over two key sets and a state of another kind serve."""

from __future__ import annotations

import pytest

from resin.conformance import Settings, verify
from resin.models.testing import TINY_CONFIGS, random_checkpoint

MODEL = "tests.conformance.odd_models:TwoStreams"


def passes(settings: Settings) -> None:
    report = verify(random_checkpoint(TINY_CONFIGS["llama"], model=MODEL, seed=5), model=MODEL, settings=settings)
    assert report.passed, f"\n{report}"


def test_passes_every_equality() -> None:
    passes(Settings(buckets=False, output_tokens=6, kernels=False))


@pytest.mark.slow
def test_passes_with_kernels() -> None:
    passes(Settings(buckets=False, output_tokens=6))
