"""Texts that an answer never holds, however tokens spell them."""

from pathlib import Path

import numpy as np
import tiny
from hypothesis import given
from hypothesis import strategies as st

from edgespec.text.banned_texts import BannedTexts, SpellingIndex
from edgespec.text.tokenizer import Tokenizer

pieces = st.text("abé", min_size=0, max_size=4).map(str.encode)
vocabularies = st.lists(pieces, min_size=1, max_size=12)


def spell(tokens: list[int], vocabulary: list[bytes]) -> bytes:
    return b"".join(vocabulary[token] for token in tokens if token < len(vocabulary))


@given(
    vocabulary=vocabularies, banned=st.lists(st.text("abé", min_size=1, max_size=5), max_size=3), data=st.data()
)
def test_a_token_is_banned_exactly_if_it_completes_a_text(
    vocabulary: list[bytes], banned: list[str], data: st.DataObject
) -> None:
    special = len(vocabulary)  # spells nothing
    index = SpellingIndex(dict(enumerate(vocabulary)), len(vocabulary) + 1)
    mask, answer = BannedTexts(banned, index), list[int]()
    for _ in range(8):
        allowed = mask(np.array(answer, np.int32))
        wanted = [
            not any(text.encode() in spell([*answer, token], vocabulary) for text in banned)
            for token in range(len(vocabulary))
        ]
        assert allowed.tolist() == [*wanted, True]
        answer.append(data.draw(st.sampled_from([*np.flatnonzero(allowed).tolist(), special])))


def test_a_text_is_banned_in_every_cut(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model / "tokenizer.json")
    index = SpellingIndex(tokenizer.spellings, tiny.VOCAB)
    text = " the in an"
    whole = tokenizer.encode(text)
    mask = BannedTexts([text], index)
    by_byte = [int(tokenizer.encode(character)[0]) for character in text]
    for tokens in (whole.tolist(), by_byte):
        allowed = [bool(mask(np.array(tokens[:i], np.int32))[token]) for i, token in enumerate(tokens)]
        assert allowed == [True] * (len(tokens) - 1) + [False]
