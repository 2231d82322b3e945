"""A runner that says what a test wrote down: NumPy only, one `forward`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from resin import BatchPlan, ForwardOutput, RowFlag, RunnerConfig
from resin.recipes import Tokenizer
from tests.recipes.byte_tokenizer import ByteTokenizer

CHOSEN_LOGPROB, OTHER_LOGPROB, PROMPT_LOGPROB = -0.25, -2.5, -1.5
TOKENIZER = ByteTokenizer()


class ScriptedRunner:
    """Continues sequences by script.

    A response belongs to every prompt that holds its key; of several keys the one that stands last in the prompt
    counts, and other prompts get `default`. After its last token the response repeats the end token. Rows with a mask
    take the scripted token if it is allowed, else the end token, else the highest allowed byte above a space, else the
    highest allowed token.
    """

    def __init__(
        self,
        *,
        default: str = "Hello!",
        step_s: float = 0.0,
        max_sequences: int = 256,
        max_context_tokens: int = 4096,
        max_plan_tokens: int = 8192,
        tokenizer: Tokenizer = TOKENIZER,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = RunnerConfig(
            vocab_size=tokenizer.vocab_size,
            max_sequences=max_sequences,
            max_context_tokens=max_context_tokens,
            max_plan_tokens=max_plan_tokens,
        )
        self.step_s = step_s
        self.fails_with: Exception | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.steps = 0
        self._end = tokenizer.eos_ids[0]
        self._default = tokenizer.encode(default)
        self._responses: dict[bytes, list[int]] = {}
        self._sequences: dict[int, list[int]] = {}
        self._plans: dict[int, tuple[int, list[int]]] = {}

    def answer(self, key: str, response: str | Sequence[int]) -> None:
        """Prompts that hold `key` are continued with `response`."""
        ids = self.tokenizer.encode(response) if isinstance(response, str) else list(response)
        self._responses[key.encode()] = ids

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        self.before_step()
        if self.fails_with is not None:
            raise self.fails_with
        if self.step_s:
            time.sleep(self.step_s)
        self.steps += 1
        tokens = np.zeros(plan.num_sequences, np.int32)
        indptr = plan.query_indptr.tolist()
        flags = plan.row_flags.tolist()
        emitted = [bool(flag & RowFlag.EMIT) for flag in flags[: plan.num_sequences]]
        for row in range(plan.num_sequences):
            new = plan.token_ids[indptr[row] : indptr[row + 1]].tolist()
            token = self._advance(plan, row, new, flags[row])
            if emitted[row]:
                tokens[row] = token
        return ForwardOutput(
            token_ids=tokens[np.asarray(emitted, bool)],
            token_indptr=np.concatenate([[0], np.cumsum(emitted)]),
            **_logprobs(plan, tokens[np.asarray(emitted, bool)]),
        )

    def _advance(self, plan: BatchPlan, row: int, new: list[int], flag: int) -> int:
        slot = int(plan.slots[row])
        start = int(plan.seq_lens[row]) - len(new)
        if not flag & RowFlag.FROM_SLOT:
            known = self._sequences.setdefault(slot, [])
            known[start:] = new
            if start == 0:
                self._plans.pop(slot, None)
        if not flag & RowFlag.EMIT:
            return 0
        sequence = self._sequences[slot]
        if slot not in self._plans:
            self._plans[slot] = self._response_to(sequence)
        prompt_length, response = self._plans[slot]
        place = len(sequence) - prompt_length
        token = response[place] if place < len(response) else self._end
        if flag & RowFlag.MASK and plan.allowed_masks is not None:
            token = self._allowed(plan.allowed_masks[np.searchsorted(plan.masked_rows, row)], token)
        sequence.append(token)
        return token

    def _response_to(self, sequence: list[int]) -> tuple[int, list[int]]:
        if not self._responses:
            return len(sequence), self._default
        data = bytes(min(token, 255) for token in sequence)
        found = max(((data.rfind(key), response) for key, response in self._responses.items()), default=(-1, []))
        return len(sequence), found[1] if found[0] >= 0 else self._default

    def _allowed(self, words: np.ndarray, token: int) -> int:
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.config.vocab_size]
        if bits[token]:
            return token
        if bits[self._end]:
            return self._end
        choices = np.flatnonzero(bits)
        visible = choices[(choices > ord(" ")) & (choices < 256)]
        return int(visible[-1]) if visible.size else int(choices[-1])


def _logprobs(plan: BatchPlan, tokens: np.ndarray) -> dict[str, np.ndarray]:
    width = plan.top_logprobs

    def top(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids = (chosen[:, None] + np.arange(width)) % 250
        values = np.full((len(chosen), width), OTHER_LOGPROB, np.float32)
        if width:
            ids[:, 0], values[:, 0] = chosen, CHOSEN_LOGPROB
        return ids.astype(np.int32), values

    columns: dict[str, np.ndarray] = {"logprobs": np.full(len(tokens), CHOSEN_LOGPROB, np.float32)}
    columns["top_ids"], columns["top_logprobs"] = top(tokens)
    if (plan.row_flags[: plan.num_sequences] & RowFlag.PROMPT_LOGPROBS).any():
        columns["prompt_logprobs"] = np.full(plan.num_tokens, PROMPT_LOGPROB, np.float32)
        columns["prompt_top_ids"], columns["prompt_top_logprobs"] = top(plan.token_ids[: plan.num_tokens])
    return columns
