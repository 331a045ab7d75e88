"""Vectors of texts, beside those of numpy over the same weights."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
from embedding_models import END, reference_vector, write_folder

from edgespec import (
    ContextOverflow,
    DeviceUnavailable,
    Engine,
    ManifestError,
    ModelError,
    UnsuitedModel,
    UsageError,
    load,
)
from edgespec.cli.main import main
from edgespec.errors import Cancelled
from edgespec.export.convert import export_model
from edgespec.manifest import parse_manifest
from edgespec.system.cancel import Cancel
from edgespec.types import TokenIds

WEIGHTS = tiny.random_weights(5)
LONG = " the an in" * 120  # more tokens than one pass runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "vectors"
    write_folder(path, WEIGHTS)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with load(folder, home=tmp_path_factory.mktemp("home")) as engine:
        yield engine


@pytest.mark.parametrize("text", ["a", "the an in", LONG])
def test_the_vector_is_the_last_tokens_state(engine: Engine, text: str) -> None:
    tokens = [*engine.tokenize(text), END]
    vector = engine.embed(text)
    assert vector.shape == (tiny.HIDDEN,)
    assert np.abs(vector - reference_vector(WEIGHTS, tokens)).max() < 1e-5


def test_a_gguf_file_states_its_pooling(tmp_path: Path) -> None:
    override = {"llama.pooling_type": 1, "tokenizer.ggml.add_eos_token": True}
    tiny.write_gguf(tmp_path / "mean.gguf", WEIGHTS, override=override)
    with load(tmp_path / "mean.gguf", home=tmp_path) as engine:
        wanted = reference_vector(WEIGHTS, [*engine.tokenize("the an"), END], "mean")
        assert np.abs(engine.embed("the an") - wanted).max() < 1e-5


def test_a_vector_does_not_depend_on_what_was_read_before(engine: Engine) -> None:
    texts = ["the an in", "the an re", LONG, "the an in"]
    vectors = engine.embed(texts)
    assert np.array_equal(vectors[0], vectors[3])
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(engine.embed, texts))
    assert np.array_equal(vectors, np.stack(beside))


def test_what_is_no_text_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="empty"):
        engine.embed(["a", ""])
    with pytest.raises(UsageError, match="wanted a str or a list"):
        engine.embed([])
    with pytest.raises(UsageError, match="the text is 3; wanted a str"):
        engine.embed([3])  # type: ignore[list-item]
    with pytest.raises(ContextOverflow):
        engine.embed("a" * (tiny.CONTEXT + 1))


@pytest.mark.parametrize(("text", "error"), [("", UsageError), ("word " * 1000, ContextOverflow)])
def test_a_text_among_several_that_is_refused_is_named(engine: Engine, text: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^texts\[1\]: "):
        engine.embed(["a", text, "b"])


def test_a_far_too_long_text_is_refused_before_all_of_it_is_encoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = engine.tokenizer.encode

    def watched(text: str) -> TokenIds:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    with pytest.raises(ContextOverflow, match="or more tokens"):
        engine.embed("a" * 3_000_000)
    assert sum(lengths) < 100_000


def test_states_that_are_no_numbers_give_no_vector(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = engine.embedder._decoder.hidden_states
    assert store is not None
    monkeypatch.setattr(store, "read", lambda tokens, start: np.full((len(tokens), tiny.HIDDEN), np.nan, "f4"))
    with pytest.raises(ModelError, match="not finite"):
        engine.embed("a")


def test_a_text_that_nobody_waits_for_is_given_up(engine: Engine) -> None:
    embedder, cancel = engine.embedder, Cancel()
    before = engine.embed("the")
    cancel.set()
    with pytest.raises(Cancelled):
        embedder.vector(embedder.encode("the"), cancel)
    assert np.array_equal(engine.embed("the"), before)


def test_it_writes_no_text(
    engine: Engine, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsuitedModel, match="is an embedding model"):
        engine.generate("the")
    lines: list[str] = []
    with load(folder, home=tmp_path, drafter="suffix", report=lines.append) as other:
        assert np.array_equal(other.embed("the"), engine.embed("the"))
    assert [line for line in lines if "has no effect" in line and "for which nothing drafts" in line]
    assert not [line for line in lines if "plain decoding" in line]


def test_a_chat_refuses_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip  # noqa: E501
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert main(["chat", str(folder), "--prompt", "hi"]) == 3
    assert "is an embedding model" in capsys.readouterr().err


def test_it_drafts_for_no_model(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsuitedModel, match="cannot draft"):
        load(tiny_model, home=tmp_path, drafter=str(folder))


def test_a_plain_engine_gives_its_vectors(engine: Engine) -> None:
    assert np.array_equal(engine.plain().embed("the"), engine.embed("the"))


def test_the_npu_form_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="the npu form has none"):
        export_model(folder, tmp_path / "npu", form="npu", precision="fp16")
    export_model(folder, tmp_path / "cpu", precision="fp32")
    stated = json.loads((tmp_path / "cpu" / "edgespec.json").read_text())
    stated["kv_cache"]["form"] = "static"
    with pytest.raises(ManifestError, match="static cache does not give"):
        parse_manifest(tmp_path, stated)


@pytest.mark.parametrize("is_drafter", [False, True])
def test_it_is_no_half_of_a_pair(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_drafter: bool
) -> None:
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights())
    target, drafter = (tmp_path / "tiny.gguf", folder) if is_drafter else (folder, tmp_path / "tiny.gguf")
    assert main(["export", str(target), "--drafter", str(drafter), "--output", str(tmp_path / "pair")]) == 2
    assert "neither drafts nor is drafted for" in capsys.readouterr().err
    assert not (tmp_path / "pair").exists()
