"""Tokenizers as publishers write them into a tokenizer.json, each learned from texts."""

from collections.abc import Callable, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_SIZE = 1500
_SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_DIGITS_AND_LETTERS = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Make = Callable[[Sequence[str]], Tokenizer]


def _begin(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, which puts <s> first."""
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


def _learn(tokenizer: Tokenizer, texts: Sequence[str], initial: Sequence[str] = ()) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZE, special_tokens=list(_SPECIAL), initial_alphabet=list(initial), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level(
    *,
    normalizer: normalizers.Normalizer | None = None,
    pattern: str | None = None,
    prefix: bool = False,
    digits: bool = False,
    added: Sequence[AddedToken] = (),
    ignore_merges: bool = False,
) -> Make:
    def make(texts: Sequence[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        steps: list[pre_tokenizers.PreTokenizer] = []
        if digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pattern:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not pattern))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        _learn(tokenizer, texts, pre_tokenizers.ByteLevel.alphabet())
        for token in added:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        return tokenizer

    return make


def _pieces(
    *,
    scheme: str | None = None,
    prepend: bool = False,
    added: Sequence[AddedToken] = (),
    normalizer: normalizers.Normalizer | None = None,
    begins: bool = True,
) -> Make:
    """SentencePiece BPE with bytes for what is unknown; scheme: of Metaspace, else a normalizer writes ▁."""

    def make(texts: Sequence[str]) -> Tokenizer:
        learner = _learn(Tokenizer(models.BPE(unk_token="<unk>")), [text.replace(" ", "▁") for text in texts])
        vocab = learner.get_vocab()
        in_order = [*_SPECIAL, *_BYTES, *(p for p in sorted(vocab, key=lambda p: vocab[p]) if p not in _SPECIAL)]
        ids = {piece: token for token, piece in enumerate(in_order)}
        merges = [
            (piece[:i], piece[i:])
            for piece in in_order[len(_SPECIAL) + 256 :]
            for i in range(1, len(piece))
            if piece[:i] in ids and piece[i:] in ids
        ]
        tokenizer = Tokenizer(models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        steps = [normalizers.Prepend("▁")] if prepend else []
        spaces = [] if scheme else [normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence([*([normalizer] if normalizer else []), *steps, *spaces])
        if scheme:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prepend or scheme in ("always", "first") else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in _SPECIAL])
        for token in added:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        return _begin(tokenizer) if begins else tokenizer

    return make


def _unigram(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=_SIZE, special_tokens=list(_SPECIAL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _begin(tokenizer)


def _wordpiece(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=_SIZE, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


_STRIPS = (
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|right|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|both|>", special=True, normalized=False, lstrip=True, rstrip=True),
)
_PLAIN = (
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=True),
    AddedToken("    ", special=False, normalized=False),
    AddedToken("naïve", special=False, normalized=False, single_word=True),
    AddedToken("[X]", special=False, normalized=False, lstrip=True),
    AddedToken("[Y]", special=False, normalized=False, rstrip=True),
)
_NESTED = (
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|a|><|b|>", special=True, normalized=False),
    AddedToken("x<|a|>y", special=False, normalized=False),
)
_NORMALIZED = (
    AddedToken("<mark>", special=True, normalized=True),
    AddedToken("[É]", special=True, normalized=True),
    AddedToken("[a b]", special=True, normalized=True),
)
_WHOLE = (AddedToken("[WORD]", special=True, normalized=False, single_word=True),)

TOKENIZERS: dict[str, Make] = {
    "byte-level": _byte_level(),
    "byte-level with NFC": _byte_level(normalizer=normalizers.NFC()),
    "byte-level with NFKC": _byte_level(normalizer=normalizers.NFKC()),
    "byte-level with NFD": _byte_level(normalizer=normalizers.NFD()),
    "byte-level, a space before": _byte_level(prefix=True),
    "byte-level, own pattern": _byte_level(pattern=_DIGITS_AND_LETTERS),
    "byte-level, own pattern, a space before": _byte_level(pattern=_DIGITS_AND_LETTERS, prefix=True),
    "byte-level, whole words first": _byte_level(pattern=_DIGITS_AND_LETTERS, ignore_merges=True),
    "byte-level, single digits": _byte_level(digits=True),
    "byte-level, stripping tokens": _byte_level(added=_STRIPS),
    "byte-level, plain added tokens": _byte_level(added=_PLAIN),
    "byte-level, tokens within tokens": _byte_level(added=_NESTED),
    "byte-level, normalized tokens": _byte_level(added=_NORMALIZED),
    "byte-level with NFKC, normalized tokens": _byte_level(normalizer=normalizers.NFKC(), added=_NORMALIZED),
    "byte-level, tokens that are whole words": _byte_level(added=_WHOLE),
    "pieces, prepended": _pieces(prepend=True),
    "pieces, nothing prepended": _pieces(),
    "pieces, no begin": _pieces(prepend=True, begins=False),
    "pieces, Metaspace always": _pieces(scheme="always"),
    "pieces, Metaspace first": _pieces(scheme="first"),
    "pieces, Metaspace never": _pieces(scheme="never"),
    "pieces with NFKC": _pieces(prepend=True, normalizer=normalizers.NFKC()),
    "pieces, stripping tokens": _pieces(prepend=True, added=_STRIPS),
    "pieces, Metaspace first, stripping tokens": _pieces(scheme="first", added=_STRIPS),
    "pieces, plain added tokens": _pieces(prepend=True, added=_PLAIN),
    "pieces, Metaspace first, plain added tokens": _pieces(scheme="first", added=_PLAIN),
    "pieces, normalized tokens": _pieces(prepend=True, added=_NORMALIZED),
    "pieces, nothing prepended, normalized tokens": _pieces(added=_NORMALIZED),
    "unigram": _unigram,
    "WordPiece": _wordpiece,
}
