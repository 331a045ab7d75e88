"""Tokens of texts: edgespec beside llama.cpp for GGUF files, and beside tokenizers for tokenizer.json."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import category, is_normalized

import made_tokenizers
import numpy as np
import tiny
from tokenizers import Tokenizer as Peer

from differential.difference import Difference, Row, shrink
from differential.llama_cpp import LlamaCpp, NoPeer
from differential.published import TOKENIZERS
from differential.texts import nasty_texts
from edgespec.errors import EdgeSpecError
from edgespec.export.sources import read_vocabulary
from edgespec.export.vocabulary import Vocabulary, vocabulary_from_gguf
from edgespec.text.tokenizer import Tokenizer

_NUM_MERGES = 900
# Tokens that are added to each kind in a GGUF file, with their types: user-defined and control.
_ADDED = {"<think>": 4, "</think>": 4, "<tool call>": 4, "[X]": 4, "naïve": 4, "<|extra|>": 3}
_BEGINS = {"<|begin_of_text|>", "<s>"}
# Why tokens may differ: by kinds of tokenizer, what a text has then, and the reason.
_REASONS: tuple[tuple[tuple[str, ...], Callable[[str], object], str], ...] = (
    (
        ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo"),
        lambda text: not is_normalized("NFC", text),
        "with loose accents: the models' own tokenizers compose them, llama.cpp does not",
    ),
    (
        ("tekken", "gpt-4o", "minimax-m2"),
        lambda text: any(not each.isascii() and category(each)[0] in "LM" for each in text),
        "not ASCII: the models' own patterns know its capitals and marks, llama.cpp's do not",
    ),
    (
        ("deepseek-llm", "deepseek-coder"),
        re.compile(r"[\u0800-\u4e00]").search,
        "with wide spaces: the models' own patterns count them as East Asian, llama.cpp's as spaces",
    ),
    (
        tuple(kind for kind, marks in made_tokenizers.BYTE_LEVEL.items() if marks[0] in _BEGINS),
        re.compile("|".join(map(re.escape, sorted(_BEGINS)))).match,
        "begin with the first token: edgespec does not write it twice, llama.cpp does",
    ),
    (
        tuple(made_tokenizers.SENTENCEPIECE),
        re.compile("<0x[0-9A-F]{2}>").search,
        "spell a byte: text to the models' own tokenizers, the token of that byte to llama.cpp",
    ),
    (
        ("pieces, normalized tokens",),
        re.compile(r"<mark>|\[É\]|\[a b\]").search,
        "with normalized special tokens: tokenizers finds those behind a space alone, as ▁ is part of them",
    ),
)

Encode = Callable[[str], list[int]]


def open_vocabulary(vocabulary: Vocabulary, folder: Path) -> Tokenizer:
    """The tokenizer of a model folder with this vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer_json, encoding="utf-8")
    return Tokenizer(folder / "tokenizer.json", vocabulary.bos_token_id, vocabulary.add_bos)


def write_gguf(path: Path, keys: dict[str, Any]) -> None:
    """A model with random weights around a tokenizer."""
    weights = tiny.random_weights()
    shape = (len(keys["tokenizer.ggml.tokens"]), tiny.HIDDEN)
    weights["model.embed_tokens.weight"] = np.random.default_rng(0).normal(0, 0.3, shape).astype(np.float32)
    tiny.write_gguf(path, weights, override=keys, skip=tuple(tiny.GGUF_TOKENIZER.keys() - keys))


def _explain(kind: str, text: str) -> str:
    """The reason why a text may differ, or none."""
    return next((why for kinds, has, why in _REASONS if kind in kinds and has(text)), "")


def _compare(where: str, texts: list[str], ours: Encode, theirs: Encode, kind: str) -> Row:
    explain = partial(_explain, kind)
    found: list[Difference] = []
    explained: Counter[str] = Counter()

    def differs(text: str) -> bool:
        return ours(text) != theirs(text)

    for text in filter(differs, texts):
        if reason := explain(text):
            explained[reason] += 1
        else:
            small = shrink(text, lambda shorter: not explain(shorter) and differs(shorter))
            found.append(Difference(where, small, str(ours(small)), str(theirs(small))))
    smallest = {each.text: each for each in found}
    return Row(where, len(texts), tuple(smallest.values()), dict(explained))


def _with_marks(texts: list[str], marks: list[str]) -> list[str]:
    """The texts, some of them around the control tokens of a tokenizer."""
    beside = [f"{texts[i]}{mark}{texts[-i - 1]}" for i, mark in enumerate(marks * 8)]
    return [*texts, *beside, "".join(marks), " ".join(marks)]


def gguf_rows(folder: Path) -> Iterator[Row]:
    texts = nasty_texts()
    merges = made_tokenizers.learn_merges(texts, _NUM_MERGES)
    words = made_tokenizers.learn_words(texts, _NUM_MERGES)
    for i, kind in enumerate(made_tokenizers.KINDS):
        is_spm = kind in made_tokenizers.SENTENCEPIECE
        keys = made_tokenizers.gguf_keys(kind, words if is_spm else merges)
        if not is_spm:  # the name says if a text begins with the first token
            del keys["tokenizer.ggml.add_bos_token"]
        keys["tokenizer.ggml.tokens"] += _ADDED
        keys["tokenizer.ggml.token_type"] += _ADDED.values()
        if is_spm:
            keys["tokenizer.ggml.scores"] += [0.0] * len(_ADDED)
        path, where = folder / f"{i}.gguf", f"tokens, GGUF, {kind}, beside llama.cpp"
        write_gguf(path, keys)
        try:
            peer = LlamaCpp(path)
        except NoPeer as error:
            yield Row(where, 0, skipped=str(error))
            continue
        tokenizer = open_vocabulary(vocabulary_from_gguf(path, keys), folder / str(i))

        def ours(text: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, special=True)]

        marks = [*keys["tokenizer.ggml.tokens"][:3], *_ADDED]
        yield _compare(where, _with_marks(texts, marks), ours, peer.tokenize, kind)
        peer.close()
        path.unlink()


def json_rows(folder: Path) -> Iterator[Row]:
    texts = nasty_texts()
    for name, published in TOKENIZERS.items():
        where = f"tokens, tokenizer.json, {name}, beside tokenizers"
        made = published(texts)
        place = folder / name.replace(" ", "_").replace("/", "_")
        place.mkdir(parents=True)
        made.save(str(place / "tokenizer.json"))
        (place / "config.json").write_text("{}")
        (place / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        try:
            tokenizer = open_vocabulary(read_vocabulary(place), place / "out")
        except EdgeSpecError as error:
            yield Row(where, 0, skipped=f"refused: {error}")
            continue
        peer = Peer.from_file(str(place / "tokenizer.json"))
        marks = [token.content for token in peer.get_added_tokens_decoder().values()]

        def ours(text: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
            return [int(token) for token in tokenizer.encode(text, special=True)]

        def theirs(text: str, peer: Peer = peer) -> list[int]:
            ids: list[int] = peer.encode(text).ids
            return ids

        yield _compare(where, _with_marks(texts, marks), ours, theirs, name)
