"""The programs that load a server with many requests, against one that runs passes of several texts as one."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import serve_endurance
import serve_load
from serve_endurance import Call, Endurance, Use, calls, endure, growth
from served import Served, home_with, serving
from server_process import Asked
from versions import ask_at_once

from edgespec import load
from edgespec.server.model_names import ModelNames

PROMPTS = ("the in", "an other", "on re the", "in an", "re re re", "other")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    names = ModelNames(home_with(tmp_path_factory.mktemp("home")), own=str(tiny_model))
    engine = load(tiny_model, deterministic=True, max_parallel=4, offline=True)
    with serving(names, lambda name: engine, first=(str(names.own_name), engine)) as found:
        yield found


@pytest.fixture
def client(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{served.url}/", timeout=120) as found:
        yield found


@pytest.mark.slow
def test_load_is_compared_and_texts_are_equal(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_load, "_LONG", 100)
    requests = [Asked(prompt, 6 + i) for i, prompt in enumerate(PROMPTS)]
    assert serve_load.compare({"edgespec": client, "again": client}, requests, [1, 3], 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("| ")[2] for line in lines if line.startswith(("| edgespec", "| again"))] == [
        "16 of 16 |", "16 of 16 |", "24 of 24 |", "24 of 24 |",
    ]  # fmt: skip
    passes = [int(found[1]) for line in lines if (found := re.search(r"first token in (\d+) passes", line))]
    assert len(passes) == 2
    assert all(1 <= each <= 3 for each in passes)


def test_requests_at_once_have_one_speed_and_one_time_to_the_first_text(client: httpx2.Client) -> None:
    [[tokens_per_s, texts_per_s]] = ask_at_once(client, 4, 7)
    assert tokens_per_s > texts_per_s > 0.0


def test_texts_that_differ_are_told(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_other(client: httpx2.Client, lists: list[list[Asked]]) -> serve_load.Outcome:
        answers = [serve_load.Answered(f"{len(lists)}", 1, 0.0) for own in lists for _ in own]
        return serve_load.Outcome(1.0, tuple(answers))

    monkeypatch.setattr(serve_load, "run", ask_other)
    monkeypatch.setattr(serve_load, "passes_to_first_token", lambda *given: (1, 0.0))
    assert not serve_load.compare({"edgespec": client}, [Asked("a", 1)] * 2, [2], 1)


def test_clients_share_the_same_requests_and_end_at_about_the_same_time() -> None:
    requests = [Asked(f"{i}", tokens) for i, tokens in enumerate((32, 96, 64, 128) * 4)]
    answered = [each.max_tokens - 20 * (i % 3 == 0) for i, each in enumerate(requests)]
    num_tokens = dict(zip(requests, answered, strict=True))
    lists = serve_load.share(requests, answered, 4)
    assert sorted(each for own in lists for each in own) == sorted(requests)
    totals = [sum(num_tokens[each] for each in own) for own in lists]
    assert max(totals) - min(totals) <= 0.1 * max(totals)
    begins = [own[0].max_tokens for own in lists]
    assert len(set(begins)) > 2


@pytest.mark.slow
def test_many_requests_leave_nothing_and_mix_nothing_up(served: Served, client: httpx2.Client) -> None:
    endurance = Endurance(client, [Asked(prompt, 60) for prompt in PROMPTS])
    lines = list[str]()
    wrong = endure(client, endurance, os.getpid(), 40, 4, 0.5, 1, lines.append)
    assert [fault for fault in wrong if not fault.startswith(("memory", "threads", "open files"))] == []
    assert len(lines) == 11
    assert served.services.admission.num_taken == 0


def test_a_text_that_is_another_ones_is_a_fault(client: httpx2.Client) -> None:
    endurance = Endurance(client, [Asked(prompt, 60) for prompt in PROMPTS[:2]])
    texts = endurance._texts
    texts[0, "completions"], texts[1, "completions"] = texts[1, "completions"], texts[0, "completions"] + "x"
    for is_stream in (True, False):
        endurance.make(Call(0, "completions", is_stream, None))
    endurance.make(Call(1, "completions", True, 40))
    assert len(endurance.faults) >= 2


def test_what_grows_is_told() -> None:
    flat = [Use(100 << 20, 20, 30)] * 10
    assert growth(flat) == []
    assert growth([Use(300 << 20, 90, 90), *flat[:9]]) == []
    assert growth([*flat[:7], *[Use(400 << 20, 20, 30)] * 3]) == ["memory grew from 105 MB to 419 MB"]
    assert len(growth([*flat[:7], *[Use(400 << 20, 40, 50)] * 3])) == 3
    assert growth([*flat[:7], Use(400 << 20, 40, 50), *flat[:2]]) == []


def test_calls_are_the_same_each_time_and_mixed() -> None:
    found = list(calls(200, 0.4, 3))
    assert found == list(calls(200, 0.4, 3))
    assert {each.path for each in found} == set(serve_endurance._PATHS)
    assert 50 < sum(each.leaves_after is not None for each in found) < 110
