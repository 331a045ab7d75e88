"""A conversation with an engine: messages, answers as they come, and what to do when the context is full.

Knows nothing of terminals.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from edgespec.answers import AnswerStream, Chunk, Completion
from edgespec.chat_template import Message
from edgespec.errors import ContextOverflow, UsageError
from edgespec.sampling import SamplingParams
from edgespec.transcript import Transcript, read_transcript, save_transcript

if TYPE_CHECKING:
    from edgespec.engine import Engine

OVERFLOWS = ("error", "drop-oldest")
# When rounds are dropped, so much of the context becomes free for what follows: each time, the rest is read anew.
_FREED_SHARE = 0.25


class Round(NamedTuple):
    """What the user said and what was answered to it; None where there is no word of an answer."""

    user: str
    answer: str | None


class Conversation:
    """Messages and an engine that answers them. Made by Engine.chat().

        with load("smollm2-135m") as engine:
            talk = engine.chat("You answer in one sentence.", overflow="drop-oldest")
            print(talk.say("Why is the sky blue?").text)

    One answer is made at a time; another is begun when the last one is over or closed.

    engine: May be exchanged for another between answers.
    overflow: Of a conversation that outgrows the context: error refuses what is said, drop-oldest sends the model
        whole rounds fewer, the oldest first. Messages keep them, and num_dropped says how many are left out.
    sampling, max_tokens, stop: As of Engine.stream, for each answer.
    """

    def __init__(
        self,
        engine: "Engine",
        system: str | None = None,
        *,
        overflow: str = "error",
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> None:
        if system is not None and not isinstance(system, str):
            raise UsageError(f"system is {system!r}; wanted a text")
        self.engine = engine
        self.overflow = overflow
        self.sampling = sampling or SamplingParams()
        self.max_tokens = max_tokens
        self.stop = stop
        self._system = system
        self._rounds: list[Round] = []
        self._num_dropped = 0  # rounds
        self._cut_short: dict[int, str] = {}  # by round
        self._num_tries = 0  # of the last round
        self._made: list[Chunk] = []  # of the answer that is made, by its reply

    @property
    def overflow(self) -> str:
        """What is done about a conversation that outgrows the context."""
        return self._overflow

    @overflow.setter
    def overflow(self, policy: str) -> None:
        """Raises UsageError: There is no such policy."""
        if policy not in OVERFLOWS:
            raise UsageError(f"overflow is {policy!r}; wanted {' or '.join(OVERFLOWS)}")
        self._overflow = policy

    @property
    def system(self) -> str | None:
        """The system message; one that is set counts from the next answer on."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What was said and answered, the oldest first."""
        return tuple(self._rounds)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that was said, what is not sent any more included."""
        return self._messages(self._rounds)

    @property
    def num_dropped(self) -> int:
        """Messages, the oldest, that the model is not sent any more."""
        return len(_flat(self._rounds[: self._num_dropped]))

    @property
    def num_tokens(self) -> int:
        """Of what the model would be sent now, up to where the assistant speaks."""
        sent = self.sent
        return self.engine.count(sent) if sent else 0

    @property
    def sent(self) -> tuple[Message, ...]:
        """Of all messages those that the model would be sent now."""
        return self._sent(self._rounds[self._num_dropped :])

    def stream(self, text: str) -> "Reply":
        """Say something; the answer as it is made.

        Messages before it that have no answer stay, and the model is not sent them: chat templates want turns to
        alternate.

        Raises:
            ContextOverflow: It does not fit, with drop-oldest not even alone; nothing was said then.
            UsageError: It is no text, or an argument of this conversation is wrong.
        """
        if not isinstance(text, str):
            raise UsageError(f"what is said is {text!r}; wanted a text")
        return self._begin([*self._rounds, Round(text, None)], num_tries=0)

    def say(self, text: str) -> Completion:
        """Say something; the whole answer. Errors as of stream."""
        return self.stream(text).completion()

    def retry(self) -> "Reply":
        """The last answer once more, sampled with the next seed, in the place of what it was.

        Raises:
            UsageError: Nothing was said yet.
        """
        if not self._rounds:
            raise UsageError("there is nothing to answer yet; say something first")
        tries = self._num_tries + (not self._is_unanswered)
        return self._begin([*self._rounds[:-1], Round(self._rounds[-1].user, None)], num_tries=tries)

    def undo(self) -> Round | None:
        """Take back what was said last and its answer; what that was, None if nothing was."""
        if not self._rounds:
            return None
        taken = self._rounds.pop()
        self._made = []
        self._cut_short.pop(len(self._rounds), None)
        self._num_dropped = min(self._num_dropped, len(self._rounds))
        self._num_tries = 0
        return taken

    def redo(self, taken: Round) -> None:
        """Put back what undo has taken."""
        self._rounds.append(taken)

    def clear(self) -> None:
        """Forget all but the system message."""
        self._rounds, self._num_dropped, self._cut_short, self._num_tries = [], 0, {}, 0
        self._made = []

    def transcript(self, model: str | None = None) -> Transcript:
        """All of it as it is written to a file; model is what a user calls the model.

        An answer that is being made is there as far as it is, as if it were cancelled.
        """
        rounds, cut_short = self._rounds, self._cut_short
        if self._is_unanswered and (made := "".join(chunk.text for chunk in self._made)):
            rounds = [*rounds[:-1], Round(rounds[-1].user, made)]
            cut_short = {**cut_short, len(rounds) - 1: "cancelled"}
        positions = {}
        at = int(self._system is not None)
        for i, each in enumerate(rounds):
            at += len(_flat([each]))
            positions[i] = at - 1
        return Transcript(
            messages=self._messages(rounds),
            model=model or self.engine.manifest.name,
            num_dropped=self.num_dropped,
            cut_short=tuple((positions[i], reason) for i, reason in sorted(cut_short.items())),
        )

    def restore(self, transcript: Transcript) -> None:
        """Take up what was said in another conversation, in the place of this one.

        Raises:
            UsageError: Behind a system message there is one of an assistant that answers none of a user.
        """
        system, rounds, cut_short = _taken_apart(transcript)
        self._system, self._rounds, self._cut_short = system, rounds, cut_short
        self._num_tries, self._made = 0, []
        sizes = [len(_flat(rounds[:i])) for i in range(len(rounds) + 1)]
        self._num_dropped = bisect_left(sizes, transcript.num_dropped)

    def save(self, path: str | Path) -> None:
        """Write the messages, as JSON Lines that load reads.

        Raises:
            EdgeSpecError: The file cannot be written.
        """
        save_transcript(Path(path), self.transcript())

    @classmethod
    def load(cls, engine: "Engine", path: str | Path, **settings: object) -> "Conversation":
        """A conversation that save has written, to go on with.

        Args:
            settings: overflow, sampling, max_tokens and stop, which no file holds.

        Raises:
            UsageError: The file cannot be read, is damaged, or is none of ours.
        """
        loaded = cls(engine, **settings)  # type: ignore[arg-type]  # as of __init__
        loaded.restore(read_transcript(Path(path)))
        return loaded

    @property
    def _is_unanswered(self) -> bool:
        return bool(self._rounds) and self._rounds[-1].answer is None

    def _messages(self, rounds: Sequence[Round]) -> tuple[Message, ...]:
        system = [Message("system", self._system)] if self._system is not None else []
        return (*system, *_flat(rounds))

    def _sent(self, rounds: Sequence[Round]) -> tuple[Message, ...]:
        return self._messages([*_with_answers(rounds[:-1]), *rounds[-1:]])

    def _begin(self, rounds: list[Round], num_tries: int) -> "Reply":
        num_dropped = self._fitting(rounds)
        sampling = replace(self.sampling, seed=(self.sampling.seed + num_tries) % 2**64)
        sent = self._sent(rounds[num_dropped:])
        num_prompt = self.engine.count(sent)
        chunks = self.engine.stream(sent, sampling=sampling, max_tokens=self.max_tokens, stop=self.stop)
        dropped = _flat(_with_answers(rounds[self._num_dropped : num_dropped]))
        # From here on it was said, whatever becomes of the answer.
        self._cut_short.pop(len(rounds) - 1, None)
        self._rounds, self._num_dropped, self._num_tries = rounds, num_dropped, num_tries
        self._made = []
        return Reply(self, chunks, num_prompt, tuple(dropped), self._made)

    def _fitting(self, rounds: Sequence[Round]) -> int:
        """How many of the oldest rounds to leave out.

        Raises:
            ContextOverflow: It is too long, and nothing may be left out or that does not help.
        """
        context = self.engine.context_length
        num_tokens = self._size(rounds, self._num_dropped)
        if num_tokens <= context and (self._overflow == "error" or self._num_dropped == len(rounds) - 1):
            return self._num_dropped
        if self._overflow == "error":
            raise ContextOverflow(num_tokens, context, self.engine.manifest.context_length)
        least_room = min(self.max_tokens or _room(context), _room(context))
        if num_tokens + least_room // 2 <= context:
            return self._num_dropped
        most = len(rounds) - 1
        dropped = bisect_left(
            range(self._num_dropped, most), True,
            key=lambda num: self._size(rounds, num) + least_room <= context,
        )  # fmt: skip
        num_dropped = self._num_dropped + dropped
        if (num_tokens := self._size(rounds, num_dropped)) > context:
            raise ContextOverflow(num_tokens, context, self.engine.manifest.context_length)
        return num_dropped

    def _size(self, rounds: Sequence[Round], num_dropped: int) -> int:
        return self.engine.count(self._sent(rounds[num_dropped:]))

    def _answered(self, answer: str, finish_reason: str) -> None:
        """What a reply came to; without a word the message stays unanswered."""
        if not answer and finish_reason == "cancelled":
            return
        self._rounds[-1] = Round(self._rounds[-1].user, answer)
        if finish_reason != "stop":
            self._cut_short[len(self._rounds) - 1] = finish_reason


class Reply:
    """An answer of a conversation as it is made: an iterator of chunks, and a context manager that closes it.

    However it ends, what there is of the answer is in the conversation then. Errors are those of Engine.stream.

    prompt_tokens: What the model was sent.
    dropped: Messages that it was sent the last time and not any more.
    """

    def __init__(
        self,
        conversation: Conversation,
        chunks: AnswerStream,
        prompt_tokens: int,
        dropped: tuple[Message, ...],
        seen: list[Chunk],
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.dropped = dropped
        self._conversation = conversation
        self._chunks = chunks
        self._seen = seen
        self._is_over = False

    def __iter__(self) -> "Reply":
        return self

    def __next__(self) -> Chunk:
        try:
            chunk = next(self._chunks)
        except BaseException:
            self.close()
            raise
        self._seen.append(chunk)
        if chunk.finish_reason is not None:
            self._end(chunk.finish_reason)
        return chunk

    def __enter__(self) -> "Reply":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(chunk.text for chunk in self._seen)

    @property
    def last(self) -> Chunk | None:
        """The last chunk, once it is made: also where the answer was closed before anybody had it."""
        return self._chunks.last

    def cancel(self) -> None:
        """End the answer at once, from any thread or a signal handler; a last chunk says that it was cancelled."""
        self._chunks.cancel()

    def close(self) -> None:
        """End the answer, if it is not over; what there is of it stays."""
        self._chunks.close()
        self._end("cancelled")

    def completion(self) -> Completion:
        """The whole answer, waited for."""
        for _ in self:
            pass
        last = self._seen[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        return Completion(
            text=self.text,
            token_ids=tuple(token for chunk in self._seen for token in chunk.token_ids),
            origins=tuple(origin for chunk in self._seen for origin in chunk.origins),
            finish_reason=last.finish_reason,
            prompt_tokens=self.prompt_tokens,
            stats=last.stats,
            timeline=last.timeline,
        )

    def _end(self, finish_reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._conversation._answered(self.text, finish_reason)


def _flat(rounds: Sequence[Round]) -> list[Message]:
    messages = []
    for each in rounds:
        messages.append(Message("user", each.user))
        if each.answer is not None:
            messages.append(Message("assistant", each.answer))
    return messages


def _with_answers(rounds: Sequence[Round]) -> list[Round]:
    return [each for each in rounds if each.answer is not None]


def _room(context: int) -> int:
    return max(1, int(_FREED_SHARE * context))


def _taken_apart(transcript: Transcript) -> tuple[str | None, list[Round], dict[int, str]]:
    """System message, rounds, and which rounds' answers were cut short."""
    messages = list(transcript.messages)
    first = int(bool(messages) and messages[0].role == "system")
    reasons = dict(transcript.cut_short)
    rounds: list[Round] = []
    cut_short = {}
    for i, message in enumerate(messages[first:], first):
        if message.role == "user":
            rounds.append(Round(message.content, None))
        elif message.role == "assistant" and rounds and rounds[-1].answer is None:
            rounds[-1] = Round(rounds[-1].user, message.content)
            if i in reasons:
                cut_short[len(rounds) - 1] = reasons[i]
        else:
            raise UsageError(f"message {i + 1} is of the role {message.role} and answers none of a user")
    return messages[0].content if first else None, rounds, cut_short
