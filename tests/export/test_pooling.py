"""Sources whose vectors are made in a way that the export lacks are refused, with what was found."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from embedding_models import END, POOLING, write_folder

from edgespec.errors import SourceError
from edgespec.export.sources import read_source
from edgespec.pooling import Pooling

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
        ({"config": {"is_causal": False}}, "causal attention"),
        ({"config": {"use_bidirectional_attention": True}}, "causal attention"),
    ],
)
def test_other_ways_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    write_folder(tmp_path / "model", WEIGHTS, **settings)
    with pytest.raises(SourceError, match=words):
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
    ],
)
def test_a_gguf_file_with_another_pooling_is_refused(tmp_path: Path, override: dict[str, Any], words: str) -> None:
    tiny.write_gguf(tmp_path / "model.gguf", WEIGHTS, override=override)
    with pytest.raises(SourceError, match=words):
        read_source(tmp_path / "model.gguf")


def test_a_gguf_file_that_writes_text_has_no_pooling(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "model.gguf", WEIGHTS, override={"llama.pooling_type": 0})
    assert read_source(tmp_path / "model.gguf").pooling is None
