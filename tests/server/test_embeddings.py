"""POST /v1/embeddings, with a tiny model that was trained for embeddings beside one that writes."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import numpy as np
import pytest
import tiny
from embedding_models import END, reference_vector, write_folder
from served import WAIT_S, Served, home_with, serving

from edgespec import Engine, load
from edgespec.engine.embedder import Embedder, Vectors
from edgespec.export.convert import export_model
from edgespec.server.model_names import ModelNames
from edgespec.system.cancel import Cancel
from edgespec.types import TokenIds

WEIGHTS = tiny.random_weights(5)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("vectors")
    write_folder(place / "source", WEIGHTS)
    export_model(place / "source", place / "vectors", precision="fp32")
    home = home_with(place / "home", tiny=tiny_model, vectors=place / "vectors")

    def open_engine(name: str) -> Engine:
        assert name == "vectors", "a model that gives no vectors is refused before it is loaded"
        return load(home.models / name, home=place / "home")

    with serving(ModelNames(home), open_engine) as found:
        yield found


def ask(served: Served, **fields: Any) -> Any:
    return served.post("/v1/embeddings", {"model": "vectors", **fields})


def vectors(served: Served, **fields: Any) -> np.ndarray:
    answer = ask(served, **fields)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == [*range(len(data))]
    return np.array([each["embedding"] for each in data], np.float32)


def test_texts_and_token_ids_give_the_vectors_of_the_model(served: Served) -> None:
    found = vectors(served, input=["the an", "in"])
    ids = served.post("/tokenize", {"model": "vectors", "content": "the an"}).json()["tokens"]
    assert np.abs(found[0] - reference_vector(WEIGHTS, [*ids, END])).max() < 1e-5
    assert np.array_equal(vectors(served, input="in")[0], found[1])
    assert np.array_equal(vectors(served, input=ids)[0], found[0])
    assert np.array_equal(vectors(served, input=[ids, [*ids, END]]), found[[0, 0]])


def test_the_same_numbers_in_base64_and_fewer_of_them(served: Served) -> None:
    (whole,) = vectors(served, input="the an")
    written = ask(served, input="the an", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(written), "<f4"), whole)
    (short,) = vectors(served, input="the an", dimensions=8)
    assert np.allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


def test_usage_counts_all_tokens_and_metrics_do(served: Served) -> None:
    answer = ask(served, input=["the an", "in"]).json()
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6} | answer["usage"]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]
    assert 'prompt_tokens_total{model="vectors"}' in served.client.get("/metrics").text


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({}, 400, "input", "input is missing"),
        ({"input": ""}, 400, "input", "empty"),
        ({"input": ["a", ""]}, 400, "input", "empty or mixed"),
        ({"input": [[]]}, 400, "input", "empty or mixed"),
        ({"input": []}, 400, "input", "empty"),
        ({"input": ["a"] * 2049}, 400, "input", "wanted at most 2048"),
        ({"input": [9_999_999]}, 400, "input", "which the model lacks"),
        ({"input": [9_999_999]}, 400, "input", "check_embedding_ctx_length=False"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "wanted float or base64"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "wanted 1 to 64"),
        ({"input": "a", "dimensions": 65}, 400, "dimensions", "wanted 1 to 64"),
        ({"input": "a" * 701}, 400, "input", "context"),
        ({"input": "a", "model": "tiny"}, 400, "model", "is a model that writes text"),
    ],
)
def test_what_cannot_be_done_is_refused(
    served: Served, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    answer = ask(served, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, words in error["message"]) == (status, True), error
    assert error["param"] == param


def test_text_is_not_asked_of_it(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = served.post("/v1/chat/completions", {"model": "vectors", "messages": messages})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsuited_model")


def test_many_who_wait_for_vectors_do_not_hold_up_other_requests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors(served, input="the")
    make, may_go, waiting = Embedder.vector, Event(), Semaphore(0)

    def wait(self: Embedder, tokens: TokenIds, cancel: Cancel | None = None, size: int | None = None) -> Vectors:
        waiting.release()
        assert may_go.wait(WAIT_S)
        return make(self, tokens, cancel)

    monkeypatch.setattr(Embedder, "vector", wait)
    with ThreadPoolExecutor(40) as pool:  # more than asyncio has threads
        asked = [pool.submit(ask, served, input="the an") for _ in range(40)]
        try:
            assert all(waiting.acquire(timeout=WAIT_S) for _ in asked)
            other = served.post("/v1/embeddings", {"model": "none", "input": "a"}, timeout=WAIT_S)
        finally:
            may_go.set()
    assert other.status_code == 404
    assert {each.result().status_code for each in asked} == {200}
