"""The server checks as a command: exit status, reports, evaluation files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.check_server import main
from bench.check_server.evaluation import read_items, read_reference
from resin import InvalidRequest
from serve import HttpServer
from tests.bench.faulty_server import EchoRunner, Fault, proxied
from tests.bench.test_check_server import QUESTIONS, check, eval_file
from tests.serve.running import running_server

__all__ = ["eval_file"]  # a fixture


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with running_server(EchoRunner()) as running:
        yield running


def test_a_run_prints_a_table_and_writes_both_reports(
    server: HttpServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert (
        main([server.url + "/v1/", "--only", "correctness", "--only", "errors: API key", "--output", str(report)]) == 0
    )
    document = json.loads(report.read_text())
    assert document["summary"] == {"pass": 10, "fail": 0, "skipped": 1}
    assert (document["model"], document["url"]) == ("scripted", server.url)
    checks = {(row["group"], row["name"]): row for row in document["checks"]}
    assert checks["correctness", "max_tokens"]["figures"] == {"tokens_of_1": 1, "tokens_of_7": 7}
    assert checks["errors", "API key"]["reason"] == "the server asks for no key"
    printed, page = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert "PASS    correctness: chat" in printed and "SKIPPED errors: API key" in printed
    assert page.count("\n| ") == 2 + 11 and "| errors: API key | skipped |" in page


def test_exit_status_says_failures_and_mistakes(
    server: HttpServer, eval_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "evaluation", "--eval-file", str(eval_file)]
    assert main([server.url, *options, "--min-accuracy", "1"]) == 0
    assert main([server.url, *options, "--min-accuracy", "1.1"]) == 1
    assert "FAIL" in capsys.readouterr().out
    with pytest.raises(InvalidRequest, match="only='speed'"):
        main([server.url, "--only", "speed"])
    with pytest.raises(InvalidRequest, match=r"url='http://127\.0\.0\.1:9': expected a server that lists its models"):
        main(["http://127.0.0.1:9", "--only", "correctness"])


def test_log_likelihoods_are_held_against_a_reference(server: HttpServer, eval_file: Path, tmp_path: Path) -> None:
    # The runner gives every token of a prompt, one a byte, -1.5.
    sums = {row["id"]: [-1.5 * (len(c) + 1) for c in row.get("choices", row.get("endings"))] for row in QUESTIONS}  # type: ignore[attr-defined]
    reference = tmp_path / "reference.json"
    options = ["--only", "evaluation", "--eval-file", str(eval_file), "--eval-reference", str(reference)]
    nested: dict[str, Any] = {"sets": {"mine": {"per_item": [{"id": name, "sums": sums[name]} for name in sums]}}}
    reference.write_text(json.dumps(nested))
    assert read_reference(reference) == sums
    assert main([server.url, *options, "--output", str(tmp_path / "report.json")]) == 0
    figures = json.loads((tmp_path / "report.json").read_text())["checks"][0]["figures"]
    assert (figures["compared"], figures["beyond_tolerance"], figures["method"]) == (2, {}, "log-likelihood")
    sums["c1"][1] += 0.003
    reference.write_text(json.dumps([{"id": name, "sums": sums[name]} for name in sums]))
    assert main([server.url, *options]) == 1
    reference.write_text("[]")
    assert main([server.url, *options]) == 0, "nothing to compare with: the reference is left out"


def test_questions_may_come_as_token_ids(server: HttpServer, tmp_path: Path) -> None:
    row = QUESTIONS[0] | {"context_ids": [65, 66], "choices_ids": [[67, 68, 69], [67]]}
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps(row) + "\n")
    options = ["--only", "evaluation", "--eval-file", str(path), "--output", str(tmp_path / "report.json")]
    assert main([server.url, *options]) == 0
    (item,) = json.loads((tmp_path / "report.json").read_text())["checks"][0]["figures"]["items"]
    assert item["sums"] == [-4.5, -1.5]


async def test_without_prompt_logprobs_the_letter_counts(server: HttpServer, eval_file: Path) -> None:
    def drop_logprobs(body: dict[str, Any]) -> None:
        body["choices"][0].pop("logprobs")

    for fault in (
        Fault(status=lambda status, path: 404 if path == "/v1/completions" else status),
        Fault(answer=drop_logprobs),
    ):
        async with proxied(server.url, fault) as url:
            (result,) = await check(url, eval_file, "evaluation: questions.jsonl")
        assert result.figures["method"] == "letter"
        assert [row["pick"] for row in result.figures["items"]] == [1, 1]  # the runner answers B
        assert (result.figures["accuracy"], result.figures["unreadable"]) == (0.5, 0)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"question": "x", "choices": ["a", "b"]}',
        '{"question": "x", "choices": ["a"], "answer": 0}',
        '{"question": "x", "choices": ["a", "b"], "answer": 2}',
        '{"choices": ["a", "b"], "answer": 1}',
    ],
)
def test_lines_that_are_no_questions_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line + "\n")
    assert len(read_items(path, 1)) == 1
    with pytest.raises(InvalidRequest, match=r"line 2 of questions\.jsonl"):
        read_items(path, 2)
