"""Code size by component: lines of Python and web page code without blank lines, comments and docstrings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from resin.plan.extras import require

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("resin", "serve", "bench")
SUFFIXES = {".py", ".html", ".css", ".js"}


def component_of(path: Path) -> str:
    """The package of a file relative to the repository, one level deep inside resin."""
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] == "resin" and len(parts) > 2 else parts[0]


def count_lines(root: Path) -> dict[str, tuple[int, int]]:
    """(files, code lines) of each component below `root`."""
    require("dev")
    from pygount import SourceAnalysis

    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SUFFIXES:
                component = component_of(path.relative_to(root))
                files[component] += 1
                lines[component] += SourceAnalysis.from_file(str(path), component, encoding="utf-8").source_count
    return {component: (files[component], lines[component]) for component in sorted(files)}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one row a component and the total."""
    counts = count_lines(ROOT)
    rows = [*counts.items(), ("total", (sum(f for f, _ in counts.values()), sum(n for _, n in counts.values())))]
    print(f"{'component':<24}{'files':>7}{'lines':>8}")
    for component, (files, lines) in rows:
        print(f"{component:<24}{files:>7}{lines:>8}")


if __name__ == "__main__":
    main()
