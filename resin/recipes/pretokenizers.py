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
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Attributes:
    pattern: regular expression whose matches are the words, or None for the byte-level default.
    single_digits: every digit is a word of its own, before the byte-level default cuts.
    ignore_merges: a word that is in the vocabulary as a whole is taken as it is.
    nfc: text is brought to Unicode normal form C first.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            cut = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        default = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.single_digits:
            return default
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), default])

    def build_normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": PreTokenizer(_LLAMA3, ignore_merges=True),
    "lfm2": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "gpt-4o": PreTokenizer(_GPT4O, ignore_merges=True),
}
