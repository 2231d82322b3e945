"""Packages that the library itself does without: each optional extra, and who needs one says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType

from resin.plan.errors import ResinError

# The modules of each extra of pyproject.toml that something here imports.
EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "serve": (
            "aiohttp",
            "gguf",
            "huggingface_hub",
            "jinja2",
            "llguidance",
            "msgspec",
            "orbax.checkpoint",
            "prometheus_client",
        ),
        "plot": ("matplotlib",),
        "dev": ("pygount",),
    }
)


class MissingPackage(ResinError, ImportError):
    """Something needs a package that is not installed; the message says what to install."""


def require(extra: str, *modules: str) -> None:
    """Holds what an extra brings against what is installed; imports nothing.

    Args:
        extra: name of the extra.
        modules: those of its modules that are needed; none for all.

    Raises:
        MissingPackage: one of them is not installed.
    """
    for module in modules or EXTRAS[extra]:
        assert module in EXTRAS[extra]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise MissingPackage(f"{module} is not installed: pip install 'resin[{extra}]'")
