"""Multiple-choice questions: accuracy of a model behind a server.

A file has one JSON object a line: `id`, `question` or `context`, `choices` or `endings` (texts), `answer` (index), and
optionally `context_ids` and `choices_ids`: the same as the token ids to send.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.check_server.answers import read_chat
from bench.check_server.api import COMPLETIONS, Api, Reply
from bench.check_server.outcome import Figures, require
from resin import InvalidRequest

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Item:
    """A question; `context` is what a choice is appended to, after a space, and `ids` both as token ids, if given."""

    id: str
    context: str
    question: str
    choices: tuple[str, ...]
    answer: int
    ids: tuple[list[int], list[list[int]]] | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    min_accuracy: less than this is a failure.
    reference: log-likelihoods by item, to be met within `tolerance`.
    """

    concurrency: int = 32
    answer_tokens: int = 8
    min_accuracy: float = 0.0
    reference: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tolerance: float = 2e-3


def read_items(path: Path, limit: int) -> list[Item]:
    """The first `limit` questions of a file.

    Raises:
        InvalidRequest: a line is no question.
    """
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit], start=1):
        try:
            row = json.loads(line)
            question = row["question"] if "question" in row else row["context"]
            # Endings continue their context; choices answer a question.
            context = row["context"] if "context" in row else f"Question: {question}\nAnswer:"
            choices = tuple(row["endings"] if "endings" in row else row["choices"])
            ids = (list(row["context_ids"]), list(row["choices_ids"])) if "choices_ids" in row else None
            item = Item(str(row.get("id", number)), context, question, choices, int(row["answer"]), ids)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "eval_file", f"line {number} of {path.name}", f"a multiple-choice question ({error!r})"
            ) from None
        if not 2 <= len(item.choices) <= len(LETTERS) or not 0 <= item.answer < len(item.choices):
            raise InvalidRequest(
                "eval_file", f"line {number} of {path.name}", "2 to 26 choices, and an answer among them"
            )
        items.append(item)
    return items


def read_reference(path: Path) -> dict[str, list[float]]:
    """Every object of a JSON file that has `id` and `sums`, wherever it stands."""
    found: dict[str, list[float]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict) and "id" in value and "sums" in value:
            found[str(value["id"])] = [float(number) for number in value["sums"]]
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                walk(inner)

    walk(json.loads(path.read_text(encoding="utf-8")))
    return found


async def check_evaluation(api: Api, figures: Figures, items: Sequence[Item], settings: Settings) -> None:
    """Scores each question by log-likelihood if the server gives logprobs of prompts, else by the letter it answers."""
    scores = await _scores_prompts(api)
    figures["method"] = "log-likelihood" if scores else "letter"
    gate = asyncio.Semaphore(settings.concurrency)

    async def one(item: Item) -> dict[str, Any]:
        async with gate:
            return await (_by_likelihood(api, item) if scores else _by_letter(api, item, settings.answer_tokens))

    rows = await asyncio.gather(*map(one, items))
    figures["questions"] = len(items)
    for name in ("pick", "pick_normalised"):
        if name in rows[0]:
            right = sum(row[name] == item.answer for row, item in zip(rows, items, strict=True))
            figures["accuracy" + name.removeprefix("pick")] = round(right / len(items), 4)
    if not scores:
        figures["unreadable"] = sum(row["pick"] is None for row in rows)
    figures["items"] = rows
    if settings.reference:
        _compare(rows, settings, figures)
    require(not figures.get("unreadable", 0) > len(items) / 2, "most answers are no letter")
    require(
        figures["accuracy"] >= settings.min_accuracy,
        f"accuracy {figures['accuracy']} is below {settings.min_accuracy}",
    )


async def _scores_prompts(api: Api) -> bool:
    prompt = "The quick brown fox"
    reply = await _score(api, prompt)
    if reply.status != 200:
        return False
    choice = reply.json()["choices"][0]
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return choice["text"].startswith(prompt) and len(values) >= 3 and all(value is not None for value in values[1:3])


async def _score(api: Api, prompt: str | list[int]) -> Reply:
    # Some servers refuse to generate nothing; the one token that they add lies beyond the prompt and is left out.
    reply = await api.post(COMPLETIONS, api.completion_body(prompt, max_tokens=0, echo=True, logprobs=1))
    if reply.status == 200 or reply.status >= 500:
        return reply
    return await api.post(COMPLETIONS, api.completion_body(prompt, max_tokens=1, echo=True, logprobs=1))


async def _by_likelihood(api: Api, item: Item) -> dict[str, Any]:
    sums = []
    for index, choice in enumerate(item.choices):
        if item.ids is not None:
            context, continuation = item.ids[0], item.ids[1][index]
            found = (await _score(api, context + continuation)).ok()["choices"][0]["logprobs"]
            values = found["token_logprobs"][len(context) : len(context) + len(continuation)]
        else:
            prompt = f"{item.context} {choice}"
            found = (await _score(api, prompt)).ok()["choices"][0]["logprobs"]
            pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
            values = [value for offset, value in pairs if len(item.context) <= offset < len(prompt)]
        require(values and all(math.isfinite(value) for value in values), f"{item.id}: no logprobs for {choice!r}")
        sums.append(round(sum(values), 4))
    normalised = [total / max(1, len(choice)) for total, choice in zip(sums, item.choices, strict=True)]
    return {
        "id": item.id,
        "sums": sums,
        "pick": sums.index(max(sums)),
        "pick_normalised": normalised.index(max(normalised)),
    }


async def _by_letter(api: Api, item: Item, max_tokens: int) -> dict[str, Any]:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, item.choices, strict=False)]
    text = "\n".join([item.question, *lines, "Answer with the letter of the right choice and nothing else."])
    said = read_chat((await api.chat(text, max_tokens=max_tokens)).ok()).text
    found = re.search(rf"\b[{LETTERS[: len(item.choices)]}]\b", said)
    return {"id": item.id, "said": said[:40], "pick": None if found is None else LETTERS.index(found[0])}


def _compare(rows: Sequence[Mapping[str, Any]], settings: Settings, figures: Figures) -> None:
    pairs = [(row, settings.reference[row["id"]]) for row in rows if row["id"] in settings.reference and "sums" in row]
    require(pairs, "the reference has none of these questions, or the server gives no logprobs of prompts")
    differences = {
        row["id"]: max(abs(own - other) for own, other in zip(row["sums"], sums, strict=True)) for row, sums in pairs
    }
    beyond = {name: round(value, 4) for name, value in differences.items() if value > settings.tolerance}
    within = [value for value in differences.values() if value <= settings.tolerance]
    figures["compared"], figures["beyond_tolerance"] = len(pairs), beyond
    figures["largest_difference_within"] = round(max(within, default=0.0), 5)
    require(not beyond, f"log-likelihoods differ by more than {settings.tolerance}: {beyond}")
