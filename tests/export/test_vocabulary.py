"""Tokenizers, special tokens and chat templates of sources, as transformers and llama.cpp read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from edgespec.export.sources import read_vocabulary
from edgespec.export.vocabulary import vocabulary_from_gguf
from edgespec.text.template_sandbox import render

NAMED = [{"name": "tool_use", "template": "T\n"}, {"name": "default", "template": " D\n"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}, *NAMED]}}, " D", "T"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "T", "T"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "own", "template": "\nO"}]}}, "\nO", "\nO"),
        ({"chat_template.json": {"chat_template": "J"}}, "J", "J"),
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


def test_chat_template_for_tools_of_a_gguf_file_is_used_with_tools() -> None:
    keys = {"chat_template": "A", "chat_template.tool_use": "B"}
    metadata = tiny.GGUF_TOKENIZER | {f"tokenizer.{key}": text for key, text in keys.items()}
    template = vocabulary_from_gguf("a.gguf", metadata).chat_template
    assert template is not None
    assert (render(template, {}), render(template, {"tools": ["a"]})) == ("A", "B")


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
