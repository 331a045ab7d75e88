"""Tokenizers, special tokens and chat templates of sources, as transformers and llama.cpp read them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_tokenizers
import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer, models

from edgespec.errors import SourceError
from edgespec.export.sources import read_source, read_vocabulary
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.text.stored_template import turn_marks
from edgespec.text.template_sandbox import render
from edgespec.tools import channels

NAMED = [{"name": "tool_use", "template": "T\n"}, {"name": "default", "template": " D\n"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}, *NAMED]}}, " D", "T"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "T", "T"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "own", "template": "\nO"}]}}, "\nO", "\nO"),
        ({"chat_template.json": {"chat_template": "J"}}, "J", "J"),
        ({"processor_config.json": {"chat_template": "P"}}, "P", "P"),
        ({"chat_template.jinja": "\nA", "additional_chat_templates/tool_use.jinja": "\nB"}, "\nA", "\nB"),
        ({"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "C"}}, "A", "A"),
    ],
)
def test_chat_template_is_found_where_transformers_writes_it(
    files: dict[str, Any], plain: str, with_tools: str, tmp_path: Path
) -> None:
    tmp_path /= "hf"
    tiny.write_huggingface(tmp_path, tiny.random_weights())
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = read_vocabulary(tmp_path).chat_template
    assert template is not None
    assert (render(template, {}), render(template, {"tools": ["a"]})) == (plain, with_tools)


@pytest.mark.parametrize("default", ["chat_template", "chat_template.default", "chat_template.own"])
def test_chat_template_for_tools_of_a_gguf_file_is_used_with_tools(default: str) -> None:
    keys = {default: "A", "chat_template.tool_use": "B"}
    without = {key: value for key, value in tiny.GGUF_TOKENIZER.items() if key != "tokenizer.chat_template"}
    metadata = without | {f"tokenizer.{key}": text for key, text in keys.items()}
    template = vocabulary_from_gguf("a.gguf", metadata).chat_template
    assert template is not None
    assert (render(template, {}), render(template, {"tools": ["a"]})) == ("A", "B")


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_an_answer_in_channels_ends_with_a_call_and_not_with_a_message(form: str, tmp_path: Path) -> None:
    marks = [each for each in channels.MARKS if each != "<|constrain|>"]
    pieces = [*marks, *tiny.PIECES]
    stated = tiny.GGUF_TOKENIZER | {
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3] * len(marks) + tiny.TYPES,
        "tokenizer.ggml.eos_token_id": pieces.index("<|return|>"),
    }
    vocabulary = vocabulary_from_gguf("a.gguf", stated)
    if form == "huggingface":
        tiny.write_huggingface(tmp_path / "hf", tiny.random_weights(), tokenizer=vocabulary.tokenizer_json)
        (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": null}')
        (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<|return|>"}')
        vocabulary = read_vocabulary(tmp_path / "hf")
    ends = {"<|return|>", "<|call|>", "<|endoftext|>"} | ({pieces[2]} if form == "huggingface" else set())
    assert {pieces[token] for token in vocabulary.eos_token_ids} == ends


@pytest.mark.parametrize("form", ["huggingface", "gguf"])
def test_eos_token_of_a_template_is_the_one_that_the_files_state(form: str, tmp_path: Path) -> None:
    """<|im_end|> ends answers too and stands behind it."""
    written = "{{ bos_token }}\n{% macro end() %}{{ eos_token }}{% endmacro %}{{ end() }}\n"
    if form == "gguf":
        stated = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": written}
        vocabulary = vocabulary_from_gguf("a.gguf", tiny.GGUF_TOKENIZER | stated)
    else:
        tmp_path /= "hf"
        tiny.write_huggingface(tmp_path, tiny.random_weights())
        settings = {"eos_token": "<|endoftext|>", "chat_template": written}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
        vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.eos_token_ids == (0, 2)
    assert vocabulary.chat_template is not None
    assert render(vocabulary.chat_template, {"bos_token": "b", "eos_token": "<|im_end|>"}) == "b\n<|endoftext|>"


def test_special_tokens_of_a_template_are_those_that_the_files_state(tmp_path: Path) -> None:
    """Also of older folders, whose own file of them transformers takes first, unless the other declares tokens."""
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    stated = {"unk_token": "<u>", "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<old>"}
    (tmp_path / "hf" / "special_tokens_map.json").write_text(json.dumps(stated))
    settings = {
        "pad_token": "<p>",
        "chat_template": "{{ unk_token }}{{ pad_token }}{{ eos_token }}{{ sep_token }}",
    }
    for more, pad in (({}, "<old>"), ({"added_tokens_decoder": {}}, "<p>")):
        (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings | more))
        template = read_vocabulary(tmp_path / "hf").chat_template
        assert template is not None
        assert render(template, {"eos_token": "<|im_end|>"}) == f"<u>{pad}<|endoftext|>"


def test_an_older_folder_ends_answers_where_its_file_of_special_tokens_says(tmp_path: Path) -> None:
    tiny.write_huggingface(folder := tmp_path / "hf", tiny.random_weights())
    add_tokens(folder, {"content": "[X]", "special": False})
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "[X]"}))
    found = read_vocabulary(folder)
    assert Tokenizer.from_str(found.tokenizer_json).token_to_id("[X]") in found.eos_token_ids
    assert "[X]" in special_tokens(found.tokenizer_json)


def test_flags_of_added_tokens_are_those_that_the_settings_declare_as_in_transformers(tmp_path: Path) -> None:
    tiny.write_huggingface(folder := tmp_path / "hf", tiny.random_weights())
    add_tokens(folder, {"content": "<x>", "special": False}, {"content": "<|y|>", "special": True})
    declared = {
        str(tiny.VOCAB): {"content": "<x>", "lstrip": True, "special": False},
        str(tiny.VOCAB + 1): {"content": "<|y|>", "rstrip": True, "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    tokenizer = Tokenizer.from_str(read_vocabulary(folder).tokenizer_json)
    assert tokenizer.encode("a <x> a <|y|> a").tokens == ["a", " <x>", "Ġa", "Ġ", "<|y|> ", "a"]


def test_first_and_last_token_that_only_the_vocabulary_has_are_special(tmp_path: Path) -> None:
    tiny.write_huggingface(folder := tmp_path / "hf", tiny.random_weights())
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "added_tokens": []}))
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = read_vocabulary(folder)
    assert special_tokens(found.tokenizer_json) == {"<|im_start|>", "<|im_end|>"}
    assert Tokenizer.from_str(found.tokenizer_json).encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pre": "llama-bpe"}, True),
        ({"pre": "tekken"}, True),
        ({"pre": "pixtral"}, True),
        ({"pre": "qwen2"}, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"model": "gemma4", "merges": [], "add_bos_token": False}, True),
    ],
)
def test_first_token_of_texts_is_added_where_llama_cpp_adds_it(keys: dict[str, Any], expected: bool) -> None:
    metadata = {key: value for key, value in tiny.GGUF_TOKENIZER.items() if not key.endswith("add_bos_token")}
    stated = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert vocabulary_from_gguf("a.gguf", metadata | stated).add_bos == expected


@pytest.mark.parametrize("name", ["olmo", "qwen2", "qwen35"])
def test_letters_and_accents_apart_or_together_are_alike(name: str) -> None:
    tokenizer = Tokenizer.from_str(
        vocabulary_from_gguf("a.gguf", tiny.GGUF_TOKENIZER | {"tokenizer.ggml.pre": name}).tokenizer_json
    )
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("é").ids


def test_sentencepiece_that_states_no_first_token_has_1() -> None:
    unstated = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token")
    metadata = {key: each for key, each in made_tokenizers.gguf_keys("spm").items() if key not in unstated}
    found = vocabulary_from_gguf("a.gguf", metadata)
    assert (found.bos_token_id, found.add_bos) == (1, True)


def special_tokens(tokenizer_json: str) -> set[str]:
    added = Tokenizer.from_str(tokenizer_json).get_added_tokens_decoder().values()
    return {token.content for token in added if token.special}


@pytest.mark.parametrize("type_", [1, 4, None])
def test_marks_of_turns_are_special_tokens_of_any_type(type_: int | None) -> None:
    """By the template and by what the file states, but not the pair of tags around reasoning."""
    pieces = [*tiny.PIECES, "<think>", "</think>"]
    types = [*([type_ or 1] * 3), *tiny.TYPES[3:], 4, 4]
    metadata = {**tiny.GGUF_TOKENIZER, "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types}
    metadata["tokenizer.chat_template"] = tiny.TEMPLATE + "<think></think>"
    if type_ is None:
        del metadata["tokenizer.ggml.token_type"]
    vocabulary = vocabulary_from_gguf("a.gguf", metadata)
    assert special_tokens(vocabulary.tokenizer_json) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert vocabulary.eos_token_ids == (0, 2)


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        ("{% for m in messages %}[|{{ m.role }}|]{{ m.content }}{% endfor %}", ["[|user|]", "[|system|]"]),
        ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}", ["<|user|>", "<|system|>"]),
        ("{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}", ["<user>", "</user>"]),
    ],
)
def test_marks_of_who_speaks_are_special_tokens_though_put_together_or_in_pairs(
    template: str, marks: list[str]
) -> None:
    stated = {"tokens": [*tiny.PIECES, *marks, "<a>", "</a>"], "token_type": [*tiny.TYPES, *[4] * 4]}
    metadata = tiny.GGUF_TOKENIZER | {f"tokenizer.ggml.{key}": each for key, each in stated.items()}
    found = vocabulary_from_gguf("a.gguf", metadata | {"tokenizer.chat_template": template + "<a></a>"})
    assert special_tokens(found.tokenizer_json) == {*tiny.SPECIAL, *marks}


def test_marks_of_turns_are_looked_for_in_one_walk_through_the_template() -> None:
    """For each of 50,000 tokens, 2 MB of a file made to harm took five minutes."""
    tokens = [f"<|a{i}|>" for i in range(50_000)]
    assert turn_marks("<|" * 1_000_000 + "a7|>[<|a8|>]", tokens) == {"<|a7|>", "<|a8|>"}


def test_many_tokens_of_one_spelling_are_told_apart_and_more_are_refused() -> None:
    """3,000 took a minute and a half, and a file made to harm may have 200,000."""
    stated = {"tokens": [*tiny.PIECES, *["the"] * 1500], "token_type": [*tiny.TYPES, *[1] * 1500]}
    metadata = tiny.GGUF_TOKENIZER | {f"tokenizer.ggml.{key}": each for key, each in stated.items()}
    tokenizer = Tokenizer.from_str(vocabulary_from_gguf("a.gguf", metadata).tokenizer_json)
    assert tokenizer.get_vocab_size() == tiny.VOCAB + 1500
    assert {tokenizer.decode([tiny.VOCAB + at]) for at in (0, 700, 1499)} == {"the"}
    with pytest.raises(SourceError, match="has 3000 tokens that are spelled as others are, at most 2000"):
        vocabulary_from_gguf(
            "a.gguf", metadata | {"tokenizer.ggml.tokens": ["a"] * 3001, "tokenizer.ggml.token_type": [1] * 3001}
        )


@pytest.mark.parametrize(
    "end",
    ["<EOT>", "[EOT]", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<start_function_response>"],
)
def test_tokens_that_end_answers_by_their_names_do_whatever_their_type_is(end: str) -> None:
    for type_ in (1, 3, 4):
        stated = {"tokens": [*tiny.PIECES, end], "token_type": [*tiny.TYPES, type_]}
        metadata = tiny.GGUF_TOKENIZER | {f"tokenizer.ggml.{key}": each for key, each in stated.items()}
        found = vocabulary_from_gguf("a.gguf", metadata)
        assert end in special_tokens(found.tokenizer_json)
        assert tiny.VOCAB in found.eos_token_ids


def test_tokens_that_a_source_suppresses_are_read_where_the_model_has_them(tmp_path: Path) -> None:
    key, stated = "suppress_tokens", [7, 5, 7, -1, tiny.VOCAB]
    found = vocabulary_from_gguf("a.gguf", tiny.GGUF_TOKENIZER | {f"tokenizer.ggml.{key}": stated}, tiny.VOCAB)
    assert found.suppressed_token_ids == (5, 7)
    tiny.write_huggingface(tmp_path / "hf", tiny.random_weights())
    file = tmp_path / "hf" / "generation_config.json"
    for value, wanted in ((stated, (5, 7)), (None, ())):
        file.write_text(json.dumps({key: value}))
        assert read_source(tmp_path / "hf").vocabulary.suppressed_token_ids == wanted
    for wrong in (5, ["5"], [True]):
        file.write_text(json.dumps({key: wrong}))
        with pytest.raises(
            SourceError, match=rf"generation_config.json: suppress_tokens is {re.escape(repr(wrong))}"
        ):
            read_source(tmp_path / "hf")


def add_tokens(folder: Path, *tokens: dict[str, Any]) -> None:
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    stated["added_tokens"] += [{**flags, "id": tiny.VOCAB - 1 + i, **token} for i, token in enumerate(tokens, 1)]
    path.write_text(json.dumps(stated))


def test_added_tokens_behind_the_embedding_are_left_out(tmp_path: Path) -> None:
    """Fine-tunes add [PAD] and others without rows for them."""
    folder = tmp_path / "hf"
    tiny.write_huggingface(folder, tiny.random_weights())
    as_it_was = read_source(folder).vocabulary
    add_tokens(folder, {"content": "[PAD]", "special": True}, {"content": "<x>", "special": False})
    found = read_source(folder).vocabulary
    assert replace(found, notes=()) == as_it_was
    assert found.notes == ("leaving out 2 tokens that the embedding has no rows for",)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": tiny.VOCAB}))
    assert read_vocabulary(folder) == found  # of the other exporter, which has no weights yet

    more = {"tokens": [*tiny.PIECES, "<x>"], "token_type": [*tiny.TYPES, 4]}
    metadata = tiny.GGUF_TOKENIZER | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    size = len(tiny.PIECES)
    found = vocabulary_from_gguf("a", metadata, size)
    assert replace(found, notes=()) == vocabulary_from_gguf("a", tiny.GGUF_TOKENIZER, size)
    assert found.notes == ("leaving out 1 tokens that the embedding has no rows for",)


def test_tokens_that_the_settings_alone_declare_are_added_as_transformers_adds_them(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    weights = tiny.random_weights()
    rows = weights["model.embed_tokens.weight"]
    tiny.write_huggingface(folder, weights | {"model.embed_tokens.weight": np.concatenate([rows, rows])})
    contents = {"100": tiny.PIECES[100], tiny.VOCAB: "<|end|>", tiny.VOCAB + 1: "<x>", "9999": "<far>"}
    declared = {
        str(token): {"content": content, "special": content != "<x>"} for token, content in contents.items()
    }
    settings = {"added_tokens_decoder": declared, "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = read_source(folder).vocabulary
    added = Tokenizer.from_str(found.tokenizer_json).get_added_tokens_decoder()
    assert {token: each.content for token, each in added.items() if token > 2} == {
        int(token): content for token, content in contents.items() if content != "<far>"
    }
    assert found.eos_token_ids == (2, tiny.VOCAB, 0)
    assert special_tokens(found.tokenizer_json) == {*tiny.SPECIAL, tiny.PIECES[100], "<|end|>"}


def test_of_unigram_and_of_end_tokens_those_behind_the_embedding_are_left_out_too(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    pieces = [[piece, -float(i)] for i, piece in enumerate(["<unk>", *tiny.PIECES[1:], "[PAD]", "<x>"])]
    made = Tokenizer(models.Unigram([(str(piece), float(str(score))) for piece, score in pieces], 0, False))
    made.add_special_tokens(["[PAD]", "<x>"])
    tiny.write_huggingface(folder, tiny.random_weights(), tokenizer=made.to_str())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tiny.VOCAB + 1]}))
    found = read_source(folder).vocabulary
    assert Tokenizer.from_str(found.tokenizer_json).get_vocab_size() == tiny.VOCAB
    assert found.eos_token_ids == (2,)
    assert found.notes == ("leaving out 2 tokens that the embedding has no rows for",)


@pytest.mark.parametrize("none", [-1, tiny.VOCAB, 2**32 - 1])
def test_ids_that_no_token_has_stand_for_none(tmp_path: Path, none: int) -> None:
    written = {"tokenizer.ggml.bos_token_id": none, "tokenizer.ggml.eos_token_id": none}
    found = vocabulary_from_gguf("a.gguf", tiny.GGUF_TOKENIZER | written, tiny.VOCAB)
    assert (found.bos_token_id, found.eos_token_ids) == (None, (0, 2))
    folder = tmp_path / "hf"
    tiny.write_huggingface(folder, tiny.random_weights())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": none}))
    assert read_source(folder).vocabulary.eos_token_ids == (0, 2)


def test_special_tokens_with_names_of_their_own_are_known_to_the_template(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny.write_huggingface(folder, tiny.random_weights())
    named = {"image_token": {"content": "<|im_end|>"}, "x y": "<|im_start|>"}
    settings = {"extra_special_tokens": named, "chat_template": "{{ image_token }} x y"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert render(str(read_vocabulary(folder).chat_template), {}) == "<|im_end|> x y"


def test_mistral_tokenizers_that_transformers_wrote_with_another_pattern_cut_as_their_own(tmp_path: Path) -> None:
    keys = made_tokenizers.gguf_keys("tekken", ["n B", "nB a", "nBa y"])
    made = (vocabulary_from_gguf("made", keys | {"tokenizer.ggml.pre": pre}) for pre in ("tekken", "llama-bpe"))
    own, written = (Tokenizer.from_str(each.tokenizer_json) for each in made)
    assert own.encode("nBay").ids != written.encode("nBay").ids
    tiny.write_huggingface(folder := tmp_path / "hf", tiny.random_weights())
    written.save(str(folder / "tokenizer.json"))
    read = read_vocabulary(folder)
    assert Tokenizer.from_str(read.tokenizer_json).encode("nBay").ids == own.encode("nBay").ids
    assert any("Mistral" in note for note in read.notes)


def test_marks_of_turns_that_a_folder_does_not_call_special_are_so(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny.write_huggingface(folder, tiny.random_weights())
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["added_tokens"] = [{**token, "special": False} for token in stated["added_tokens"]]
    path.write_text(json.dumps(stated))
    add_tokens(folder, *({"content": tag, "special": False} for tag in ("<x>", "</x>")))
    said = {"0": "<|endoftext|>", "3": "<x>"}
    declared = {number: {"content": content, "special": True} for number, content in said.items()}
    settings = {"chat_template": tiny.TEMPLATE, "added_tokens_decoder": declared}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = read_vocabulary(folder)
    assert special_tokens(vocabulary.tokenizer_json) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert vocabulary.eos_token_ids == (2, 0)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "a.gguf"])
def test_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    tiny.write_huggingface(folder, tiny.random_weights())
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        read_source(folder / name if name == "a.gguf" else folder)


def test_a_tokenizer_is_made_of_each_pre_tokenizer() -> None:
    """Else `make differential` would not see it."""
    with pytest.raises(SourceError, match=r"'unheard', .* safetensors.*; known are ") as caught:
        vocabulary_from_gguf("a", tiny.GGUF_TOKENIZER | {"tokenizer.ggml.pre": "unheard"})
    assert str(caught.value).partition("known are ")[2].split(", ") == sorted(made_tokenizers.BYTE_LEVEL)


def test_tokenizer_of_gemma4_merges_as_its_file_lists() -> None:
    """Merges are those that SentencePiece makes by scores, but none joins a line end to something else."""
    words = made_tokenizers.learn_words(["the hen in the inn  the\nthen\n\nhen <|x|>"] * 3, 40)
    listed, scored = (
        Tokenizer.from_str(vocabulary_from_gguf("made", made_tokenizers.gguf_keys(kind, words)).tokenizer_json)
        for kind in ("gemma4", "spm without a space before")
    )
    for text in ("the hen in  the inn", " then é the", "hen", "\n\n", "x\N{GRINNING FACE}\t"):
        ids = listed.encode(text, add_special_tokens=False).ids
        assert ids == scored.encode(text, add_special_tokens=False).ids
        assert listed.decode(ids, skip_special_tokens=False) == text
    pieces = listed.encode("the\n\nthen", add_special_tokens=False).tokens
    assert not any(piece.strip("\n") and "\n" in piece for piece in pieces)
    keys = made_tokenizers.gguf_keys("gemma4")
    assert vocabulary_from_gguf("made", {k: v for k, v in keys.items() if "add_bos" not in k}).add_bos
    for change, message in (({"merges": None}, "no merges"), ({"merges": ["t zz"]}, "do not fit")):
        wrong = keys | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        with pytest.raises(SourceError, match=message):
            vocabulary_from_gguf("made", wrong)


@pytest.mark.parametrize("kind", made_tokenizers.KINDS)
def test_each_kind_of_tokenizer_gives_its_text_back(kind: str) -> None:
    tokenizer = Tokenizer.from_str(made_tokenizers.tokenizer_json(kind))
    text = "Hello the 3rd day, 12345 x!\n\n  nôt ASCII 日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == tiny.VOCAB
