"""From a prompt and the options of its answer to a request, which one model can answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.decoding.sampling import SamplingParams, suppressing
from edgespec.draft.speculation import ALL_DRAFTERS
from edgespec.engine.reasoning import ModelReasoning
from edgespec.engine.request import (
    AnswerSettings,
    CallReading,
    Request,
    choose_drafters,
    require_answerable,
    require_writer,
    under_constraint,
)
from edgespec.errors import FormatError, ToolError, UsageError
from edgespec.manifest import Manifest
from edgespec.text.banned_texts import BannedTexts, SpellingIndex
from edgespec.text.prompt_encoder import (
    Prompt,
    PromptEncoder,
    is_conversation,
    is_ids,
    parse_messages,
    split_begun,
)
from edgespec.tools.tool import ToolUse, demands_call, schema_refusal
from edgespec.types import append

if TYPE_CHECKING:
    from edgespec.grammar.compile import GrammarCompiler
    from edgespec.grammar.response_format import ResponseFormat

# What a grammar says of a format, and what of calls that have to come.
_OF_CALLS = (
    ("shortest one found that matches its response_format has", "shortest call of a tool takes"),
    (" or use a smaller format", ""),
    ("match its response_format", "begin a call of a tool"),
)


@dataclass(kw_only=True)
class RequestReader:
    """Encodes prompts for one model, and checks whether it can answer them as it is asked to.

    greedy_device: The target's device where only greedy text is exact; None where all text is, or none has to be.
    """

    encoder: PromptEncoder
    manifest: Manifest
    greedy_device: str | None = None
    _grammars: "GrammarCompiler | None" = field(init=False, default=None)  # has read the vocabulary
    _lock: Lock = field(init=False, default_factory=Lock)  # one thread reads it

    @cached_property
    def reasoning(self) -> ModelReasoning:
        return ModelReasoning(self.encoder, self.manifest)

    def read(
        self, prompt: Prompt, options: AnswerSettings, open_drafters: tuple[str, ...], target_context: int
    ) -> Request:
        """The request; raises what Engine.stream raises before any work.

        target_context: The most tokens that the target takes, which may be fewer than the encoder's.
        """
        try:
            return self._read(prompt, options, open_drafters, target_context)
        except UsageError as error:
            if options.schema is not None and not isinstance(error, ToolError):
                said = str(error).replace("the JSON schema of response_format", "the schema", 1)
                error.args = (said.replace("response_format", "schema", 1),)
            raise

    def _read(
        self, prompt: Prompt, options: AnswerSettings, open_drafters: tuple[str, ...], target_context: int
    ) -> Request:
        require_writer(self.manifest)
        if suppressed := self.manifest.suppressed_token_ids:
            options = replace(options, sampling=suppressing(options.sampling or SamplingParams(), suppressed))
        given, wanted = options.prefill, options.format
        if not options.raw and is_conversation(prompt):
            turns = parse_messages(prompt)
            prompt, given = split_begun(turns) if given is None else (turns, given)
        encoder, context = self.encoder, self.encoder.context_length
        use = None
        if options.tools is not None or options.tool_choice is not None:
            use = ToolUse.parse(options.tools, options.tool_choice, is_parallel=options.parallel_tool_calls)
        tokens = encoder.encode(
            prompt,
            options.system,
            raw=options.raw,
            tools=use.tools if use else (),
            thinking=options.thinking,
            template_options=options.template_options,
            is_bounded=True,
        )
        may_open = self.reasoning.is_opened_by_template and not options.raw
        opens_reasoning = may_open and self.reasoning.is_open(tokens)
        if isinstance(given, str) and given and not options.raw:
            tokens, given, opens_reasoning = self.reasoning.place(tokens, given)
        elif (wanted is not None or (use and demands_call(use.choice))) and not (options.raw or is_ids(prompt)):
            tokens, opens_reasoning = self.reasoning.begin_answer(tokens, has_tools=use is not None), False
        begun = np.zeros(0, np.int32) if given is None else encoder.encode_prefill(given)
        if not isinstance(given, str) and len(begun):
            opens_reasoning = False
        drafters = ALL_DRAFTERS
        if options.drafting is not None:
            before = append(tokens, begun)
            drafters = choose_drafters(options.drafting, open_drafters, before, encoder.tokenizer, context)
        calls = None
        if use:
            form = encoder.tool_template.format
            if use.is_ensured:
                from edgespec.tools.call_grammar import constrained_format

                form = constrained_format(form)
            calls = CallReading(use, form, options.whole_tool_calls)
        is_raw = options.raw or is_ids(prompt)
        request = Request(
            tokens,
            options,
            begun,
            drafters,
            BannedTexts(options.banned_texts, self._spelling_index) if options.banned else None,
            calls=calls,
            is_raw=is_raw,
            opens_reasoning=opens_reasoning,
            answer_marks=() if is_raw or (len(begun) and not opens_reasoning) else self.reasoning.answer_marks,
        )
        require_answerable(request, self.manifest, context)
        if self.greedy_device is not None:
            self._require_exact(request)
        budget = options.thinking_budget
        if budget is not None:
            self.reasoning.require_budget_possible(use, wanted, options.banned_texts)
        if wanted is not None or (use and use.is_ensured):
            request = self._constrained(request, wanted, min(context, target_context))
        return request if budget is None else self.reasoning.bounded(request, budget)

    @cached_property
    def _spelling_index(self) -> SpellingIndex:
        return SpellingIndex(self.encoder.tokenizer.spellings, self.manifest.vocab_size)

    def _require_exact(self, request: Request) -> None:
        if not request.sampling.is_greedy:
            raise UsageError(
                f"the temperature is {request.sampling.temperature}, and exact covers greedy text only on "
                f"'{self.greedy_device}', where deterministic mode is off; use temperature 0, or leave out exact"
            )

    def _constrained(
        self, request: Request, response_format: Mapping[str, Any] | None, context_length: int
    ) -> Request:
        """The request, with what its answer has to match by response_format and by its tools.

        context_length: The most tokens of the prompt and the answer.

        Raises:
            FormatError: The response_format is wrong, or no answer of max_tokens can match it.
            UsageError: No grammar can ensure calls as they are asked for.
        """
        calls = request.calls
        from edgespec.grammar.constraint import GrammarConstraint  # takes 20 ms, and few answers need it
        from edgespec.grammar.response_format import read_format

        if calls:
            try:
                wanted = self._format_with_calls(calls, calls.use, response_format)
            except (FormatError, UsageError):  # perhaps for a tool whose schema need not be followed
                wanted = self._format_with_calls(calls, calls.use.without_loose_bounds(), response_format)
        else:
            wanted = read_format(response_format or {})
        if wanted is None:
            return request
        compiler = self._compiler()
        # A pass over the whole context still gives the token that follows it.
        max_tokens = min(request.max_tokens, context_length + 1 - len(request.tokens))
        try:
            constraint = GrammarConstraint(compiler.compile(wanted), max_tokens, request.prefill)
        except FormatError as error:
            if max_tokens < request.max_tokens:
                advice = "shorten the prompt, raise --context if you gave one,"
                error.args = (str(error).replace("allow more tokens", advice),)
            if calls:
                said = str(error)
                for theirs, ours in _OF_CALLS if response_format is None else ():
                    said = said.replace(theirs, ours, 1)
                raise cannot_be_ensured(said) from None
            raise
        drafters = under_constraint(request.drafters, constraint, len(request.prompt))
        return request._replace(constraint=constraint, drafters=drafters)

    def _format_with_calls(
        self, calls: CallReading, use: ToolUse, response_format: Mapping[str, Any] | None
    ) -> "ResponseFormat | None":
        """The format of an answer that may call tools of use, or else has to match a response_format.

        Raises:
            FormatError: The response_format is wrong.
            ToolError: No grammar can hold the schema of a tool.
            UsageError: The response_format is of another kind, or no grammar can hold calls of this form.
        """
        from edgespec.grammar.response_format import read_format
        from edgespec.tools.call_grammar import call_grammar, constrained_format

        wanted = read_format(response_format) if response_format else None
        if wanted is None and not use.is_ensured:
            return None
        if wanted is not None and wanted.kind != "json_schema":
            raise UsageError(
                f"tools are given with a response_format of the type {wanted.kind}; leave one of them out, or "
                "give a JSON schema"
            )
        schema = None if wanted is None else json.loads(wanted.source)
        compiler = self._compiler()
        special = compiler.vocabulary.special_among(self.encoder.tokenizer.added_tokens)
        wanted = call_grammar(use, constrained_format(calls.format), special, schema)
        try:
            compiler.compile(wanted)
        except FormatError as error:
            raise explain_refusal(use, error, compiler) from None
        return wanted

    def _compiler(self) -> "GrammarCompiler":
        from edgespec.grammar.compile import GrammarCompiler

        with self._lock:
            if self._grammars is None:
                path, ends = self.encoder.tokenizer.path, tuple(self.manifest.eos_token_ids)
                self._grammars = GrammarCompiler(path, self.manifest.vocab_size, ends)
            return self._grammars


def explain_refusal(use: ToolUse, refused: FormatError, compiler: "GrammarCompiler") -> UsageError:
    """The error of a grammar of calls that cannot be compiled: it names the tool whose schema is the reason."""
    from edgespec.grammar.response_format import read_format
    from edgespec.tools.call_grammar import closed

    for tool in use.possible:
        try:
            alone = read_format({"type": "json_schema", "schema": closed(tool.parameters)})
            fault = compiler.find_fault(alone) if alone else None
        except FormatError as error:
            fault = str(error)
        if fault is not None:
            return schema_refusal(tool, fault)
    return cannot_be_ensured(str(refused))


def cannot_be_ensured(refused: str) -> UsageError:
    """The error of a grammar of calls that no single tool is the reason of."""
    return UsageError(f"tools cannot be ensured as they are asked for: {refused}")
