"""A loaded model as one object that answers.

Knows protocols: load() decides on decoders and drafters.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, Unpack
from weakref import WeakSet, ref

from edgespec.config.presets import Preset
from edgespec.decoding.decoder import Decoder
from edgespec.decoding.pass_queue import Caller
from edgespec.decoding.sampling import SamplingParams
from edgespec.draft.speculation import Speculation
from edgespec.engine.answer_stream import AnswerStream, chunks_of
from edgespec.engine.answers import Chunk, Completion, join_chunks
from edgespec.engine.embedder import Embedder, Vectors
from edgespec.engine.generation import Generation, LoadedModel, OpenDrafters
from edgespec.engine.prefix_file import find_key, read_prefix, write_prefix
from edgespec.engine.preset_defaults import begin_chat, by_preset, opened, settings_by
from edgespec.engine.request import (
    AnswerOptions,
    Settings,
    answer_settings,
    is_any_text,
    lists_options,
    require_embedding_model,
)
from edgespec.engine.request_reader import RequestReader
from edgespec.engine.run_ahead import Ticket
from edgespec.engine.target_caches import AnswerDecoder, TargetCaches, interrupt
from edgespec.errors import ContextOverflow, EdgeSpecError, UsageError
from edgespec.memory.free_memory import return_freed
from edgespec.system.arguments import require_kind
from edgespec.system.threads import Owner, in_thread
from edgespec.text.prompt_encoder import Prompt, parse_ids
from edgespec.tools.tool import demands_call, parse_tools
from edgespec.types import TokenIds, ToolChoice, append

if TYPE_CHECKING:
    from edgespec.engine.conversation import Conversation


class Engine:
    """A loaded model. Made by load(); close it, or use it in a with statement.

    Several threads and tasks may share it. As many answers as max_parallel says are made at once, each with a
    KV cache of its own: their passes run as one where the device allows, and take turns elsewhere. Others wait for
    the end of one of them; an answer that was not read for a second lets them go first. Where is_deterministic
    each answer has the text that it would have alone; otherwise the last bits of logits depend on what a pass runs
    beside it.
    """

    def __init__(self, model: LoadedModel, caches: TargetCaches, drafting: OpenDrafters | None = None) -> None:
        """Serve answers with a target, whose caches several engines may have; without drafting nothing drafts."""
        self.preset: Preset | None = None  # by which answers are made where their options leave it open
        self.manifest = model.manifest
        self.tokenizer = model.encoder.tokenizer
        self.device_names = model.device_names  # of target and drafter
        self.is_deterministic = model.is_deterministic  # one text, to the byte, whatever drafts
        self._model, self._caches, self._encoder = model, caches, model.encoder
        self._drafting = drafting or OpenDrafters()
        self._owner = Owner()
        self._streams: WeakSet[AnswerStream] = WeakSet()
        self._streams_lock = Lock()
        device = None if model.near_tie is None else model.device_names[0]
        self._requests = RequestReader(encoder=model.encoder, manifest=model.manifest, greedy_device=device)

    def __enter__(self) -> "Engine":
        """Raises EdgeSpecError: the engine is closed."""
        self._require_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse copies: what is open would be closed twice, and no other process has it."""
        raise TypeError("an engine cannot be copied or pickled; threads share one, and other processes load one")

    def close(self) -> None:
        """Cancel open answers and free the models.

        A reader of such an answer still gets what is made of it, and a last chunk that is "cancelled"; the
        models stay until that chunk is read or the stream is dropped. Calls that need no model, such as
        tokenize, still work.
        """
        self._caches.close()
        if not self._owner.is_here:  # the rest belongs to the process that loaded it
            return
        with self._streams_lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        self._encoder.close()
        self._drafting.close()
        self._drafting = OpenDrafters()
        return_freed()

    def plain(self) -> "Engine":
        """An engine that decodes plainly on this one's decoders and cache."""
        self._require_open()
        return by_preset(Engine(self._model, self._caches), self.preset)

    def forget_prompts(self) -> None:
        """Free the memory of texts that were kept in case they go on; only the first cache keeps its text."""
        self._caches.forget()

    @property
    def drafter_sha256(self) -> tuple[str, ...]:
        """The recorded SHA-256 of each drafter model's weights file; empty where only the text drafts."""
        return self._drafting.sha256

    @property
    def prefix_key(self) -> str | None:
        """All that files of save_prefix depend on beside their tokens; None where it cannot write any."""
        return find_key(self.target)

    def held_texts(self) -> dict[int, TokenIds]:
        """The tokens in each cache that no answer has, by the cache's number; the longest unused comes first."""
        self._require_open()
        return self._caches.texts()

    def save_prefix(self, path: str | Path, cache: int = 0) -> int:
        """Write what the model has read of the last text to a file, for load_prefix; returns how many tokens.

        The file takes manifest.kv_cache.bytes_per_token for each, and can be read by its owner alone.

        Args:
            cache: The number of the cache that has the text; the last text is in the first one, unless several
                answers were made at once.

        Raises:
            EdgeSpecError: It cannot be written, or an answer is being made.
            ModelError: Keys and values of this model cannot be taken out on its device.
            UsageError: There is no such cache, or it holds nothing.
        """
        return write_prefix(path, self._idle_target(cache))

    def load_prefix(self, path: str | Path, cache: int = 0) -> int:
        """Take what save_prefix has written, so that a text that begins with it is not read again.

        Answers are those that they would be without it. Returns how many tokens the file has.

        cache: The number of the cache that is to hold the text, below max_parallel.

        Raises:
            MemoryExhausted: It does not fit.
            ModelError: As save_prefix does.
            UsageError: There is no such cache, or the file is damaged or of another model, device or ONNX Runtime.
        """
        tokens = read_prefix(path, self._idle_target(cache), self.manifest.kv_cache)
        self._caches.hold(cache, tokens)
        return len(tokens)

    def _idle_target(self, cache: int) -> Decoder:
        self._require_open()
        if type(cache) is not int or not 0 <= cache < self.max_parallel:
            raise UsageError(f"the cache is {cache!r}; wanted 0 to {self.max_parallel - 1}")
        if self._caches.queue.is_held(cache):
            raise EdgeSpecError("an answer is being made; read it to its end or close it, and ask again then")
        return self._caches.open(cache)

    def __repr__(self) -> str:
        state = f"on {self.device_names[0]}" if self._caches.decoders else "closed"
        return f"<Engine {self.manifest.name}, {state}>"

    @property
    def max_parallel(self) -> int:
        """How many answers are made at once; further ones wait."""
        return self._caches.num_caches

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer: the model's own context, or what memory has space for."""
        return self._encoder.context_length

    @property
    def model_sampling(self) -> SamplingParams | None:
        """The sampling that a preset or the model's own files suggest, by which answers are made by default.

        None, and answers are greedy, where they suggest none, or text has to be exact and only greedy text is.
        """
        suggested = self.manifest.sampling if self._model.near_tie is None else None
        stated = asdict(suggested) if suggested else {}
        if self.preset:
            stated |= self.preset.sampling
        return SamplingParams(**stated) if stated else None

    @property
    def speculation(self) -> Speculation:
        """The drafters, and what is known of them."""
        return self._drafting.speculation

    @property
    def open_drafters(self) -> tuple[str, ...]:
        """The names of the drafters that are open now."""
        return tuple(drafter.name for drafter in self._drafting.speculation.drafters())

    @property
    def target(self) -> Decoder:
        """Raises EdgeSpecError: the engine is closed."""
        return self._require_open()[0]

    def _require_open(self) -> Sequence[Decoder]:
        """The decoders of the caches. Raises EdgeSpecError: the engine is closed."""
        self._owner.require_here()
        if not (decoders := self._caches.decoders):
            raise EdgeSpecError("this engine is closed; load the model again")
        return decoders

    @lists_options
    def stream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> AnswerStream:
        """An answer as it is made, a chunk per pass of the target.

            for chunk in engine.stream("Why is the sky blue?", max_tokens=60):
                print(chunk.text, end="", flush=True)

        Args:
            prompt: A text of the user, or a conversation, as messages or as dicts with role and content; or token
                ids, which the model reads as they are. A last message of the assistant is continued.
            system: A system message to put first; an empty one is none, not that of a preset either.
            sampling: How tokens are chosen; by default as model_sampling says, greedily where that is None.
            temperature, top_k, top_p, min_p, seed and other fields of SamplingParams: Each by itself, in the place
                of the sampling's own.
            max_tokens: The most tokens of an answer; by default as many as fit. 0 only reads the prompt;
                -1 is no limit, whatever a preset says.
            stop: One or several strings that end the answer and are not part of it.
            raw: The prompt is a text that the model continues, without the chat template. Special tokens that it
                spells are special tokens.
            prefill: The beginning of the answer, as text or token ids, which the model continues. It is no part of
                what is returned, but penalties take it for part of the answer.
            drafting: Which of the open drafters may draft, and how much; by default as the engine was loaded.
            logprobs: Give the log-probability of each token, and of this many of the likeliest in its place; 0 for
                that of the token alone.
            prompt_logprobs: Give those of the prompt's tokens too, before the answer; the first has nan.
            banned: One or several texts that the answer never holds, however tokens spell them; upper and lower
                case differ.
            response_format: What the answer has to match, prefill included, as the OpenAI API states it: a JSON
                schema, any JSON object, a regular expression or a grammar. Where max_tokens or the context runs
                out, the answer takes a short way to a valid end.
            schema: The same by a JSON schema alone, as a dict or text, or by a type such as a dataclass or a class
                of pydantic; Completion.parse() makes a value of that type.
            timeout_s: End the answer so many seconds after this call, also while it waits for others: its finish
                reason is "timeout" then, and it consists of the chunks that were read.
            priority: Where several answers are made at once, one of a lower priority waits between two passes
                until those of a higher one are done; equal ones share.
            tools: What the model may call: functions of Python, of whose signature and docstring it is told, or
                dicts in the form of OpenAI's API, of Anthropic's or of MCP.
            tool_choice: "auto", "none", "required", or the name of the tool that must be called.
            parallel_tool_calls: The answer may have several calls; otherwise it ends with the first one.
            whole_tool_calls: Give calls once they are whole, and what turns out to be none as text. Otherwise
                arguments are given as they come.
            thinking: Whether the model is to reason before it answers, if its chat template has a switch for that;
                None leaves it to the template. The reasoning is part of the text: Completion.reasoning tells it.
            template_options: Further names that the chat template reads, as chat_template_kwargs elsewhere.
            thinking_budget: The most tokens of the reasoning; then it is closed, and the model answers. 0 closes
                it at once, None never. What is written is the same whatever drafts.
            ends_loops: End an answer that repeats one span of tokens over and over, with the finish reason "loop".
                None: where max_tokens does not bound it.

        Raises:
            ContextOverflow: The prompt does not fit.
            ConversationError: The chat template of the model refuses the messages.
            ManifestError: The tokenizer gives a token that the model does not have.
            MemoryExhausted: A pass does not fit, though all drafters were closed. The engine can be used again.
            UsageError: An argument has a wrong type, the prompt has no token, no answer of max_tokens can match
                response_format, or thinking_budget is given for a model or an answer without reasoning.
        """
        return self._stream(prompt, options)

    @lists_options
    def astream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> AsyncGenerator[Chunk, None]:
        """Stream an answer to an asyncio task; arguments and errors as in stream, errors with the first chunk.

        Other tasks run while the target works. Cancelling the reading task cancels the answer.

            async def answer(question: str) -> None:
                async for chunk in engine.astream(question, max_tokens=60):
                    print(chunk.text, end="", flush=True)

            asyncio.run(answer("Why is the sky blue?"))
        """
        return chunks_of(lambda: self.stream(prompt, **options))

    @lists_options
    def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Completion:
        """A whole answer; arguments and errors as in stream, but calls are whole in any case."""
        stream = self._whole(prompt, options)
        return join_chunks(list(stream), stream.prompt_tokens, stream.schema)

    @lists_options
    async def agenerate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Completion:
        """A whole answer for an asyncio task, as generate gives it; cancelling the task ends the answer."""
        async with await in_thread(self._whole, prompt, options) as stream:
            return join_chunks([chunk async for chunk in stream], stream.prompt_tokens, stream.schema)

    def _whole(self, prompt: Prompt, options: AnswerOptions) -> AnswerStream:
        if options.get("whole_tool_calls") is False:
            raise UsageError("whole_tool_calls is False; a whole answer has whole calls: leave it out, or stream")
        return self._stream(prompt, {"whole_tool_calls": True, **options})

    @lists_options
    def chat(self, *texts: object, system: str | None = None, **settings: Unpack[Settings]) -> "Conversation":
        """A conversation that remembers its messages; arguments as in Conversation and stream.

        Raises UsageError: An argument has a wrong type or no name, or the overflow policy does not exist.
        """
        from edgespec.engine.conversation import Conversation  # which knows this class

        if texts:
            raise UsageError(
                "chat begins a conversation, without a message: engine.chat().say(text) sends one, and "
                "engine.chat(system=text) begins with a system message"
            )
        return begin_chat(Conversation(self, system, **settings), self.preset)

    def encode(
        self,
        prompt: Prompt,
        system: str | None = None,
        *,
        raw: bool = False,
        tools: Sequence[Any] | None = None,
        thinking: bool | None = None,
        prefill: str | Sequence[int] | TokenIds = "",
    ) -> tuple[int, ...]:
        """The ids of the tokens that a prompt becomes; chat template and tools included, unless it is raw.

        prefill is the beginning of the answer, a text or token ids, whose tokens come last.

        Raises:
            ConversationError: The chat template of the model refuses the messages.
            EdgeSpecError: The engine is closed.
            UsageError: The prompt is no text, no list of messages and no token ids.
        """
        self._require_open()
        tokens = self._encoder.encode(prompt, system, raw=raw, tools=parse_tools(tools), thinking=thinking)
        if isinstance(prefill, str) and prefill and not raw:
            tokens, prefill, _ = self._requests.reasoning.place(tokens, prefill)
        return tuple(append(tokens, self._encoder.encode_prefill(prefill)).tolist())

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text's tokens; special tokens are not recognised, they are text too.

        Raises UsageError: It is no text.
        """
        require_kind("the text", text, str, "a str")
        return tuple(self.tokenizer.encode(text).tolist())

    def detokenize(self, token_ids: Sequence[int] | TokenIds) -> str:
        """The text of tokens, without special tokens.

        Raises UsageError: They are no token ids of this model.
        """
        return self.tokenizer.decode(parse_ids(token_ids, self.manifest.vocab_size, "token_ids"))

    def embed(self, texts: str | Sequence[str]) -> Vectors:
        """Vectors of length 1: of a text, [hidden_size], or of several, [num_texts, hidden_size].

        The text is read as it is; what a model wants before a question, such as "Instruct: …", is part of it.

        Raises:
            ContextOverflow: A text does not fit.
            UnsuitedModel: The model was not trained for embeddings.
            UsageError: It is no text, or an empty one.
        """
        return self.embedder.vectors(texts)

    @property
    def embedder(self) -> Embedder:
        """Makes vectors of texts. Raises UnsuitedModel: The model was not trained for embeddings."""
        self._require_open()
        require_embedding_model(self.manifest)
        assert self._model.embedder is not None
        return self._model.embedder

    def count(
        self,
        prompt: Prompt,
        system: str | None = None,
        *,
        raw: bool = False,
        thinking: bool | None = None,
        tools: Sequence[Any] | None = None,
    ) -> int:
        """How many tokens of the context a prompt takes, with what tells of tools; errors as in encode.

        A message many times longer than the context is counted only until it exceeds the context.
        """
        self._require_open()
        parsed = parse_tools(tools)
        try:
            encode = self._encoder.encode
            return len(encode(prompt, system, raw=raw, tools=parsed, thinking=thinking, is_bounded=True))
        except ContextOverflow as error:
            return error.num_tokens

    @property
    def takes_tools(self) -> bool:
        """True if the model's chat template tells it of tools; otherwise a system message has to."""
        self._require_open()
        return self._encoder.tool_template.variable is not None

    @property
    def has_chat_template(self) -> bool:
        """False for a model that only continues texts: of a conversation, the contents joined by blank lines."""
        return self._encoder.template is not None

    @property
    def can_switch_thinking(self) -> bool:
        """True if the model's chat template has a switch for reasoning, which thinking=True or False sets."""
        return self._encoder.can_switch_thinking

    def opens_reasoning(
        self,
        prompt: Prompt,
        *,
        thinking: bool | None = None,
        template_options: Mapping[str, Any] | None = None,
        prefill: str = "",
        response_format: Mapping[str, Any] | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> bool:
        """True if an answer begins in the reasoning, so that it has only the mark of its end.

        The chat template begins it, or the beginning of the answer that is given. An answer that has to match a
        format, of a preset too, or to call a tool, has none.
        """
        self._require_open()
        of_preset = self.preset.answer_options.get("response_format") if self.preset else None
        if not prefill and (demands_call(tool_choice) or not is_any_text(response_format or of_preset)):
            return False
        options = {"thinking": thinking, "template_options": template_options}
        return self._requests.reasoning.opens(prompt, prefill, options)

    @property
    def can_think(self) -> bool:
        """True if the model may reason before it answers: its chat template or its tokenizer knows <think>."""
        return self._requests.reasoning.is_possible

    @property
    def tool_format(self) -> str:
        """How the model is told of tools and writes calls, such as "hermes, by the chat template"."""
        self._require_open()
        return self._encoder.tool_template.description

    def _stream(self, prompt: Prompt, options: AnswerOptions) -> AnswerStream:
        called_s = monotonic()
        preset, suggested = self.preset, self.model_sampling
        settings = settings_by(options, suggested, preset) if preset else answer_settings(options, suggested)
        target, caches = self.target, self._caches
        if preset or settings.system == "":
            prompt, settings = opened(prompt, settings, preset)
        drafters = self.open_drafters if settings.drafting else ()
        request = self._requests.read(prompt, settings, drafters, target.context_length)
        self._drafting.report()
        ticket = Ticket(deadline_s=called_s + (settings.timeout_s or inf), caller=Caller(settings.priority))
        target = AnswerDecoder(caches, target, ticket, request.tokens)
        ticket.interrupt = partial(interrupt, caches.decoders, self._drafting.pool, ref(ticket))
        num_read = caches.watch_reading(ticket, request.tokens, target)
        stream = Generation(self._model, self._drafting).stream(target, request, caches.queue, ticket, num_read)
        with self._streams_lock:
            self._streams.add(stream)
        if not caches.decoders:  # closed meanwhile by another thread
            stream.cancel()
        return stream
