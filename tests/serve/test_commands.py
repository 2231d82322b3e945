"""The `resin` command on a scripted model."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from resin import Engine, SamplingParams
from resin.models.registry import advised_sampling
from resin.models.sampling_defaults import SamplingDefaults
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
from resin.recipes import get_native_recipe
from serve.cli import main
from serve.commands import chat, generate, loading
from serve.commands.options import chosen_sampling
from serve.loaded_model import LoadedModel
from tests.models.loading.test_text_part import OLDER, wrapped
from tests.serve.conftest import CALL, WORDS
from tests.serve.scripted_runner import CHOSEN_LOGPROB, TOKENIZER, ScriptedRunner
from tests.serve.test_structured import SCHEMA, fits

Run = Callable[..., int]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ScriptedRunner:
    runner = ScriptedRunner()
    runner.answer("[words]", WORDS)
    runner.answer("[call]", "<think>\nHm.\n</think>\n\nWait." + CALL)

    def load(args: Any) -> LoadedModel:
        recipe = get_native_recipe("qwen3", TOKENIZER)
        tokenizer: Any = TOKENIZER
        sampling = (advised_sampling(args.source) or SamplingDefaults()).overridden(**chosen_sampling(args))
        return LoadedModel("scripted", Engine(runner), tokenizer, recipe, sampling)

    monkeypatch.setattr(chat, "load_model", load)
    monkeypatch.setattr(generate, "load_model", load)
    return runner


def write_lines(path: Path, *lines: Any) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read_results(path: Path) -> dict[Any, Any]:
    return {result["id"]: result for result in map(json.loads, path.read_text().splitlines())}


def generate_with(tmp_path: Path) -> int:
    return main(["generate", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")])


def test_generate_takes_every_kind_of_prompt(runner: ScriptedRunner, tmp_path: Path) -> None:
    ids = TOKENIZER.encode("[words]")
    write_lines(
        tmp_path / "in.jsonl",
        {"id": "ids", "prompt_ids": ids, "max_tokens": 5, "temperature": 0, "logprobs": 2},
        {"id": 7, "prompt": "x", "seed": 3, "top_p": 0.5},
        {"id": "chat", "messages": [{"role": "user", "content": "[call]"}], "logprobs": None},
        {"id": "stop", "prompt": "[words]", "stop": ["quick", "fox"], "logprobs": 0},
    )
    assert generate_with(tmp_path) == 0
    results = read_results(tmp_path / "out.jsonl")
    assert list(results["ids"]) == ["id", "token_ids", "text", "finish_reason", "logprobs", "usage"]
    assert results["ids"]["token_ids"] == list(WORDS[:5].encode())
    assert (results["ids"]["text"], results["ids"]["finish_reason"]) == ("The q", "length")
    assert results["ids"]["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 5, "total_tokens": len(ids) + 5}
    first = results["ids"]["logprobs"][0]
    assert first["token_id"] == ord("T") and first["logprob"] == pytest.approx(CHOSEN_LOGPROB)
    assert [top["token_id"] for top in first["top"]] == [ord("T"), ord("U")]
    assert results[7]["text"] == "Hello!" and results[7]["finish_reason"] == "stop"
    assert results[7]["token_ids"] == [*b"Hello!", TOKENIZER.eos_ids[0]]
    assert results[7]["logprobs"] is None
    assert results["chat"]["text"] == "Wait." and results["chat"]["reasoning"] == "Hm."
    assert results["chat"]["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Bonn"}'}]
    assert results["stop"]["text"] == "The " and results["stop"]["finish_reason"] == "stop"
    assert results["stop"]["token_ids"] == list(b"The quick")
    assert len(results["stop"]["logprobs"]) == len(b"The quick")


def test_generate_holds_answers_to_what_binds_them(runner: ScriptedRunner, tmp_path: Path) -> None:
    words, call = ([{"role": "user", "content": text}] for text in ("[words]", "[call]"))
    format = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}  # type: ignore[operator]
    write_lines(
        tmp_path / "in.jsonl",
        {"id": "format", "messages": words, "response_format": format, "max_completion_tokens": 300},
        {"id": "json", "messages": words, "response_format": {"type": "json_object"}},
        {"id": "strict", "messages": call, "tools": [strict]},
        {"id": "must", "messages": words, "tools": [tool], "tool_choice": "required"},
        {
            "id": "cyclic",
            "messages": words,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        },
        {"id": "raw", "prompt": "x", "response_format": format},
        {"id": "old", "messages": words, "functions": [tool["function"]]},
        {"id": "zero", "prompt": "x", "max_tokens": 0},
    )
    assert generate_with(tmp_path) == 1
    results = read_results(tmp_path / "out.jsonl")
    assert fits(json.loads(results["format"]["text"])) and isinstance(json.loads(results["json"]["text"]), dict)
    for name in ("strict", "must"):
        (made,) = results[name]["tool_calls"]
        assert fits(json.loads(made["arguments"]))
    faults = {name: result["error"]["param"] for name, result in results.items() if "error" in result}
    format_faults = dict.fromkeys(("cyclic", "raw"), "response_format")
    assert faults == format_faults | {"old": "functions", "zero": "max_tokens"}


def test_generate_reports_bad_lines_in_their_results(runner: ScriptedRunner, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "in.jsonl",
        {"id": 1, "prompt": "x"},
        "{oops",
        {"id": 2, "prompt": "x", "temperature": -1},
        {"prompt": "x"},
        {"id": 3},
        {"id": 4, "prompt": "x", "prompt_ids": [1]},
        {"id": 5, "prompt_ids": [99999]},
        {"id": 6, "prompt": "y" * 5000},
        {"id": 1, "prompt": "x"},
        {"id": 7, "prompt": "x"},
    )
    assert generate_with(tmp_path) == 1
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["id"] for line in lines if "error" not in line} == {1, 7}
    faults = {(line["id"], line["line"]): line["error"]["param"] for line in lines if "error" in line}
    assert faults == {
        (None, 2): None,
        (2, 3): "temperature",
        (None, 4): "id",
        (3, 5): "prompt",
        (4, 6): "prompt",
        (5, 7): "prompt",
        (6, 8): "prompt",
        (1, 9): "id",
    }


def test_generate_goes_on_where_it_stopped(runner: ScriptedRunner, tmp_path: Path) -> None:
    requests = [{"id": i, "prompt": f"number {i}"} for i in range(20)]
    write_lines(tmp_path / "in.jsonl", "{oops", *requests)
    assert generate_with(tmp_path) == 1
    whole = (tmp_path / "out.jsonl").read_bytes()
    # The process died in the middle of a line.
    (tmp_path / "out.jsonl").write_bytes(whole[: len(whole) // 2])
    kept = whole[: len(whole) // 2].count(b"\n")
    steps = runner.steps
    generate_with(tmp_path)
    again = (tmp_path / "out.jsonl").read_bytes()
    assert sorted(again.splitlines()) == sorted(whole.splitlines())
    assert again.splitlines()[:kept] == whole.splitlines()[:kept]
    assert runner.steps > steps
    steps = runner.steps
    assert generate_with(tmp_path) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == again
    assert runner.steps == steps


def test_generate_batches(runner: ScriptedRunner, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": f"{i}", "max_tokens": 50} for i in range(32)))
    runner.answer("", "abcde" * 10)
    assert generate_with(tmp_path) == 0
    assert len(read_results(tmp_path / "out.jsonl")) == 32
    assert runner.steps < 32 * 50 / 8


def test_generate_reads_a_pipe_as_its_lines_come(runner: ScriptedRunner, tmp_path: Path) -> None:
    # Whoever writes waits for each result before the next request, so nothing may wait for the end of the input.
    pipe, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(generate_with(tmp_path)))
    thread.start()
    with pipe.open("w") as writer:
        for count in range(1, 4):
            print(json.dumps({"id": count, "prompt": "x"}) + "\n", file=writer, flush=True)
            deadline = time.monotonic() + 20
            while not (output.exists() and output.read_bytes().count(b"\n") == count):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        print("{oops", file=writer)
    thread.join(20)
    assert statuses == [1]
    assert [result["id"] for result in map(json.loads, output.read_text().splitlines())] == [1, 2, 3, None]


def test_generate_writes_to_a_pipe(runner: ScriptedRunner, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *({"id": i, "prompt": "x"} for i in range(3)))
    os.mkfifo(tmp_path / "out.jsonl")
    received: list[str] = []
    thread = threading.Thread(target=lambda: received.append((tmp_path / "out.jsonl").read_text()))
    thread.start()
    assert generate_with(tmp_path) == 0
    thread.join(10)
    assert {json.loads(line)["id"] for line in received[0].splitlines()} == {0, 1, 2}


def test_generate_names_a_missing_input(
    runner: ScriptedRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate_with(tmp_path) == 1
    assert "in.jsonl" in capsys.readouterr().err


def test_generate_names_an_output_that_cannot_be_written(
    runner: ScriptedRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    write_lines(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"})
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "open", lambda path, *mode, **kinds: FullDisk() if "ab" in mode else opened(path, *mode, **kinds)
        )
        assert generate_with(tmp_path) == 1
    assert re.search(r"resin: \[Errno 28\] .*out.jsonl'\n$", capsys.readouterr().err)
    # What cannot even be opened is found before the model is loaded.
    monkeypatch.setattr(generate, "load_model", lambda args: pytest.fail("loaded"))
    (tmp_path / "out.jsonl").mkdir()
    assert generate_with(tmp_path) == 1
    assert "out.jsonl" in capsys.readouterr().err


def test_chat_answers_each_line(
    runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.answer("second", "Again.")
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n[call]\n/reset\n[words]\n/exit\nnever\n"))
    assert main(["chat", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f'Hello!\nAgain.\nHm.\n\nWait.\nweather({{"city": "Bonn"}})\n\n{WORDS}\n'
    reports = captured.err.splitlines()
    assert len(reports) == 4
    assert all("tokens/s" in report and "first after" in report for report in reports)


def test_chat_keeps_the_conversation(runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    submit = Engine.submit

    def spy(self: Engine, token_ids: Any, *, sampling_params: SamplingParams) -> Any:
        prompts.append(TOKENIZER.decode(token_ids))
        return submit(self, token_ids, sampling_params=sampling_params)

    monkeypatch.setattr(Engine, "submit", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    assert main(["chat", "--system", "Be brief."]) == 0
    assert prompts[1].startswith(prompts[0] + "Hello!")
    assert "Be brief." in prompts[0] and "second" in prompts[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["smollm2-135m"], (0.2, 0.9, 512)),
        (["qwen3-0.6b"], (0.7, 0.95, 4000)),  # more would not fit the scripted model's context
        (["smollm2-135m", "--temperature", "0", "--top-p", "0.5", "--max-tokens", "7"], (0.0, 0.5, 7)),
        (["./some.gguf", "--temperature", "1.5"], (1.5, 0.95, 4000)),
    ],
)
def test_chat_samples_as_the_model_wants_unless_told_otherwise(
    runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: tuple[float, float, int]
) -> None:
    seen: list[SamplingParams] = []
    submit = Engine.submit

    def spy(self: Engine, token_ids: Any, *, sampling_params: SamplingParams) -> Any:
        seen.append(sampling_params)
        return submit(self, token_ids, sampling_params=sampling_params)

    monkeypatch.setattr(Engine, "submit", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", *arguments]) == 0
    (params,) = seen
    temperature, top_p, limit = expected
    assert (params.temperature, params.top_p) == (temperature, top_p)
    assert min(params.max_output_tokens, 4000) == limit


def test_chat_takes_no_empty_answer(
    runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--max-tokens", "0"]) == 1
    assert "max_output_tokens=0" in capsys.readouterr().err


@pytest.mark.parametrize("earlier", [[], ["first", "second"]])
def test_a_message_that_is_too_long_leaves_the_conversation_as_it_was(
    runner: ScriptedRunner,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    earlier: list[str],
) -> None:
    prompts: list[str] = []
    submit = Engine.submit

    def spy(self: Engine, token_ids: Any, *, sampling_params: SamplingParams) -> Any:
        prompts.append(TOKENIZER.decode(token_ids))
        return submit(self, token_ids, sampling_params=sampling_params)

    monkeypatch.setattr(Engine, "submit", spy)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*earlier, "x" * 5000, "third", "fourth"]) + "\n"))
    assert main(["chat"]) == 1  # one message has no answer
    captured = capsys.readouterr()
    assert captured.out == "Hello!\n" * (len(earlier) + 2)
    assert "tokens': expected fewer than the context's 4096" in captured.err
    assert "no longer fit" not in captured.err
    assert all(message in prompts[-1] for message in (*earlier, "third", "fourth")) and "xxx" not in prompts[-1]


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(
    runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(("x" * 1500 + "\n") * 4))
    assert main(["chat", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n" * 4
    assert "no longer fit" in captured.err


def test_mistakes_end_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["chat", "no-such-model"], ["download", "no-such-model"], ["serve", "no-such-model"]):
        assert main(arguments) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("resin: model='no-such-model': expected")
    for arguments in ([], ["fly"], ["serve", "--port", "many"], ["generate"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    version = f"resin {metadata.version('resin')} (jax {metadata.version('jax')}, Python "
    assert capsys.readouterr().out.startswith(version)


@pytest.mark.parametrize(
    "command", [["chat"], ["serve", "--port", "0"], ["generate", "--input", "IN", "--output", "OUT"]]
)
@pytest.mark.parametrize("recipe", ["nosuch", "no.such.module:Recipe", "json:NoSuchName"])
def test_a_wrong_recipe_is_found_before_anything_is_fetched(
    command: list[str], recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "resolve", None)
    (tmp_path / "in").touch()
    places = {"IN": str(tmp_path / "in"), "OUT": str(tmp_path / "out")}
    assert main([*(places.get(word, word) for word in command), "--recipe", recipe]) == 1
    assert capsys.readouterr().err.startswith(f"resin: recipe={recipe!r}: expected")


@pytest.mark.parametrize("text", ["{oops", "[1]", "", '"text"'])
def test_inspect_names_a_config_that_is_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["inspect", str(tmp_path / "config.json")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("resin: ") and "config.json: is not" in line


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "from serve import cli; from serve.commands import download; "
    code += "download.run = lambda args: print('x' * 10**6) or 0; cli.main(['download', 'm'])"
    command = ["bash", "-c", f'{sys.executable} -c "{code}" | head -c 1']
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("x", "")


def test_a_server_logs_what_is_its_own() -> None:
    code = """
import logging, sys
from resin import InvalidRequest
from serve import cli
from serve.commands import serving
def load(args):
    logging.getLogger("jax._src.xla_bridge").info("Unable to initialize backend 'tpu'")
    logging.getLogger("resin.serve").info("serving")
    raise InvalidRequest("model", "x", "another")
serving.load_model = load
sys.exit(cli.main(["serve", "--port", "0"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    first, last = result.stderr.splitlines()
    assert first.endswith("INFO resin.serve serving") and last == "resin: model='x': expected another"


def test_help_needs_no_jax() -> None:
    code = "import sys; sys.modules['jax'] = None\nfrom serve.cli import main\nmain(['chat', '--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "registered name, local path" in result.stdout


@pytest.mark.parametrize("text", ["[1, 2]", "{", '"llama"', '{"model_type": ["llama"]}'])
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["inspect", str(path)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and ("config.json" in lines[0] or "model_type=" in lines[0])


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "bare", random_checkpoint(TINY_CONFIGS["llama"]))
    assert main(["chat", str(directory)]) == 1
    assert f"resin: {directory}: has no tokenizer" in capsys.readouterr().err


def test_what_a_checkpoint_has_to_say_is_said_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = wrapped("mistral3", OLDER)
    directory = write_checkpoint(tmp_path / "model", checkpoint)
    assert main(["generate", str(directory), "--input", os.devnull, "--output", os.devnull]) != 0
    errors = capsys.readouterr().err
    assert "2 tensors of images are left alone: mistral3 is served as text\n" in errors
    assert "has no tokenizer" in errors  # nothing was compiled or loaded for this test
