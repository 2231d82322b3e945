"""A layer whose keys, values or states do not fit the plane that its model declares is refused when it is traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resin.models.declare import Placement
from resin.models.lfm2 import Lfm2
from resin.models.llama import Llama
from resin.models.testing import TINY_CONFIGS
from resin.plan import ArenaSpec, CacheGroup, InvalidRequest
from resin.runtime import RunnerOptions
from resin.runtime.executable import compile_step
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh
from resin.runtime.program_kind import ProgramKind
from tests.runtime.tiny_runner import tiny_options


class Misdeclared:
    """A model class with one plane of its last group changed."""

    def __init__(self, model: Any, **changes: int) -> None:
        self._model = model
        self._changes = changes

    def __call__(self, config: Any, placement: Placement) -> Any:
        return self._model(config, placement)

    def cache_groups(self, config: Any, placement: Placement) -> tuple[CacheGroup, ...]:
        def change(plane: Any) -> Any:
            return replace(plane, **{name: getattr(plane, name) + by for name, by in self._changes.items()})

        groups = self._model.cache_groups(config, placement)
        return tuple(replace(group, planes=tuple(map(change, group.planes))) for group in groups)


@pytest.mark.parametrize(("model", "family"), [(Llama, "llama"), (Lfm2, "lfm2")])
@pytest.mark.parametrize("changes", [{"rows": -1}, {"width": -8}, {"width": 8}])
def test_a_plane_that_does_not_fit_is_refused(model: Any, family: str, changes: dict[str, int]) -> None:
    config = model.Config.from_hf(TINY_CONFIGS[family])
    spec = build_spec(Misdeclared(model, **changes), config, tiny_options(), build_mesh(RunnerOptions()))
    arena = ArenaSpec(64, spec.config.geometry.page_bytes, spec.config.arena_dtype)
    with pytest.raises(InvalidRequest, match=r"plane '\w+'=.*: expected at least \d+ rows of \d+"):
        compile_step(spec, spec.config.buckets[0], arena, ProgramKind.ANY)
