"""The program that sorts the messages of a table by a schema, several rows at once."""

import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import csv_batch
import pytest

from edgespec import Engine, load

DEMOS = Path(__file__).parents[2] / "demos"
MESSAGES = DEMOS / "messages.csv"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with load(tiny_model, drafter="none", deterministic=True) as engine:
        yield engine


def table(path: Path) -> list[dict[str, str]]:
    return list(csv_batch.read_rows(path))


def answered_alone(engine: Engine, row: dict[str, str]) -> dict[str, Any]:
    answer = engine.generate(
        row["message"], system=csv_batch.SYSTEM, response_format=csv_batch.FORMAT, max_tokens=120
    )
    found: dict[str, Any] = json.loads(answer.text)
    return found


@pytest.mark.slow
def test_each_row_has_what_its_message_alone_gives(engine: Engine, tmp_path: Path) -> None:
    rows = table(MESSAGES)
    assert csv_batch.run(engine, MESSAGES, tmp_path / "sorted.csv") == len(rows) == 6
    found = table(tmp_path / "sorted.csv")
    for before, after in zip(rows, found, strict=True):
        alone = answered_alone(engine, before)
        assert alone["category"] in csv_batch.SCHEMA["properties"]["category"]["enum"]  # type: ignore[index]
        assert {**before, **alone, "is_urgent": json.dumps(alone["is_urgent"]), "problem": ""} == after


def test_several_rows_are_worked_on_at_once(engine: Engine, tmp_path: Path, monkeypatch: Any) -> None:
    meeting, numbers, generate = Barrier(2), itertools.count(), engine.generate

    def meet(*arguments: Any, **options: Any) -> Any:
        if next(numbers) < 2:
            meeting.wait(WAIT_S)  # for another row, which is worked on meanwhile
        return generate(*arguments, **options)

    monkeypatch.setattr(engine, "generate", meet)
    assert csv_batch.run(engine, MESSAGES, tmp_path / "sorted.csv") == 6


def test_a_second_run_goes_on_behind_the_rows_that_are_there(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "sorted.csv"
    csv_batch.run(engine, MESSAGES, output)
    whole = output.read_text("utf-8")
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table_of(whole)[0]))
        writer.writeheader()
        writer.writerows(table_of(whole)[:2])
    assert csv_batch.run(engine, MESSAGES, output) == 4
    assert output.read_text("utf-8") == whole
    assert csv_batch.run(engine, MESSAGES, output) == 0


def table_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines(keepends=True)))


def test_a_message_that_is_too_long_is_named_and_the_others_are_sorted(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "long.csv"
    source.write_text(f"message\n{'the in ' * 4000}\nthe in\n", "utf-8")
    csv_batch.run(engine, source, tmp_path / "sorted.csv")
    first, second = table(tmp_path / "sorted.csv")
    assert "do not fit the context" in first["problem"]
    assert not first["category"]
    assert second["category"]
    assert not second["problem"]


def test_a_row_with_other_fields_than_the_first_line_stops_no_other(engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "ragged.csv"
    source.write_text("id,message\n1,the, in\n2\n3,the in\n", "utf-8")
    assert csv_batch.run(engine, source, tmp_path / "sorted.csv") == 3
    first, _, third = table(tmp_path / "sorted.csv")
    assert first["problem"].startswith("it has more fields than the first line")
    assert (third["id"], third["problem"], bool(third["category"])) == ("3", "", True)


def test_a_table_without_messages_is_refused(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("id,text\n1,the\n", "utf-8")
    with pytest.raises(SystemExit, match="no column 'message'"):
        csv_batch.run(engine, tmp_path / "other.csv", tmp_path / "sorted.csv")


@pytest.mark.slow
def test_the_program_runs_as_it_is_printed(tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "sorted.csv"
    command = [sys.executable, str(DEMOS / "csv_batch.py"), str(MESSAGES), str(output), "--model", str(tiny_model)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "6 rows were sorted\n"), ran.stderr
    assert [row["id"] for row in table(output)] == list("123456")
    missing = subprocess.run([*command[:2], "none.csv", *command[3:]], capture_output=True, text=True, timeout=120)
    assert (missing.returncode, "none.csv" in missing.stderr) == (1, True)


def test_ctrl_c_waits_for_no_answer() -> None:
    is_closed, ended = Event(), []

    class Slow:
        max_parallel = 2

        def generate(self, message: str, **_: object) -> object:
            if message != "first":
                is_closed.wait(10)
                ended.append(message)
            return SimpleNamespace(text="{}")

    table = csv_batch.sort_table(Slow(), iter([{"message": each} for each in ("first", "second", "third")]))
    try:
        assert next(table) == {"message": "first"}
        with pytest.raises(KeyboardInterrupt):
            table.throw(KeyboardInterrupt)
        assert ended == []
    finally:
        is_closed.set()
