"""Loads a made-up sharded bfloat16 checkpoint and reports how much anonymous memory that took.

    python -m tests.models.loading_memory DIRECTORY MEGABYTES

Prints one JSON object; run it in a process of its own, so that nothing else is measured.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.loading import TensorInfo, open_checkpoint_path
from resin.models.loading.safetensors_writer import stream_safetensors, write_index
from resin.models.testing import TINY_CONFIGS
from resin.models.weights import AbstractModel, load_weights
from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh

SHARDS = 4
LAYERS = 32
HEADS = 16


def sized_config(megabytes: float) -> dict[str, object]:
    """A Llama of 32 layers with about so many megabytes of bfloat16: a layer has 13.5 hidden^2 numbers."""
    hidden = int((megabytes * 1e6 / 2 / LAYERS / 13.5) ** 0.5) // 64 * 64
    return {
        **TINY_CONFIGS["llama"],
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 3 // 64 * 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    }


def rss_anon_bytes() -> int:
    """Anonymous memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def write_shards(directory: Path, config: dict[str, object]) -> AbstractModel:
    """Writes every declared tensor, one at a time, over four files with an index."""
    model_class = find_model_class(config)
    model = AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement("bfloat16")))
    infos = {
        name: TensorInfo(shape, "bfloat16")
        for item in model.declarations
        for name, shape in zip(item.sources, item.assembly.source_shapes(item.shape), strict=True)
    }
    names = list(infos)
    pattern = np.linspace(-1, 1, 1 << 16, dtype=np.float32).astype(ml_dtypes.bfloat16)
    shards = {f"model-{index + 1}-of-{SHARDS}.safetensors": names[index::SHARDS] for index in range(SHARDS)}
    directory.mkdir(parents=True, exist_ok=True)
    for file, held in shards.items():
        stream_safetensors(
            directory / file, {name: infos[name] for name in held}, lambda name: np.resize(pattern, infos[name].shape)
        )
    write_index(directory, shards)
    (directory / "config.json").write_text(json.dumps(config))
    return model


def main() -> None:
    """Writes, loads and measures."""
    directory, megabytes = Path(sys.argv[1]), float(sys.argv[2])
    model = write_shards(directory, sized_config(megabytes))
    mesh = build_mesh(RunnerOptions())
    before = peak = rss_anon_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, rss_anon_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    calls: list[int] = []
    started = time.perf_counter()
    checkpoint = open_checkpoint_path(directory)
    weights = load_weights(model, checkpoint, mesh, progress=lambda what, count, total: calls.append(count))
    checkpoint.close()
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    size = sum(array.nbytes for array in weights)
    print(
        json.dumps(
            {
                "bytes": size,
                "peak_share": (peak - before) / size,
                "seconds": seconds,
                "progress_calls": len(calls),
                "progress_rises": calls == sorted(calls) and calls[-1] == size,
            }
        )
    )


if __name__ == "__main__":
    main()
