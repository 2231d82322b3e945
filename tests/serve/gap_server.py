"""`resin serve` over a scripted runner and a real tokenizer: the process that test_stream_gaps measures."""

from __future__ import annotations

import sys
from typing import Any

from resin import Engine
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import get_native_recipe
from resin.recipes.tokenizer import ChatTokenizer
from serve import cli
from serve.commands import serving
from serve.loaded_model import LoadedModel
from tests.recipes.byte_tokenizer import CONTROLS
from tests.recipes.tiny_tokenizers import byte_level
from tests.serve.scripted_runner import ScriptedRunner

STEP_S = 0.005
CONTEXT_TOKENS = 1 << 18


def load(args: Any) -> LoadedModel:
    # The longest control token makes a text of 15 MB one that might fit, so that it has to be encoded.
    tokenizer = ChatTokenizer(byte_level(list(CONTROLS)), eos_ids=[256 + CONTROLS.index("<|im_end|>")])
    # Steps stay short however long a prompt is: their length is the runner's affair.
    runner = ScriptedRunner(
        default="abcdefghij" * 100_000,
        step_s=STEP_S,
        max_context_tokens=CONTEXT_TOKENS,
        max_plan_tokens=1024,
        tokenizer=tokenizer,
    )
    recipe = get_native_recipe("qwen3", tokenizer)
    return LoadedModel("scripted", Engine(runner), tokenizer, recipe, SamplingDefaults())


if __name__ == "__main__":
    serving.load_model = load
    sys.exit(cli.main(["serve", "--port", "0", "--max-active-sessions", "256", *sys.argv[1:]]))
