"""The program that answers several requests at once."""

from pathlib import Path

import load as bench
import pytest


def test_requests_are_those_of_the_file_again_and_again() -> None:
    path = Path(bench.__file__).with_name("prompts.jsonl")
    requests = bench.read_requests(path, 40)
    assert len(requests) == 40
    assert len({each.max_tokens for each in requests}) == 4
    assert all(each.prompt for each in requests)


def test_every_text_is_that_of_its_request_alone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"turns": ["{text}"]}}\n' for text in ("the in", "an other", "on re")))
    monkeypatch.setattr(bench, "_MAX_TOKENS", (4, 9))
    monkeypatch.setattr(bench, "_LONG_TOKENS", 60)
    assert bench.report(str(tiny_model), [1, 3], 1, {"drafter": "none", "deterministic": True}, prompts)
    printed = capsys.readouterr().out
    assert "9 of 9" in printed
    counts = eval(printed.rpartition("first token: ")[2])
    assert all(1 <= count <= 3 for count in counts.values())
