"""Every model family, tiny and random: all equalities through the Engine, and transformers' logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resin.conformance import Report, Settings, verify
from resin.models.testing import TINY_CONFIGS, random_checkpoint

GOLDENS = Path(__file__).resolve().parent.parent / "data" / "goldens"
SEED = 5
# Families that between them have every kind of cache group and layer: only these compile every bucket here.
EVERY_BUCKET = ("lfm2", "gpt_oss")


def verify_family(family: str, *, buckets: bool) -> Report:
    checkpoint = random_checkpoint(TINY_CONFIGS[family], seed=SEED)
    with np.load(GOLDENS / f"{family}.npz") as reference:
        return verify(checkpoint, reference=reference, settings=Settings(buckets=buckets))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_family_conforms(family: str) -> None:
    report = verify_family(family, buckets=family in EVERY_BUCKET)
    assert report.passed, f"\n{report}"
    assert len(report.checks) == 12


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in TINY_CONFIGS if family not in EVERY_BUCKET])
def test_family_conforms_in_every_bucket(family: str) -> None:
    report = verify_family(family, buckets=True)
    assert report.passed, f"\n{report}"
