"""`verify`: every check of a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from resin.conformance.drafts import drafted
from resin.conformance.equalities import EQUALITIES
from resin.conformance.kit import ConformanceKit, Settings
from resin.conformance.reference import reference_checks
from resin.conformance.report import Report
from resin.conformance.serving import serving_kernels
from resin.models.loading.checkpoint import Checkpoint
from resin.models.weights import Progress


def verify(
    checkpoint: Checkpoint,
    *,
    model: str | None = None,
    reference: Mapping[str, np.ndarray] | None = None,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Runs every check on a model.

    Args:
        checkpoint: weights and config.
        model: "package.module:Name" for a model file outside this library.
        reference: `token_ids` int [T] and `logits` float [T, vocab] of another implementation.
        settings: sizes.
        progress: called while weights load and programs compile.

    Raises:
        ResinError: the model cannot be built at all.
    """
    kit = ConformanceKit(checkpoint, model=model, settings=settings, progress=progress)
    checks = {**EQUALITIES, "drafts": drafted, **reference_checks(reference)}
    if kit.settings.kernels:
        checks["serving kernels"] = serving_kernels
    return kit.run(checks, checkpoint.location)
