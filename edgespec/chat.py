"""Answers on a terminal: one for a prompt, or a conversation."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from edgespec.answers import Chunk
from edgespec.chat_template import Message
from edgespec.engine import Engine
from edgespec.errors import ContextOverflow
from edgespec.sampling import SamplingParams
from edgespec.stats import Stats
from edgespec.talk import say
from edgespec.trace_file import TraceFile

_HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /clear forgets the conversation, /exit leaves."


def answer_once(
    engine: Engine,
    prompt: str,
    system: str | None,
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
    *,
    as_json: bool,
    trace: TraceFile | None = None,
) -> int:
    """Print one answer as it is made, or as one JSON document; returns the exit code."""
    if as_json:
        done = engine.generate(prompt, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop)
        document = {
            "text": done.text,
            "token_ids": done.token_ids,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "stats": done.stats.as_dict(),
        }
        print(json.dumps(document))
        if trace:
            trace.add(done.timeline)
        return 0
    chunks = engine.stream(prompt, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop)
    last = _print_stream(chunks, [])
    if last.finish_reason != "stop":
        say(f"edgespec: {_why(last.finish_reason)}")
    if trace:
        trace.add(last.timeline)
    return 0


def converse(
    engine: Engine,
    system: str | None,
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
    trace: TraceFile | None = None,
) -> int:
    """Read, answer, repeat, until the user leaves; returns the exit code."""
    with suppress(ImportError):  # line editing for input, where the platform has it
        import readline  # noqa: F401
    say(f"{engine.manifest.name} on {engine.device_names[0]}, drafter {engine.speculation.name}. {_HELP}")
    messages = [Message("system", system)] if system is not None else []
    first = len(messages)
    while True:
        try:
            said = _read()
            if said is None:
                return 0
            if said == "/clear":
                del messages[first:]
            elif said.startswith("/") and not said.startswith("//"):
                say(f"{_HELP} A message that begins with / is written with //.")
            elif said:
                asked = [*messages, Message("user", said.removeprefix("/"))]
                answer = _answer(engine, asked, sampling, max_tokens, stop, trace)
                if answer is not None:
                    messages = [*asked, Message("assistant", answer)]
        except KeyboardInterrupt:  # between one thing and the next
            say("\n(stopped; Ctrl-D leaves)")


def _read() -> str | None:
    """What the user says next; None to leave."""
    try:
        said = input("\n> ").strip()
    except EOFError:
        say("")
        return None
    return None if said in ("/exit", "/quit", "/bye") else said


def _answer(
    engine: Engine,
    messages: Sequence[Message],
    sampling: SamplingParams,
    max_tokens: int | None,
    stop: Sequence[str],
    trace: TraceFile | None,
) -> str | None:
    """Stream an answer and return it, or what there was of it when interrupted; None if there was none."""
    shown: list[str] = []
    try:
        chunks = engine.stream(messages, sampling=sampling, max_tokens=max_tokens, stop=stop)
        last = _print_stream(chunks, shown)
    except KeyboardInterrupt:
        say("\n(stopped; Ctrl-D leaves)")
        return "".join(shown) or None
    except ContextOverflow as error:
        say(f"edgespec: {error}, or begin anew with /clear")
        return None
    if last.stats is not None:
        ended = "" if last.finish_reason == "stop" else f"; {_why(last.finish_reason)}"
        say(f"({_summary(last.stats)}{ended})")
    if trace:
        trace.add(last.timeline)
    return "".join(shown)


def _print_stream(chunks: Iterator[Chunk], shown: list[str]) -> Chunk:
    """Print the chunks and end their last line, collecting their text in shown as they come."""
    is_terminal = sys.stdout.isatty()
    for chunk in chunks:
        shown.append(chunk.text)
        sys.stdout.write(_harmless(chunk.text) if is_terminal else chunk.text)
        if chunk.finish_reason is not None and not "".join(shown).endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
    return chunk


def _harmless(text: str) -> str:
    """Control characters as pictures: a model's output must not steer the terminal."""
    return "".join(
        character if character in "\n\t" or not _is_control(character) else f"\\x{ord(character):02x}"
        for character in text
    )


def _is_control(character: str) -> bool:
    return ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0


def _why(finish_reason: str | None) -> str:
    return {
        "length": "stopped at the token limit (--max-tokens)",
        "context": "stopped because the context is full",
    }.get(finish_reason or "", "stopped")


def _summary(stats: Stats) -> str:
    parts = []
    if stats.decode_tokens_per_second:
        parts.append(f"{stats.decode_tokens_per_second:.1f} tokens/s")
    if stats.tokens_per_pass:
        parts.append(f"{stats.tokens_per_pass:.2f} tokens a pass")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts kept")
    return ", ".join(parts)
