"""Builds a `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from resin.models.loading import CheckpointError
from resin.recipes.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece vocabularies


class _Vocabulary:
    """The tokenizer keys of one file, checked."""

    def __init__(self, metadata: Mapping[str, Any], location: str) -> None:
        self.metadata = metadata
        self.location = location
        self.tokens: list[str] = self.texts("tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise CheckpointError(location, "metadata tokenizer.ggml.tokens holds a token twice")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(self.tokens))
        if not isinstance(types, list) or len(types) != len(self.tokens):
            raise CheckpointError(location, "metadata tokenizer.ggml.token_type does not match the tokens in length")
        self.types: list[Any] = types

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def texts(self, key: str) -> list[str]:
        values = self.get(key)
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise CheckpointError(self.location, f"metadata tokenizer.ggml.{key} is not a list of texts")
        return values

    def of_kind(self, kind: int) -> list[str]:
        return [token for token, given in zip(self.tokens, self.types, strict=True) if given == kind]

    def added_tokens(self, *, normalized: bool) -> list[AddedToken]:
        """Control tokens, and user-defined ones, which also match before any merging."""
        return [
            AddedToken(token, special=kind == _CONTROL, normalized=normalized and kind != _CONTROL)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]


def build_gguf_tokenizer(metadata: Mapping[str, Any], location: str) -> Tokenizer:
    """Builds the tokenizer of a GGUF file.

    Raises:
        CheckpointError: a kind that is not supported, or a malformed vocabulary.
    """
    vocabulary = _Vocabulary(metadata, location)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        tokenizer = _build_byte_level(vocabulary)
    elif kind == "llama":
        tokenizer = _build_sentencepiece(vocabulary)
    else:
        raise CheckpointError(location, f"tokenizer model {kind!r} is not supported (gpt2, llama)")
    bos = vocabulary.get("bos_token_id")
    # Files that do not say rely on what llama.cpp does for their kind.
    by_default = kind == "llama" or _pre_tokenizer(vocabulary).adds_bos
    if vocabulary.get("add_bos_token", by_default) and isinstance(bos, int) and 0 <= bos < len(vocabulary.tokens):
        token = vocabulary.tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, bos)])
    return tokenizer


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.get("pre")
    if name is None:
        raise CheckpointError(
            vocabulary.location,
            "has no tokenizer.ggml.pre, so how to cut text is unknown: convert the model again or set the key",
        )
    kind = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(vocabulary.location, f"pre-tokenizer {name!r} is not supported (supported: {known})")
    return kind


def _build_byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    kind = _pre_tokenizer(vocabulary)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.texts("merges"))]
    tokenizer = _build_bpe(vocabulary, merges, ignore_merges=kind.ignore_merges)
    normalizer = kind.build_normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(vocabulary.added_tokens(normalized=False))
    return tokenizer


def _build_sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    has_prefix = bool(vocabulary.get("add_space_prefix", True))
    if has_prefix and any(_SPACE in token or " " in token for token in vocabulary.of_kind(_USER_DEFINED)):
        raise CheckpointError(
            vocabulary.location, "user-defined pieces with spaces in a vocabulary with a space prefix are not supported"
        )
    unknown = "<unk>" if "<unk>" in vocabulary.ids else None
    tokenizer = _build_bpe(vocabulary, _score_merges(vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown)
    marks = normalizers.Replace(" ", _SPACE)
    # The prefix stands in front of every stretch of text between two control tokens, as llama.cpp has it.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marks]) if has_prefix else marks
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    # User-defined pieces (runs of spaces and line ends) hold the space sign, so they match normalised text; the
    # longest one at each place wins, before merging: 37 spaces are a run of 31 and a run of 6.
    tokenizer.add_tokens(vocabulary.added_tokens(normalized=not has_prefix))
    return tokenizer


def _build_bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception for a merge that is not in the vocabulary
        raise CheckpointError(vocabulary.location, f"the vocabulary cannot be used ({error})") from error


def _score_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece keeps scores, not merges: every split of a piece into two pieces is one, best score first."""
    scores = vocabulary.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(vocabulary.tokens)
        or not all(isinstance(score, int | float) for score in scores)
    ):
        raise CheckpointError(vocabulary.location, "metadata tokenizer.ggml.scores does not match the tokens in length")
    normal = {
        token: (score, index)
        for index, (token, kind, score) in enumerate(zip(vocabulary.tokens, vocabulary.types, scores, strict=True))
        if kind == _NORMAL
    }
    ranked = sorted(
        (token for token in normal if len(token) > 1), key=lambda token: (-normal[token][0], normal[token][1])
    )
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
