"""RunnerOptions: what a user may choose about execution, frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from resin.plan import InvalidRequest
from resin.plan.cache import FP8_DTYPE
from resin.plan.config import MAX_DRAFT_TOKENS
from resin.topology import MeshShape

DTYPES = ("float32", "bfloat16")
KERNELS = ("triton", "reference", "interpret")
FRESH_ATTENTION = ("cudnn", "paged")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Execution settings; None means the platform's default, which `load_runner` resolves.

    Attributes:
        dtype: dtype of weights and activations: what converted weights have, else float32 on CPU, bfloat16 on GPU.
        cache_dtype: dtype of the arena: float32 on CPU, bfloat16 on GPU; "uint16" holds the bits of bfloat16.
        kv_dtype: "float8_e4m3fn" keeps keys and values in 8 bits; None in the arena's dtype. The arena is then uint16
            where Triton bodies run.
        kv_scale: 8-bit keys and values are stored as value / kv_scale, within +-448.
        kernels: "triton", "reference" (plain XLA) or "interpret" (Triton bodies in an interpreter, for tests): Triton
            on GPU, the references on CPU.
        fresh_attention: what a long prompt of which nothing is cached attends with beside Triton bodies: "cudnn", or
            "paged", the kernel that reads pages, as every other prompt does.
        dp, cp, tp: devices along each axis of the mesh: replicas, context, tensors. cp is 1 so far. Limits and sizes
            below are of each replica.
        max_sequences: sequences that run at once: 16 on CPU; on GPU 256 at most, as memory holds.
        max_penalised: of these, sequences with penalties; others of them wait. The device counts the tokens of each in
            2 bytes a token of the vocabulary; None takes what 32 MiB hold.
        max_context_tokens: longest sequence; None takes the model's own limit, at most 4096 on CPU and 32768 on GPU.
        max_plan_tokens: tokens of the largest prefill step: 512 on CPU, 8192 on GPU.
        decode_sequences: padded sequence counts of the decode buckets; None picks them up to max_sequences.
        prefill_tokens: padded token counts of the prefill buckets; None picks them up to max_plan_tokens.
        prefill_sequences: sequences that one prefill step packs at most.
        draft_tokens: drafts that a decode step checks of a sequence at most, 0 to 7: guesses at its next tokens, from
            what followed the same words before. They change no token; buckets of up to 256 tokens get a second
            program, and a step checks drafts where that is the faster way by what has been measured.
        page_tokens: tokens a page; None searches for the least waste.
        checkpoint_tokens: distance of the State checkpoints that the prefix cache keeps; None takes the model's own.
        cache_bytes: arena bytes a device at most; None takes 1 GiB on CPU and nine tenths of what is free on GPU.
            Without a prefix cache the arena is no larger than all sequences at full length need.
        dummy: random weights instead of the checkpoint's.
        seed: of the random weights.
        compile_threads: buckets compiled at once; None takes the CPU count, at most 8.
        compile_cache: directory of compiled programs, shared between processes; None takes "programs" in Resin's cache.
        compile_cache_bytes: size at which the oldest programs are dropped; 0 keeps none.
    """

    dtype: str | None = None
    cache_dtype: str | None = None
    kv_dtype: str | None = None
    kv_scale: float = 1.0
    kernels: str | None = None
    fresh_attention: str = "cudnn"
    dp: int = 1
    cp: int = 1
    tp: int = 1
    max_sequences: int | None = None
    max_penalised: int | None = None
    max_context_tokens: int | None = None
    max_plan_tokens: int | None = None
    decode_sequences: tuple[int, ...] | None = None
    prefill_tokens: tuple[int, ...] | None = None
    prefill_sequences: int = 16
    draft_tokens: int = 0
    page_tokens: int | None = None
    checkpoint_tokens: int | None = None
    cache_bytes: int | None = None
    dummy: bool = False
    seed: int = 0
    compile_threads: int | None = None
    compile_cache: str | Path | None = None
    compile_cache_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name, known in (("dtype", DTYPES), ("cache_dtype", (*DTYPES, "uint16")), ("kv_dtype", (FP8_DTYPE,))):
            if getattr(self, name) not in (None, *known):
                raise InvalidRequest(name, getattr(self, name), f"one of {known}")
        if not 0 < self.kv_scale < math.inf:
            raise InvalidRequest("kv_scale", self.kv_scale, "a finite number above 0")
        if self.kernels not in (None, *KERNELS):
            raise InvalidRequest("kernels", self.kernels, f"one of {KERNELS}")
        if self.fresh_attention not in FRESH_ATTENTION:
            raise InvalidRequest("fresh_attention", self.fresh_attention, f"one of {FRESH_ATTENTION}")
        if self.cp != 1:
            raise InvalidRequest("cp", self.cp, "1 (only dp and tp are implemented)")
        self.mesh  # noqa: B018 (checked as it is made)
        low = {"prefill_sequences": 1, "compile_cache_bytes": 0}
        optional = {
            "max_sequences": 1,
            "max_penalised": 1,
            "max_context_tokens": 2,
            "max_plan_tokens": 1,
            "page_tokens": 1,
            "checkpoint_tokens": 1,
            "cache_bytes": 1,
            "compile_threads": 1,
        }
        for name, least in (low | optional).items():
            value = getattr(self, name)
            if not (value is None and name in optional) and (not isinstance(value, int) or value < least):
                raise InvalidRequest(name, value, f"an integer of at least {least}")
        if self.draft_tokens not in range(MAX_DRAFT_TOKENS + 1):
            raise InvalidRequest("draft_tokens", self.draft_tokens, f"0 to {MAX_DRAFT_TOKENS}")
        for name in ("decode_sequences", "prefill_tokens"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1):
                raise InvalidRequest(name, sizes, "increasing sizes of at least 1")

    @property
    def mesh(self) -> MeshShape:
        """Devices along each axis."""
        return MeshShape(self.dp, self.cp, self.tp)
