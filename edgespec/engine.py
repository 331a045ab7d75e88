"""A loaded model as one object that answers.

Knows protocols: which decoders and drafter it was given is loading's affair.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from edgespec.answering import Answering, Request
from edgespec.answers import AnswerStream, Chunk, Completion, chunks_of
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError, UsageError
from edgespec.forks import Owner
from edgespec.headroom import return_freed
from edgespec.manifest import Manifest
from edgespec.memory import Memory
from edgespec.prompt_encoder import Prompt, PromptEncoder
from edgespec.roster import Roster
from edgespec.sampling import SamplingParams
from edgespec.speculation import Speculation
from edgespec.turns import Turn, Turns
from edgespec.types import Decoder, Interruptible, TokenIds

if TYPE_CHECKING:
    from edgespec.conversation import Conversation


def _stop_strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    strings = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"stop is {stop!r}; wanted one or several texts")
    return strings


class Engine:
    """A loaded model. Made by load(); close it, or use it in a with statement.

    Several threads and tasks may share it. Their answers queue: one is made from its first chunk to its last, then
    the one that was asked for next. Whoever has several open and reads now from one, now from another, has them
    made in turns, which costs reading a prompt anew at each change; and an answer from which nobody has read for a
    second lets the others go first. Loaded as deterministic, each has the text that it would have alone; otherwise
    what is held of one moves the other's passes, and with them the last bits of logits.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        encoder: PromptEncoder,
        decoders: Sequence[Decoder],
        speculation: Speculation,
        roster: Roster | None = None,
        memory: Memory | None = None,
        device_names: tuple[str, str] = ("cpu", "cpu"),
        turns: Turns | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = encoder.tokenizer
        self._encoder = encoder
        self._decoders = list(decoders)
        self._speculation = speculation
        self._roster = roster or Roster()
        self._memory = memory
        self.device_names = device_names  # of target and drafter
        self._turns = turns or Turns()
        self._owner = Owner()
        self._streams: WeakSet[AnswerStream] = WeakSet()
        self._adding = Lock()

    def __enter__(self) -> "Engine":
        """Raises EdgeSpecError: the engine is closed."""
        self._expect_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the answers that are open, and free the models.

        Whoever reads such an answer has what is made of it, and a last chunk that is "cancelled"; until that is
        taken, or the stream is let go, it keeps the models. What needs no model, as tokenize, still works.
        """
        self._decoders.clear()
        if not self._owner.is_here:  # all else belongs to the process that loaded it
            return
        with self._adding:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        self._encoder.close()
        self._speculation.close()
        self._speculation = Speculation()
        self._roster.close()
        self._roster = Roster()
        if self._memory:
            self._memory.save()
        return_freed()

    def plain(self) -> "Engine":
        """The same loaded model without speculation; decoders and cache are shared."""
        self._expect_open()
        return Engine(
            manifest=self.manifest,
            encoder=self._encoder,
            decoders=self._decoders[:1],
            speculation=Speculation(),
            device_names=self.device_names,
            turns=self._turns,
        )

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together: the model's own, or what there was memory for."""
        return self._encoder.context_length

    @property
    def speculation(self) -> Speculation:
        """Who drafts, and what is known of that."""
        return self._speculation

    @property
    def target(self) -> Decoder:
        """Raises EdgeSpecError: the engine is closed."""
        self._expect_open()
        return self._decoders[0]

    def _expect_open(self) -> None:
        self._owner.expect_here()
        if not self._decoders:
            raise EdgeSpecError("this engine is closed; load the model again")

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> AnswerStream:
        """An answer as it is made, a chunk per pass of the target.

            for chunk in engine.stream("Why is the sky blue?", max_tokens=60):
                print(chunk.text, end="", flush=True)

        Args:
            prompt: What the user says, or a conversation that ends with it, as messages or as dicts with
                role and content.
            system: A system message to put first.
            sampling: How tokens are chosen; greedy unless given.
            max_tokens: The most tokens of an answer; unless given, what the context has room for.
            stop: One or several strings that end the answer and are not part of it.

        Raises:
            ContextOverflow: The prompt does not fit.
            ManifestError: The tokenizer gives a token that the model does not have.
            MemoryExhausted: A pass does not fit, though nothing drafts any more. The engine can be used again.
            UsageError: An argument is of another kind, or the prompt comes to no token at all.
        """
        return self._stream(self._fitting(prompt, system), sampling, max_tokens, stop)

    def astream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """The same for asyncio; arguments as in stream, and errors too, but with the first chunk.

        Other tasks run while the target works. Cancelling the task that reads cancels the answer.

            async def answer(question: str) -> None:
                async for chunk in engine.astream(question, max_tokens=60):
                    print(chunk.text, end="", flush=True)

            asyncio.run(answer("Why is the sky blue?"))
        """
        return chunks_of(
            lambda: self.stream(prompt, system=system, sampling=sampling, max_tokens=max_tokens, stop=stop)
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Completion:
        """A whole answer; arguments and errors as in stream."""
        tokens = self._fitting(prompt, system)
        chunks = list(self._stream(tokens, sampling, max_tokens, stop))
        last = chunks[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            origins=tuple(origin for chunk in chunks for origin in chunk.origins),
            finish_reason=last.finish_reason,
            prompt_tokens=len(tokens),
            stats=last.stats,
            timeline=last.timeline,
        )

    def chat(
        self,
        system: str | None = None,
        *,
        overflow: str = "error",
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> "Conversation":
        """A conversation that keeps its messages; arguments as of conversation.Conversation and stream.

        Raises:
            UsageError: There is no such overflow policy, or system is no text.
        """
        from edgespec.conversation import Conversation  # which knows this class

        return Conversation(self, system, overflow=overflow, sampling=sampling, max_tokens=max_tokens, stop=stop)

    def encode(self, prompt: Prompt, system: str | None = None) -> TokenIds:
        """The tokens that a prompt becomes, chat template included, [num_tokens].

        Raises:
            EdgeSpecError: The engine is closed.
            UsageError: The prompt is no text and no list of messages.
        """
        self._expect_open()
        return self._encoder.encode(prompt, system)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text's tokens; what looks like a special token is text too.

        Raises:
            UsageError: It is no text.
        """
        if not isinstance(text, str):
            raise UsageError(f"the text is a {type(text).__name__}; wanted a str")
        return tuple(self.tokenizer.encode(text).tolist())

    def count(self, prompt: Prompt, system: str | None = None) -> int:
        """How many tokens of the context a prompt takes, chat template included; errors as in encode.

        Of a message many times longer than the context not all are counted, but more than it has room for.
        """
        self._expect_open()
        return self._encoder.count(prompt, system)

    def _fitting(self, prompt: Prompt, system: str | None) -> TokenIds:
        self._expect_open()
        return self._encoder.fitting(prompt, system)

    def _stream(
        self,
        prompt: TokenIds,
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
    ) -> AnswerStream:
        sampling = sampling or SamplingParams()
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise UsageError(f"max_tokens is {max_tokens!r}; wanted a whole number from 1")
        if not isinstance(sampling, SamplingParams):
            raise UsageError(f"sampling is {sampling!r}; wanted SamplingParams")
        if not len(prompt):
            raise UsageError("the prompt is empty; give at least one token")
        if len(prompt) > self.context_length:
            raise ContextOverflow(len(prompt), self.context_length, self.manifest.context_length)
        if (last := int(prompt.max())) >= self.manifest.vocab_size:
            raise ManifestError(
                f"the tokenizer of {self.manifest.name} gives the token {last}, and the model has "
                f"{self.manifest.vocab_size}; they are not of one model, export it again"
            )
        target = self.target
        turn = Turn(partial(_interrupt, target, self._roster))
        request = Request(prompt, sampling, max_tokens or 2 * self.context_length, _stop_strings(stop))
        chunks = self._answering().chunks(target, request, turn)
        stream = AnswerStream(chunks, self._turns, turn, self._roster.tell)
        with self._adding:
            self._streams.add(stream)
        if not self._decoders:  # closed meanwhile by another thread
            stream.cancel()
        return stream

    def _answering(self) -> Answering:
        return Answering(
            tokenizer=self.tokenizer,
            end_tokens=self.manifest.eos_token_ids,
            speculation=self._speculation,
            roster=self._roster,
            memory=self._memory,
            device_names=self.device_names,
        )


def _interrupt(target: Decoder, roster: Roster) -> None:
    """End the pass and the drafts that are being made, from another thread."""
    if isinstance(target, Interruptible):
        target.interrupt()
    roster.interrupt()
