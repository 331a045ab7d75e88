"""A loaded model as one object that answers.

Knows protocols: load() decides on decoders and drafters.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from edgespec.decoders import Decoder, Interruptible
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.answer_cache import AnswerCache
from edgespec.drafters.pool import DrafterPool
from edgespec.engine.answers import AnswerStream, Chunk, Completion, chunks_of, join_chunks
from edgespec.engine.generation import Generation, Request
from edgespec.engine.idle_learner import IdleLearner
from edgespec.engine.request_queue import RequestQueue, Ticket
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError, UsageError
from edgespec.manifest import Manifest
from edgespec.memory.free_memory import return_freed
from edgespec.policy.speculation import Speculation
from edgespec.system.owner_process import Owner
from edgespec.tokenization.prompt_encoder import Prompt, PromptEncoder
from edgespec.types import TokenIds

if TYPE_CHECKING:
    from edgespec.engine.conversation import Conversation


def _stop_strings(stop: str | Sequence[str] | None) -> Sequence[str]:
    strings = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"stop is {stop!r}; wanted one or several texts")
    return strings


class Engine:
    """A loaded model. Made by load(); close it, or use it in a with statement.

    Several threads and tasks may share it. Their answers queue: one is made from its first chunk to its last,
    then the one that was asked for next. A thread that reads several answers alternately makes each change read
    a prompt again; and an answer that was not read for a second lets the others go first. Where is_deterministic
    each answer has the text that it would have alone; otherwise the cached tokens of one shift the passes of the
    other, and with them the last bits of logits.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        encoder: PromptEncoder,
        decoders: Sequence[Decoder],
        speculation: Speculation,
        pool: DrafterPool | None = None,
        answers: AnswerCache | None = None,
        device_names: tuple[str, str] = ("cpu", "cpu"),
        is_deterministic: bool = False,
        near_tie: float | None = None,
        queue: RequestQueue | None = None,
        learner: IdleLearner | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = encoder.tokenizer
        self._encoder = encoder
        self._decoders = list(decoders)
        self._speculation = speculation
        self._pool = pool or DrafterPool()
        self._answers = answers
        self.device_names = device_names  # of target and drafter
        self.is_deterministic = is_deterministic  # one text, to the byte, whatever drafts
        self._near_tie = near_tie  # as Generation has it
        self._queue = queue or RequestQueue()
        self._learner = learner
        self._owner = Owner()
        self._streams: WeakSet[AnswerStream] = WeakSet()
        self._streams_lock = Lock()

    def __enter__(self) -> "Engine":
        """Raises EdgeSpecError: the engine is closed."""
        self._require_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel open answers and free the models.

        A reader of such an answer still gets what is made of it, and a last chunk that is "cancelled"; the
        models stay until that chunk is read or the stream is dropped. Calls that need no model, such as
        tokenize, still work.
        """
        self._decoders.clear()
        if not self._owner.is_here:  # the rest belongs to the process that loaded it
            return
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        self._encoder.close()
        if self._learner:
            self._learner.close()
        self._speculation.close()
        self._speculation = Speculation()
        self._pool.close()
        self._pool = DrafterPool()
        if self._answers:
            self._answers.save()
        return_freed()

    def plain(self) -> "Engine":
        """An engine that decodes plainly on this one's decoders and cache."""
        self._require_open()
        return Engine(
            manifest=self.manifest,
            encoder=self._encoder,
            decoders=self._decoders[:1],
            speculation=Speculation(),
            device_names=self.device_names,
            is_deterministic=self.is_deterministic,
            near_tie=self._near_tie,
            queue=self._queue,
        )

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer: the model's own context, or what memory has space for."""
        return self._encoder.context_length

    @property
    def speculation(self) -> Speculation:
        """The drafters, and what is known of them."""
        return self._speculation

    @property
    def target(self) -> Decoder:
        """Raises EdgeSpecError: the engine is closed."""
        self._require_open()
        return self._decoders[0]

    def _require_open(self) -> None:
        self._owner.require_here()
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
            prompt: A text of the user, or a conversation that ends with one, as messages or as dicts with role and
                content.
            system: A system message to put first.
            sampling: How tokens are chosen; greedy by default.
            max_tokens: The most tokens of an answer; by default as many as fit the context.
            stop: One or several strings that end the answer and are not part of it.

        Raises:
            ContextOverflow: The prompt does not fit.
            ManifestError: The tokenizer gives a token that the model does not have.
            MemoryExhausted: A pass does not fit, though all drafters were closed. The engine can be used again.
            UsageError: An argument has a wrong type, or the prompt has no token.
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
        """Stream an answer to an asyncio task; arguments and errors as in stream, errors with the first chunk.

        Other tasks run while the target works. Cancelling the reading task cancels the answer.

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
        return join_chunks(list(self._stream(tokens, sampling, max_tokens, stop)), len(tokens))

    def chat(
        self,
        system: str | None = None,
        *,
        overflow: str = "error",
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> "Conversation":
        """A conversation that remembers its messages; arguments as in Conversation and stream.

        Raises:
            UsageError: The overflow policy does not exist, or system is no text.
        """
        from edgespec.engine.conversation import Conversation  # which knows this class

        return Conversation(self, system, overflow=overflow, sampling=sampling, max_tokens=max_tokens, stop=stop)

    def encode(self, prompt: Prompt, system: str | None = None) -> TokenIds:
        """The tokens that a prompt becomes, chat template included, [num_tokens].

        Raises:
            EdgeSpecError: The engine is closed.
            UsageError: The prompt is no text and no list of messages.
        """
        self._require_open()
        return self._encoder.encode(prompt, system)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text's tokens; special tokens are not recognised, they are text too.

        Raises:
            UsageError: It is no text.
        """
        if not isinstance(text, str):
            raise UsageError(f"the text is a {type(text).__name__}; wanted a str")
        return tuple(self.tokenizer.encode(text).tolist())

    def count(self, prompt: Prompt, system: str | None = None) -> int:
        """How many tokens of the context a prompt takes, chat template included; errors as in encode.

        A message many times longer than the context is counted only until it exceeds the context.
        """
        self._require_open()
        return self._encoder.count(prompt, system)

    def _fitting(self, prompt: Prompt, system: str | None) -> TokenIds:
        self._require_open()
        return self._encoder.encode_fitting(prompt, system)

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
        if self._near_tie is not None and not sampling.is_greedy:
            raise UsageError(
                f"the temperature is {sampling.temperature}, and exact covers greedy text only on "
                f"'{self.device_names[0]}', where deterministic mode is off; use temperature 0, or leave out exact"
            )
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
        self._pool.report_changes()  # those of the time without answers
        if self._learner:
            self._learner.report_problem()
        ticket = Ticket(partial(_interrupt, target, self._pool))
        request = Request(prompt, sampling, max_tokens or 2 * self.context_length, _stop_strings(stop))
        chunks = self._generation().chunks(target, request, self._queue, ticket)
        stream = AnswerStream(chunks, self._queue, ticket, self._pool.report_changes)
        with self._streams_lock:
            self._streams.add(stream)
        if not self._decoders:  # closed meanwhile by another thread
            stream.cancel()
        return stream

    def _generation(self) -> Generation:
        return Generation(
            tokenizer=self.tokenizer,
            end_tokens=self.manifest.eos_token_ids,
            speculation=self._speculation,
            pool=self._pool,
            answers=self._answers,
            device_names=self.device_names,
            near_tie=self._near_tie,
            learner=self._learner,
        )


def _interrupt(target: Decoder, pool: DrafterPool) -> None:
    """End the pass and the drafts that are being made, from another thread."""
    if isinstance(target, Interruptible):
        target.interrupt()
    pool.interrupt()
