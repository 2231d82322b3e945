"""The table of sampling columns drives layout, slots, planner and decode image: a new column is in every plan."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from resin import Bucket, Phase, SamplingParams, plan_geometry
from resin.plan import plan_layout
from resin.plan.sampling import MIN_TOP_P, SAMPLING_COLUMNS

WITH_ANOTHER_COLUMN = """
import sys
import resin.plan.sampling as sampling

column = sampling.SamplingColumn("{name}", "{dtype}", lambda params, seed: params.max_output_tokens + 0.5)
sampling.SAMPLING_COLUMNS += (column,)
for name in [name for name in sys.modules if name.partition(".")[0] == "resin" and name != sampling.__name__]:
    del sys.modules[name]  # the tests' tables are made when their modules are

from resin import Engine, Phase, SamplingParams
from tests.fakes import PagedFake, fake_config, history_group

runner = PagedFake(fake_config((history_group(),), max_sequences=3, max_plan_tokens=24))
with Engine(runner) as engine:
    engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=4))
    engine.step()
    engine.submit([4, 5], sampling_params=SamplingParams(max_output_tokens=7))
    while engine.has_work():
        engine.step()
seen = {{(plan.phase, *plan.sampling["{name}"][:plan.num_sequences].tolist()) for plan in runner.plans}}
assert all(plan.layout.by_name["{name}"].dtype == "{dtype}" for plan in runner.plans)
values = [4.5, 7.5] if "{dtype}" == "float32" else [4, 7]
wanted = {{(Phase.PREFILL, values[0]), (Phase.PREFILL, values[1]), (Phase.DECODE, *values)}}
assert wanted <= seen, seen
"""


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_a_column_more_is_in_every_plan(dtype: str) -> None:
    code = WITH_ANOTHER_COLUMN.format(name="another", dtype=dtype)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_columns_hold_what_a_policy_says() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, top_p=1e-300, min_p=0.25, repetition_penalty=2)
    values = {column.name: column.value(params, 2**63 + 2**31 + 5) for column in SAMPLING_COLUMNS}
    assert values["seed_low"] == 5 - 2**31 and values["seed_high"] == -(2**31)
    assert (values["temperature"], values["top_k"], values["top_p"], values["min_p"]) == (0.7, 5, MIN_TOP_P, 0.25)
    assert (values["presence_penalty"], values["frequency_penalty"], values["repetition_penalty"]) == (0, 0, 2)


@pytest.mark.parametrize("temperature", [0, 1e-7, 9e-7])
def test_cold_rows_are_greedy(temperature: float) -> None:
    (column,) = (column for column in SAMPLING_COLUMNS if column.name == "temperature")
    assert column.value(SamplingParams(temperature=temperature), 0) == 0


def test_columns_of_the_table_are_columns_of_the_layout() -> None:
    layout = plan_layout(Bucket(Phase.DECODE, 4, 4, ()), (), plan_geometry((), arena_dtype="float32"))
    for column in SAMPLING_COLUMNS:
        assert layout.by_name[column.name].length == 4 and layout.by_name[column.name].dtype == column.dtype
        assert np.dtype(column.dtype).itemsize == 4
