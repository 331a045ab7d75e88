"""Ask a question about a text file: python demos/ask_notes.py notes.txt "When is the meeting?" """

import sys
from pathlib import Path

from edgespec import load


def main(path: str, question: str) -> None:
    notes = Path(path).read_text(encoding="utf-8")
    system = f"Answer from these notes, in one sentence.\n\n{notes}"
    with load("smollm2-135m") as engine:
        for chunk in engine.stream(question, system=system, max_tokens=80):
            print(chunk.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:3])
