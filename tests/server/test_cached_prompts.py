"""What a server tells of prompts that it did not have to read again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, home_with, serving

from edgespec import load
from edgespec.server.model_names import ModelNames

LONG = "in the an re on " * 12


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path), own=str(tiny_model))
    engine = load(tiny_model, deterministic=True, max_parallel=3, offline=True)
    with serving(names, lambda name: engine, first=(str(names.own_name), engine)) as found:
        yield found


def usage(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = served.post(path, fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


def test_tokens_that_a_cache_held_are_counted(served: Served) -> None:
    def cached(text: str, **fields: Any) -> tuple[int, int]:
        found = usage(
            served, "/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=3, **fields
        )
        return found["prompt_tokens_details"]["cached_tokens"], found["prompt_tokens"]

    assert cached(LONG)[0] < 8  # a probe of the device may have left a token
    again, num_prompt = cached(LONG)
    assert again == num_prompt - 1
    common = cached(LONG + "other")[0]
    assert num_prompt // 2 < common < num_prompt
    assert cached("re")[0] < 16


def test_every_address_counts_them(served: Served) -> None:
    for path, field, length in (
        ("/v1/completions", "prompt", "max_tokens"),
        ("/v1/responses", "input", "max_output_tokens"),
    ):
        found = [usage(served, path, **{field: f"{path} {LONG}", length: 3}) for _ in range(2)]
        details = [each.get("prompt_tokens_details") or each["input_tokens_details"] for each in found]
        assert details[0]["cached_tokens"] < details[1]["cached_tokens"]
    found = [usage(served, "/v1/completions", prompt=["a " + LONG, "b " + LONG], n=2, max_tokens=2) for _ in "ab"]
    assert found[1]["prompt_tokens_details"]["cached_tokens"] < found[1]["prompt_tokens"]


def test_a_stream_counts_them_too(served: Served) -> None:
    fields = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
    counts = [
        served.events("/v1/chat/completions", {**fields, "stream_options": {"include_usage": True}})[-2]["usage"]
        for _ in range(2)
    ]
    assert counts[0]["prompt_tokens_details"]["cached_tokens"] < 8
    assert counts[1]["prompt_tokens_details"]["cached_tokens"] > 20
