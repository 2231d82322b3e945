"""Whether the head is the embedding's table: what a config says, and what its tensors say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from resin.models.loading.checkpoint import Checkpoint

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 1 << 24


def settle_head(config: Any, checkpoint: Checkpoint) -> Any:
    """The config, untied if the checkpoint stores a head that is not its table, whatever its settings say."""
    if not getattr(config, "tied", False) or HEAD not in checkpoint.tensors or TABLE not in checkpoint.tensors:
        return config
    is_one = checkpoint.tensors[HEAD] == checkpoint.tensors[TABLE] and _have_same_bytes(
        checkpoint.read(HEAD), checkpoint.read(TABLE)
    )
    return config if is_one else replace(config, tied=False)


def settled_settings(config: Any, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Settings that make a Config read from them as tied or untied as this one is."""
    return dict.fromkeys(tied_spellings(settings), config.tied) if hasattr(config, "tied") else {}


def tied_spellings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Names under which such settings say whether the head is tied."""
    return ("tie_word_embeddings", *(name for name in ("tie_embedding",) if name in settings))


def _have_same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Compares in pieces: mapped tables of a gigabyte stay where they are, and different ones differ at once."""
    left, right = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    starts = range(0, len(left), _CHUNK_BYTES)
    return all(np.array_equal(left[at : at + _CHUNK_BYTES], right[at : at + _CHUNK_BYTES]) for at in starts)
