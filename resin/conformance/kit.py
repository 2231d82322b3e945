"""ConformanceKit: one warm float32 runner of a model, and the checks that run against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from resin import ArenaSpec, Engine, HistoryGroup, Policy, SamplingParams, StateGroup, WindowGroup
from resin.conformance.generation import TOP, Comparison, Job, Trace, compare, generate
from resin.conformance.plain import PlainForward
from resin.conformance.report import Check, Report
from resin.conformance.tolerance import ENGINE_SPREADS, FP8_SHARE, REFERENCE_SPREADS, rounding_share
from resin.models.declare import Placement
from resin.models.families import read_model
from resin.models.loading.checkpoint import Checkpoint
from resin.models.weights import Progress
from resin.plan import InvalidRequest
from resin.runtime import ModelRunner, RunnerOptions, build_runner
from resin.runtime.drafting import Drafter
from resin.sched.cache import CacheManager
from resin.topology import MeshShape

MAX_SEQUENCES = 4
DRAFT_ROOM = 4  # a State has a copy for each token of a row


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the workload.

    Attributes:
        output_tokens: tokens that each job generates.
        page_tokens: of the first paged group, and the chunk of the small prefill bucket.
        buckets: try every bucket; False compiles the fewest.
        kernels: run once in bfloat16 through the kernels of a GPU as well, interpreted where there is none.
        kv_dtype: "float8_e4m3fn" for keys and values in 8 bits, which the plain forward then rounds alike.
        tp: devices to split the model over; above 1, checks that need the plain forward cannot run.
        seed: of the prompts.
    """

    output_tokens: int = 12
    page_tokens: int = 16
    buckets: bool = True
    kernels: bool = True
    kv_dtype: str | None = None
    tp: int = 1
    seed: int = 0


class ConformanceKit:
    """Checks one model. Each check is a method that returns what it found; `run` times them and never raises for one.

    Args:
        checkpoint: weights and config.
        model: "package.module:Name"; None finds it by `model_type`.
        settings: sizes.
        progress: called while weights load and programs compile.

    Raises:
        InvalidRequest: the model's context is too short for a meaningful run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        model: str | None = None,
        settings: Settings | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.settings = settings = settings or Settings()
        model_class, config = read_model(checkpoint, model)
        groups = model_class.cache_groups(config, Placement(mesh=MeshShape(tp=settings.tp)))
        windows = [group.window_tokens for group in groups if isinstance(group, WindowGroup)]
        # One page or window is passed by the third prompt, two by the last.
        self.reach = max([2 * settings.page_tokens, *windows])
        whole = 2 * self.reach + settings.page_tokens
        context = whole + 2 * settings.page_tokens + 2 * settings.output_tokens
        if context > config.max_context_tokens:
            raise InvalidRequest("max_context_tokens", config.max_context_tokens, f"at least {context} for this check")
        # A window of one token keeps nothing of what came before, and a State does not grow.
        self.grows = any(
            isinstance(group, HistoryGroup) or (isinstance(group, WindowGroup) and group.window_tokens > 1)
            for group in groups
        )
        self.keeps_prefixes = self.grows or any(isinstance(group, StateGroup) for group in groups)
        options = RunnerOptions(
            dtype="float32",
            cache_dtype="float32",
            kv_dtype=settings.kv_dtype,
            max_sequences=MAX_SEQUENCES,
            max_context_tokens=context,
            decode_sequences=(1, MAX_SEQUENCES) if settings.buckets else (MAX_SEQUENCES,),
            prefill_tokens=(settings.page_tokens, whole) if settings.buckets else (whole,),
            page_tokens=settings.page_tokens,
            checkpoint_tokens=settings.page_tokens,
            tp=settings.tp,
        )
        self.vocab_size = config.vocab_size
        self._checkpoint, self._model = checkpoint, model
        self.runner: ModelRunner = build_runner(checkpoint, options, model=model)
        self.context = context
        geometry = self.runner.config.geometry
        self._need = CacheManager(groups, geometry, 0, prefix_cache=True).pages_needed(context, whole)
        self.pages = 1 + 2 * MAX_SEQUENCES * self._need
        self.runner.bind(ArenaSpec(self.pages, geometry.page_bytes, self.runner.config.arena_dtype))
        self.runner.warm_up(progress)

    # -- workload -----------------------------------------------------------------------------------------------

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """Greedy jobs from one token to past two windows, and one that samples."""
        rng, page = np.random.default_rng(self.settings.seed), self.settings.page_tokens
        lengths = (1, page - 3, self.reach + 5, 2 * self.reach + page - 1, page + 1)
        greedy = SamplingParams(
            max_output_tokens=self.settings.output_tokens, temperature=0, logprobs=TOP, ignore_stop=True
        )
        sampled = SamplingParams(
            max_output_tokens=self.settings.output_tokens, temperature=0.8, top_k=20, seed=7, logprobs=TOP
        )
        low = min(3, self.vocab_size - 1)
        prompts = [rng.integers(low, self.vocab_size, length).astype(np.int32) for length in lengths]
        return tuple(Job(prompt, sampled if prompt is prompts[-1] else greedy) for prompt in prompts)

    @cached_property
    def baseline(self) -> list[Trace]:
        """Each job alone, prompt in one chunk, without a prefix cache and without overlap."""
        with self.engine() as engine:
            return generate(engine, self.jobs, alone=True)

    @cached_property
    def plain(self) -> PlainForward:
        """The jitted forward over whole sequences.

        Raises:
            InvalidRequest: the weights are cut over several devices.
        """
        if self.settings.tp > 1:
            raise InvalidRequest("tp", self.settings.tp, "1 for checks against the plain forward")
        return PlainForward(self.runner.model, self.runner.weights, self.runner.config.groups, self.context)

    def engine(self, *, overlap: int = 0, changes: Mapping[str, Any] | None = None, **options: Any) -> Engine:
        """An engine over the shared runner; `changes` replace fields of its config."""
        return Engine(self.runner.view(**(changes or {})), overlap=overlap, enable_metrics=False, **options)

    def build_serving_runner(self) -> ModelRunner:
        """A runner in bfloat16 with the kernels of a GPU, interpreted where there is none."""
        page, geometry = self.settings.page_tokens, self.runner.config.geometry
        is_cpu = self.runner.device.platform == "cpu"
        options = RunnerOptions(
            dtype="bfloat16",
            cache_dtype=None if self.settings.kv_dtype is not None else "bfloat16",
            kv_dtype=self.settings.kv_dtype,
            kernels="interpret" if is_cpu else None,
            max_sequences=2,
            max_context_tokens=self.context,
            decode_sequences=(2,),
            prefill_tokens=(2 * page,),
            page_tokens=page,
            checkpoint_tokens=page,
            cache_bytes=self.pages * geometry.page_bytes,
        )
        return build_runner(self._checkpoint, options, model=self._model)

    def build_drafting_runner(self, drafter: Drafter) -> ModelRunner:
        """A float32 runner whose rows try three drafts of this drafter's, with the fewest buckets."""
        config, page = self.runner.config, self.settings.page_tokens
        options = RunnerOptions(
            dtype="float32",
            cache_dtype="float32",
            kv_dtype=self.settings.kv_dtype,
            max_sequences=MAX_SEQUENCES,
            max_context_tokens=self.context,
            decode_sequences=(MAX_SEQUENCES,),
            prefill_tokens=(config.max_plan_tokens,),
            page_tokens=page,
            checkpoint_tokens=page,
            cache_bytes=DRAFT_ROOM * self.pages * config.geometry.page_bytes,
            tp=self.settings.tp,
            draft_tokens=3,
        )
        return build_runner(self._checkpoint, options, model=self._model, drafter=drafter)

    @cached_property
    def tolerance(self) -> float:
        """Largest difference of a logprob between two ways to compute it."""
        share = ENGINE_SPREADS * rounding_share(self.runner.model, "float32")
        if self.settings.kv_dtype is not None:
            share = max(share, FP8_SHARE)
        return share * max(1.0, self.plain.score(self.jobs[-2].prompt).deviation)

    @property
    def reference_tolerance(self) -> float:
        """Largest difference from another implementation's logits, as a share of their deviation."""
        return REFERENCE_SPREADS * rounding_share(self.runner.model, "float32")

    def compare(self, traces: Sequence[Trace]) -> Comparison:
        """These results against the baseline's."""
        return compare(self.baseline, traces, self.tolerance)

    def policy(self, chunk_tokens: int) -> Policy:
        """A scheduling policy that cuts prompts into chunks."""
        return Policy(max_plan_tokens=chunk_tokens)

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, checks: Mapping[str, Callable[[ConformanceKit], tuple[bool | None, str]]], name: str = "") -> Report:
        """Runs checks by name, in order."""
        done = []
        for check, function in checks.items():
            started = time.perf_counter()
            try:
                passed, detail = function(self)
            except Exception as error:
                passed, detail = False, f"{type(error).__name__}: {error}"
            done.append(Check(check, passed, detail, time.perf_counter() - started))
        return Report(name, tuple(done))
