"""Sort the messages of a table: each gets a category, whether it is urgent, and a summary.

    python demos/csv_batch.py demos/messages.csv sorted.csv

Every answer matches a JSON schema. Several rows are worked on at once, and are written in their order. Where the
output has rows already, the program continues after them.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from edgespec import ContextOverflow, EdgeSpecError, Engine, load

SYSTEM = "You sort messages of customers. Answer with their category, whether they are urgent, and a summary."
NEW_COLUMNS = ["category", "is_urgent", "summary", "problem"]
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": ["order", "invoice", "fault", "question", "other"]},
        "is_urgent": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 80},
    },
    "required": NEW_COLUMNS[:-1],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sorted", "schema": SCHEMA}}
_REST = "(rest)"  # the column of fields that the first line does not name
Row = dict[str, str]


def sort_message(engine: Engine, row: Row) -> Row:
    """The row with its new columns."""
    if row.pop(_REST, None):
        return row | {"problem": "it has more fields than the first line; put a text with commas in quotes"}
    try:
        answer = engine.generate(row["message"], system=SYSTEM, response_format=FORMAT, max_tokens=120)
    except ContextOverflow as error:  # this message is too long; others are not
        return row | {"problem": str(error)}
    found = json.loads(answer.text)
    return row | {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def sort_table(engine: Engine, rows: Iterator[Row]) -> Iterator[Row]:
    """Ask the model about each row, several at once, and give the rows with its answers in their order."""
    pool = ThreadPoolExecutor(engine.max_parallel)
    try:
        while batch := list(islice(rows, 100)):
            yield from pool.map(partial(sort_message, engine), batch)
    finally:  # after Ctrl-C the engine, which closes next, ends the answers: to wait for them takes long
        pool.shutdown(wait=False)


def run(engine: Engine, source: Path, output: Path) -> int:
    """Returns how many rows were added to the output."""
    num_done = len(list(read_rows(output))) if output.exists() else 0
    with (
        source.open(newline="", encoding="utf-8-sig") as read,
        output.open("a", newline="", encoding="utf-8") as out,
    ):
        rows = csv.DictReader(read, restkey=_REST, restval="")
        if "message" not in (rows.fieldnames or ()):
            raise SystemExit(
                f"{source} has no column 'message' in its first line; name the column with the texts so"
            )
        writer = csv.DictWriter(out, [*(rows.fieldnames or ()), *NEW_COLUMNS])
        if out.tell() == 0:
            writer.writeheader()
        num_added = 0
        for row in sort_table(engine, islice(rows, num_done, None)):
            writer.writerow(row)
            out.flush()  # what is done stays, whatever comes
            num_added += 1
        return num_added


def read_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sort the messages of a table.")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    try:
        with load(options.model) as engine:
            print(f"{run(engine, options.source, options.output)} rows were sorted")
    except EdgeSpecError as error:
        print(f"csv_batch: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"csv_batch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
