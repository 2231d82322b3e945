"""Safetensors files and directories: values, views, and an error that names file, tensor and reason for every fault."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resin.models.loading import CheckpointError, open_checkpoint_path
from tests.models.loading.safetensors_files import LABELS, describe, write_directory, write_raw, write_safetensors


def make_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    names = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in LABELS}
    tensors = {f"t.{name}": draws.integers(1, 3, (3, 5)).astype(dtype) for name, dtype in names.items()}
    return tensors | {"scalar": np.float32(4.5).reshape(()), "empty": np.zeros((0, 4), np.float32)}


def test_every_dtype_reads_back_as_a_read_only_view(tmp_path: Path) -> None:
    tensors = make_tensors()
    checkpoint = open_checkpoint_path(write_directory(tmp_path / "m", {"model.safetensors": tensors}))
    assert set(checkpoint.tensors) == set(tensors)
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert checkpoint.tensors[name] == (expected.shape, expected.dtype.name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        assert not found.flags.writeable
        assert not found.flags.owndata


def test_arrays_outlive_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint_path(write_directory(tmp_path / "m", {"model.safetensors": make_tensors()}))
    found = checkpoint.read("t.float32")
    checkpoint.close()
    np.testing.assert_array_equal(found, make_tensors()["t.float32"])
    with pytest.raises(CheckpointError, match=r"'t\.float32': the checkpoint is closed"):
        checkpoint.read("t.float32")


def test_shards_are_joined_and_read_in_parallel(tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    shards = {
        f"model-0000{shard}-of-00003.safetensors": {
            f"layer{shard}.{part}": draws.standard_normal((33, 17)).astype(np.float32) for part in range(8)
        }
        for shard in range(1, 4)
    }
    checkpoint = open_checkpoint_path(write_directory(tmp_path / "m", shards, {"model_type": "llama", "n": 3}))
    assert checkpoint.config["n"] == 3
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(checkpoint.tensors, pool.map(checkpoint.read, checkpoint.tensors), strict=True))
    for tensors in shards.values():
        for name, expected in tensors.items():
            np.testing.assert_array_equal(found[name], expected)


def test_reading_costs_no_anonymous_memory(tmp_path: Path) -> None:
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("needs /proc")

    def anonymous_kib() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1])

    size = 128 << 20
    header = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path = write_raw(tmp_path / "model.safetensors", header, b"")
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + size)
    (tmp_path / "config.json").write_text("{}")
    before = anonymous_kib()
    values = open_checkpoint_path(tmp_path).read("w")
    assert int(values.sum()) == 0
    assert anonymous_kib() - before < size // 1024 // 8


ONE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "v": np.ones(4, np.float16)}


def damaged_header(**changes: object) -> tuple[dict, bytes]:
    header, body = describe(ONE)
    header["w"] = {**header["w"], **changes}
    return header, body


@pytest.mark.parametrize(
    ("header", "body", "tensor", "reason"),
    [
        (*damaged_header(dtype="F4"), "w", "dtype 'F4' is not supported"),
        (*damaged_header(dtype=["F32"]), "w", "is not supported"),
        (*damaged_header(shape=[2, 4]), "w", "has 24 bytes, expected 32 for F32 of shape (2, 4)"),
        (*damaged_header(shape=[-2, -3]), "w", "shape [-2, -3] is not a list of sizes"),
        (*damaged_header(shape=[2, 3.0]), "w", "is not a list of sizes"),
        (*damaged_header(shape=[0, 2**70]), "w", "is not a list of sizes"),
        (*damaged_header(shape=None), "w", "is not a list of sizes"),
        (*damaged_header(data_offsets=[0]), "w", "is not a pair"),
        (*damaged_header(data_offsets=[24, 0]), "w", "has -24 bytes, expected 24"),
        (*damaged_header(data_offsets=[4, 28]), "w", "leaves a gap after the header"),
        (*damaged_header(data_offsets=[2**40, 2**40 + 24]), "v", "leaves a gap after the header"),
        ({"w": 3}, b"", "w", "header entry is not an object"),
        ([], b"", None, "header is not a JSON object"),
        (b"{", b"", None, "header is not JSON"),
        (b"\xff\xff", b"", None, "header is not JSON"),
        (b"[" * 100_000, b"", None, "header is not JSON"),
        (b'{"w": 1, "w": 1}', b"", None, "a name appears twice"),
        (*describe({}), None, None),
    ],
)
def test_damaged_headers_are_explained(
    tmp_path: Path, header: object, body: bytes, tensor: str | None, reason: str | None
) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = write_raw(tmp_path / "model.safetensors", header, body)
    if reason is None:
        assert open_checkpoint_path(tmp_path).tensors == {}
        return
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint_path(tmp_path)
    assert caught.value.location == str(path)
    assert caught.value.tensor == tensor
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)


def test_overlap_truncation_and_surplus_are_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    header, body = describe(ONE)
    header["v"]["data_offsets"] = [20, 28]
    write_raw(path, header, body)
    with pytest.raises(CheckpointError, match=r"tensor 'v': starts at byte \d+ and overlaps 'w'"):
        open_checkpoint_path(tmp_path)
    write_raw(path, *describe(ONE))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"tensor 'v': ends at byte .*truncated"):
        open_checkpoint_path(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="1 bytes after 'v' that belong to no tensor"):
        open_checkpoint_path(tmp_path)
    path.write_bytes(whole[:5])
    with pytest.raises(CheckpointError, match="has 5 bytes, too few"):
        open_checkpoint_path(tmp_path)
    path.write_bytes(b"\xff" * 16)
    with pytest.raises(CheckpointError, match="claims a header of"):
        open_checkpoint_path(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="the file is empty"):
        open_checkpoint_path(tmp_path)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_and_cut_bytes_never_raise_another_error(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = write_safetensors(tmp_path / "model.safetensors", ONE)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        checkpoint = open_checkpoint_path(tmp_path)
    except CheckpointError as error:
        assert error.reason
        return
    for name, info in checkpoint.tensors.items():
        assert checkpoint.read(name).shape == info.shape


def test_index_faults_are_explained(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": np.ones(2, np.float32)}, "b.safetensors": {"y": np.ones(2, np.float32)}}
    directory = write_directory(tmp_path / "m", shards)
    index = directory / "model.safetensors.index.json"

    def open_with(weight_map: object) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        open_checkpoint_path(directory)

    open_with({"x": "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor 'z': is not in b\.safetensors"):
        open_with({"z": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"c\.safetensors: cannot be opened"):
        open_with({"z": "c.safetensors"})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_with({"x": "../m/a.safetensors"})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_with([])


def test_missing_pieces_of_a_directory_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or directory"):
        open_checkpoint_path(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        open_checkpoint_path(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: is not a JSON object"):
        open_checkpoint_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled weights are not read"):
        open_checkpoint_path(tmp_path)
    with pytest.raises(CheckpointError, match="is not a form of weights"):
        open_checkpoint_path(tmp_path / "pytorch_model.bin")
    path = write_safetensors(tmp_path / "other.safetensors", ONE)
    assert set(open_checkpoint_path(tmp_path).tensors) == set(open_checkpoint_path(path).tensors) == set(ONE)
    with pytest.raises(CheckpointError, match="'nope': is not in the checkpoint"):
        open_checkpoint_path(path).read("nope")
