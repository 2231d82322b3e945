"""The two engines of `bench.cpu_compare`, each in a process of its own.

A worker reads one JSON command a line from standard input and answers with one JSON line. It imports its own engine
only, so the two may run in different Python environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol


class TimedEngine(Protocol):
    """Greedy generation with times. All prompts run as one batch and have equal length."""

    def describe(self) -> dict[str, Any]: ...

    def generate(self, prompts: list[list[int]], new_tokens: int, *, gaps: bool = False) -> dict[str, Any]:
        """Generates exactly `new_tokens` tokens a prompt.

        Returns:
            `token_ids` per prompt; `first_s`, seconds until every prompt has its first token; `decode_s` and
            `decode_tokens`, the seconds after that and the tokens that came in them; with `gaps`, where the engine
            offers it, the distance between the two largest logits at each place.
        """
        ...


class TransformersEngine:
    """The model in transformers, float32, with a bare loop: less overhead than its `generate`."""

    def __init__(self, gguf: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def describe(self) -> dict[str, Any]:
        import transformers

        return {"transformers": transformers.__version__, "torch": self._torch.__version__}

    def generate(self, prompts: list[list[int]], new_tokens: int, *, gaps: bool = False) -> dict[str, Any]:
        from transformers import DynamicCache

        torch = self._torch
        columns, gap_columns = [], []
        with torch.inference_mode():
            start = time.perf_counter()
            first = start
            cache = DynamicCache(config=self._model.config)
            inputs = torch.tensor(prompts)
            for place in range(new_tokens):
                logits = self._model(inputs, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
                inputs = logits.argmax(-1, keepdim=True)
                columns.append(inputs[:, 0].tolist())
                if place == 0:
                    first = time.perf_counter()
                if gaps:
                    best = logits.topk(2).values
                    gap_columns.append((best[:, 0] - best[:, 1]).tolist())
            end = time.perf_counter()
        return {
            "token_ids": list(zip(*columns, strict=True)),
            "first_s": first - start,
            "decode_s": end - first,
            "decode_tokens": len(prompts) * (new_tokens - 1),
            "gaps": list(zip(*gap_columns, strict=True)),
        }

    def matmul_flops(self) -> float:
        """Best float32 matrix product rate, FLOP/s: the limit of prefill."""
        torch = self._torch
        size, best_s = 2048, float("inf")
        left, right = torch.ones(size, size), torch.ones(size, size)
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(left, right)
            best_s = min(best_s, time.perf_counter() - start)
        return 2 * size**3 / best_s


class ResinEngine:
    """The model in Resin on the CPU, float32, through the Engine."""

    def __init__(self, gguf: Path, _threads: int) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from resin import Engine
        from resin.runtime import RunnerOptions, load_runner

        self._runner = load_runner(str(gguf), RunnerOptions())
        self._engine = Engine(self._runner, context_length=1024)

    def describe(self) -> dict[str, Any]:
        import jax

        return {"jax": jax.__version__, "python": sys.version.split()[0]}

    def encode(self, text: str) -> list[int]:
        return list(self._runner.tokenizer.encode(text))

    def generate(self, prompts: list[list[int]], new_tokens: int, *, gaps: bool = False) -> dict[str, Any]:
        from resin import SamplingParams, TokensEvent

        params = SamplingParams(max_output_tokens=new_tokens, temperature=0.0)
        start = time.perf_counter()
        requests = [self._engine.submit(prompt, sampling_params=params) for prompt in prompts]
        waiting = {request.id for request in requests}
        first, decode_tokens = start, 0
        while self._engine.has_work():
            for event in self._engine.step():
                if not isinstance(event, TokensEvent):
                    continue
                if not waiting:
                    decode_tokens += len(event.token_ids)
                    continue
                waiting -= {request.id for request in event.requests}
                first = time.perf_counter()
        end = time.perf_counter()
        return {
            "token_ids": [request.take_result() for request in requests],
            "first_s": first - start,
            "decode_s": end - first,
            "decode_tokens": decode_tokens,
            "gaps": [],
        }


ENGINES: dict[str, type] = {"resin": ResinEngine, "transformers": TransformersEngine}


def main() -> None:
    """Arguments: engine name, GGUF file, threads."""
    name, gguf, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    # Answers have a channel of their own: libraries print to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):  # XLA sizes its thread pool by the cores it may use
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    engine = ENGINES[name](gguf, threads)
    print(json.dumps(engine.describe()), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(engine, command.pop("method"))(**command)
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
