"""All checks, or those that are named."""

from __future__ import annotations

import numpy as np
import pytest

from resin.conformance import choose_checks, verify
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan import InvalidRequest

REFERENCE = {"token_ids": np.arange(2), "logits": np.zeros((2, 4), np.float32)}


def test_named_checks_are_chosen_in_the_order_in_which_all_run() -> None:
    assert list(choose_checks(("overlapped", "batched"))) == ["batched", "overlapped"]


def test_all_that_can_run_are_chosen_where_none_is_named() -> None:
    alone = list(choose_checks(kernels=False))
    assert alone[0] == "plain forward" and alone[-1] == "drafts"
    assert list(choose_checks()) == [*alone, "serving kernels"]
    assert list(choose_checks(reference=REFERENCE)) == [
        *alone,
        "reference logits",
        "reference steps",
        "serving kernels",
    ]


def test_a_check_that_there_is_not_is_refused_by_name() -> None:
    for name in ("batch", "", "reference logits"):  # the last needs a reference
        with pytest.raises(InvalidRequest, match=f"checks='{name}': expected one of plain forward, batched, "):
            verify(random_checkpoint(TINY_CONFIGS["llama"], seed=5), only=("drafts", name))
    assert list(choose_checks(("reference logits",), reference=REFERENCE)) == ["reference logits"]
