"""Where a figure comes from: commit, versions, device."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parent.parent


def describe_run(commit: str | None = None) -> dict[str, str]:
    """Commit (with "+" if tracked files differ from it), Python, jax, jaxlib, XLA's flags and the device."""
    device = jax.devices()[0]
    return {
        "commit": commit or current_commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "platform": str(getattr(device.client, "platform_version", device.platform)).splitlines()[0],
        "device": device.device_kind,
    }


def current_commit() -> str:
    """Short hash of the checkout; "unknown" outside one."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
