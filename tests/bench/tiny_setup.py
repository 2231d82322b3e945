"""Specs of tiny models with the buckets of benchmark cases; nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.cases import Case
from bench.model_setup import all_buckets, sized_options
from resin.models.families import find_model_class
from resin.models.testing import TINY_CONFIGS
from resin.runtime import RunnerOptions
from resin.runtime.executable import StepSpec
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh


def tiny_spec(family: str, cases: Sequence[Case]) -> StepSpec:
    """A float32 spec of one family."""
    config = TINY_CONFIGS[family]
    model_class = find_model_class(config)
    options = sized_options(RunnerOptions(dtype="float32", cache_dtype="float32"), cases)
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, build_mesh(options))
    return replace(spec, config=replace(spec.config, buckets=all_buckets(spec, cases)))
