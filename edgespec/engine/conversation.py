"""A conversation with an engine: messages, streamed answers, a full context. Knows nothing of terminals."""

import reprlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn, Unpack
from weakref import ref

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.answer_stream import Reply
from edgespec.engine.answers import Chunk, Completion
from edgespec.engine.preset_defaults import by_preset, settings_by
from edgespec.engine.reasoning import CLOSE, OPEN
from edgespec.engine.request import (
    ReplyOptions,
    Settings,
    TalkOptions,
    answer_settings,
    checked_setting,
    is_any_text,
    lists_options,
)
from edgespec.engine.transcript import (
    ConversationState,
    Round,
    Transcript,
    answered_rounds,
    cut_answers,
    drop_oldest,
    messages_of,
    read_rounds,
)
from edgespec.errors import ContextOverflow, UsageError
from edgespec.system.arguments import require_function, require_kind, require_path
from edgespec.system.units import format_count
from edgespec.text.chat_template import CallMessage, ResultMessage, Turn
from edgespec.tools.tool import REFUSED, ToolCall, ToolUse, demands_call, is_yes, runners_among
from edgespec.types import Overflow

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine


class Conversation:
    """Messages and an engine that answers them. Engine.chat() makes one.

        with load("smollm2-135m") as engine:
            talk = engine.chat(system="You answer in one sentence.", overflow="drop-oldest")
            print(talk.say("Why is the sky blue?").text)

    One answer is generated at a time; the next can begin when it is over or closed, and raises UsageError until
    then, in any thread. Engine, system and the settings may be changed between answers.

    overflow: When the conversation outgrows the context, "error" refuses the new message and "drop-oldest" stops
        sending the oldest rounds to the model. They stay in messages, and num_dropped counts them.
    sampling, max_tokens, stop, response_format, schema: Arguments of Engine.stream for each answer. Without a
        sampling, the one that the model's files suggest; greedy where they suggest none.
    thinking, thinking_budget: Whether the model reasons before each answer, and in how many tokens at most.
    tools, parallel_tool_calls: What the model may call, and whether several at once, as in Engine.stream. An
        answer may then end with calls: give_results goes on, and run does all of it.
    tool_choice: As in Engine.stream, for the first answer to a message; after results the model may call or not.
    ends_loops: Whether an answer that repeats one span of tokens over and over ends, with the finish reason loop.
        None: where max_tokens does not bound it.
    """

    @lists_options
    def __init__(self, engine: "Engine", system: str | None = None, **settings: Unpack[Settings]) -> None:
        self.engine, self.system = engine, system
        self.overflow: Overflow = settings.pop("overflow", "error")
        answers: TalkOptions = settings
        given = settings_by(answers, engine.model_sampling, engine.preset)
        ToolUse.parse(given.tools, given.tool_choice)
        self.sampling = given.sampling or SamplingParams()
        self.max_tokens, self.stop, self.ends_loops = given.max_tokens, given.stop, given.ends_loops
        self.response_format, self.schema = given.response_format, given.schema
        self.tools, self.tool_choice = given.tools or (), given.tool_choice
        self.parallel_tool_calls = given.parallel_tool_calls
        self.thinking, self.thinking_budget = given.thinking, given.thinking_budget
        self._now = ConversationState()
        self._before: ConversationState | None = None  # before the last message, until undo takes that back
        self._undone: ConversationState | None = None  # before undo
        self._replaced: ConversationState | None = None  # before the current answer, if it is another try
        self._begun = ""  # what the current answer was given to begin with
        self._is_reasoning = False  # what it begins with, as the chat template opened it
        self._chunks: list[Chunk] = []  # of the current answer, filled by its reply
        self._reply: Callable[[], Reply | None] = lambda: None  # which fills it, weakly
        self._lock = RLock()  # held while a message is added or taken back

    def __reduce__(self) -> NoReturn:
        raise TypeError("a conversation cannot be copied or pickled; save() and Conversation.load() make another")

    def __repr__(self) -> str:
        return f"<Conversation with {self.engine.manifest.name}, {format_count(len(self.messages), 'message')}>"

    if not TYPE_CHECKING:  # to a type checker any name could be set then

        def __setattr__(self, name: str, value: Any) -> None:
            """Raises AttributeError: No setting has this name; UsageError: It cannot have this value."""
            if not name.startswith("_"):
                value = checked_setting(name, value, vars(self).get("engine", value))
            super().__setattr__(name, value)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """All messages of the user with their answers, the oldest first."""
        if self._now.is_unanswered and self._reply() is None:
            with self._lock:  # held while an answer begins, which nobody has yet
                self._take_let_go()
        return self._now.rounds

    @property
    def messages(self) -> tuple[Turn, ...]:
        """All messages, also those that are no longer sent to the model."""
        return messages_of(self.rounds, self.system)

    @property
    def num_dropped(self) -> int:
        """How many of the oldest messages are no longer sent to the model."""
        return len(messages_of(self.rounds[: self._now.num_dropped]))

    @property
    def num_tokens(self) -> int:
        """Tokens of the messages that the model would be sent now."""
        return self._count(sent, self.thinking) if (sent := self.sent) else 0

    @property
    def sent(self) -> tuple[Turn, ...]:
        """The messages that the model would be sent now."""
        return self._sent(self.rounds[self._now.num_dropped :])

    def count_room(self, text: str = "") -> int:
        """Tokens left for what follows text in the next message, and for its answer; maybe negative.

        With drop-oldest all other messages could make room.
        """
        num_dropped = len(self.rounds) if self.overflow == "drop-oldest" else self._now.num_dropped
        sent = self._sent((*self.rounds, Round(text, None))[num_dropped:])
        return self.engine.context_length - self._count(sent, self.thinking)

    @lists_options
    def stream(self, text: str, *, begun: str = "", **options: Unpack[ReplyOptions]) -> Reply:
        """Send a message; return its answer as a stream.

        Args:
            begun: The beginning of the answer, which the model continues.
            options: Those of Engine.stream, for this answer alone, in the place of the conversation's; system and
                tools stay as they are.

        An earlier message without an answer stays, but is not sent to the model: chat templates want user and
        assistant to alternate.

        Raises:
            ContextOverflow: The message does not fit (with drop-oldest, not even alone) and was not added.
            UsageError: The text is not a str, or a setting of this conversation is wrong.
        """
        require_kind("the message", text, str, "a text")
        require_kind("begun", begun, str, "a text")
        with self._lock:
            self._require_idle()
            before = self._now
            reply = self._begin((*before.rounds, Round(text, None)), 0, options, begun, is_answer=bool(begun))
            self._before = before
            return reply

    @lists_options
    def say(self, text: str, **options: Unpack[ReplyOptions]) -> Completion:
        """Send a message; return the whole answer. Options and errors as in stream."""
        return self.stream(text, **options).completion()

    @lists_options
    def retry(self, **options: Unpack[ReplyOptions]) -> Reply:
        """Answer the last message again with the next seed. Raises UsageError: there is no message yet."""
        with self._lock:
            self._require_idle()
            before = self._now
            if not before.rounds:
                raise UsageError("there is nothing to answer yet; send a message first")
            tries = before.num_tries + (not before.is_unanswered)
            reply = self._begin((*before.rounds[:-1], Round(before.rounds[-1].user, None)), tries, options)
            self._replaced = before
            return reply

    @lists_options
    def go_on(self, **options: Unpack[ReplyOptions]) -> Reply:
        """Continue the last answer after its end, with the same seed; the reply streams what is new.

        Raises UsageError: there is no answer yet.
        """
        with self._lock:
            self._require_idle()
            now = self._now
            answer = now.rounds[-1].answer if now.rounds else None
            if not answer:
                raise UsageError("there is no answer to continue; retry() makes one")
            # A character that the answer was cut within is written anew, with the space that its token began with.
            begun = answer.rstrip("\N{REPLACEMENT CHARACTER}")
            begun = begun if begun == answer else begun.rstrip(" ")
            rounds, is_answer = now.with_last(answer=None, cut_short=None), bool(begun) and now.is_answer
            return self._begin(rounds, now.num_tries, options, begun, is_answer=is_answer)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that the last answer ended with, and that have no results yet."""
        return self._now.asked.calls if self._now.asked else ()

    @lists_options
    def give_results(self, results: Sequence[str], **options: Unpack[ReplyOptions]) -> "Reply":
        """Give the model what the tools of its calls gave, in their order; return what it says then.

        Raises:
            ContextOverflow: The results do not fit, and were not given.
            UsageError: They are not as many texts as there are calls.
        """
        with self._lock:
            self._require_idle()
            now, asked = self._now, self._now.asked
            is_list = isinstance(results, Sequence) and not isinstance(results, str)
            are_texts = is_list and all(isinstance(each, str) for each in results)
            if asked is None or not are_texts or len(results) != len(asked.calls):
                raise UsageError(
                    f"results are {reprlib.repr(results)}; wanted a text for each of the {len(self.calls)} calls"
                )
            pairs = zip(asked.calls, results, strict=True)
            given = [ResultMessage(result, call.id, call.name) for call, result in pairs]
            steps = (*now.asked_behind, asked, *given)
            rounds = now.with_last(answer=None, cut_short=None, steps=steps)
            return self._begin(rounds, now.num_tries, options)

    @lists_options
    def run(
        self,
        text: str,
        *,
        max_steps: int = 8,
        may_call: Callable[[ToolCall], bool] | None = None,
        **options: Unpack[ReplyOptions],
    ) -> Completion:
        """Send a message, run the functions among tools that the model calls, and return the answer.

            def get_weather(city: str) -> str:
                "Tell the weather of a city."
                return f"sunny in {city}"

            talk = engine.chat(tools=[get_weather], max_tokens=40)
            print(talk.run("Will it rain in Rome?").text)

        A model may call anything with any arguments: a function has to check what it is given. What it raises is
        told to the model.

        Args:
            max_steps: The most answers that are made; the last one may still ask for calls.
            may_call: Whether a call may be run, such as by asking the user: True, or False. By default functions
                may, and tools of MCP servers that allow names.

        Raises UsageError: A tool cannot be run here, or not without may_call, or this gives no True or False, or a
            function has changed this conversation; else as in stream.
        """
        if type(max_steps) is not int or max_steps < 1:
            raise UsageError(f"max_steps is {max_steps!r:.60}; wanted a whole number from 1")
        if may_call is not None:
            require_function("may_call", may_call, "a function that takes a ToolCall, or None")
        runners = runners_among(self.tools, is_asked=may_call is not None)
        answer = self.say(text, **options)
        for _ in range(max_steps - 1):
            if not self.calls:
                break
            asked = self._now
            results = [
                runners[call.name](call) if may_call is None or is_yes(may_call(call), call.name) else REFUSED
                for call in self.calls
            ]
            if self._now is not asked:
                raise UsageError(
                    "this conversation was changed while the functions that it called ran; a function that asks "
                    "the model needs a conversation of its own: engine.chat()"
                )
            answer = self.give_results(results, **options).completion()
        return answer

    def rewrite(self, answer: str) -> None:
        """Put a text in the place of the last answer, or give one to an unanswered message.

        Raises UsageError: there is no message yet, or the text is empty.
        """
        require_kind("the answer", answer, str, "a text")
        with self._lock:
            self._require_idle()
            now = self._now
            if not now.rounds or not answer:
                raise UsageError("an answer needs a message and a text; there is no message, or the text is empty")
            before = now.rounds[-1].answer
            is_answer = now.is_answer or not before or CLOSE in before
            rounds = now.with_last(answer=answer, cut_short=None)
            self._now = now._replace(rounds=rounds, is_answer=is_answer, asked=None)

    def keep(self, num_rounds: int) -> None:
        """Forget all but the first messages and their answers. Raises UsageError: no such number of messages."""
        if type(num_rounds) is not int or num_rounds < 0:
            raise UsageError(f"num_rounds is {num_rounds!r}; wanted a whole number from 0")
        with self._lock:
            self._require_idle()
            self._cut(num_rounds)

    def undo(self) -> Round | None:
        """Remove and return the last message and its answer, as far as it came; None if there is none."""
        with self._lock:
            if not self.rounds:
                return None
            self._take_made()
            undone, before = self._now, self._before
            self._cut(len(undone.rounds) - 1)
            self._now, self._undone = before or self._now, undone
            return undone.rounds[-1]

    def redo(self, removed: Round) -> None:
        """Put back what undo removed. Raises UsageError: It is no Round, or an answer is being read."""
        require_kind("removed", removed, Round, "a Round, which undo returned")
        with self._lock:
            self._require_idle()
            undone, before = self._undone, self._now
            rounds = (*before.rounds, removed)
            self._restore(rounds, before.num_dropped)
            if undone and undone.rounds[-1] is removed:
                self._now, self._before = undone._replace(rounds=rounds), before

    def clear(self) -> None:
        """Forget everything except the system message."""
        self._cut(0)

    def transcript(self, model: str | None = None) -> Transcript:
        """The conversation as a file holds it; model is the user's name for the model.

        An answer that is being generated is in it as far as it came, as if it were cancelled.
        """
        rounds = self.rounds
        if self._now.is_unanswered:
            if made := self._made:
                rounds = self._now.with_last(answer=self._marked(made), cut_short="cancelled")
            elif self._replaced:
                rounds = self._replaced.rounds
        return Transcript(
            messages=messages_of(rounds, self.system),
            model=model or self.engine.manifest.name,
            num_dropped=self.num_dropped,
            sampling=self.sampling,
            cut_short=cut_answers(rounds, self.system),
        )

    def restore(self, transcript: Transcript) -> None:
        """Continue another conversation here, with its sampling.

        Raises UsageError: A message is neither a user's nor its answer.
        """
        require_kind("transcript", transcript, Transcript, "a Transcript")
        self.system, rounds = read_rounds(transcript)
        self.sampling = transcript.sampling or self.sampling
        sizes = [len(messages_of(rounds[:i])) for i in range(len(rounds) + 1)]
        self._restore(rounds, bisect_left(sizes, transcript.num_dropped))

    def save(self, path: str | Path) -> None:
        """Write a file (JSON Lines) that load reads. Raises EdgeSpecError: it cannot be written."""
        self.transcript().save(require_path("path", path))

    @classmethod
    def load(cls, engine: "Engine", path: str | Path, **settings: Unpack[Settings]) -> "Conversation":
        """Read what save wrote; settings are those of __init__ that it does not hold.

        A sampling among the settings comes before the one in the file.

        Raises UsageError: the file cannot be read, is damaged, or is no conversation.
        """
        loaded = cls(engine, **settings)
        loaded.restore(Transcript.read(require_path("path", path)))
        loaded.sampling = settings.get("sampling") or loaded.sampling
        return loaded

    @property
    def _made(self) -> str:
        """The current answer as far as it came."""
        return self._begun + "".join(chunk.text for chunk in self._chunks)

    def _marked(self, answer: str) -> str:
        """An answer that was cut short in its reasoning with the mark of that, else the answer as it is."""
        is_reasoning = self._is_reasoning and CLOSE not in answer and not answer.startswith(OPEN)
        return OPEN + answer if is_reasoning else answer

    def _cut(self, num_rounds: int) -> None:
        """Forget all but the first rounds."""
        self._restore(self.rounds[:num_rounds], min(self._now.num_dropped, num_rounds))

    def _restore(self, rounds: Sequence[Round], num_dropped: int) -> None:
        # Reasoning that has no end was cut short, and calls come behind it.
        is_answer = bool(rounds) and rounds[-1].cut_short in (None, "tool_calls")
        with self._lock:
            self._now = ConversationState(tuple(rounds), num_dropped, is_answer=is_answer)
            self._begun, self._chunks, self._reply = "", [], lambda: None
            self._replaced = self._before = self._undone = None

    def _require_idle(self) -> None:
        """Take what was read of an answer that its reader let go; raises UsageError: one is being read."""
        reply = self._reply()
        if reply is not None and not reply.is_over:
            del reply  # a debugger or a notebook keeps the error, and its traceback this frame
            raise UsageError(
                "this conversation is being answered; read that answer to its end or close it, and ask again then"
            )
        self._take_let_go()

    def _take_let_go(self) -> None:
        """Take what was read of an answer whose reader let it go, maybe in its midst."""
        if self._reply() is None:
            self._take_made()

    def _take_made(self) -> None:
        """Take what came of the current answer as the last one, or else the one that it takes the place of."""
        if self._now.is_unanswered and (self._made or self._replaced):
            self._finish(self._made, "cancelled")

    def _sent(self, rounds: Sequence[Round]) -> tuple[Turn, ...]:
        return messages_of([*answered_rounds(rounds[:-1]), *rounds[-1:]], self.system)

    def _begin(
        self,
        rounds: tuple[Round, ...],
        num_tries: int,
        options: ReplyOptions,
        begun: str = "",
        *,
        is_answer: bool = False,
    ) -> Reply:
        """Begin an answer; is_answer: its beginning is no reasoning where it has no mark."""
        given = answer_settings(options, None)
        thinking = given.thinking if "thinking" in options else self.thinking
        max_tokens = given.max_tokens if "max_tokens" in options else self.max_tokens
        num_dropped, num_prompt = self._fit(rounds, begun, max_tokens, thinking)
        sent = self._sent(rounds[num_dropped:])
        stated: dict[str, Any] = {name: getattr(self, name) for name in TalkOptions.__annotations__}
        stated |= {
            "sampling": replace(self.sampling, seed=(self.sampling.seed + num_tries) % 2**64),
            "tools": self.tools or None,
            "tool_choice": "auto" if self.tools and rounds[-1].steps else self.tool_choice,
            "whole_tool_calls": True,
            "prefill": begun or None,
        }
        if options.keys() & {"schema", "response_format"}:  # either takes the place of both
            stated |= {"schema": None, "response_format": None}
        stated |= {"system": "", **options}
        is_free = stated["schema"] is None and is_any_text(stated["response_format"])
        is_answer = is_answer or not is_free or demands_call(stated["tool_choice"])
        # What a preset says is among the settings, where it may have been changed since.
        engine = by_preset(self.engine, None) if self.engine.preset else self.engine
        if begun and not is_answer and CLOSE not in begun and engine.opens_reasoning(sent, thinking=thinking):
            begun = begun.removeprefix(OPEN)
            stated["prefill"] = OPEN + begun
        stream = engine.stream(sent, **stated)
        dropped = messages_of(answered_rounds(rounds[self._now.num_dropped : num_dropped]))
        # From here on the message is part of the conversation, even if its answer fails.
        self._now = ConversationState(rounds, num_dropped, num_tries, is_answer)
        self._begun, self._chunks, self._replaced, self._undone = begun, [], None, None
        self._is_reasoning = stream.opens_reasoning
        reply = Reply(num_prompt, dropped, stream, self._chunks, self._take_answer, begun)
        self._reply = ref(reply)
        return reply

    def _fit(
        self, rounds: tuple[Round, ...], begun: str, max_tokens: int | None, thinking: bool | None
    ) -> tuple[int, int]:
        """How many of the oldest rounds not to send, and the tokens of the others.

        Raises ContextOverflow: They do not fit, and dropping is off or does not help.
        """
        num_begun = len(self.engine.tokenizer.encode(begun, is_behind_text=True)) if begun else 0

        @cache
        def count(num_dropped: int) -> int:
            return self._count(self._sent(rounds[num_dropped:]), thinking) + num_begun

        num_dropped, context = self._now.num_dropped, self.engine.context_length
        if self.overflow == "drop-oldest":
            num_dropped = drop_oldest(num_dropped, len(rounds), count, context, max_tokens)
        if count(num_dropped) > context:
            overflow = ContextOverflow(count(num_dropped), context, self.engine.manifest.context_length)
            if self.overflow == "error" and len(rounds) > 1:
                overflow.args = (f"{overflow}; overflow='drop-oldest' leaves out the oldest messages",)
            raise overflow
        return num_dropped, count(num_dropped) - num_begun

    def _count(self, sent: Sequence[Turn], thinking: bool | None) -> int:
        return self.engine.count(sent, thinking=thinking, tools=self.tools or None)

    def _take_answer(self, reply: Reply, finish_reason: str) -> None:
        """End a reply; its answer as far as it came is the conversation's, unless its message was taken back."""
        with self._lock:
            if not reply.is_over and self._reply() is reply:
                self._finish(reply.text, finish_reason, reply.calls)
            reply.is_over = True

    def _finish(self, answer: str, finish_reason: str, calls: tuple[ToolCall, ...] = ()) -> None:
        """Record the last answer; a message that got no word of one, or calls alone, stays as it was.

        The text before calls is its answer until they have results.
        """
        is_stopped = finish_reason in ("cancelled", "timeout")
        if calls:
            asked, behind = CallMessage(answer, calls), self._now.rounds[-1].steps
            self._now = self._now._replace(asked=asked, asked_behind=behind)
            if not answer.strip():
                if old := self._replaced:  # its answer stays until the calls have results
                    self._now = self._now._replace(rounds=old.rounds, is_answer=old.is_answer)
                return
        elif not answer and self._replaced:
            # A seed that gives no word is not tried again.
            num_tries = (self._replaced if is_stopped else self._now).num_tries
            self._now, self._replaced = self._replaced._replace(num_tries=num_tries), None
            return
        elif not answer and is_stopped:
            return
        cut_short = None if finish_reason == "stop" else finish_reason
        answer = self._marked(answer) if cut_short else answer
        self._now = self._now._replace(rounds=self._now.with_last(answer=answer, cut_short=cut_short))
