"""`verify`: every check of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np

from resin.conformance.drafts import drafted
from resin.conformance.equalities import EQUALITIES, Found
from resin.conformance.kit import ConformanceKit, Settings
from resin.conformance.reference import reference_checks
from resin.conformance.report import Report
from resin.conformance.serving import serving_kernels
from resin.models.loading.checkpoint import Checkpoint
from resin.models.weights import Progress
from resin.plan import InvalidRequest


def verify(
    checkpoint: Checkpoint,
    *,
    model: str | None = None,
    reference: Mapping[str, np.ndarray] | None = None,
    settings: Settings | None = None,
    only: Collection[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Runs every check on a model, or some.

    Args:
        checkpoint: weights and config.
        model: "package.module:Name" for a model file outside this library.
        reference: `token_ids` int [T] and `logits` float [T, vocab] of another implementation.
        settings: sizes.
        only: names of the checks to run; empty for all that can.
        progress: called while weights load and programs compile.

    Raises:
        InvalidRequest: `only` names a check that there is not.
        ResinError: the model cannot be built at all.
    """
    settings = settings or Settings()
    checks = choose_checks(only, reference=reference, kernels=settings.kernels)
    kit = ConformanceKit(checkpoint, model=model, settings=settings, progress=progress)
    return kit.run(checks, checkpoint.location)


def choose_checks(
    only: Collection[str] = (), *, reference: Mapping[str, np.ndarray] | None = None, kernels: bool = True
) -> dict[str, Callable[[ConformanceKit], Found]]:
    """Checks by name, in the order in which they run: those named, or all that can.

    Raises:
        InvalidRequest: a name is none of them.
    """
    checks = {**EQUALITIES, "drafts": drafted, **reference_checks(reference)}
    if kernels:
        checks["serving kernels"] = serving_kernels
    for name in only:
        if name not in checks:
            raise InvalidRequest("checks", name, f"one of {', '.join(checks)}")
    return {name: check for name, check in checks.items() if not only or name in only}
