"""What drafts bring: tokens a second of one user with drafts and without, on texts that repeat and one that does not.

    python -m bench drafts [--model smollm2-135m] [--draft-tokens 7] [--tokens 128] [--rounds 3] [--output REPORT.json]

Both runners serve the same weights, rounds take turns, and every token must be the same. Answers are greedy, but for
the free text, which a small model would soon repeat: it is drawn at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.arguments import output_file, positive_int
from resin import Engine, ResinError, SamplingParams
from resin.models.registry import DEFAULT_MODEL

_CODE = '''class Counter:
    """Counts words of a text."""

    def __init__(self, text):
        self.count = {}
        for word in text.split():
            self.count[word] = self.count.get(word, 0) + 1

    def most_common(self, number):
        pairs = sorted(self.count.items(), key=lambda pair: -pair[1])
        return pairs[:number]

    def total(self):
        return sum(self.count.values())
'''
_REPORT = (
    "The harbour of Lindau was closed for three days. A storm had torn the moorings of eleven boats, and two of them "
    "sank near the lighthouse. Nobody was hurt, because the crews had been ashore since the evening before. Divers "
    "reported that one of the wrecks blocks the fairway. The town expects the repairs to cost four hundred thousand "
    "francs, and asks the canton to pay half of it. Ferries will use the eastern pier until the fairway is free."
)
_FREE = "free text"
PROMPTS = {
    "code edit": f"Rename the class to WordCounter. File:\n```python\n{_CODE}```\nChanged file:\n```python\n",
    "summary": f"Report: {_REPORT}\n\nThe most important sentences of the report, word by word: The harbour of",
    _FREE: "My grandmother kept bees, and every summer she told me",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One text: medians over the rounds.

    Attributes:
        plain_tokens_per_s, drafted_tokens_per_s: of the answer after its first token.
        ratio: of the second to the first, round by round.
        tokens_per_step: tokens that a decode step gave with drafts.
        tried, agreed: drafts that steps checked, and those that held.
    """

    text: str
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    ratio: float
    tokens_per_step: float
    tried: int
    agreed: int


class TokensDiffer(ResinError):
    """Drafts changed a token, which they must not."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench drafts", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"registered name, path or hub id; default {DEFAULT_MODEL}"
    )
    parser.add_argument("--draft-tokens", type=positive_int, default=7, help="drafts a step checks at most (default 7)")
    parser.add_argument("--tokens", type=positive_int, default=128, help="tokens of each answer (default 128)")
    parser.add_argument("--rounds", type=positive_int, default=3, help="of each text (default 3)")
    parser.add_argument("--output", type=output_file, help="JSON report to write")
    args = parser.parse_args(argv)
    results = measure(args.model, args.draft_tokens, args.tokens, args.rounds)
    print(f"{'text':12} {'plain':>8} {'drafts':>8} {'ratio':>6} {'tokens a step':>14} {'held':>10}")
    for found in results:
        held = f"{found.agreed}/{found.tried}"
        speeds = f"{found.plain_tokens_per_s:8.1f} {found.drafted_tokens_per_s:8.1f} {found.ratio:6.2f}"
        print(f"{found.text:12} {speeds} {found.tokens_per_step:14.2f} {held:>10}")
    if args.output is not None:
        Path(args.output).write_text(
            json.dumps([asdict(found) for found in results], indent=1) + "\n", encoding="utf-8"
        )
    return 0


def measure(model: str, draft_tokens: int, tokens: int, rounds: int) -> list[Result]:
    """Every text in turns with drafts and without.

    Raises:
        TokensDiffer: the answers are not the same.
    """
    from resin.runtime import RunnerOptions, load_runner

    runners = [
        load_runner(model, RunnerOptions(max_sequences=1, max_context_tokens=1024, draft_tokens=count))
        for count in (0, draft_tokens)
    ]
    with Engine(runners[0], enable_metrics=False) as plain, Engine(runners[1], enable_metrics=False) as drafted:
        for runner in runners:
            runner.warm_up()
        print(f"runs with: {drafted.resolved}", file=sys.stderr)
        encode = runners[0].tokenizer.encode
        return [_measure(name, encode(text), plain, drafted, tokens, rounds) for name, text in PROMPTS.items()]


def _measure(name: str, prompt: Sequence[int], plain: Engine, drafted: Engine, tokens: int, rounds: int) -> Result:
    pairs, drafts = [], drafted.scheduler.drafts
    params = SamplingParams(max_output_tokens=tokens, temperature=float(name == _FREE), seed=1, ignore_stop=True)
    before = int(drafts.tried.sum()), int(drafts.agreed.sum())
    for _ in range(rounds):
        one, other = (_answer(engine, prompt, params) for engine in (plain, drafted))
        if one.token_ids != other.token_ids:
            place = next(
                i for i, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if len(set(pair)) > 1
            )
            raise TokensDiffer(
                f"{name}: token {place} is {other.token_ids[place]}, without drafts {one.token_ids[place]}"
            )
        pairs.append((one, other))
    return Result(
        text=name,
        plain_tokens_per_s=statistics.median(one.tokens_per_s for one, _ in pairs),
        drafted_tokens_per_s=statistics.median(other.tokens_per_s for _, other in pairs),
        ratio=statistics.median(other.tokens_per_s / one.tokens_per_s for one, other in pairs),
        tokens_per_step=float(np.mean([(tokens - 1) / other.steps for _, other in pairs])),
        tried=int(drafts.tried.sum()) - before[0],
        agreed=int(drafts.agreed.sum()) - before[1],
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: list[int]
    tokens_per_s: float
    steps: int  # that brought tokens after the first


def _answer(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> _Answer:
    request = engine.submit(prompt, sampling_params=params)
    started_s, steps, known = 0.0, -1, 0
    while engine.has_work():
        engine.step()
        if len(request.output_ids) > known:
            known, steps = len(request.output_ids), steps + 1
            started_s = started_s or time.perf_counter()
    return _Answer(request.take_result(), (known - 1) / (time.perf_counter() - started_s), steps)
