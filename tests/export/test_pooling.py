"""Sources whose vectors are made in a way that the export lacks are refused, with what was found."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from embedding_models import END, POOLING, write_folder

from edgespec.errors import SourceError
from edgespec.export.sources import read_source
from edgespec.manifest import Pooling

WEIGHTS = tiny.random_weights()


@pytest.mark.parametrize(
    ("stated", "kind"),
    [
        (POOLING, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"embedding_dimension": tiny.HIDDEN, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_a_folder_says_how_vectors_are_made(tmp_path: Path, stated: dict[str, Any], kind: str) -> None:
    write_folder(tmp_path / "model", WEIGHTS, pooling=stated)
    assert read_source(tmp_path / "model").pooling == Pooling(kind=kind, last_tokens=(END,))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pooling": {"pooling_mode_cls_token": True}}, "makes a vector by 'cls_token'"),
        ({"pooling": {"pooling_mode_cls_token": True, **POOLING}}, "by 'cls_token and last'"),
        ({"pooling": {"pooling_mode": ["mean", "max"]}}, "makes a vector by"),
        ({"pooling": {}}, "makes a vector by None"),
        ({"pooling": None}, "has no config.json, which says how a vector is made"),
        ({"modules": ("Transformer", "Pooling", "Dense", "Normalize")}, "has the module Dense"),
        ({"modules": ("Transformer",)}, "has no module Pooling"),
        ({"modules": ("Pooling", "Transformer")}, "in this order"),
        ({"modules": ("Pooling",)}, "in this order"),
        ({"modules": ("Transformer", "Pooling", "Pooling")}, "in this order"),
        ({"pooling": {"pooling_mode_mean_tokens": "false"}}, "wanted true or false"),
        ({"pooling": {"pooling_mode_mean_tokens": 1}}, "wanted true or false"),
        ({"config": {"is_causal": False}}, "causal attention"),
        ({"config": {"use_bidirectional_attention": True}}, "causal attention"),
    ],
)
def test_other_ways_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_folder(tmp_path / "model", WEIGHTS, **settings)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "model")


@pytest.mark.parametrize("place", ["../other", "..", "/", "a/../../other", "", None, ["1_Pooling"], "ABSOLUTE"])
def test_settings_are_read_in_the_folder_alone(tmp_path: Path, place: Any) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    write_folder(tmp_path / "other", WEIGHTS)
    other = tmp_path / "other" / "1_Pooling"
    for path in (tmp_path, tmp_path / "other"):
        (path / "config.json").write_text((other / "config.json").read_text())
    path = tmp_path / "model" / "modules.json"
    modules = json.loads(path.read_text())
    modules[1]["path"] = str(other) if place == "ABSOLUTE" else place
    path.write_text(json.dumps(modules))
    with pytest.raises(SourceError, match="wanted a folder in"):
        read_source(tmp_path / "model")


def test_a_model_in_another_folder_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    path = tmp_path / "model" / "modules.json"
    modules = json.loads(path.read_text())
    modules[0]["path"] = "0_Transformer"
    path.write_text(json.dumps(modules))
    with pytest.raises(SourceError, match="has its model in '0_Transformer'"):
        read_source(tmp_path / "model")


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config.json"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    path = tmp_path / "model" / name
    path.unlink()
    path.symlink_to("/dev/null")  # /dev/zero has no end
    with pytest.raises(SourceError, match="not a regular file"):
        read_source(tmp_path / "model")


def test_a_link_to_a_list_of_modules_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    (tmp_path / "model" / "modules.json").unlink()
    (tmp_path / "model" / "modules.json").symlink_to(tmp_path / "blob")
    with pytest.raises(SourceError, match=r"has no modules\.json"):
        read_source(tmp_path / "model")


@pytest.mark.parametrize("ids", [[END] * 9, [tiny.VOCAB]])
def test_a_tokenizer_that_puts_too_much_behind_a_text_is_refused(tmp_path: Path, ids: list[int]) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    path = tmp_path / "model" / "tokenizer.json"
    stated = json.loads(path.read_text())
    (token,) = stated["post_processor"]["special_tokens"].values()
    token |= {"ids": ids, "tokens": ["end"] * len(ids)}
    path.write_text(json.dumps(stated))
    with pytest.raises(SourceError, match="behind a text"):
        read_source(tmp_path / "model")


@pytest.mark.parametrize("content", ["[", "{}", "[3]", '[{"type": 3}]'])
def test_a_damaged_list_of_modules_is_refused(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    (tmp_path / "model" / "modules.json").write_text(content)
    with pytest.raises(SourceError, match=r"modules\.json"):
        read_source(tmp_path / "model")


def test_a_tokenizer_that_changes_the_text_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", WEIGHTS)
    path = tmp_path / "model" / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["post_processor"]["single"].reverse()  # the end token before the text, which is no bos
    path.write_text(json.dumps(stated))
    with pytest.raises(SourceError, match="without special ones"):
        read_source(tmp_path / "model")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"llama.pooling_type": 2}, "makes a vector by 'cls'"),
        ({"llama.pooling_type": 4}, "makes a vector by 'rank'"),
        ({"llama.pooling_type": 9}, "makes a vector by 9"),
        ({"llama.pooling_type": 3, "llama.attention.causal": False}, "causal attention"),
        ({"llama.pooling_type": 3, "llama.attention.causal": 0}, "wanted true or false"),
        ({"llama.pooling_type": "last"}, "wanted a whole number"),
        ({"llama.pooling_type": True}, "wanted a whole number"),
        ({"llama.pooling_type": [1, 2]}, "wanted a whole number"),
        ({"llama.pooling_type": 3, "tokenizer.ggml.add_eos_token": 1}, "wanted true or false"),
        (
            {
                "llama.pooling_type": 3,
                "tokenizer.ggml.add_eos_token": True,
                "tokenizer.ggml.eos_token_id": tiny.VOCAB,
            },
            "does not name one of its own",
        ),
    ],
)
def test_a_gguf_file_with_another_pooling_is_refused(tmp_path: Path, override: dict[str, Any], words: str) -> None:
    tiny.write_gguf(tmp_path / "model.gguf", WEIGHTS, override=override)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "model.gguf")


def test_a_gguf_file_that_writes_text_has_no_pooling(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "model.gguf", WEIGHTS, override={"llama.pooling_type": 0})
    assert read_source(tmp_path / "model.gguf").pooling is None
