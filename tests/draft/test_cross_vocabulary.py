"""A drafter of another vocabulary: which tokens are the same, how text goes over, and what comes back."""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.head_rows import UNKNOWN
from edgespec.decoding.tree import Tree
from edgespec.draft.cross_vocabulary import (
    TranslatedDecoder,
    Translation,
    longest_pieces,
    match_vocabularies,
    respell,
    shared_token_share,
)
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.errors import ContextOverflow, VocabularyMismatch
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import TokenIds

OTHER_SPECIAL = ["<pad>", "<end>", "<|im_start|>"]
OTHER_MERGES = ["h e", "t he", "Ġ the", "a n", "an d", "Ġ a", "Ã ©"]
OTHER = OTHER_SPECIAL + tiny.byte_pieces()[::-1] + [merge.replace(" ", "") for merge in OTHER_MERGES]
END, OTHER_END = tiny.PIECES.index("<|im_end|>"), OTHER.index("<end>")


SENTENCES = (
    ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "t", "h", "e", "he", "▁the"]
)


def opened(**metadata: Any) -> Tokenizer:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        stated = vocabulary_from_gguf("tiny", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
        path.write_text(stated.tokenizer_json)
        return Tokenizer(path, stated.bos_token_id, stated.add_bos)


def byte_level(pieces: list[str], merges: list[str]) -> Tokenizer:
    types = [3] * 3 + [1] * (len(pieces) - 3)
    return opened(model="gpt2", pre="qwen2", tokens=pieces, token_type=types, merges=merges)


def sentencepiece() -> Tokenizer:
    types = [2, 3, 3] + [6] * 256 + [1] * (len(SENTENCES) - 259)
    scores = [-float(i) for i in range(len(SENTENCES))]
    return opened(model="llama", tokens=SENTENCES, token_type=types, scores=scores, bos_token_id=1)


TARGET, DRAFTER = byte_level(tiny.PIECES, tiny.MERGES), byte_level(OTHER, OTHER_MERGES)
TRANSLATION = match_vocabularies(TARGET, DRAFTER, tiny.VOCAB, ([END], [OTHER_END]))
SEQUENCES = st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=12)
TEXTS = st.lists(st.integers(len(tiny.SPECIAL), tiny.VOCAB - 1), max_size=12)


def ids(tokens: list[int]) -> TokenIds:
    return np.array(tokens, np.int32)


def translated(context_length: int = 1000) -> TranslatedDecoder:
    return TranslatedDecoder(TableDecoder(len(OTHER), 5, context_length=context_length), TRANSLATION)


def spelled(tokens: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(tokenizer.spellings[token] for token in tokens)


def test_spellings_are_the_bytes_that_the_tokenizer_reads() -> None:
    for tokenizer in (TARGET, DRAFTER):
        for text in ("the café", "\n\ther 12", "漢"):
            assert spelled(tokenizer.encode(text).tolist(), tokenizer) == text.encode()
    sentences = sentencepiece()
    assert sentences.spellings[SENTENCES.index("▁the")] == b" the"
    assert sentences.spellings[SENTENCES.index("<0xC3>")] == b"\xc3"
    assert SENTENCES.index("<s>") not in sentences.spellings


def test_a_token_is_the_same_where_both_have_its_bytes() -> None:
    theirs = set(DRAFTER.spellings.values())
    for token, text in TARGET.spellings.items():
        same = int(TRANSLATION.counterparts[token])
        assert (same >= 0) == (text in theirs)
        assert same < 0 or DRAFTER.spellings[same] == text


def test_special_tokens_meet_by_spelling_or_by_role() -> None:
    start, text_end = tiny.PIECES.index("<|im_start|>"), tiny.PIECES.index("<|endoftext|>")
    assert TRANSLATION.counterparts[start] == OTHER.index("<|im_start|>")
    assert TRANSLATION.counterparts[END] == OTHER_END
    assert TRANSLATION.counterparts[text_end] == -1
    drafted, ends = TRANSLATION(ids([text_end, start, text_end]))
    assert drafted.tolist() == [OTHER.index("<|im_start|>")]
    assert ends.tolist() == [0, 1, 1]


@given(TEXTS)
def test_the_drafter_reads_the_bytes_of_the_target(tokens: list[int]) -> None:
    """Parts of characters too: every token of a single byte is drawn."""
    drafted, ends = TRANSLATION(ids(tokens))
    assert spelled(drafted.tolist(), DRAFTER) == spelled(tokens, TARGET)
    assert len(ends) == len(tokens)


@given(SEQUENCES, SEQUENCES)
def test_what_follows_never_changes_what_a_text_has_become(tokens: list[int], more: list[int]) -> None:
    drafted, ends = TRANSLATION(ids(tokens))
    longer, longer_ends = TRANSLATION(ids(tokens + more))
    assert longer[: len(drafted)].tolist() == drafted.tolist()
    assert longer_ends[: len(ends)].tolist() == ends.tolist()


@given(SEQUENCES)
def test_of_its_own_vocabulary_a_decoder_is_itself(tokens: list[int]) -> None:
    own = match_vocabularies(TARGET, TARGET, tiny.VOCAB)
    decoder = TableDecoder(tiny.VOCAB, 5)
    there_and_back = TranslatedDecoder(decoder, own).logits(ids(tokens), len(tokens))
    assert np.array_equal(there_and_back, decoder.logits(ids(tokens), len(tokens)))


@given(st.lists(st.tuples(st.integers(0, 20), SEQUENCES, st.integers(1, 20)), max_size=6))
def test_calls_before_leave_no_trace(steps: list[tuple[int, list[int], int]]) -> None:
    """Each step keeps some tokens, goes on differently and asks for some rows."""
    held = translated()
    tokens: list[int] = []
    for kept, more, num_last in steps:
        tokens = tokens[:kept] + more
        num_last = min(num_last, len(tokens))
        rows = held.logits(ids(tokens), num_last)
        assert np.array_equal(rows, translated().logits(ids(tokens), num_last))


@given(SEQUENCES, st.data())
def test_many_rows_are_those_asked_for_one_by_one(tokens: list[int], data: st.DataObject) -> None:
    num_last = data.draw(st.integers(1, len(tokens)))
    rows = translated().logits(ids(tokens), num_last)
    stops = range(len(tokens) - num_last + 1, len(tokens) + 1)
    assert np.array_equal(rows, np.concatenate([translated().logits(ids(tokens[:stop]), 1) for stop in stops]))


def test_shared_tokens_have_the_drafters_logits_and_others_are_never_chosen() -> None:
    tokens = TARGET.encode("the her")
    drafted, _ = TRANSLATION(tokens)
    row = translated().logits(tokens, 1)[0]
    theirs = TableDecoder(len(OTHER), 5).logits(drafted, 1)[0]
    shared = TRANSLATION.counterparts >= 0
    assert np.array_equal(row[shared], theirs[TRANSLATION.counterparts[shared]])
    assert (row[~shared] == UNKNOWN).all()


def test_one_more_token_costs_the_drafter_what_it_spells() -> None:
    decoder = translated()
    tokens = TARGET.encode("the her in")
    decoder.logits(tokens[:-1], 1)
    before = decoder.num_fed
    decoder.logits(tokens, 1)
    assert decoder.num_fed - before == len(TRANSLATION(tokens)[0]) - len(TRANSLATION(tokens[:-1])[0])


def test_before_any_token_all_are_alike() -> None:
    assert (translated().logits(ids([tiny.PIECES.index("<|endoftext|>")]), 1) == UNKNOWN).all()


def test_longer_than_the_context_is_read_from_a_later_start() -> None:
    lacking = tiny.PIECES.index("er")  # two tokens of the drafter
    decoder = translated(context_length=16)
    whole = translated()
    tokens = ids([lacking] * 14)
    assert np.array_equal(decoder.logits(tokens, 1), whole.logits(tokens, 1))  # a table looks back three tokens
    with pytest.raises(ContextOverflow):
        decoder.logits(tokens, 14)
    with pytest.raises(ContextOverflow):
        decoder.logits(ids([lacking] * 17), 1)


def respelled(*tokens: int, with_distributions: bool = False) -> list[int]:
    own_tokens = partial(respell, tokenizer=TARGET, spellings=TARGET.spellings)
    drafter = ModelDrafter(TableDecoder(tiny.VOCAB, 5), tiny.VOCAB, respell=own_tokens)
    request = DraftRequest(len(tokens), with_distributions=with_distributions)
    draft = drafter.chain_draft(Tree(np.array(tokens, np.int32)), request)
    assert draft.buckets == tuple(range(len(draft.tokens)))
    return draft.tokens.tolist()


def test_guesses_are_put_into_the_targets_own_tokens() -> None:
    e, r, her = (tiny.PIECES.index(piece) for piece in ("e", "r", "er"))
    assert respelled(e, r, END, e, r) == [her, END, e, r]
    assert respelled(e, r, with_distributions=True) == [e, r]
    half = TARGET.encode("é").tolist()
    first = [token for token, text in TARGET.spellings.items() if text == b"\xc3"]
    assert respelled(e, *first) == [e, *first]
    assert respelled(*half) == half
    assert respelled() == []


@given(TEXTS)
def test_a_guess_keeps_its_text_and_grows_no_longer(tokens: list[int]) -> None:
    guess = respelled(*tokens)
    assert len(guess) <= len(tokens)
    assert spelled(tokens, TARGET).startswith(spelled(guess, TARGET))


def test_sentencepiece_drafter_gets_its_prefix() -> None:
    theirs = sentencepiece()
    drafted, ends = match_vocabularies(TARGET, theirs, tiny.VOCAB)(TARGET.encode(" the é"))
    assert [SENTENCES[token] for token in drafted] == ["<s>", "▁the", "▁", "<0xC3>", "<0xA9>"]
    assert ends[0] == 2


def test_longest_pieces_leave_out_what_no_token_has() -> None:
    assert longest_pieces(b"abxc", {b"a": 1, b"ab": 2, b"c": 3}) == [2, 3]


def test_too_few_shared_tokens_are_refused() -> None:
    names = ("large", "small")
    assert shared_token_share(match_vocabularies(TARGET, TARGET, tiny.VOCAB), TARGET, names) == 1.0
    assert 0.55 < shared_token_share(TRANSLATION, TARGET, names) < 1
    nothing = Translation(np.full(tiny.VOCAB, -1, np.int32), TARGET.spellings, {}, {}, DRAFTER)
    with pytest.raises(VocabularyMismatch, match="small has 0% of the tokens that the target large"):
        shared_token_share(nothing, TARGET, names)
