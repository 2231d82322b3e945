"""How each tokenizer kind named in GGUF metadata cuts text before byte-pair merging.

The names are the values of `tokenizer.ggml.pre`; the patterns are those of the models' published tokenizer files.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+<contractions>"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*<contractions>"
    r"|<numbers>| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
)
_GPT4O = _CASED.replace("<contractions>", _CONTRACTIONS + "?").replace("<numbers>", r"\p{N}{1,3}")
_TEKKEN = _CASED.replace("<contractions>", "").replace("<numbers>", r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Attributes:
    patterns: regular expressions, each cutting what the one before left whole; none is the byte-level default.
    single_digits: every digit is a word of its own, before the byte-level default cuts.
    ignore_merges: a word that is in the vocabulary as a whole is taken as it is.
    nfc: text is brought to Unicode normal form C first.
    adds_bos: files of this kind that do not say so start a text with bos.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.patterns:
            cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
            return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        default = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.single_digits:
            return default
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), default])

    def build_normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3_KIND = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN2_KIND = PreTokenizer((_QWEN2,), nfc=True)
_CL100K_KIND = PreTokenizer((_LLAMA3,))

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "exaone4": PreTokenizer(),
    "olmo": PreTokenizer(),
    "refact": PreTokenizer(single_digits=True),  # Granite 3
    "smollm": PreTokenizer(single_digits=True),
    "chatglm-bpe": _CL100K_KIND,
    "dbrx": _CL100K_KIND,  # OLMo 2 and 3
    "glm4": _CL100K_KIND,
    "smaug-bpe": _CL100K_KIND,  # SmolLM3
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "pixtral": _LLAMA3_KIND,
    "lfm2": PreTokenizer((_LLAMA3,), adds_bos=True),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "gpt-4o": PreTokenizer((_GPT4O,), ignore_merges=True),
    "llama4": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
