"""What answers have to match by a response format or by their tools, as grammars over the tokens of one model."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from edgespec.engine.drafting import under_constraint
from edgespec.engine.request import CallReading, Request
from edgespec.errors import FormatError, UsageError
from edgespec.manifest import Manifest
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.tools.formats import CallFormat
from edgespec.tools.tool import ToolUse, schema_refusal

if TYPE_CHECKING:
    from edgespec.grammar.compile import GrammarCompiler
    from edgespec.grammar.response_format import ResponseFormat


class AnswerGrammars:
    """Constrains the answers of one model; reads its vocabulary once the first of them needs a grammar."""

    def __init__(self, tokenizer: Tokenizer, manifest: Manifest) -> None:
        self._tokenizer, self._manifest = tokenizer, manifest
        self._lock = Lock()  # one thread reads the vocabulary

    def constrain(
        self, request: Request, response_format: Mapping[str, Any] | None, context_length: int
    ) -> Request:
        """The request, with what its answer has to match by response_format and by its tools.

        Args:
            context_length: The most tokens of the prompt and the answer.

        Raises UsageError: The format is wrong, no grammar can ensure it, or no answer of max_tokens can match it.
        """
        if request.calls is None:
            return self._constrained(request, _read_format(response_format), context_length)
        wanted = format_with_calls(request.calls, response_format, self._named_tokens)
        if wanted is None:
            return request
        try:
            self._compiler().compile(wanted)
        except FormatError as error:
            raise explain_refusal(request.calls.use, error, self._compiler()) from None
        try:
            return self._constrained(request, wanted, context_length)
        except FormatError as error:
            raise cannot_be_ensured(error) from None

    def _constrained(self, request: Request, wanted: "ResponseFormat | None", context_length: int) -> Request:
        if wanted is None:
            return request
        from edgespec.grammar.constraint import GrammarConstraint  # takes 20 ms, and few answers need it

        compiler = self._compiler()
        # A pass over the whole context still gives the token that follows it.
        left = context_length + 1 - len(request.tokens)
        max_tokens = min(request.max_tokens, left)
        constraint = GrammarConstraint(compiler.compile(wanted), max_tokens, request.prefill)
        drafters = under_constraint(request.drafters, constraint, len(request.prompt))
        return request._replace(constraint=constraint, drafters=drafters)

    def _compiler(self) -> "GrammarCompiler":
        with self._lock:
            return self._held_compiler

    @cached_property
    def _held_compiler(self) -> "GrammarCompiler":
        from edgespec.grammar.compile import GrammarCompiler

        manifest = self._manifest
        return GrammarCompiler(self._tokenizer.path, manifest.vocab_size, tuple(manifest.eos_token_ids))

    def _named_tokens(self) -> Mapping[str, int]:
        """Tokens that grammars have to name, by their spelling."""
        return self._compiler().special_among(self._tokenizer.added_tokens)


def _read_format(stated: Mapping[str, Any] | None) -> "ResponseFormat | None":
    if stated is None:
        return None
    from edgespec.grammar.response_format import read_format

    return read_format(stated)


def call_reading(use: ToolUse, format: CallFormat, *, whole: bool) -> CallReading:
    """How the calls of an answer are found; whole: given once they are whole."""
    if use.is_ensured:
        from edgespec.grammar.call_grammar import constrained_format

        format = constrained_format(format)
    return CallReading(use, format, whole)


def format_with_calls(
    calls: CallReading, response_format: Mapping[str, Any] | None, find_special: Callable[[], Mapping[str, int]]
) -> "ResponseFormat | None":
    """What an answer has to match that may have calls, or else has to match a response_format.

    Args:
        find_special: Gives the tokens that grammars have to name, by their spelling.

    Raises:
        FormatError: The response_format is wrong.
        ToolError: No grammar can hold the schema of a tool.
        UsageError: The response_format is of another kind, or no grammar can hold calls of this form.
    """
    if not (calls.use.is_ensured or response_format):
        return None
    from edgespec.grammar.call_grammar import call_grammar, constrained_format
    from edgespec.grammar.response_format import read_format

    wanted = read_format(response_format)
    if wanted is None and not calls.use.is_ensured:
        return None
    if wanted is not None and wanted.kind != "json_schema":
        raise UsageError(
            f"tools are given with a response_format of the type {wanted.kind}; leave one of them out, or give a "
            "JSON schema"
        )
    schema = None if wanted is None else json.loads(wanted.source)
    return call_grammar(calls.use, constrained_format(calls.format), find_special(), schema)


def explain_refusal(use: ToolUse, refused: FormatError, compiler: "GrammarCompiler") -> UsageError:
    """The error of a grammar of calls that cannot be compiled: it names the tool whose schema is the reason."""
    from edgespec.grammar.response_format import read_format

    for tool in use.possible:
        try:
            alone = read_format({"type": "json_schema", "schema": tool.parameters})
            fault = compiler.find_fault(alone) if alone else None
        except FormatError as error:
            fault = str(error)
        if fault is not None:
            return schema_refusal(tool, fault)
    return cannot_be_ensured(refused)


def cannot_be_ensured(refused: FormatError) -> UsageError:
    """The error of a grammar of calls that no single tool is the reason of."""
    return UsageError(f"tools cannot be ensured as they are asked for: {refused}")
