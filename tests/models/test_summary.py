from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from resin.models.summary import summarise
from resin.models.testing import TINY_CONFIGS
from resin.plan import InvalidRequest
from resin.topology import MeshShape
from serve.cli import main
from tests.models.test_published import CONFIGS


def test_sizes_of_a_published_hybrid() -> None:
    summary = summarise(CONFIGS["Gemma-3-270m"])
    assert summary.parameters == 268_098_176
    norms = 18 * (4 * 640 + 2 * 256) + 640  # kept in float32
    assert summary.weight_nbytes == 2 * (summary.parameters + norms)
    assert summary.token_nbytes == 3_072
    assert {row.kind for row in summary.cache} == {"History", "Window"}
    assert 15 * 512 * 1024 < summary.sequence_nbytes < 15 * 560 * 1024


def test_packed_weights_count_what_they_decode_to() -> None:
    summary = summarise(CONFIGS["gpt-oss-20b"])
    assert summary.parameters / 1e9 == pytest.approx(20.9, rel=0.01)
    row = next(row for row in summary.weights if row.name.endswith("gate_up.words"))
    assert (row.count, row.shape, row.dtype) == (24, (32, 360, 45, 128), "int32")
    assert summary.weight_nbytes < 14e9


def test_context_that_fits_leaves_room_for_weights_windows_and_states() -> None:
    summary = summarise(CONFIGS["LFM2-1.2B"])
    fixed = summary.weight_nbytes + 4 * summary.sequence_nbytes
    assert summary.context_that_fits(fixed - 1, 4) == 0
    assert summary.context_that_fits(int(fixed + 4 * 1000 * summary.token_nbytes), 4) == 1000
    assert summary.context_that_fits(1 << 50) == 128_000


def test_every_weight_has_a_row() -> None:
    summary = summarise(TINY_CONFIGS["lfm2_moe"], dtype="float32")
    assert sum(row.nbytes for row in summary.weights) == summary.weight_nbytes
    assert sum(row.count * int(np.prod(row.shape)) for row in summary.weights) == summary.parameters == 277_336


def test_command_prints_tables_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["LFM2-350M"]))
    assert main(["inspect", str(path), "--memory-gib", "8"]) == 0
    shown = capsys.readouterr().out
    assert "Lfm2, 354.5 M parameters" in shown and "12,288 bytes a token" in shown
    assert "conv       State" in shown and "     8 GiB" in shown
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "Lfm2"
    assert main(["inspect", str(path), "--memory-gib", "0"]) == 1
    assert "memory_gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [{"token_ids": np.arange(4)}, {"token_ids": np.arange(4), "logits": np.zeros((3, 9))}]
)
def test_verify_refuses_a_reference_that_is_none(
    tmp_path: Path, content: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "bad.npz", **content)
    assert main(["verify", str(tmp_path), "--reference", str(tmp_path / "bad.npz")]) == 1
    assert "reference" in capsys.readouterr().err


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
def test_a_mesh_shares_weights_and_cache(dp: int, tp: int) -> None:
    config = TINY_CONFIGS["qwen3_moe"]
    alone, shared = summarise(config), summarise(config, mesh=MeshShape(dp=dp, tp=tp))
    assert alone.device_nbytes == alone.weight_nbytes == shared.weight_nbytes
    assert shared.token_nbytes * tp == alone.token_nbytes
    assert alone.weight_nbytes / (dp * tp) < shared.device_nbytes < alone.weight_nbytes / tp * 1.2
    with pytest.raises(InvalidRequest, match="num_attention_heads=4"):
        summarise(config, mesh=MeshShape(tp=8))
