"""Popular checkpoints, what the loader reads of each config (restated, not copied), and what becomes of it.

python -m tests.models.checkpoints    # prints the table of docs/checkpoints.md
"""

from __future__ import annotations

from tests.models import (
    checkpoints_dense,
    checkpoints_gguf,
    checkpoints_mixtures,
    checkpoints_others,
    checkpoints_packed,
)

MODULES = (checkpoints_dense, checkpoints_others, checkpoints_mixtures, checkpoints_packed, checkpoints_gguf)
CASES = tuple(case for module in MODULES for case in module.CASES)


def table() -> str:
    """The table of docs/checkpoints.md."""
    rows = [f"| {case.name} | `{case.kind}` | {case.result} |" for case in CASES]
    return "\n".join(["| checkpoint | `model_type` | |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(table())
