"""A chat with an engine that answers by rule, to be run in a terminal: python rule_chat.py SCRIPT.

The script is JSON: from messages to the pieces of their answers, with a pause in seconds before each piece, and
whether the chat is saved in the model home. A message is followed by | and the beginning of its answer, if one is
given, and by |at most N where its reasoning has a budget. A piece that is an object with call and arguments is a
call of a tool; the file tools has their functions, and mcp the commands of servers. One with until and a path
waits until there is such a file. Where there is a prompt, it is answered once, and no conversation is held.
"""

import json
import sys
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chunk_stream import stream_of

from edgespec import Message, SamplingParams
from edgespec.chat.files import AutosaveFile
from edgespec.chat.loop import answer_once, converse
from edgespec.chat.printer import print_line
from edgespec.chat.session import ChatSession
from edgespec.chat.tool_box import ask_at_terminal, open_tools
from edgespec.engine.answer_stream import AnswerStream
from edgespec.engine.answers import Chunk, Tally
from edgespec.engine.conversation import Conversation
from edgespec.engine.run_ahead import Ticket
from edgespec.setup.home import default_home
from edgespec.tools.call_events import CallArguments, CallEnd, CallStart
from edgespec.tools.channels import THINK_MARKS

STATS = Tally().stats(drafter="none", draft_length="auto", target_device="cpu", drafter_device=None)


class _Tokenizer:
    """Makes a token of each piece of the answers, in order."""

    channel_marks = None
    think_marks = THINK_MARKS[0]
    think_texts: dict[int, str] = {}  # noqa: RUF012  read only

    def __init__(self) -> None:
        self.pieces: list[str] = []  # of the tokens, by their ids

    def special_within(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset()

    def encode(self, text: str, *, is_behind_text: bool) -> tuple[int, ...]:
        return tuple(range(len(text.split())))

    def decode(self, tokens: Sequence[int], shown: Collection[int] = ()) -> str:
        return "".join(self.pieces[token] for token in tokens)

    def ends_in_bytes(self, tokens: Sequence[int]) -> bool:
        return False


class RuleEngine:
    """Answers the last message as a script has it; a message has a token for each word, and one more."""

    context_length = 10_000
    model_sampling = preset = None
    can_switch_thinking = can_think = takes_tools = True

    def __init__(self, script: dict[str, Sequence[Any]], pause_s: float = 0.0) -> None:
        self.manifest = SimpleNamespace(name="rule\x1b]0;evil\x07", context_length=self.context_length)
        self.device_names = ("cpu", "cpu")
        self.speculation = SimpleNamespace(name="none")
        self.tokenizer = _Tokenizer()
        self.target = SimpleNamespace(num_fed=0)
        self._script, self._pause_s = script, pause_s

    def count(self, messages: Sequence[Message], thinking: bool | None = None, tools: Any = None) -> int:
        return sum(1 + len(each.content.split()) for each in messages)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text.split())))

    def stream(self, messages: Sequence[Message], *, sampling: SamplingParams, **limits: Any) -> AnswerStream:
        ticket = Ticket(lambda: None)
        begun = f"|{limits['prefill']}" if limits.get("prefill") else ""
        begun += "|off" if limits.get("thinking") is False else ""
        begun += f"|at most {budget}" if (budget := limits.get("thinking_budget")) else ""
        chunks = self._chunks(messages[-1].content + begun, ticket)
        return stream_of(chunks, ticket, STATS, ends_loops=limits["ends_loops"])

    def opens_reasoning(self, messages: Sequence[Message], **options: Any) -> bool:
        return False

    def close(self) -> None:
        pass

    def _chunks(self, message: str, ticket: Ticket) -> Generator[Chunk, None, None]:
        num_calls = 0
        for piece in self._script.get(message, ["what?"]):
            ends = time.monotonic() + self._pause_s
            self.target.num_fed += 1
            while time.monotonic() < ends and not ticket.is_cancelled:
                time.sleep(0.005)
            if piece is None:  # a limit cuts the answer
                yield Chunk(text="", token_ids=(), finish_reason="length", stats=STATS)
                return
            if isinstance(piece, dict) and "until" in piece:
                while not Path(piece["until"]).exists() and not ticket.is_cancelled:
                    time.sleep(0.005)
                continue
            if isinstance(piece, dict):
                yield _call_chunk(num_calls, piece)
                num_calls += 1
                continue
            if piece not in self.tokenizer.pieces:
                self.tokenizer.pieces.append(piece)
            yield Chunk(text=piece, token_ids=(self.tokenizer.pieces.index(piece),), origins=("suffix",))
        yield Chunk(text="", token_ids=(), finish_reason="tool_calls" if num_calls else "stop", stats=STATS)


def _call_chunk(index: int, call: dict[str, Any]) -> Chunk:
    start = CallStart(index=index, name=call["call"], id=f"call{index}-{time.monotonic_ns()}")
    arguments = CallArguments(index=index, text=json.dumps(call["arguments"]))
    return Chunk(text="", token_ids=(), tool_calls=(start, arguments, CallEnd(index=index)))


def main() -> int:
    script = json.loads(Path(sys.argv[1]).read_text())
    engine: Any = RuleEngine(script["answers"], script.get("pause_s", 0.0))
    file, servers = script.get("tools"), script.get("mcp", ())
    box = open_tools(Path(file) if file else None, servers, ()) if file or servers else None
    session = ChatSession(
        conversation=Conversation(engine, ends_loops=True, tools=box.tools if box else None),
        model="rule",
        drafter="none",
        open_engine=lambda model, drafter: engine,
        describe_plan=lambda model, drafter: "no plan",
        info=print_line,
        autosave=AutosaveFile(default_home() / "chats", print_line) if script.get("saves") else None,
        tools=box,
    )
    if script.get("prompt"):
        session.permit = partial(ask_at_terminal, show=print_line)
        return answer_once(session, script["prompt"])
    return converse(session, keeps_history=False)


if __name__ == "__main__":
    sys.exit(main())
