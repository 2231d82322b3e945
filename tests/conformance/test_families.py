"""Every model family, tiny and random: all equalities through the Engine, and transformers' logits.

The README's table of supported models is made from the outcomes of these tests (`tests.conformance.support`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.conformance import ConformanceKit, Report, Settings, verify
from resin.conformance.reference import reference_checks
from resin.conformance.tolerance import REFERENCE_SPREADS, rounding_share
from resin.models.declare import Placement
from resin.models.families import find_model_class, sequence_logits
from resin.models.loading import open_checkpoint_path
from resin.models.testing import (
    TINY_CONFIGS,
    MemoryCheckpoint,
    dequantised_checkpoint,
    fp8_checkpoint,
    random_checkpoint,
    write_checkpoint,
)
from resin.models.weights import AbstractModel, load_weights
from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh

GOLDENS = Path(__file__).resolve().parent.parent / "data" / "goldens"
SEED = 5
# The family that compiles every bucket in the default run; the others do so among the slow tests.
EVERY_BUCKET = ("lfm2",)
# Families of the quick tests: between them every kind of cache group, experts and every order of norms.
QUICK = ("llama", "gemma3_text", "lfm2_moe")
# Families of the full tier: what each of the others consists of is in one of these.
FULL = ("lfm2", "gpt_oss", "gemma2", "olmo2", "cohere2", "glm4_moe", "granitemoe")


def tier(family: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if family in QUICK else (pytest.mark.full,) if family in FULL else (pytest.mark.slow,)


TIERS = [pytest.param(family, marks=tier(family)) for family in TINY_CONFIGS]
CAPABILITIES = {
    "load": (),
    "prefill": ("plain forward", "chunked", "reference logits", "stale pages"),
    "decode": ("batched", "overlapped", "retracted", "drafts", "reference steps"),
    "prefix cache": ("prefix cold", "prefix hit", "conversation"),
}


def tiny(family: str) -> MemoryCheckpoint:
    return random_checkpoint(TINY_CONFIGS[family], seed=SEED)


def golden(family: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{family}.npz") as file:
        return dict(file)


@cache
def report_of(family: str, directory: Path, every_bucket: bool) -> Report:
    checkpoint = open_checkpoint_path(write_checkpoint(directory / family, tiny(family)))
    return verify(checkpoint, reference=golden(family), settings=Settings(buckets=every_bucket, kernels=False))


@pytest.mark.parametrize("capability", CAPABILITIES)  # changes first: one report serves all of a family
@pytest.mark.parametrize("family", TIERS)
def test_capability(family: str, capability: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    report = report_of(family, tmp_path_factory.getbasetemp(), family in EVERY_BUCKET)
    assert all(report.check(name).passed for name in CAPABILITIES[capability]), f"\n{report}"
    if capability == "load":
        assert report.passed and len(report.checks) == 13, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in TINY_CONFIGS if family not in EVERY_BUCKET])
def test_every_bucket(family: str, tmp_path: Path) -> None:
    report = report_of(family, tmp_path, True)
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_tensor_parallel(family: str) -> None:
    kit = ConformanceKit(tiny(family), settings=Settings(buckets=False, tp=2))
    report = kit.run({"reference steps": reference_checks(golden(family))["reference steps"]})
    assert report.passed, f"\n{report}"


@pytest.mark.full
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_logits_are_those_of_transformers(family: str) -> None:
    """Without an engine: the model over a whole sequence."""
    checkpoint, reference = tiny(family), golden(family)
    model_class = find_model_class(checkpoint.config)
    model = AbstractModel.of(model_class(model_class.Config.from_hf(checkpoint.config), Placement()))
    built = model.merge(load_weights(model, checkpoint, build_mesh(RunnerOptions())))
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(lambda ids: sequence_logits(built, ids))(jnp.asarray(reference["token_ids"], jnp.int32))
    share = np.abs(np.asarray(logits) - reference["logits"]).max() / reference["logits"].std()
    assert share <= REFERENCE_SPREADS * rounding_share(model, "float32")


@pytest.mark.parametrize("family", TIERS)
def test_quantised(family: str) -> None:
    """Packed files give the weights of the file that they decode to; MXFP4 experts stay packed where declared so."""
    packed = tiny(family) if family == "gpt_oss" else fp8_checkpoint(tiny(family))
    plain = dequantised_checkpoint(packed)
    model_class = find_model_class(plain.config)
    model = AbstractModel.of(model_class(model_class.Config.from_hf(plain.config), Placement()))
    mesh = build_mesh(RunnerOptions())
    assert packed.quantised and not plain.quantised
    for one, other in zip(load_weights(model, packed, mesh), load_weights(model, plain, mesh), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
