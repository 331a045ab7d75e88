"""A loaded model as one object that answers.

Knows protocols: which decoders and drafter it was given is loading's affair.
"""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakSet

from edgespec.answers import AnswerStream, Chunk, Completion, chunks_of
from edgespec.chat_template import ROLES, Message, encode_chat
from edgespec.costs import PassCosts
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError, UsageError
from edgespec.forks import Owner
from edgespec.greedy_rows import read_by
from edgespec.manifest import Manifest
from edgespec.memory import Memory
from edgespec.roster import Roster
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, Gate, serial
from edgespec.speculation import Speculation
from edgespec.stats import Stats, Tally
from edgespec.stopping import TextStop, TokenStop
from edgespec.template_process import TemplateProcess
from edgespec.timeline import Interval, overlap, schedule_of
from edgespec.tokenizer import TextStream, Tokenizer
from edgespec.turns import Turn, Turns
from edgespec.types import Decoder, Draft, Interruptible, Logits, Sampler, TokenIds, append

if TYPE_CHECKING:
    from edgespec.conversation import Conversation

_LONG = 16  # characters a token, which hardly any text has

Prompt = str | Sequence[Message | Mapping[str, str]]


def _message(each: Message | Mapping[str, str]) -> Message:
    if isinstance(each, Mapping):
        if not {"role", "content"} <= each.keys():
            raise UsageError(f"a message has the keys {sorted(each)}; wanted role and content")
        each = Message(each["role"], each["content"])
    if not isinstance(each, tuple) or len(each) != 2 or not all(isinstance(part, str) for part in each):
        raise UsageError(f"a message is {each!r}; wanted a role and a content, both text")
    return Message(*each)


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
        tokenizer: Tokenizer,
        template: str | None,
        renderer: TemplateProcess,
        decoders: Sequence[Decoder],
        speculation: Speculation,
        roster: Roster | None = None,
        memory: Memory | None = None,
        context_length: int | None = None,
        device_names: tuple[str, ...] = ("cpu", "cpu"),
        turns: Turns | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._template = template
        self._renderer = renderer
        self._decoders = list(decoders)
        self._speculation = speculation
        self._roster = roster or Roster()
        self._memory = memory
        self._context_length = context_length or manifest.context_length
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
        self._renderer.close()
        self._speculation.close()
        self._speculation = Speculation()
        self._roster.close()
        self._roster = Roster()
        if self._memory:
            self._memory.save()

    def plain(self) -> "Engine":
        """The same loaded model without speculation; decoders and cache are shared."""
        self._expect_open()
        return Engine(
            manifest=self.manifest,
            tokenizer=self.tokenizer,
            template=self._template,
            renderer=self._renderer,
            decoders=self._decoders[:1],
            speculation=Speculation(),
            context_length=self.context_length,
            device_names=self.device_names,
            turns=self._turns,
        )

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together: the model's own, or what there was memory for."""
        return self._context_length

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
        return self._encoded(self._messages(prompt, system))

    def _fitting(self, prompt: Prompt, system: str | None) -> TokenIds:
        """The same; what is far longer than the context is refused at once: 10 MB take 10 s and 2 GB to encode.

        Raises:
            ContextOverflow: A message alone does not fit.
        """
        messages = self._messages(prompt, system)
        for message in messages:
            if len(message.content) > _LONG * self.context_length:
                num_tokens = self.tokenizer.least_tokens(message.content, self.context_length)
                if num_tokens > self.context_length:
                    raise ContextOverflow(
                        num_tokens, self.context_length, self.manifest.context_length, is_all=False
                    )
        return self._encoded(messages)

    def _messages(self, prompt: Prompt, system: str | None) -> list[Message]:
        self._expect_open()
        if system is not None and not isinstance(system, str):
            raise UsageError(f"system is {system!r}; wanted a text")
        if isinstance(prompt, Mapping) or not isinstance(prompt, (str, Sequence)):
            raise UsageError(f"the prompt is a {type(prompt).__name__}; wanted a text or a list of messages")
        messages = [Message("user", prompt)] if isinstance(prompt, str) else [_message(each) for each in prompt]
        if unknown := [message.role for message in messages if message.role not in ROLES]:
            raise UsageError(f"a message has the role '{unknown[0]}'; known are {', '.join(ROLES)}")
        if system is not None:
            messages.insert(0, Message("system", system))
        return messages

    def _encoded(self, messages: Sequence[Message]) -> TokenIds:
        return encode_chat(self._template, self._renderer.render, messages, self.tokenizer, self._special_tokens())

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text's tokens; what looks like a special token is text too.

        Raises:
            UsageError: It is no text.
        """
        if not isinstance(text, str):
            raise UsageError(f"the text is a {type(text).__name__}; wanted a str")
        return _ints(self.tokenizer.encode(text))

    def count(self, prompt: Prompt, system: str | None = None) -> int:
        """How many tokens of the context a prompt takes, chat template included; errors as in encode.

        Of a message many times longer than the context not all are counted, but more than it has room for.
        """
        try:
            return len(self._fitting(prompt, system))
        except ContextOverflow as error:
            return error.num_tokens

    def _special_tokens(self) -> dict[str, str]:
        names = {"bos_token": self.manifest.bos_token_id}
        if self.manifest.eos_token_ids:
            names["eos_token"] = self.manifest.eos_token_ids[-1]
        pieces = {name: self.tokenizer.piece(token) for name, token in names.items() if token is not None}
        return {name: piece for name, piece in pieces.items() if piece is not None}

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
        most = max_tokens or 2 * self.context_length
        chunks = self._chunks(target, prompt, sampling, most, _stop_strings(stop), turn)
        stream = AnswerStream(chunks, self._turns, turn, self._roster.tell)
        with self._adding:
            self._streams.add(stream)
        if not self._decoders:  # closed meanwhile by another thread
            stream.cancel()
        return stream

    def _chunks(
        self,
        target: Decoder,
        prompt: TokenIds,
        sampling: SamplingParams,
        max_tokens: int,
        stop: Sequence[str],
        turn: Turn,
    ) -> Generator[Chunk, None, None]:
        sampler = GumbelSampler(sampling, len(prompt))
        token_stop = TokenStop(self.manifest.eos_token_ids, max_tokens)
        text_stream, text_stop = TextStream(self.tokenizer), TextStop(stop)
        tally, timeline = Tally(), list[Interval]()
        started, fed = perf_counter(), target.num_fed
        reason = None
        speculation, roster = self._speculation, self._roster
        gate = roster.gate(speculation)
        blocks = serial(
            prompt,
            read_by(sampling, target),
            sampler,
            _WantedGate(gate, turn),
            speculation.accept,
            max_tokens,
            relieve=roster.relieve,
        )
        answer = prompt[:0]
        try:
            turn.expect_wanted()
            for block in blocks:
                kept, reason = token_stop.cut(block.tokens)
                answer = append(answer, kept)
                if not tally.passes:
                    tally.prompt_read(target.num_fed - fed, perf_counter() - started)
                text, num_shown, is_cut = _shown(kept, text_stream, text_stop)
                tally.add(block, num_shown)
                timeline.append(_verified(block))
                if reason or is_cut:
                    break
                yield Chunk(text=text, token_ids=_ints(kept), origins=_origins(block, len(kept)))
            else:
                text, kept, num_shown, is_cut, reason = "", prompt[:0], 0, False, "context"
        except Exception:
            if not turn.is_cancelled:  # else it is what ended the pass
                raise
            text, kept, num_shown, is_cut, reason = "", prompt[:0], 0, False, "cancelled"
        finally:
            blocks.close()
            if self._memory:
                self._memory.add(prompt, answer)
        if not is_cut:
            rest, is_cut = text_stop.push(text_stream.flush())
            text += rest if is_cut else rest + text_stop.flush()
        reason = "stop" if is_cut else reason or "stop"
        timeline += [each for each in roster.take_intervals() if each.start_s >= started]
        stats = self._stats(tally, speculation, roster, timeline, gate.undrafted)
        yield Chunk(
            text=text,
            token_ids=_ints(kept[:num_shown]),
            origins=_origins(block, num_shown) if num_shown else (),
            finish_reason=reason,
            stats=stats,
            timeline=tuple(timeline),
        )

    def _stats(
        self,
        tally: Tally,
        speculation: Speculation,
        roster: Roster,
        timeline: Sequence[Interval],
        undrafted: Mapping[str, int],
    ) -> Stats:
        length = speculation.draft_length
        return tally.stats(
            drafter=speculation.name,
            draft_length="auto" if length is None else str(length),
            target_device=self.device_names[0],
            drafter_device=self.device_names[1] if roster.has_models else None,
            downgrades=roster.take_news(),
            schedule=schedule_of(timeline),
            overlap=overlap(timeline),
            costs=PassCosts(dict(speculation.ratios)),
            undrafted=undrafted,
        )


@dataclass(frozen=True, slots=True)
class _WantedGate:
    """Another gate, which ends an answer that was cancelled before the next pass."""

    gate: Gate
    turn: Turn

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        """Raises Cancelled."""
        self.turn.expect_wanted()
        draft = self.gate.draft(tokens, room, sampler)
        self.turn.expect_wanted()
        return draft

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        self.gate.observe(tokens, draft, logits, emitted, verify_s)

    def close(self) -> None:
        self.gate.close()


def _interrupt(target: Decoder, roster: Roster) -> None:
    """End the pass and the drafts that are being made, from another thread."""
    if isinstance(target, Interruptible):
        target.interrupt()
    roster.interrupt()


def _origins(block: Block, num_tokens: int) -> tuple[str, ...]:
    """Of the first num_tokens of a block: who drafted each, and "target" for the last, which is its own."""
    return (*[block.draft.source] * block.num_accepted, "target")[:num_tokens]


def _verified(block: Block) -> Interval:
    return Interval("target", "verify", block.started_s, block.started_s + block.verify_s, len(block.tokens))


def _shown(tokens: TokenIds, text_stream: TextStream, text_stop: TextStop) -> tuple[str, int, bool]:
    """Text of tokens up to a stop string, how many tokens that took, and whether one was met.

    Token by token, so that where the answer ends does not depend on how tokens came in blocks.
    """
    text = ""
    for i, token in enumerate(tokens):
        piece, is_cut = text_stop.push(text_stream.push([token]))
        text += piece
        if is_cut:
            return text, i + 1, True
    return text, len(tokens), False


def _ints(tokens: TokenIds) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)
