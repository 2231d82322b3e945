"""What a runner declares once, the arena that an engine binds it to, and what its steps were measured to take."""

from __future__ import annotations

from dataclasses import dataclass

from resin.plan.buckets import Bucket, Phase
from resin.plan.cache import CacheGeometry, CacheGroup, plan_geometry
from resin.plan.errors import InvalidRequest

MAX_OVERLAP = 4  # plans in flight while the next one is made
MAX_DRAFT_TOKENS = 7  # attention computes up to 8 tokens of a sequence in one pass over its pages


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What a runner declares once; the Engine plans within it.

    Attributes:
        vocab_size: token ids are in [0, vocab_size); 0 leaves ids unchecked.
        max_sequences: sequences that can run at once (device slots).
        max_penalised: of these, sequences that can have penalties, for which the device counts tokens; None for all.
        max_context_tokens: longest sequence, prompt and output together.
        max_plan_tokens: tokens of the largest prefill plan (the chunk budget).
        groups: the model's cache groups; empty for a runner that keeps its own cache.
        geometry: page geometry of the groups.
        buckets: compiled shapes, smallest first; empty for exact-size plans.
        draft_tokens: most drafts that a row of a decode plan may try; 0 for a runner that drafts nothing. Decode
            buckets are of width 1 or of this and 1.
        arena_dtype: dtype of the arena's elements.
        replicas: arenas that the runner keeps; each has sequences of its own, to which the limits above apply. A runner
            of several takes a StepPlan where others take a BatchPlan, and returns an output for each of its plans.
    """

    vocab_size: int = 0
    max_sequences: int = 64
    max_penalised: int | None = None
    max_context_tokens: int = 1 << 20
    max_plan_tokens: int = 8192
    groups: tuple[CacheGroup, ...] = ()
    geometry: CacheGeometry = plan_geometry((), arena_dtype="float32")
    buckets: tuple[Bucket, ...] = ()
    arena_dtype: str = "float32"
    draft_tokens: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        for name, low in (("replicas", 1), ("max_sequences", 1), ("max_context_tokens", 2), ("max_plan_tokens", 1)):
            if getattr(self, name) < low:
                raise InvalidRequest(name, getattr(self, name), f"at least {low}")
        if self.max_penalised is not None and not 1 <= self.max_penalised <= self.max_sequences:
            raise InvalidRequest("max_penalised", self.max_penalised, f"1 to max_sequences ({self.max_sequences})")
        if not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidRequest("draft_tokens", self.draft_tokens, f"0 to {MAX_DRAFT_TOKENS}")
        widths = {bucket.width for bucket in self.buckets} - {1, 1 + self.draft_tokens}
        if widths:
            raise InvalidRequest("buckets", sorted(widths), f"decode buckets of width 1 or {1 + self.draft_tokens}")
        if len(self.geometry.groups) != len(self.groups):
            raise InvalidRequest(
                "geometry", len(self.geometry.groups), f"one entry for each of {len(self.groups)} groups"
            )
        if self.buckets and {bucket.phase for bucket in self.buckets} != {Phase.PREFILL, Phase.DECODE}:
            raise InvalidRequest("buckets", self.buckets, "at least one prefill and one decode bucket")

    @property
    def count_rows(self) -> int:
        """Rows of token counts, without the scratch row after them."""
        return self.max_sequences if self.max_penalised is None else self.max_penalised

    def of_phase(self, phase: Phase) -> list[Bucket]:
        """The buckets of a phase, smallest first."""
        return [bucket for bucket in self.buckets if bucket.phase is phase]

    def bucket_sizes(self, phase: Phase) -> tuple[int, ...]:
        """What tells the buckets of a phase apart, each once, rising: padded tokens of prefill, sequences of decode."""
        is_prefill = phase is Phase.PREFILL
        return tuple(sorted({bucket.tokens if is_prefill else bucket.sequences for bucket in self.of_phase(phase)}))


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """The one physical cache pool. Page 0 is scratch; pages 1 to num_pages - 1 are handed out."""

    num_pages: int
    page_bytes: int
    dtype: str

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a runner's steps, measured when it was warm.

    Attributes:
        prefill_s: (padded tokens, seconds) of the prefill buckets, smallest first, up to the first that took very long.
        decode_s: a step of the smallest decode bucket, one queued behind the other.
        read_back_s: what a step takes beyond that if its results are waited for.
        draft_costs: (sequences, time of a decode step that checks drafts over that of one that does not), for each
            bucket with places for drafts.
    """

    prefill_s: tuple[tuple[int, float], ...]
    decode_s: float
    read_back_s: float
    draft_costs: tuple[tuple[int, float], ...] = ()
