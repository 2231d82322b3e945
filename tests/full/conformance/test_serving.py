"""The check of the path that a GPU serves with passes for every family, and fails where kernels stand for others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from resin.conformance import ConformanceKit, Settings
from resin.conformance.serving import serving_kernels
from resin.models.norm import RMSNorm
from resin.models.testing import TINY_CONFIGS, random_checkpoint

pytestmark = pytest.mark.slow  # bodies of kernels take seconds to compile for an interpreter


class HalfMoreNorm(RMSNorm):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * jnp.asarray(1.5, x.dtype)


def kit_of(family: str) -> ConformanceKit:
    return ConformanceKit(random_checkpoint(TINY_CONFIGS[family], seed=5), settings=Settings(buckets=False))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_kernels_stray_no_further_than_plain_bfloat16(family: str) -> None:
    passed, detail = serving_kernels(kit_of(family))
    assert passed, detail


def test_a_norm_that_kernels_mistake_for_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resin.models.llama.RMSNorm", HalfMoreNorm)
    monkeypatch.setattr("resin.models.ops.triton._is_known", lambda norm: True)
    passed, detail = serving_kernels(kit_of("llama"))
    assert not passed, detail
