"""What a chat holds between one line of the user and the next: conversation, engine, files, the last answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from edgespec.answers import Chunk
from edgespec.chat_status import Standing
from edgespec.conversation import Conversation
from edgespec.engine import Engine
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.stats import Stats
from edgespec.trace_file import TraceFile
from edgespec.transcript import AutosaveFile

Say = Callable[[str], None]
OpenEngine = Callable[[str, str], Engine]
VIEWS = ("markdown", "plain", "drafted")


class Answer(NamedTuple):
    """The last answer: its chunks, and the last of them once more, if it came."""

    chunks: tuple[Chunk, ...]
    last: Chunk | None

    @property
    def stats(self) -> Stats | None:
        return self.last.stats if self.last else None


@dataclass(slots=True)
class ChatSession:
    """One chat.

    model, drafter: As the user named them.
    open_engine: Loads a model with a drafter.
    plan: What the planner says of a model with a drafter.
    say: Takes words beside the talk.
    autosave: Where the conversation is kept, if it is.
    trace: A file for the lanes' work of every answer.
    view: One of VIEWS.
    is_quiet: Say only what was asked for, and what went wrong.
    """

    conversation: Conversation
    model: str
    drafter: str
    open_engine: OpenEngine
    plan: Callable[[str, str], str]
    say: Say
    autosave: AutosaveFile | None = None
    trace: TraceFile | None = None
    view: str = VIEWS[0]
    answer: Answer | None = None
    downgrades: list[str] = field(default_factory=list)
    is_multi_line: bool = False
    is_quiet: bool = False

    @property
    def engine(self) -> Engine:
        return self.conversation.engine

    @property
    def stats(self) -> Stats | None:
        return self.answer.stats if self.answer else None

    def save(self) -> None:
        """Keep what was said so far."""
        if self.autosave:
            self.autosave.write(self.conversation.transcript(self.model))

    def keep(self, answer: Answer) -> None:
        """An answer that is over."""
        self.answer = answer
        if answer.stats:
            self.downgrades += answer.stats.downgrades
        if self.trace and answer.last:
            self.trace.add(answer.last.timeline)
        self.save()

    def reload(self, model: str, drafter: str) -> None:
        """Go on with another model or drafter.

        The one at hand is given up before the other is there only where there is no room for both.

        Raises:
            EdgeSpecError: The other cannot be loaded; the chat goes on with the one at hand.
        """
        before = self.engine
        try:
            self.conversation.engine = self.open_engine(model, drafter)
            before.close()
        except MemoryExhausted:
            self.say("there is no room for both; closing the present model first")
            before.close()
            try:
                self.conversation.engine = self.open_engine(model, drafter)
            except EdgeSpecError:
                self.conversation.engine = self.open_engine(self.model, self.drafter)
                raise
        self.model, self.drafter = model, drafter
        self.answer, self.downgrades = None, []
        self.save()

    def standing(self) -> Standing:
        conversation = self.conversation
        return Standing(
            model=self.engine.manifest.name,
            devices=(self.engine.device_names[0], self.engine.device_names[1]),
            drafter=self.engine.speculation.name,
            num_context=conversation.num_tokens,
            context_length=self.engine.context_length,
            overflow=conversation.overflow,
            stats=self.stats,
            keys="multi-line: Alt-Enter sends" if self.is_multi_line else "",
        )
