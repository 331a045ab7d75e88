"""The state of a chat between two lines of the user: conversation, engine, files, the last answer."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec import (
    Chunk,
    Conversation,
    EdgeSpecError,
    Engine,
    MemoryExhausted,
    Reply,
    SamplingParams,
    Stats,
    Transcript,
    ends_in_loop,
    follow_preset,
    has_spent,
)
from edgespec.chat.attachments import Attachment, join_message
from edgespec.chat.status import Status
from edgespec.chat.tool_box import Permit, ToolBox, require_tools
from edgespec.system.printable import one_line

if TYPE_CHECKING:
    from edgespec.chat.files import AutosaveFile, TraceFile

VIEWS = ("markdown", "plain", "drafted")
THINKING_VIEWS = ("show", "fold", "hide")  # dimmed, as a count of tokens, or not at all


@dataclass(slots=True)
class ChatSession:
    """One chat, with the names of model and drafter that the user gave."""

    conversation: Conversation
    model: str
    drafter: str | None  # None where the user gave none
    open_engine: Callable[[str, str | None], Engine]  # of a model and a drafter
    describe_plan: Callable[[str, str | None], str]  # of a model and a drafter
    info: Callable[[str], None]  # prints a line of the chat's own
    autosave: "AutosaveFile | None" = None
    trace: "TraceFile | None" = None  # for the timeline of every answer
    view: str = VIEWS[0]
    answer: tuple[Chunk, ...] = ()  # the last one, as far as it came
    has_looped: bool = False  # the last answer ends with a span that came over and over
    name: str | None = None  # of the conversation
    thinking_view: str = THINKING_VIEWS[0]  # how reasoning is printed, one of THINKING_VIEWS
    begun: str = ""  # what the current answer was given to begin with
    opens_reasoning: bool = False  # what is new of the current answer begins within it
    # Before each /compact, the latest last: the conversation, its file, the fingerprint of that, and its name.
    before_compacting: tuple[tuple[Transcript, Path | None, tuple[int, int] | None, str | None], ...] = ()
    prefill: str = ""  # how the next answer is to begin
    tools: ToolBox | None = None
    permit: Permit | None = None  # asks whether a tool may be run; None: nobody can be asked
    keeps_prefix: bool = False  # on the disk, when the chat is left
    downgrades: list[str] = field(default_factory=list)
    # The files that commands have written from this conversation, with the fingerprint of each.
    written: dict[Path, tuple[int, int] | None] = field(default_factory=dict)
    listed: tuple[Path, ...] = ()  # the saved chats as the user saw them last, by their numbers
    attachments: list[Attachment] = field(default_factory=list)  # for the next message
    is_multi_line: bool = False
    shows_figures: bool = False  # while an answer is written
    is_quiet: bool = False  # print only what was asked for, and problems

    @property
    def engine(self) -> Engine:
        return self.conversation.engine

    @property
    def last(self) -> Chunk | None:
        """The chunk that says why the last answer ended, if it came."""
        return self.answer[-1] if self.answer and self.answer[-1].finish_reason else None

    @property
    def stats(self) -> Stats | None:
        return self.last.stats if self.last else None

    @property
    def shown_name(self) -> str:
        """The name of the model, behind that of its preset if it has one."""
        preset, model = self.engine.preset, self.engine.manifest.name
        return f"{preset.name} by {model}" if preset else model

    def send(self, text: str) -> Reply:
        """Send a message with the attached files; they stay attached if Conversation.stream refuses it."""
        reply = self.conversation.stream(join_message(self.attachments, text), begun=self.prefill)
        self.attachments, self.prefill = [], ""
        return reply

    def begin_answer(self, reply: Reply) -> None:
        self.begun, self.opens_reasoning = reply.begun, reply.opens_reasoning

    def rewrite(self, text: str) -> None:
        """Put a text in the place of the last answer, of which the figures stay."""
        self.conversation.rewrite(text)
        self.begun, self.opens_reasoning = text, False
        self.answer = tuple(replace(each, text="", token_ids=(), origins=()) for each in self.answer[-1:])
        self.save()

    @property
    def has_spent_budget(self) -> bool:
        """True if the reasoning of the current answer, if that is a whole one, was closed for its budget."""
        budget = self.conversation.thinking_budget
        if budget is None or self.begun:
            return False
        tokens = np.array([token for chunk in self.answer for token in chunk.token_ids], np.int32)
        return has_spent(tokens, budget, self.engine.tokenizer, is_open=self.opens_reasoning)

    def save(self) -> None:
        if self.autosave:
            self.name = self.autosave.write(self.transcript())

    @property
    def file(self) -> Path | None:
        """The file that the conversation is saved in, once it has one."""
        return self.autosave.path if self.autosave else None

    def transcript(self) -> Transcript:
        return replace(self.conversation.transcript(self.model), name=self.name)

    def start_new_file(self) -> None:
        """Leave the file as it is and go on in another one, without a name and a last answer."""
        if self.autosave:
            self.autosave.start_new_file()
        self._forget_conversation(None)

    def open_file(self, path: Path, transcript: Transcript) -> None:
        """Go on in the file of another conversation, which was restored."""
        if self.autosave:
            self.autosave.go_on_in(path)
        self._forget_conversation(transcript.name)

    def _forget_conversation(self, name: str | None) -> None:
        """Drop what belonged to the conversation before this one, which has another name."""
        self.answer, self.name, self.before_compacting = (), name, ()
        self.written.clear()

    def record(self, answer: tuple[Chunk, ...]) -> None:
        """Record a finished answer as the last one, and write it to the files."""
        self.answer = answer
        self.has_looped = ends_in_loop([token for chunk in answer for token in chunk.token_ids])
        if self.stats:
            self.downgrades += self.stats.downgrades
        if self.trace and self.last:
            self.trace.add(self.last.timeline)
        self.save()

    def switch_engine(self, model: str, drafter: str | None) -> None:
        """Continue with another model or drafter; where memory is short, close the current one first.

        Raises EdgeSpecError: the other one cannot be loaded; the chat continues with the current one.
        """
        before = self.engine
        is_default = self.conversation.sampling == _default_sampling(before)
        try:
            self.conversation.engine = self._open(model, drafter)
            before.close()
        except MemoryExhausted:
            self.info("there is not enough memory for both models; closing the current one first")
            before.close()
            try:
                self.conversation.engine = self._open(model, drafter)
            except BaseException:  # Ctrl-C too
                self.conversation.engine = self.open_engine(self.model, self.drafter)
                raise
        self.model, self.drafter = model, drafter
        if is_default:
            self.conversation.sampling = _default_sampling(self.engine)
        if self.conversation.thinking is not None and not self.engine.can_switch_thinking:
            self.conversation.thinking = None
            self.info(
                f"{one_line(self.engine.manifest.name)} has no switch for its reasoning, so that of /think is gone"
            )
        if self.conversation.thinking_budget is not None and not self.engine.can_think:
            self.conversation.thinking_budget = None
            self.info(
                f"{one_line(self.engine.manifest.name)} does not think, so the limit of /think no longer applies"
            )
        preset = self.engine.preset
        if not follow_preset(self.conversation, before.preset) and preset:
            self.info(
                f"this chat has messages already, so the examples of {preset.name} are left out; edgespec chat "
                f"{preset.name} begins with them"
            )
        self.answer, self.downgrades = (), []
        self.save()

    def _open(self, model: str, drafter: str | None) -> Engine:
        engine = self.open_engine(model, drafter)
        try:
            if self.tools:
                require_tools(engine)
        except EdgeSpecError:
            engine.close()
            raise
        return engine

    def status(self) -> Status:
        num_context = None
        with suppress(EdgeSpecError):  # a chat template may refuse messages
            num_context = self.conversation.num_tokens
        return Status(
            model=self.shown_name,
            devices=self.engine.device_names,
            drafter=self.engine.speculation.name,
            num_context=num_context,
            context_length=self.engine.context_length,
            stats=self.stats,
            has_looped=self.has_looped,
            hint=" · ".join(self._hints()),
        )

    def _hints(self) -> Iterator[str]:
        if self.is_multi_line:
            yield "multi-line: Alt-Enter sends"
        if self.prefill:
            yield "the answer's beginning is set"
        if num := len(self.attachments):
            yield f"{num} file{'s' if num > 1 else ''} attached"


def _default_sampling(engine: Engine) -> SamplingParams:
    return engine.model_sampling or SamplingParams()
