import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import ManifestError
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.tokenizer import TextStream, Tokenizer

METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": tiny.PIECES,
    "tokenizer.ggml.token_type": tiny.TYPES,
    "tokenizer.ggml.merges": tiny.MERGES,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(vocabulary_from_gguf("tiny", METADATA).tokenizer_json)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece vocabulary: bytes, letters, and pieces with scores as trained ones have."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw"]
    types = [2, 3, 3] + [6] * 256 + [1] * 11
    joined = ["he", "ll", "▁he", "llo", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + joined,
        "tokenizer.ggml.token_type": types + [1] * len(joined),
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(i) for i in range(len(joined))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    vocabulary = vocabulary_from_gguf("tiny", metadata)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(vocabulary.tokenizer_json)
    return Tokenizer(path, vocabulary.bos_token_id, vocabulary.add_bos)


def test_byte_level_tokens_follow_the_merges(tokenizer: Tokenizer) -> None:
    spelled = [tokenizer.piece(int(token)) for token in tokenizer.encode("in the the")]
    assert spelled == ["in", "Ġthe", "Ġthe"]


@given(text=st.text())
def test_encoding_then_decoding_gives_the_text_in_nfc(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    decoded = tokenizer.decode(tokenizer.encode(text))
    assert unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text)


def test_lone_surrogates_do_not_break_encoding(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\N{REPLACEMENT CHARACTER}b"


def test_special_tokens_in_text_stay_text(tokenizer: Tokenizer) -> None:
    typed = tokenizer.encode("<|im_end|>")
    assert 2 not in typed
    assert tokenizer.decode(typed) == "<|im_end|>"
    assert tokenizer.encode("a<|im_end|>b", special=True).tolist()[1] == 2


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    spelled = [sentencepiece.piece(int(token)) for token in sentencepiece.encode("hello world é")]
    assert spelled == ["<s>", "▁hello", "▁world", "▁", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(sentencepiece.encode("hello world é")) == "hello world é"


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
def test_streamed_pieces_join_to_the_whole_decoding(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    size = tiny.VOCAB if kind == "tokenizer" else 270
    blocks = data.draw(st.lists(st.lists(st.integers(0, size - 1), max_size=6), max_size=20))
    stream = TextStream(tokenizer)
    shown = [stream.push(block) for block in blocks]
    shown.append(stream.flush())
    assert "".join(shown) == tokenizer.decode([token for block in blocks for token in block])


@given(text=st.text("é中😀a👨‍👩‍👧 \n", max_size=20))
def test_no_piece_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push([int(token)]) for token in tokenizer.encode(text)]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert stream.flush() == ""


def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(ManifestError, match="no tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_empty_text_has_no_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").dtype == np.int32
    assert len(tokenizer.encode("")) == 0


def test_padding_that_a_converter_made_up_is_no_token() -> None:
    size = len(tiny.PIECES)
    padded = METADATA | {
        "tokenizer.ggml.tokens": [*tiny.PIECES, f"[PAD{size}]", f"[PAD{size + 1}]"],
        "tokenizer.ggml.token_type": [*tiny.TYPES, 5, 5],
    }
    assert vocabulary_from_gguf("x", padded).tokenizer_json == vocabulary_from_gguf("x", METADATA).tokenizer_json
