"""A server in a process of its own that is asked over HTTP, and what one answer of it took."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any, NamedTuple

import httpx2

_STOP_S = 60.0
TIMEOUT_S = 900.0


class Asked(NamedTuple):
    """A prompt, and the most tokens of its answer."""

    prompt: str
    max_tokens: int


class Answered(NamedTuple):
    """An answer.

    first_s: Seconds until its first text.
    waited_passes: Passes that ended until its own had, if the server counts them.
    """

    text: str
    num_tokens: int
    first_s: float
    waited_passes: int | None = None


@contextmanager
def served(
    model: str, options: Sequence[str] = (), python: str = sys.executable
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of `edgespec serve MODEL OPTIONS` on a free port, and its process, until the block ends.

    python: The interpreter whose edgespec serves.
    """
    command = [python, "-P", "-m", "edgespec", "serve", model, "--port", "0", "--json", *options]
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ})
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                log.seek(0)
                sys.exit(f"the server did not start: {log.read()}")
            yield str(json.loads(line)["url"]), process
        finally:
            process.terminate()  # SIGINT is ignored by what a shell has started in the background
            process.wait(_STOP_S)


def ask(
    client: httpx2.Client, asked: Asked, on_text: Callable[[], None] = lambda: None, **fields: Any
) -> Answered:
    """The greedy answer to a prompt, streamed; on_text is called at each event with text."""
    document = {
        "messages": [{"role": "user", "content": asked.prompt}], "max_tokens": asked.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    texts, num_tokens, waited, started, first_s = list[str](), 0, None, perf_counter(), 0.0
    with client.stream("POST", "chat/completions", json=document) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.read().decode('utf-8', 'replace')}")
        for each in events(answer.iter_lines()):
            if each.get("usage"):
                num_tokens = int(each["usage"]["completion_tokens"])
                waited = each["usage"].get("speculation", {}).get("waited_passes")
            if text := "".join(choice["delta"].get("content") or "" for choice in each["choices"]):
                first_s = first_s or perf_counter() - started
                texts.append(text)
                on_text()
    return Answered("".join(texts), num_tokens, first_s, waited)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The documents of a stream of events; raises RuntimeError: one of them is an error."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            found: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in found:
                raise RuntimeError(found["error"]["message"])
            yield found
