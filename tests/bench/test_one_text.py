from pathlib import Path
from typing import Any

import one_text
import pytest

from edgespec import Engine, load

pytestmark = pytest.mark.slow  # a module of many models or processes


def arguments(model: Path, drafter: Path, configurations: str) -> list[str]:
    few = ["--short", "2", "--long", "0", "--conversations", "1", "--tokens", "8", "--only", configurations]
    return ["one_text.py", str(model), "--drafter", str(drafter), *few]


def test_one_text_is_found_with_each_kind_of_drafter(
    tiny_model: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", arguments(tiny_model, tiny_drafter, "suffix,model hedged,default"))
    assert one_text.main() == 0
    lines = [line.rsplit(maxsplit=6) for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(name.strip(), int(count), int(different)) for name, count, different, *_ in lines] == [
        ("none", 6, 0),
        ("suffix", 4, 0),
        ("model hedged", 4, 0),
        ("default", 6, 0),
    ]
    assert all(int(drafted) > 0 for _, _, _, _, drafted, *_ in lines[1:3])


def test_other_text_of_a_drafter_is_counted_and_shown(
    tiny_model: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_model(model: str, **settings: Any) -> Engine:
        return load(tiny_drafter if settings["drafter"] == "suffix" else model, **settings)

    monkeypatch.setattr(one_text, "load", other_model)
    monkeypatch.setattr("sys.argv", arguments(tiny_model, tiny_drafter, "ngram,suffix"))
    assert one_text.main() == 1
    *_, ngram, suffix, total = capsys.readouterr().out.splitlines()
    assert ngram.split()[2] == "0"
    assert suffix.split()[2] in ("1", "2", "3", "4")
    assert "prompt " in suffix
    assert total == f"{suffix.split()[2]} of 8 answers differ from the reference"


def test_unknown_configuration_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", arguments(tiny_model, tiny_model, "sufix"))
    assert one_text.main() == 2
    assert "--only names sufix; wanted some of: none, ngram, suffix" in capsys.readouterr().err
