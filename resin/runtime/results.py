"""What a dispatched plan brings: device arrays on their way to the host, and the ForwardOutput made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from resin.plan import BatchPlan, ForwardOutput, Phase, RowFlag
from resin.plan.output import DRAFT_REPORT
from resin.runtime.executable import StepOutput


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched plan whose results are on their way to the host.

    Attributes:
        results: the part of the output that the plan's rows asked for.
    """

    plan: BatchPlan
    output: StepOutput
    results: Sequence[jax.Array]

    @classmethod
    def of(cls, plan: BatchPlan, output: StepOutput) -> StepHandle:
        return cls(plan, output, _wanted(plan, output))

    def read(self) -> ForwardOutput:
        """Waits for the results."""
        plan, output = self.plan, self.output
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


def _wanted(plan: BatchPlan, output: StepOutput) -> list[jax.Array]:
    """Outputs that this plan's rows asked for; the rest stays on the device."""
    flags = np.bitwise_or.reduce(plan.row_flags)
    leaves = [output.token_ids]
    if output.drafting is not None:
        leaves.append(output.drafting)
    if flags & RowFlag.LOGPROBS:
        assert output.logprobs is not None
        leaves += output.logprobs
    if flags & RowFlag.PROMPT_LOGPROBS and plan.phase is Phase.PREFILL and output.prompt is not None:
        leaves += output.prompt
    return leaves
