import base64
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from time import process_time

import numpy as np
import pytest
import tiny
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from psutil import Process

from edgespec.errors import ManifestError, MemoryExhausted
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.text import tokenizer as tokenizer_module
from edgespec.text.tokenizer import TextStream, Tokenizer, translate_errors

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


def edited(path: Path, **changes: object) -> Path:
    stated = json.loads(vocabulary_from_gguf("tiny", METADATA).tokenizer_json)
    path.write_text(json.dumps(stated | changes))
    return path


def split(pattern: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(found: str, written: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": found}, "content": written}


def charsmap(text: str) -> str:
    """A table of SentencePiece that makes a text of some characters; its trie has none."""
    return base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + f"ss\0{text}\0".encode()).decode()


def sequence(kind: str, name: str, part: dict[str, object], times: int) -> dict[str, object]:
    return {kind: {"type": "Sequence", name: [part] * times}}


def nested(depth: int) -> dict[str, object]:
    part = split(".")
    for _ in range(depth):
        part = {"type": "Sequence", "pretokenizers": [part, part]}
    return {"pre_tokenizer": part}


HOSTILE = {
    "expression": ({"pre_tokenizer": split(r"(\w+\s?)+$")}, "retry-limit"),
    "replacement": (sequence("normalizer", "normalizers", replace("q", "qq"), 40), "ever more text"),
    "table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * 65)}},
        "ever more text",
    ),
    "nested": (nested(11), "does not finish|to read"),
    "bytes": (sequence("normalizer", "normalizers", {"type": "ByteLevel"}, 28), "takes more than 210 MB"),
    "many": (sequence("normalizer", "normalizers", {"type": "NFC"}, 20_000), "does not finish|to read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_tokenizers_made_to_harm_are_ended_in_a_process_of_their_own(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, words = HOSTILE[kind]
    # Another fault than time is found within a second, with the start of the process, on an idle machine alone.
    monkeypatch.setattr(tokenizer_module, "_TRIAL_S", 1.0 if "does not finish" in words else 60.0)
    monkeypatch.setattr(tokenizer_module, "_TRIAL_BYTES", 200 << 20)
    path = edited(tmp_path / "tokenizer.json", **changes)
    resident, started = Process().memory_info().rss, process_time()
    with pytest.raises(ManifestError, match=words):
        Tokenizer(path)
    assert process_time() - started < 2
    assert Process().memory_info().rss - resident < 100 << 20


def test_unigram_makes_no_special_tokens_of_text_either(tmp_path: Path) -> None:
    """Its own are among the pieces that it finds in a text."""
    pieces = ["<unk>", "<s>", "</s>", *"▁</s>ab"]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    made.add_special_tokens(pieces[:3])
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    for text in ("a<s>b</s>", "</s></s>", "<s>", "<ab"):
        tokens = tokenizer.encode(text)
        assert tokens.min() > 2
        assert tokenizer.decode(tokens) == text
    assert tokenizer.encode("a?b<s>")[:3].tolist() == [8, 0, 9]
    assert tokenizer.encode("a</s>", special=True).tolist() == [8, 2]


def test_a_tokenizer_is_tried_once_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    tried: list[Path] = []
    monkeypatch.setattr(tokenizer_module, "_try", lambda path, size: tried.append(path) or "")
    path, other = edited(tmp_path / "tokenizer.json"), edited(tmp_path / "other.json", decoder=None)
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    for each in (path, copy, path, other):
        Tokenizer(each)
    assert tried == [path, other]
    (tmp_path / "home" / "tokenizers.json").write_text("no JSON")
    Tokenizer(path)
    assert tried == [path, other, path]
    monkeypatch.setattr(tokenizer_module, "_try", lambda path, size: "it is bad")
    with pytest.raises(ManifestError, match=r"not a usable tokenizer \(it is bad\); export the model again"):
        Tokenizer(edited(tmp_path / "tokenizer.json", normalizer={"type": "NFD"}))


@pytest.mark.slow
def test_characters_that_rules_name_are_tried(tmp_path: Path) -> None:
    """The library gives up, which is no Exception."""
    with pytest.raises(ManifestError, match="retry-limit"):
        Tokenizer(edited(tmp_path / "tokenizer.json", pre_tokenizer=split("(ж+)+$")))


def test_a_failure_of_the_library_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_try", lambda path, size: "")
    tokenizer = Tokenizer(edited(tmp_path / "tokenizer.json", pre_tokenizer=split("(b+)+$")))
    with pytest.raises(ManifestError, match="retry-limit"):
        tokenizer.encode("b" * 40 + "c")


def test_text_is_neither_padded_nor_cut(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(edited(tmp_path / "tokenizer.json", truncation=truncation))
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"


def test_expressions_that_match_nothing_grow_text_too(tmp_path: Path) -> None:
    inserting = replace("", "b") | {"pattern": {"Regex": "(?=.)"}}
    normalizer = {"type": "Sequence", "normalizers": [inserting] * 15}
    with pytest.raises(ManifestError, match="ever more text"):
        Tokenizer(edited(tmp_path / "tokenizer.json", normalizer=normalizer))


@pytest.mark.parametrize(("length", "is_usable"), [(18, True), (65, False)])
def test_tables_of_characters_that_grow_are_refused(tmp_path: Path, length: int, is_usable: bool) -> None:
    """The longest text in the table of T5 and XLM-R has 18 characters."""
    stated = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("x" * length)}}
    path = edited(tmp_path / "tokenizer.json", **stated)
    with nullcontext() if is_usable else pytest.raises(ManifestError, match="ever more text"):
        Tokenizer(path)


def test_a_hundred_thousand_tokens_around_each_text_are_refused(tmp_path: Path) -> None:
    special = {"SpecialToken": {"id": "x", "type_id": 0}}
    added = {
        "type": "TemplateProcessing",
        "single": [*[special] * 100, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
    }
    with pytest.raises(ManifestError, match="adds 100000 tokens to each text"):
        Tokenizer(edited(tmp_path / "tokenizer.json", post_processor=added))


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
def test_a_pipe_in_the_place_of_a_tokenizer_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ManifestError, match="not a regular file"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(ManifestError, match=r"17\.2 GB"):
        Tokenizer(tmp_path / "tokenizer.json")


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


def test_what_a_tokenizer_puts_before_all_texts_is_put_there_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stated = json.loads(tokenizer.path.read_text())
    names = tiny.SPECIAL[:2]
    before: list[dict[str, object]] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(names)},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    other, alone = Tokenizer(tmp_path / "tokenizer.json"), tokenizer.encode("in the").tolist()
    assert other.encode("in the").tolist() == [0, 1, *alone]
    assert other.encode("".join(names) + "in the", special=True).tolist() == [0, 1, *alone]
    assert other.encode("in the", is_behind_text=True).tolist() == alone


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    spelled = [sentencepiece.piece(int(token)) for token in sentencepiece.encode("hello world é")]
    assert spelled == ["<s>", "▁hello", "▁world", "▁", "<0xC3>", "<0xA9>"]
    assert sentencepiece.decode(sentencepiece.encode("hello world é")) == "hello world é"


GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁"]
GEMMA_TYPES = [3, 3, 3, 2, 3, 4, 4, 4, 4, 4]
LETTERS = ["▁", *"ehlo", "he", "ll", "llo", "▁he", "▁hello"]


def sentencepiece_metadata(pieces: list[str], types: list[int], **keys: object) -> dict[str, object]:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + LETTERS,
        "tokenizer.ggml.token_type": types + [1] * len(LETTERS),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(pieces + LETTERS))],
    }
    return metadata | keys


def written(folder: Path, metadata: dict[str, object]) -> Tokenizer:
    vocabulary = vocabulary_from_gguf("tiny", metadata)
    (folder / "tokenizer.json").write_text(vocabulary.tokenizer_json)
    return Tokenizer(folder / "tokenizer.json", vocabulary.bos_token_id, vocabulary.add_bos)


def test_gemma_takes_the_longest_run_of_spaces_and_no_space_in_front(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.bos_token_id": 2}
    tokenizer = written(tmp_path, sentencepiece_metadata(GEMMA, GEMMA_TYPES, **keys))
    text = "hello hello     hello\n\nhello"
    tokens = tokenizer.encode(text)
    spelled = [tokenizer.piece(int(token)) for token in tokens]
    assert spelled == ["<bos>", "he", "llo", "▁hello", "▁▁▁", "▁▁", "he", "llo", "\n\n", "he", "llo"]
    assert tokenizer.decode(tokens) == text


def test_end_of_turn_ends_an_answer_even_where_it_is_no_control_token() -> None:
    html, types = [*GEMMA, "</s>"], [*GEMMA_TYPES, 4]  # which ends nothing but struck out text
    metadata = sentencepiece_metadata(html, types, **{"tokenizer.ggml.eos_token_id": 1})
    assert vocabulary_from_gguf("tiny", metadata).eos_token_ids == (1, 5)


def test_a_call_of_glm4_ends_an_answer_where_the_file_names_the_end_of_a_turn_alone() -> None:
    pieces, types = ["<unk>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"], [2, 3, 3, 3, 3]
    metadata = sentencepiece_metadata(pieces, types, **{"tokenizer.ggml.eos_token_id": 2})
    assert vocabulary_from_gguf("tiny", metadata).eos_token_ids == (1, 2, 4)


@pytest.mark.parametrize(
    ("architecture", "spelled"), [("phi3", ["▁hello"]), ("llama", ["▁", "<unk>", "he", "llo"])]
)
def test_control_tokens_of_phi3_take_the_white_space_behind_them(
    tmp_path: Path, architecture: str, spelled: list[str]
) -> None:
    pieces, types = ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "<|end|>"], [2, 3, 3, 3, 3]
    stated = {"general.architecture": architecture, "tokenizer.ggml.add_bos_token": False}
    metadata = sentencepiece_metadata(pieces, types, **stated)
    tokenizer = written(tmp_path, metadata)
    tokens = [tokenizer.piece(int(token)) for token in tokenizer.encode("<|user|>\nhello<|end|>\n", special=True)]
    assert tokens[: 1 + len(spelled)] == ["<|user|>", *spelled]
    assert tokens[1 + len(spelled) :] == (["<|end|>"] if architecture == "phi3" else ["<|end|>", "▁", "<unk>"])
    assert vocabulary_from_gguf("tiny", metadata).eos_token_ids == (2, 4)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dbrx", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ", "(x", ")"]),
        ("olmo", ["I", "'", "LL", "Ġadd", "Ġ12345", "!", "Ċ", "(", "x", ")"]),
        ("refact", ["I", "'", "LL", "Ġadd", "Ġ", *"12345", "!", "Ċ", "(", "x", ")"]),
        ("falcon3", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ", "(x", ")"]),
        ("gpt-4o", ["I'LL", "Ġadd", "Ġ", "123", "45", "!Ċ", "(x", ")"]),
        ("tekken", ["I", "'LL", "Ġadd", "Ġ", *"12345", "!Ċ", "(x", ")"]),
        ("deepseek-llm", ["I", "'", "LL", "Ġadd", "Ġ", "12345", "!", "Ċ", "(", "x", ")"]),
        ("deepseek-coder", ["I", "'", "LL", "Ġadd", "Ġ", *"12345", "!", "Ċ", "(", "x", ")"]),
        ("default", ["I", "'", "LL", "Ġadd", "Ġ", "123", "45", "!", "Ċ", "(", "x", ")"]),
        ("glm4", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ", "(x", ")"]),
        ("exaone4", ["I", "'", "LL", "Ġadd", "Ġ12345", "!", "Ċ", "(", "x", ")"]),
        ("seed-coder", ["I", "'LL", "Ġadd", "Ġ", *"12345", "!", "Ċ", "(x", ")"]),
        ("hunyuan-dense", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ", "(x", ")"]),
        ("qwen35", ["I", "'LL", "Ġadd", "Ġ", *"12345", "!Ċ", "(x", ")"]),
    ],
)
def test_pre_tokenizers_cut_words_and_digits_where_they_should(name: str, parts: list[str]) -> None:
    rebuilt = tokenizers.Tokenizer.from_str(
        vocabulary_from_gguf("tiny", METADATA | {"tokenizer.ggml.pre": name}).tokenizer_json
    )
    assert [part for part, _ in rebuilt.pre_tokenizer.pre_tokenize_str("I'LL add 12345!\n(x)")] == parts


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
    with pytest.raises(ManifestError, match="not a usable tokenizer"):
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


@pytest.mark.parametrize("name", ["gpt-4o", "tekken"])
def test_a_capital_begins_a_word_where_the_pre_tokenizer_says_so(name: str) -> None:
    stated = vocabulary_from_gguf("tiny", METADATA | {"tokenizer.ggml.pre": name}).tokenizer_json
    cutter = tokenizers.Tokenizer.from_str(stated).pre_tokenizer
    assert [part for part, _ in cutter.pre_tokenize_str("HelloWorld HTTPServer")] == [
        "Hello", "World", "ĠHTTPServer",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["[INST]hello[/INST]", "hello[INST] hello hello", " hello", "hello"])
def test_mark_of_a_beginning_stands_at_the_beginning_of_the_whole_text_alone(text: str, tmp_path: Path) -> None:
    """With prepend_scheme first a tokenizer puts ▁ before the first piece of a text, and before no later one."""
    metadata = sentencepiece_metadata(["<unk>", "[INST]", "[/INST]"], [2, 3, 3])
    stated = json.loads(vocabulary_from_gguf("tiny", metadata).tokenizer_json)
    cutter = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated | {"normalizer": None, "pre_tokenizer": cutter}))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    itself = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text, special=True).tolist() == itself.encode(text, add_special_tokens=False).ids
    assert [tokenizer.piece(token) for token in tokenizer.encode("hello", is_behind_text=True)] == ["he", "llo"]


def test_a_text_that_continues_another_has_its_first_space(sentencepiece: Tokenizer) -> None:
    tokens = sentencepiece.encode("hello hello é hello")
    whole = sentencepiece.decode(tokens)
    for cut in range(1, len(tokens)):
        stream = TextStream(sentencepiece, (), tokens[:cut])
        before = sentencepiece.decode(tokens[:cut])
        found = "".join(stream.push([token]) for token in tokens[cut:]) + stream.flush()
        assert "\ufffd" in before or before + found == whole


@pytest.mark.parametrize("name", ["tokenizer", "sentencepiece"])
def test_text_that_is_known_already_does_not_come_again(name: str, request: pytest.FixtureRequest) -> None:
    """Also a character that was spelled in bytes, which a stream holds back as its run may go on."""
    tokenizer = request.getfixturevalue(name)
    tokens = tokenizer.encode("hello é hello 日")
    whole = tokenizer.decode(tokens)
    for cut in range(len(tokens) + 1):
        stream, before = TextStream(tokenizer), tokenizer.decode(tokens[:cut])
        stream.skip(tokens[:cut].tolist())
        found = "".join(stream.push([token]) for token in tokens[cut:]) + stream.flush()
        assert before.rstrip("\ufffd") + found == whole


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_of_one_spelling_all_stand_for_it(kind: str, tmp_path: Path) -> None:
    if kind == "gpt2":
        pieces = [*tiny.PIECES, tiny.PIECES[-1], "a"]
        types = {"tokenizer.ggml.token_type": [*tiny.TYPES, 1, 1]}
        tokenizer = written(tmp_path, {**tiny.GGUF_TOKENIZER, "tokenizer.ggml.tokens": pieces, **types})
        twins = {(pieces.index(piece), token) for token, piece in enumerate(pieces[-2:], len(tiny.PIECES))}
    else:
        tokenizer = written(tmp_path, sentencepiece_metadata(["<unk>", "▁he"], [2, 1]))
        twins = {(1, tokenizer.encode("he")[-1])}
    for first, last in twins:
        assert tokenizer.spellings[first] == tokenizer.spellings[last]
        assert tokenizer.decode([first]) == tokenizer.decode([last])
        assert tokenizer.decode([first]) != ""
        assert tokenizer.encode(tokenizer.decode([first])).tolist() == [last]


@pytest.mark.parametrize("text", ["[a][b]", "[a]", "x[a]y", "[w] [w]. a[w] [w]b", "[b][a]x[a]"])
def test_special_tokens_are_found_where_the_library_finds_them(text: str, tmp_path: Path) -> None:
    """Also those that are whole words, those that others begin with, and plain tokens that hold one."""
    made = tokenizers.Tokenizer.from_str(vocabulary_from_gguf("tiny", METADATA).tokenizer_json)
    special = (("[a]", False), ("[a][b]", False), ("[w]", True))
    made.add_special_tokens([tokenizers.AddedToken(each, special=True, single_word=one) for each, one in special])
    made.add_tokens([tokenizers.AddedToken("x[a]y", normalized=False)])
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json").encode(text, special=True).tolist() == made.encode(text).ids


@pytest.mark.parametrize(("name", "tokens"), [("glm4", ["hello"]), ("smaug-bpe", ["he", "l", "l", "o"])])
def test_a_whole_word_is_its_token_only_where_the_pre_tokenizer_says_so(name: str, tokens: list[str]) -> None:
    """Merges do not lead to it."""
    keys = {"tokenizer.ggml.tokens": [*tiny.PIECES, "hello"], "tokenizer.ggml.token_type": [*tiny.TYPES, 1]}
    made = vocabulary_from_gguf("tiny", {**METADATA, **keys, "tokenizer.ggml.pre": name})
    assert tokenizers.Tokenizer.from_str(made.tokenizer_json).encode("hello").tokens == tokens


def test_the_unknown_token_is_special(tmp_path: Path) -> None:
    """A tokenizer.json of a SentencePiece model declares it so, and then it is never shown."""
    tokenizer = written(tmp_path, sentencepiece_metadata(["<unk>"], [2]))
    assert tokenizer.encode("<unk>hello", special=True).tolist() == [0, *tokenizer.encode("hello")]
    assert tokenizer.decode([0]) == ""


def test_characters_that_wait_for_further_bytes_are_counted_once_whole(sentencepiece: Tokenizer) -> None:
    """So the text of the next token, which a stop string may begin, is known to stand behind them."""
    stream = TextStream(sentencepiece)
    held = []
    for token in sentencepiece.encode("é日").tolist():
        assert stream.push([token]).strip() == ""
        held.append(stream.num_held)
    assert held[-5:] == [0, 1, 0, 0, 2]  # a run of bytes is read as a whole
    assert stream.flush() == "é日"


def test_white_space_that_a_special_token_absorbs_is_looked_for_once(tmp_path: Path) -> None:
    """From each of its places, 131,000 spaces of a client held all threads up for two minutes."""
    stated = json.loads(vocabulary_from_gguf("tiny", tiny.GGUF_TOKENIZER).tokenizer_json)
    flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    stated["added_tokens"].append({"id": tiny.VOCAB, "content": "<mask>", "lstrip": True, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    itself = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a  <mask> b", " \n<mask>", "a \t<mask> <mask>  <|im_end|>", "  <mask", " " * 131_000 + "a"):
        assert tokenizer.encode(text, special=True).tolist() == itself.encode(text).ids


def test_a_limit_on_threads_is_no_fault_of_the_tokenizer() -> None:
    said = (
        "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11 }) }"
    )
    with (
        pytest.raises(MemoryExhausted, match="no further thread can be started"),
        translate_errors("tokenizer.json", ManifestError, "export the model again"),
    ):
        raise Exception(said)


@pytest.mark.parametrize("content", ["<｜tool▁calls▁begin｜>", "a▁b", "Ġx"])
def test_the_spelling_of_an_added_token_is_what_it_is_decoded_to(content: str, tmp_path: Path) -> None:
    """DeepSeek's marks of calls are such tokens: added, not special, and with ▁ in them."""
    flags = dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), False)
    added = [{"id": tiny.VOCAB, "content": content, **flags}]
    tokenizer = Tokenizer(edited(tmp_path / "tokenizer.json", added_tokens=added))
    assert tokenizer.spellings[tiny.VOCAB] == tokenizer.decode([tiny.VOCAB]).encode()
