from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from resin.models.conversion import convert_checkpoint, restore_weights
from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.loading import CheckpointError, open_checkpoint_path
from resin.models.loading.converted import ConvertedCheckpoint
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
from resin.models.weights import AbstractModel, load_weights
from resin.plan import InvalidRequest
from resin.runtime import RunnerOptions, build_runner
from resin.runtime.mesh import build_mesh
from resin.topology import MeshShape
from serve.cli import main


def abstract(family: str, tp: int = 1, dtype: str = "float32") -> AbstractModel:
    config = TINY_CONFIGS[family]
    model_class = find_model_class(config)
    return AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement(dtype, mesh=MeshShape(tp=tp))))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "gpt_oss"
    checkpoint = random_checkpoint(TINY_CONFIGS["gpt_oss"])
    return convert_checkpoint(checkpoint, directory, build_mesh(RunnerOptions(tp=2)), dtype="float32")


# On how many devices it was converted, and is restored. 2 KV heads, of Gemma 1; channels in lfm2_moe.
MESHES = [
    ("llama", 1, 2),
    ("llama", 1, 4),
    ("llama", 4, 1),
    ("gpt_oss", 1, 4),
    ("lfm2_moe", 1, 4),
    ("gemma3_text", 4, 2),
]


@pytest.mark.parametrize(("family", "before", "tp"), MESHES)
def test_restored_weights_are_the_loaded_ones_on_any_mesh(family: str, before: int, tp: int, tmp_path: Path) -> None:
    config = TINY_CONFIGS[family]
    converted = convert_checkpoint(
        random_checkpoint(config), tmp_path / "new", build_mesh(RunnerOptions(tp=before)), dtype="float32"
    )
    mesh, model = build_mesh(RunnerOptions(tp=tp)), abstract(family, tp=tp)
    loaded = load_weights(model, random_checkpoint(config), mesh)
    checkpoint = open_checkpoint_path(converted)
    assert isinstance(checkpoint, ConvertedCheckpoint)
    restored = restore_weights(model, checkpoint, mesh, dtype="float32")
    for one, other in zip(loaded, restored, strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_was_converted_otherwise_is_refused(converted: Path) -> None:
    checkpoint = ConvertedCheckpoint(converted)
    mesh = build_mesh(RunnerOptions(tp=2))
    with pytest.raises(InvalidRequest, match="dtype"):
        restore_weights(abstract("gpt_oss", 2, "bfloat16"), checkpoint, mesh, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"\d+ weights do not fit the model: missing .*extra ") as caught:
        restore_weights(abstract("llama", 2), checkpoint, mesh, dtype="float32")
    assert "misshapen layers.0.attention.qkv.weight float32 [64, 2, 6, 16], expected float32 [64, 2, 4, 16]" in str(
        caught.value
    )
    with pytest.raises(CheckpointError, match="no single tensors"):
        checkpoint.read("model.norm.weight")


def test_directories_in_use_and_damaged_manifests(converted: Path, tmp_path: Path) -> None:
    mesh = build_mesh(RunnerOptions())
    with pytest.raises(InvalidRequest, match="empty or does not exist"):
        convert_checkpoint(random_checkpoint(TINY_CONFIGS["llama"]), converted, mesh)
    with pytest.raises(InvalidRequest, match="converted already"):
        convert_checkpoint(ConvertedCheckpoint(converted), tmp_path / "new", mesh)
    (tmp_path / "config.json").write_text("{}")
    for manifest, reason in (
        ({"format": 1, "tp": 1}, "has format 1, expected 2: convert again"),
        ({"format": 2}, "damaged"),
    ):
        (tmp_path / "resin.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint_path(tmp_path)


def test_command_keeps_the_files_beside_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", random_checkpoint(TINY_CONFIGS["llama"]))
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("template")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("template for tools")
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "resin.json",
        "weights",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates",
    }
    assert (target / "additional_chat_templates" / "tool_use.jinja").read_text() == "template for tools"
    runner = build_runner(open_checkpoint_path(target), RunnerOptions(dtype="float32", compile_cache_bytes=0))
    loaded = build_runner(open_checkpoint_path(source), RunnerOptions(dtype="float32", compile_cache_bytes=0))
    for one, other in zip(runner.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert main(["convert", str(source), str(target)]) == 1
    assert "empty or does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("RESOURCE_EXHAUSTED: no space")])
def test_a_disk_that_is_full_is_said_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    import orbax.checkpoint as ocp

    def full(*args: object) -> None:
        raise fault

    mesh, target = build_mesh(RunnerOptions()), tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "save", full)
        with pytest.raises(CheckpointError, match=r"new: cannot be written \(.*[nN]o space"):
            convert_checkpoint(random_checkpoint(TINY_CONFIGS["llama"]), target, mesh)
    assert not target.exists()


def test_converted_weights_are_run_in_their_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", random_checkpoint(TINY_CONFIGS["llama"]))
    (source / "tokenizer.json").write_text("{}")
    for options, dtype in (([], "float32"), (["--dtype", "bfloat16"], "bfloat16")):
        target = tmp_path / dtype
        assert main(["convert", str(source), str(target), *options]) == 0
        assert build_runner(open_checkpoint_path(target), RunnerOptions(compile_cache_bytes=0)).dtype == dtype
    with pytest.raises(InvalidRequest, match="dtype='float32': expected bfloat16, which"):
        build_runner(open_checkpoint_path(target), RunnerOptions(dtype="float32", compile_cache_bytes=0))
    dummy = RunnerOptions(dummy=True, compile_cache_bytes=0)
    assert build_runner(open_checkpoint_path(target), dummy).dtype == "float32"
