"""The library runs on its own dependencies, and whatever needs more says which extra to install."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench.__main__
from resin import Engine, ResinError
from resin.models.conversion import convert_checkpoint
from resin.models.registry import open_checkpoint
from resin.models.sources.hub import HubSource
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan.extras import EXTRAS, MissingPackage, require
from resin.recipes import get_native_recipe
from resin.recipes.tokenizer import find_tokenizer
from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh
from serve import cli
from tests.fakes import PagedFake, fake_config, history_group

ROOT = Path(__file__).resolve().parent.parent
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({[name.partition('.')[0] for name in EXTRAS['serve']]}))\n"


def declared(extra: str) -> set[str]:
    """Distributions of an extra of pyproject.toml, spelled like modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w.-]", wanted)[0] for wanted in project["optional-dependencies"][extra]]
    return {name.replace("-", "_").lower() for name in names}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_an_extra_brings_what_is_said_of_it(extra: str) -> None:
    modules = {module.replace(".", "_") for module in EXTRAS[extra]}
    assert modules == declared(extra) if extra == "serve" else modules <= declared(extra)


def test_the_library_runs_a_model_from_token_ids_alone(tmp_path: Path) -> None:
    code = BLOCK + textwrap.dedent("""
        from pathlib import Path
        from resin import Engine, SamplingParams
        from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
        from resin.runtime import RunnerOptions, load_runner
        write_checkpoint(Path("tiny"), random_checkpoint(TINY_CONFIGS["llama"]))
        options = RunnerOptions(max_sequences=1, max_context_tokens=32, prefill_tokens=(16,), compile_cache_bytes=0)
        with Engine(load_runner("tiny", options)) as engine:
            request = engine.submit([1, 17, 42], sampling_params=SamplingParams(max_output_tokens=4, temperature=0))
            while engine.has_work():
                engine.step()
            print(len(request.take_result()))
    """)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("4\n", 0), run.stderr


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the extra `serve` is installed."""
    for name in EXTRAS["serve"]:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)


def scrape(directory: Path) -> Any:
    with Engine(PagedFake(fake_config((history_group(),)))) as engine:
        assert engine.metrics is not None
        return engine.metrics.registry


def open_gguf(directory: Path) -> Any:
    (directory / "model.gguf").write_bytes(b"GGUF")
    return open_checkpoint(directory / "model.gguf")


PLACES: dict[str, Callable[[Path], Any]] = {
    "prometheus_client": scrape,
    "gguf": open_gguf,
    "huggingface_hub": lambda directory: HubSource("somebody/model").fetch(),
    "orbax.checkpoint": lambda directory: convert_checkpoint(
        random_checkpoint(TINY_CONFIGS["llama"]), directory / "converted", build_mesh(RunnerOptions())
    ),
    "jinja2": lambda directory: get_native_recipe("jinja", None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("module", sorted(PLACES))
def test_what_needs_an_extra_names_it(module: str, bare: None, tmp_path: Path) -> None:
    with pytest.raises(MissingPackage) as error:
        PLACES[module](tmp_path)
    assert str(error.value) == f"{module} is not installed: pip install 'resin[serve]'"
    assert isinstance(error.value, ResinError) and isinstance(error.value, ImportError)


def test_a_directory_without_a_tokenizer_needs_nothing(bare: None, tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None


@pytest.mark.parametrize("command", ["serve", "serving", "check-server"])
def test_commands_name_it_before_anything_else(command: str, bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = "aiohttp is not installed: pip install 'resin[serve]'"
    assert bench.__main__.main([command, "--help"]) == 2
    assert capsys.readouterr().err == f"bench {command}: {wanted}\n"
    assert cli.main(["--help"]) == 1
    assert capsys.readouterr().err == f"resin: {wanted}\n"
    with pytest.raises(MissingPackage, match="aiohttp"):
        import serve

        serve.__getattr__("HttpServer")


def test_what_is_installed_is_not_missed() -> None:
    require("serve")
