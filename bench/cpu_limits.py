"""What memory and arithmetic allow on this machine: the limits that `bench.cpu_compare` sets its figures against."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from resin.plan.extras import require

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One figure: `prompts` sequences of `prompt_tokens`, `new_tokens` generated for each."""

    name: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    target: float  # wanted ratio of Resin's tokens/s to transformers'

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1

    def tokens_per_s(self, result: dict[str, Any]) -> float:
        if self.is_prefill:
            return self.prompts * self.prompt_tokens / float(result["first_s"])
        return float(result["decode_tokens"]) / float(result["decode_s"])


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a step has to read and compute, from the shapes in the GGUF file."""

    layer_params: int
    head_params: int
    kv_values_per_token: int
    attention_width: int  # layers * heads * head_dim

    @classmethod
    def read(cls, gguf_path: Path) -> ModelSize:
        require("serve", "gguf")
        from gguf import GGUFReader

        reader = GGUFReader(gguf_path)
        arch = reader.fields["general.architecture"].contents()

        def number(key: str) -> int:
            return int(reader.fields[f"{arch}.{key}"].contents())

        layers, heads, width = number("block_count"), number("attention.head_count"), number("embedding_length")
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        return cls(
            layer_params=sum(size for name, size in sizes.items() if name.startswith("blk.")),
            head_params=sizes.get("output.weight", sizes["token_embd.weight"]),
            kv_values_per_token=2 * layers * number("attention.head_count_kv") * (width // heads),
            attention_width=layers * width,
        )

    def limit_tokens_per_s(self, workload: Workload, bytes_per_s: float, flops: float) -> float:
        """Tokens/s if decode only read memory, or if prefill only multiplied."""
        if workload.is_prefill:
            tokens = workload.prompt_tokens
            # Scores and weighted values take 2 * 2 FLOP a pair and channel; half of the pairs are causal.
            attention = 2 * 2 * self.attention_width * tokens**2 / 2
            work = 2 * self.layer_params * tokens + 2 * self.head_params + attention
            return flops * tokens / work
        context = workload.prompt_tokens + workload.new_tokens / 2
        values = self.layer_params + self.head_params + workload.prompts * context * self.kv_values_per_token
        return bytes_per_s * workload.prompts / (values * FLOAT32_BYTES)


def memory_bandwidth(threads: int) -> float:
    """Bytes/s that `threads` threads read from memory, best of five passes over 256 MB each."""
    arrays = reading_arrays(threads, threads << 28)
    return max(read_rate(arrays) for _ in range(5))


def reading_arrays(threads: int, nbytes: int) -> list[np.ndarray]:
    """One int64 array a thread, `nbytes` in all."""
    return [np.ones(nbytes // 8 // threads, np.int64) for _ in range(threads)]


def read_rate(arrays: Sequence[np.ndarray]) -> float:
    """Bytes/s of one pass over the arrays, each read by a thread of its own."""
    with ThreadPoolExecutor(len(arrays)) as pool:
        start = time.perf_counter()
        list(pool.map(np.bitwise_or.reduce, arrays))
        return sum(array.nbytes for array in arrays) / (time.perf_counter() - start)


def product_rate(left: np.ndarray, right: np.ndarray) -> float:
    """FLOP/s of NumPy's product of two square matrices, which uses all threads."""
    start = time.perf_counter()
    left @ right
    return 2 * left.shape[0] ** 3 / (time.perf_counter() - start)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache_bytes() -> int:
    """Size of the largest cache, or 32 MiB where the system does not tell."""
    sizes = [_cache_bytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=0) or 32 << 20


def _cache_bytes(path: Path) -> int:
    text = path.read_text().strip()
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text.rstrip("KMG")) * units.get(text[-1:], 1)


def processor_name() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
