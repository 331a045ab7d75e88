"""Answer questions from a folder of notes, on this machine only.

    python demos/ask_notes.py demos/notes "When does the boat club meet?"
    python demos/ask_notes.py demos/notes

With a question it prints one answer. Without one it keeps asking for questions. Passages of the notes that share
words with the question go into the prompt, as many as fit the context, and are named below the answer. Ctrl-C
stops an answer, Ctrl-D leaves.
"""

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from passages import SUFFIXES, Index, Passage, read_folder

from edgespec import AnswerStream, EdgeSpecError, Engine, load

SYSTEM = "You answer questions from the user's notes, in one or two sentences."
MAX_PASSAGES, MAX_TOKENS = 4, 200


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer questions from a folder of notes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", nargs="?", help="leave it out to ask several questions")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    if not options.folder.is_dir():
        print(f"{options.folder} is not a folder", file=sys.stderr)
        return 2
    index = Index(read_folder(options.folder))
    if not index.passages:
        print(f"{options.folder} contains no notes ({', '.join(SUFFIXES)})", file=sys.stderr)
        return 2
    try:
        with load(options.model, report=lambda line: print(line, file=sys.stderr)) as engine:
            for question in [options.question] if options.question else read_questions():
                answer(engine, index, question)
    except EdgeSpecError as error:
        print(f"ask_notes: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read_questions() -> Iterator[str]:
    """Read questions from the terminal until Ctrl-D or Ctrl-C."""
    while True:
        try:
            if question := input("\nask> ").strip():
                yield question
        except (EOFError, KeyboardInterrupt):
            return


def answer(engine: Engine, index: Index, question: str) -> None:
    """Print an answer while it is made, then the places of the notes that it used."""
    found = fit_context(engine, index.best(question, MAX_PASSAGES), question)
    if not found:
        print("None of the notes shares a word with this question.")
        return
    with cancel_on_ctrl_c(engine.stream(prompt(found, question), system=SYSTEM, max_tokens=MAX_TOKENS)) as chunks:
        for chunk in chunks:
            print(replace_control_characters(chunk.text), end="", flush=True)
    print(" … (stopped)" if chunk.finish_reason == "cancelled" else "")
    print("from " + ", ".join(passage.place for passage in reversed(found)))


def prompt(found: Sequence[Passage], question: str) -> str:
    notes = "\n\n".join(f"Note {each.place}\n{each.heading}\n{each.text}" for each in found)
    return f"{notes}\n\nQuestion: {question}\nAnswer from the notes above."


def fit_context(engine: Engine, found: list[Passage], question: str) -> list[Passage]:
    """Keep the best passages that leave room for an answer; the best one comes last, next to the question."""
    room = engine.context_length - MAX_TOKENS
    while found and engine.count(prompt(found, question), system=SYSTEM) > room:
        found = found[:-1]
    return found[::-1]


@contextmanager
def cancel_on_ctrl_c(chunks: AnswerStream) -> Iterator[AnswerStream]:
    """Let Ctrl-C end the answer and not the program, even while the model still reads the notes."""
    before = signal.signal(signal.SIGINT, lambda number, frame: chunks.cancel())
    try:
        with chunks:
            yield chunks
    finally:
        signal.signal(signal.SIGINT, before)


def replace_control_characters(text: str) -> str:
    """Notes may contain codes that control a terminal, and a model may repeat them."""
    return re.sub(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)


if __name__ == "__main__":
    sys.exit(main())
