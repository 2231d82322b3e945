"""From a model's name to a runner with its weights on the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from resin.models.conversion import check_converted, restore_weights
from resin.models.declare import Placement
from resin.models.families import read_model
from resin.models.loading.checkpoint import Checkpoint
from resin.models.loading.converted import ConvertedCheckpoint
from resin.models.registry import open_checkpoint, resolve
from resin.models.weights import AbstractModel, Progress, check_tensors, dummy_weights, load_weights
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan import CacheGroup, InvalidRequest, RunnerConfig, StateGroup, plan_geometry
from resin.plan.cache import with_kv_dtype
from resin.recipes.tokenizer import find_tokenizer
from resin.runtime.bucket_table import CPU_SEQUENCES, build_buckets, decode_sizes, prefill_sizes, sequences_that_fit
from resin.runtime.compile_cache import use_compile_cache
from resin.runtime.drafting import Drafter, PromptLookup
from resin.runtime.executable import StepSpec
from resin.runtime.ledger import device_limit_bytes
from resin.runtime.memory import GPU_CACHE_SHARE
from resin.runtime.mesh import build_mesh, local_device, platform_of
from resin.runtime.options import RunnerOptions
from resin.runtime.program_cache import ProgramCache
from resin.runtime.runner import ModelRunner
from resin.runtime.slots import COUNT_DTYPE
from resin.settings import CACHE_DIRECTORY

DEFAULTS = {
    "cpu": {"dtype": "float32", "cache_dtype": "float32", "context": 4096, "plan_tokens": 512},
    "gpu": {"dtype": "bfloat16", "cache_dtype": "bfloat16", "context": 32768, "plan_tokens": 8192},
}
# Token counts of sequences with penalties: 128 sequences of a vocabulary of 128k.
COUNT_BYTES = 32 << 20


def load_runner(
    source: str | Path,
    options: RunnerOptions | None = None,
    *,
    model: str | None = None,
    drafter: Drafter | None = None,
    progress: Progress | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """Fetches a model and returns its runner, ready for an Engine; weights are read when the memory ledger holds.

    A checkpoint without a tokenizer gives a runner whose `tokenizer` is None.

    Args:
        source: registered name, local path or hub id.
        options: execution settings.
        model: "package.module:Name" of a model class; None finds it by the checkpoint's `model_type`.
        drafter: makes the drafts where `options.draft_tokens` are wanted; None: a PromptLookup.
        progress: called with (what, done, total) while files are fetched.
        make: the runner's class, or what takes its arguments: `LeadingRunner` for rank 0 of several processes.

    Raises:
        InvalidRequest: options that do not fit the model or the machine.
        CheckpointError: files that are missing, damaged or do not fit the model.
    """
    found = resolve(source)
    files = found.fetch(progress)
    checkpoint = open_checkpoint(files)
    try:
        return build_runner(
            checkpoint,
            options,
            model=model,
            drafter=drafter,
            tokenizer=find_tokenizer(files),
            on_loaded=checkpoint.close,
            make=make,
        )
    except BaseException:
        checkpoint.close()
        raise


def build_runner(
    checkpoint: Checkpoint,
    options: RunnerOptions | None = None,
    *,
    model: str | None = None,
    drafter: Drafter | None = None,
    tokenizer: Any = None,
    on_loaded: Callable[[], None] | None = None,
    make: Callable[..., ModelRunner] = ModelRunner,
) -> ModelRunner:
    """The same from an open checkpoint, which must stay open until the weights are loaded.

    Args:
        on_loaded: called once they are.
        make: the runner's class, or what takes its arguments.
    """
    options = fit_options(options or RunnerOptions(), checkpoint)
    directory = Path(options.compile_cache or CACHE_DIRECTORY.read() / "programs").absolute()
    half = options.compile_cache_bytes // 2
    keeps = bool(half) and use_compile_cache(directory, half)
    mesh = build_mesh(options)
    model_class, config = read_model(checkpoint, model)
    spec = build_spec(model_class, config, options, mesh, drafter)
    programs = None
    if half and jax.process_count() == 1:  # a program of several processes is no other's
        programs = ProgramCache.of(directory / "steps", half, model_class, config, spec, is_writable=keeps)
    check_weights(spec, checkpoint, options)

    def load(progress: Progress | None) -> tuple[jax.Array, ...]:
        weights = read_weights(spec, checkpoint, options, progress)
        if on_loaded is not None:
            on_loaded()
        return weights

    return make(
        spec,
        load,
        model_config=config,
        tokenizer=tokenizer,
        eos_token_ids=config.eos_token_ids,
        cache_bytes=options.cache_bytes,
        compile_threads=options.compile_threads,
        program_cache=programs,
    )


def default_dtype(mesh: jax.sharding.Mesh) -> str:
    """Dtype of weights and activations on a mesh's platform."""
    return str(_defaults(mesh)["dtype"])


def _defaults(mesh: jax.sharding.Mesh) -> Mapping[str, Any]:
    return DEFAULTS["cpu" if platform_of(mesh) == "cpu" else "gpu"]


def fit_options(options: RunnerOptions, checkpoint: Checkpoint) -> RunnerOptions:
    """The options, with the dtype of converted weights where they name none: other weights take the platform's."""
    if options.dtype is None and isinstance(checkpoint, ConvertedCheckpoint) and not options.dummy:
        return replace(options, dtype=checkpoint.dtype)
    return options


def check_weights(spec: StepSpec, checkpoint: Checkpoint, options: RunnerOptions) -> None:
    """Holds the model's declarations against the checkpoint's index, before anything is compiled.

    Raises:
        InvalidRequest: converted weights of another dtype.
        CheckpointError: tensors that are missing, extra, misshapen or of a wrong dtype.
    """
    if options.dummy:
        return
    if isinstance(checkpoint, ConvertedCheckpoint):
        check_converted(spec.model, checkpoint, dtype=spec.dtype)
    else:
        check_tensors(spec.model, checkpoint)


def read_weights(
    spec: StepSpec, checkpoint: Checkpoint, options: RunnerOptions, progress: Progress | None = None
) -> tuple[jax.Array, ...]:
    """The weights on their devices: random ones, restored ones, or read tensor by tensor.

    Raises:
        CheckpointError: they do not fit the model or cannot be read.
    """
    if options.dummy:
        return dummy_weights(spec.model, spec.mesh, seed=options.seed, progress=progress)
    if isinstance(checkpoint, ConvertedCheckpoint):
        return restore_weights(spec.model, checkpoint, spec.mesh, dtype=spec.dtype, progress=progress)
    return load_weights(spec.model, checkpoint, spec.mesh, progress=progress)


def build_spec(
    model_class: Any, config: Any, options: RunnerOptions, mesh: jax.sharding.Mesh, drafter: Drafter | None = None
) -> StepSpec:
    """Resolves the options against model and platform; nothing is allocated.

    Raises:
        InvalidRequest: a context longer than the model's, or sizes that contradict each other.
    """
    platform = platform_of(mesh)
    defaults = _defaults(mesh)
    placement = Placement(options.dtype or defaults["dtype"], options.mesh)
    context = options.max_context_tokens or min(config.max_context_tokens, defaults["context"])
    if context > config.max_context_tokens:
        raise InvalidRequest("max_context_tokens", context, f"at most the model's {config.max_context_tokens}")
    plan_tokens = options.max_plan_tokens or defaults["plan_tokens"]
    prefill = options.prefill_tokens or prefill_sizes(platform, plan_tokens)
    backend = None if options.kernels is None else Backend(options.kernels)
    arena_dtype = _arena_dtype(options, platform, placement.dtype, backend)
    groups = _fit_states(model_class.cache_groups(config, placement), options)
    if options.kv_dtype is not None:
        groups = with_kv_dtype(groups, options.kv_dtype, scale=options.kv_scale, arena_dtype=arena_dtype)
    geometry = plan_geometry(groups, arena_dtype=arena_dtype, page_tokens=options.page_tokens)
    abstract = AbstractModel.of(model_class(config, placement))
    sequences = options.max_sequences
    if sequences is None and platform == "cpu":
        sequences = CPU_SEQUENCES
    elif sequences is None:
        free = int(GPU_CACHE_SHARE * (device_limit_bytes(local_device(mesh)) - abstract.device_nbytes(mesh)))
        sequences = sequences_that_fit(groups, geometry, context, options.cache_bytes or free)
    decode = options.decode_sequences or decode_sizes(platform, sequences)
    runner_config = RunnerConfig(
        vocab_size=config.vocab_size,
        max_sequences=sequences,
        max_penalised=_max_penalised(options, sequences, config.vocab_size),
        max_context_tokens=context,
        max_plan_tokens=prefill[-1],
        groups=groups,
        geometry=geometry,
        buckets=build_buckets(
            groups,
            geometry,
            decode_sequences=decode,
            prefill_tokens=prefill,
            prefill_sequences=min(options.prefill_sequences, sequences),
            max_context_tokens=context,
            draft_tokens=options.draft_tokens,
        ),
        arena_dtype=arena_dtype,
        draft_tokens=options.draft_tokens,
        replicas=options.dp,
    )
    drafter = (drafter or PromptLookup()) if options.draft_tokens else None
    is_fresh = options.fresh_attention == "cudnn"
    return StepSpec(abstract, runner_config, mesh, placement.dtype, backend, is_fresh, drafter)


def _max_penalised(options: RunnerOptions, sequences: int, vocab_size: int) -> int:
    """Sequences whose tokens are counted at once."""
    fits = options.max_penalised or max(COUNT_BYTES // (vocab_size * COUNT_DTYPE.itemsize), 1)
    return min(fits, sequences)


def _arena_dtype(options: RunnerOptions, platform: str, dtype: str, backend: Backend | None) -> str:
    """The arena's dtype. Elements of 16 bits that hold 8-bit values are integers, which nothing converts."""
    is_reference = pick_kernels(platform, backend=backend).backend is Backend.REFERENCE
    default = str(DEFAULTS["cpu" if platform == "cpu" else "gpu"]["cache_dtype"])
    if options.kv_dtype is not None and not (is_reference and default == "float32"):
        default = "uint16"
    chosen = options.cache_dtype or default
    if options.kv_dtype is not None and chosen not in (("float32", "uint16") if is_reference else ("uint16",)):
        expected = "uint16 or float32" if is_reference else "uint16"
        raise InvalidRequest("cache_dtype", chosen, f"{expected} beside kv_dtype={options.kv_dtype}")
    if chosen == "uint16" and dtype == "float32" and options.kv_dtype is None:
        raise InvalidRequest("cache_dtype", chosen, "float32 or bfloat16 beside dtype=float32")
    return chosen


def _fit_states(groups: tuple[CacheGroup, ...], options: RunnerOptions) -> tuple[CacheGroup, ...]:
    """The groups, States with the checkpoints that the options ask for and a copy for each token of a row."""

    def fit(group: CacheGroup) -> CacheGroup:
        if not isinstance(group, StateGroup):
            return group
        checkpoints = options.checkpoint_tokens or group.checkpoint_tokens
        return replace(group, checkpoint_tokens=checkpoints, copies=1 + options.draft_tokens)

    return tuple(map(fit, groups))
