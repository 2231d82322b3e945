"""Popular checkpoints load, with as many parameters as they are published with, or are refused by what refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from resin.models.declare import Placement
from resin.models.families import read_config
from resin.models.loading import CheckpointError
from resin.models.loading.gguf_config import translate_gguf_config
from resin.models.loading.gguf_header import GgufHeader, GgufTensor
from resin.models.summary import count_parameters
from resin.models.weights import AbstractModel
from resin.plan import InvalidRequest
from tests.models.checkpoint_case import Case, Config
from tests.models.checkpoints import CASES, table

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def config_of(case: Case) -> Config:
    """The config that is read; a GGUF file's is translated from its keys and the tensors that matter."""
    if case.architecture is None:
        return case.config
    tied = case.architecture in ("gemma2", "gemma3", "granite", "granitemoe", "lfm2", "smollm3", "cohere2")
    shapes = {"token_embd.weight": (case.config["vocab_size"], case.config["embedding_length"])}
    shapes |= {} if tied else {"output.weight": shapes["token_embd.weight"]}
    shapes |= {f"blk.{layer}.attn_norm.weight": (1,) for layer in range(case.config["block_count"])}
    tensors = {name: GgufTensor(name, GGMLQuantizationType.F32, shape, 0, 0) for name, shape in shapes.items()}
    keys = {f"{case.architecture}.{key}": value for key, value in case.config.items()}
    metadata = {"general.architecture": case.architecture, "general.type": "model", **keys}
    return translate_gguf_config(GgufHeader(case.name, metadata, tensors))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_published_config_loads_or_is_refused_by_what_the_table_says(case: Case) -> None:
    if case.refused is not None:
        with pytest.raises((InvalidRequest, CheckpointError)) as caught:
            read_config(config_of(case))
        text = str(caught.value).removeprefix(f"{case.name}: ").removeprefix("metadata ")
        assert text.startswith(case.refused)
        return
    model_class, config = read_config(config_of(case))
    model = AbstractModel.of(model_class(config, Placement("bfloat16")))
    assert model_class.cache_groups(config, Placement("bfloat16"))
    found = sum(count_parameters(declaration) for declaration in model.declarations) / 1e9
    assert found == pytest.approx(case.billions, rel=0.002)


def test_the_page_has_this_table() -> None:
    assert len(CASES) >= 40 and len({case.name for case in CASES}) == len(CASES)
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.models.checkpoints prints the table"
