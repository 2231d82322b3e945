"""Settings of every test run, given as environment variables so that tests without JAX never import it.

They reach the processes that tests start as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SETTINGS = {
    # Compiled programs are kept between runs, beside the tests and not in the user's own cache.
    "RESIN_CACHE": str(Path(__file__).resolve().parent.parent / ".cache"),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
}

# A variable that is set already wins: JAX_PLATFORMS=cuda runs the tests marked gpu.
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("resin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("resin")


FULL = Path(__file__).resolve().parent / "full"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies in tests/full is the full tier: `make test` leaves it out, `make test-full` runs it."""
    for item in items:
        if item.path.is_relative_to(FULL):
            item.add_marker(pytest.mark.full)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weights", help="checkpoint that the engine tests marked gpu run with; default: random weights")
