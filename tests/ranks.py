"""A rank as a process: `python -m tests.ranks RANK PROCESSES PORT WHAT`, over a tiny model of random weights.

Rank 0 prints one JSON line of tokens and then does WHAT: "end", or "go on" until something stops it.
"""

from __future__ import annotations

import json
import os
import sys

import jax

from resin import Engine, EngineFailed, SamplingParams
from resin.runtime import ModelRunner, RunnerOptions, build_runner
from resin.runtime.worker import RankLost, Ranks, Worker, digest_of
from resin.topology import Launch
from tests.runtime.tiny_runner import tiny_checkpoint

OPTIONS = {
    "max_sequences": 4,
    "max_context_tokens": 128,
    "decode_sequences": (4,),
    "prefill_tokens": (32,),
    "page_tokens": 16,
    "compile_cache_bytes": 0,
}
PROMPTS = [[3 + 5 * i + j for j in range(6 + i)] for i in range(4)]


def build(tp: int, **named: object) -> ModelRunner:
    return build_runner(tiny_checkpoint("llama"), RunnerOptions(tp=tp, **OPTIONS), **named)  # type: ignore[arg-type]


def generate(engine: Engine) -> list[list[int]]:
    """Answers of every prompt; one of them sampled, one with penalties."""
    params = [
        SamplingParams(max_output_tokens=12, temperature=0, ignore_stop=True),
        SamplingParams(max_output_tokens=12, temperature=0.8, seed=7, ignore_stop=True),
        SamplingParams(max_output_tokens=12, temperature=0, presence_penalty=0.5, ignore_stop=True),
    ]
    requests = [engine.submit(prompt, sampling_params=params[i % 3]) for i, prompt in enumerate(PROMPTS)]
    while engine.has_work():
        engine.step()
    return [request.take_result() for request in requests]


def say(told: object) -> None:
    print(json.dumps(told), flush=True)


def leave(error: BaseException) -> None:
    """Ends the process at once: what runs on the devices may never end."""
    print(f"resin: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def main(rank: int, processes: int, port: int, what: str) -> None:
    launch = Launch(processes, rank, f"127.0.0.1:{port}")
    digest = digest_of("other" if what == "other" else "same")
    try:
        if rank == 0:
            ranks = Ranks(launch, digest)
            ranks.gather(60)
        else:
            worker = Worker(launch, digest, timeout_s=60)
            worker.on_lost = leave
    except RankLost as error:
        leave(error)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(launch.coordinator, processes, rank)
    if rank:
        worker.follow(build(jax.device_count()))
        return
    try:
        with Engine(build(jax.device_count(), make=ranks.make_runner), prefix_cache=True) as engine:
            say(generate(engine))
            while what == "go on":
                generate(engine)
    except (EngineFailed, RankLost) as error:
        leave(error)
    ranks.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
