"""What a dispatched plan brings: device arrays on their way to the host, and the ForwardOutput made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from resin.plan import BatchPlan, ForwardOutput, Phase, RowFlag, StepPlan
from resin.plan.layout import HEADER
from resin.plan.output import DRAFT_REPORT
from resin.runtime.executable import StepOutput


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched step whose results are on their way to the host.

    Attributes:
        step: plans of all replicas.
        output: theirs, one below the other.
        results: the part of the output that the plans' rows asked for.
    """

    step: StepPlan
    output: StepOutput
    results: Sequence[jax.Array]

    @classmethod
    def of(cls, step: StepPlan, output: StepOutput) -> StepHandle:
        return cls(step, output, _wanted(step, output))

    def read(self) -> list[ForwardOutput]:
        """Waits for the results, of each plan."""
        wanted = {id(leaf): np.asarray(leaf) for leaf in self.results}
        count = len(self.step.plans)

        def share(leaf: jax.Array, replica: int) -> np.ndarray | None:
            whole = wanted.get(id(leaf))
            if whole is None or count == 1:
                return whole
            rows = len(whole) // count
            return whole[replica * rows : (replica + 1) * rows]

        parts = [jax.tree.map(partial(share, replica=replica), self.output) for replica in range(count)]
        return [_output_of(plan, part) for plan, part in zip(self.step.plans, parts, strict=True)]


def _output_of(plan: BatchPlan, output: StepOutput) -> ForwardOutput:
    """What a plan's rows asked for, of its own part of the results."""
    counts = plan.emits.astype(np.int32)
    fields: dict[str, np.ndarray] = {}
    if output.drafting is not None:
        drafting = fields["drafting"] = np.asarray(output.drafting)[: plan.num_sequences]
        if plan.bucket.width > 1:
            counts *= 1 + drafting[:, DRAFT_REPORT.agreed]
    indptr = np.zeros(plan.num_sequences + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    emits = np.repeat(np.arange(plan.num_sequences), counts)  # of rows with logprobs each one token
    flags = np.bitwise_or.reduce(plan.row_flags)
    if flags & RowFlag.LOGPROBS:
        assert output.logprobs is not None
        chosen, top_ids, top = (np.asarray(leaf)[emits] for leaf in output.logprobs)
        fields |= {"logprobs": chosen, "top_ids": top_ids, "top_logprobs": top}
    if flags & RowFlag.PROMPT_LOGPROBS and output.prompt is not None:
        chosen, top_ids, top = (np.asarray(leaf)[: plan.num_tokens] for leaf in output.prompt)
        fields |= {"prompt_logprobs": chosen, "prompt_top_ids": top_ids, "prompt_top_logprobs": top}
    for name in ("top_ids", "top_logprobs", "prompt_top_ids", "prompt_top_logprobs"):
        if name in fields:
            fields[name] = fields[name][:, : plan.top_logprobs]
    tokens = np.asarray(output.token_ids)[: plan.num_sequences]
    token_ids = tokens[np.arange(tokens.shape[1])[None, :] < counts[:, None]]
    return ForwardOutput(token_ids=token_ids, token_indptr=indptr, **fields)


def _wanted(step: StepPlan, output: StepOutput) -> list[jax.Array]:
    """Outputs that the plans' rows asked for; the rest stays on the device."""
    flags = np.bitwise_or.reduce([plan.buffer[HEADER.any_flags] for plan in step.plans])
    leaves = [output.token_ids]
    if output.drafting is not None:
        leaves.append(output.drafting)
    if flags & RowFlag.LOGPROBS:
        assert output.logprobs is not None
        leaves += output.logprobs
    if flags & RowFlag.PROMPT_LOGPROBS and step.bucket.phase is Phase.PREFILL and output.prompt is not None:
        leaves += output.prompt
    return leaves
