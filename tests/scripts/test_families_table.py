"""The table of families: what it prints, and that a difference fails it."""

from pathlib import Path

import families_table
import pytest

from edgespec.export.convert import export_model

pytestmark = pytest.mark.slow  # exports, and opens each export several times


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_table, "TEXT_DRAFTERS", ("suffix",))
    monkeypatch.setattr(families_table, "SCHEDULES", ("pipelined",))
    monkeypatch.setattr(families_table, "SOURCES", [("llama", "gguf")])
    monkeypatch.setattr("sys.argv", ["families_table.py", "llama", "--prompts", "2", "--tokens", "6"])


def test_table_has_a_line_for_each_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert families_table.main() == 0
    _, *lines, verdict = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["llama", "GGUF", bits] for bits in ("fp32", "int4")]
    assert all(line.split()[5] == "0/4" for line in lines)
    assert verdict == "none of the lines differ"


def test_other_logits_are_further_away_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families_table, "LOGITS", {"llama": -families_table.LOGITS["llama"]})
    export_model(families_table.write_source(tmp_path, "llama", "gguf"), tmp_path / "out", precision="fp32")
    for precision, allowed in families_table.PRECISIONS.items():
        assert families_table.logit_error(tmp_path / "out", "llama", precision) > allowed
