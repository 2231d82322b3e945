"""GGUF files in parts read as the whole does; a set that is no set is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin.models.loading import CheckpointError, open_checkpoint_path
from tests.models.loading.gguf_files import GgufFile
from tests.models.loading.gguf_makers import make_lfm2


def write_parts(directory: Path, count: int = 3, **changes: dict[str, Any]) -> list[Path]:
    """Deals a file's tensors out to parts; `changes` replaces split keys of a part, "part2" for example."""
    whole = make_lfm2()
    names = list(whole.stored)
    paths = []
    for index in range(count):
        part = GgufFile(whole.architecture)
        part.metadata = dict(whole.metadata) if index == 0 else {}
        part.metadata |= {"split.no": index, "split.count": count, "split.tensors.count": len(names)}
        part.metadata |= changes.get(f"part{index + 1}", {})
        part.stored = {name: whole.stored[name] for name in names[index::count]}
        paths.append(part.write(directory / f"tiny-{index + 1:05}-of-{count:05}.gguf"))
    return paths


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_read_as_the_whole(tmp_path: Path, count: int) -> None:
    whole = open_checkpoint_path(make_lfm2().write(tmp_path / "whole.gguf"))
    parts = open_checkpoint_path(write_parts(tmp_path, count)[0])
    assert parts.config == whole.config
    assert dict(parts.tensors) == dict(whole.tensors)
    for name in whole.tensors:
        np.testing.assert_array_equal(parts.read(name), whole.read(name))
    parts.close()
    with pytest.raises(CheckpointError, match="the checkpoint is closed"):
        parts.read("model.embed_tokens.weight")


def test_another_part_names_the_first(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    with pytest.raises(CheckpointError, match=r"is part 2 of 3: give the first, tiny-00001-of-00003\.gguf"):
        open_checkpoint_path(paths[1])


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"parts are missing: tiny-00002-of-00003\.gguf"):
        open_checkpoint_path(paths[0])


@pytest.mark.parametrize("name", ["tiny-00000-of-00000.gguf", "tiny-00004-of-00003.gguf"])
def test_a_name_that_counts_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="there is no part"):
        open_checkpoint_path(make_lfm2().write(tmp_path / name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"part2": {"split.no": 2}},
            r"00002-of-00003\.gguf: .* part number 2 of 3, expected number 1 of 3",
        ),
        ({"part3": {"split.count": 4}}, "part number 2 of 4"),
        ({"part1": {"split.tensors.count": 99}}, "tensors are in all parts, expected 99"),
    ],
)
def test_parts_of_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint_path(write_parts(tmp_path, **changes)[0])


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    path = write_parts(tmp_path)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="says that it is part number 0 of 3, expected number 0 of 1"):
        open_checkpoint_path(path)


def test_a_tensor_is_in_one_part(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, 2)
    copy = make_lfm2()
    copy.metadata = {"split.no": 1, "split.count": 2}
    copy.write(paths[1])
    with pytest.raises(CheckpointError, match="is in another part as well"):
        open_checkpoint_path(paths[0])
