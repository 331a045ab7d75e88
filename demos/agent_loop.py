"""A model that looks things up in your notes and writes reminders, after your yes to each call.

    python demos/agent_loop.py demos/notes "When does the boat club meet? Remind me of it." --model qwen2.5-7b

The model gets two functions, and asks for calls of them. Each call is shown, and made if you say yes. What
it gives goes back to the model, until it answers without a call. Small models do this badly.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec import EdgeSpecError, Engine, ToolCall, load

SYSTEM = "You answer from the user's notes, which you search with find_lines. Call one function at a time."
MAX_STEPS = 8
Tools = dict[str, Callable[..., str]]


def tools_for(folder: Path) -> Tools:
    """What the model may do with a folder. It reads their names, types and docstrings."""

    def find_lines(word: str) -> str:
        """Find lines of the notes that have a word.

        Args:
            word: One word, in upper or lower case.
        """
        found = [
            f"{path.name}: {line}"
            for path in sorted(folder.glob("*.md"))
            for line in path.read_text(encoding="utf-8").splitlines()
            if word.casefold() in line.casefold()
        ]
        return "\n".join(found[:20]) or f"no line has the word {word}"

    def add_reminder(text: str) -> str:
        """Write a line into the user's reminders.

        Args:
            text: What to be reminded of, and when.
        """
        with (folder / "reminders.md").open("a", encoding="utf-8") as file:
            file.write(f"- {' '.join(text.split())}\n")
        return "written"

    return {function.__name__: function for function in (find_lines, add_reminder)}


def answer(engine: Engine, question: str, tools: Tools, may_call: Callable[[ToolCall], bool]) -> str:
    """Let the model call tools until it answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        step = engine.generate(messages, system=SYSTEM, tools=list(tools.values()), max_tokens=400)
        messages.append(step.message)
        if not step.tool_calls:
            return step.text
        for call in step.tool_calls:
            result = make_call(tools, call) if may_call(call) is True else "the user does not want this call"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"(no answer yet; this program takes {MAX_STEPS} steps at most)"


def make_call(tools: Tools, call: ToolCall) -> str:
    """What a tool gives, or what was wrong with its call: the model may then try another one."""
    tool = tools[call.name]
    try:
        return tool(**call.parse(tool))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"


def ask_user(call: ToolCall) -> bool:
    # Written by the model: repr shows codes that would control a terminal.
    return input(f"{call.name} {call.arguments!r} - may it? [y/N] ").strip().casefold() in ("y", "yes")


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a model use your notes.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", default="smollm2-1.7b")
    options = parser.parse_args()
    try:
        with load(options.model) as engine:
            print(answer(engine, options.question, tools_for(options.folder), ask_user))
    except EdgeSpecError as error:
        print(f"agent_loop: {error}", file=sys.stderr)
        return error.exit_code
    except (EOFError, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
