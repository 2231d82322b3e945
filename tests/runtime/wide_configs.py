"""The tiny configs with heads, experts and widths that up to eight devices can share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resin.models.testing import TINY_CONFIGS

HEADS = 8


def widened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Eight query heads of the same size; KV heads as they are where they divide eight, and eight experts."""
    kv_heads = config["num_key_value_heads"]
    wide = {**config, "num_attention_heads": HEADS, "num_key_value_heads": kv_heads if HEADS % kv_heads == 0 else HEADS}
    if "head_dim" not in config:
        wide["hidden_size"] = config["hidden_size"] // config["num_attention_heads"] * HEADS
    return wide | {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config}


WIDE_CONFIGS = {family: widened(config) for family, config in TINY_CONFIGS.items()}
