"""Makes the README's table of supported models from test outcomes.

    python -m tests.conformance.support [FAMILY ...]

Runs the family tests, slow ones included (some minutes), of all families or of some; writes the outcomes to
tests/data/support.json, and puts the table that they give into the README. A test holds the README against that file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from resin.models.testing import TINY_CONFIGS

ROOT = Path(__file__).resolve().parent.parent.parent
OUTCOMES = ROOT / "tests" / "data" / "support.json"
README = ROOT / "README.md"
BEGIN = "<!-- support table: python -m tests.conformance.support -->"
END = "<!-- end of the support table -->"
# Column -> the part of a test's name that stands for it; "{}" is the family.
COLUMNS = {
    "load": "test_capability[{}-load]",
    "prefill": "test_capability[{}-prefill]",
    "decode": "test_capability[{}-decode]",
    "prefix cache": "test_capability[{}-prefix cache]",
    "quantised": "test_quantised[{}]",
    "TP": "test_tensor_parallel[{}]",
}
NAMES = {
    "llama": "Llama, SmolLM2",
    "mistral": "Mistral, Ministral",
    "mixtral": "Mixtral",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
    "exaone4": "EXAONE 4",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "glm": "GLM-4",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "qwen2_moe": "Qwen2-MoE, Qwen1.5-MoE",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "phi3": "Phi-3, Phi-3.5, Phi-4",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
}
# Real weights that a family is checked with besides the tiny ones, and the test module that does it.
REAL = {"llama": ("SmolLM2 135M", "full/test_smollm2.py"), "gemma3_text": ("Gemma 3 270M", "test_gemma3.py")}
TESTS = ("tests/conformance/test_families.py", *(f"tests/{module}" for _, module in REAL.values()))


def run_tests(families: Sequence[str]) -> dict[str, str]:
    """Runs the tests of some families, or of all and those of real weights, slow ones too.

    Returns:
        "module::test" -> "pass", "skip" or "fail".
    """
    chosen = [*TESTS[:1], "-k", " or ".join(families)] if families else TESTS
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *chosen, "-m", "not gpu", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {
            f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}": _outcome(case) for case in cases
        }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "fail"
    return "skip" if case.find("skipped") is not None else "pass"


def keep_skipped(outcomes: Mapping[str, str], earlier: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The outcomes, with an earlier run's where this one skipped: without its weights nothing is known of a model.

    Returns:
        The outcomes, and the names of tests that were kept.
    """
    kept = sorted(name for name, found in outcomes.items() if found == "skip" and earlier.get(name, "skip") != "skip")
    return {**outcomes, **{name: earlier[name] for name in kept}}, kept


def render(outcomes: Mapping[str, str]) -> str:
    """The table as Markdown."""
    words = {"pass": "yes", "fail": "no", "skip": "-"}
    rows = [["model", *COLUMNS, "verified against"], ["---"] * (len(COLUMNS) + 2)]
    for family in TINY_CONFIGS:
        cells = [words[outcomes.get(f"test_families.py::{test.format(family)}", "skip")] for test in COLUMNS.values()]
        rows.append([NAMES[family], *cells, _verified(family, outcomes)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _verified(family: str, outcomes: Mapping[str, str]) -> str:
    claims = []
    if outcomes.get(f"test_families.py::test_capability[{family}-decode]") == "pass":
        claims.append("transformers, tiny weights")
    if family in REAL:
        name, module = REAL[family]
        results = {outcome for test, outcome in outcomes.items() if test.startswith(f"{Path(module).name}::")}
        if results == {"pass"}:
            claims.append(f"transformers, {name}")
    return "; ".join(claims) or "-"


def replace_table(text: str, table: str) -> str:
    """The README with a new table between the two marks."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table}\n\n{END}", text)


def main() -> int:
    """Returns 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    families = parser.parse_args().families
    earlier = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}
    found = run_tests(families)
    outcomes, kept = keep_skipped({**earlier, **found} if families else found, earlier)
    for name in kept:
        print(f"skipped here, kept from an earlier run: {name} ({outcomes[name]})", file=sys.stderr)
    OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    README.write_text(replace_table(README.read_text(encoding="utf-8"), render(outcomes)), encoding="utf-8")
    print(render(outcomes))
    return int("fail" in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
