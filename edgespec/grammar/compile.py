"""Grammars compiled for one model: from a response format to what follows token by token."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

import llguidance

from edgespec.errors import FormatError
from edgespec.grammar.closing import Closer, ClosingTokens
from edgespec.grammar.endings import endings_of, largest_opening
from edgespec.grammar.response_format import ResponseFormat, require_bounded
from edgespec.grammar.schema import schemas_in, subschemas
from edgespec.grammar.vocabulary import GrammarVocabulary, first_words
from edgespec.system.threads import run_with_stack

# No white space between the tokens of JSON: a small model may write blanks for ever, and it costs tokens.
_JSON_OPTIONS: Any = {"whitespace_flexible": False}
# The library follows a schema's references by recursion, and ends the process where its stack ends: in 8 MB behind
# some 900 of them. 131,072 characters hold no more than 13,000.
_STACK_BYTES = 256 << 20
_MAX_SYMBOLS = 200_000
_MAX_ITEMS = 20_000  # of the parser at one place; 4 for each optional property of an object
_MAX_LOCATED = 200  # parts of a schema that are tried to find the one that is wrong
_LOCATED_S = 2.0  # for which they are tried
_MAX_COMPILED = 32  # grammars that are kept for later answers
_MAX_KEPT = 1 << 19  # their sizes together; each of it takes up to 450 bytes
_OPENING = 64  # characters that a value of a grammar that is no schema is taken to need to end, at least
_LIBRARY_GRAMMARS: dict[str, Any] = {
    "json_schema": partial(llguidance.LLMatcher.grammar_from_json_schema, overrides=_JSON_OPTIONS),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "grammar": llguidance.LLMatcher.grammar_from_lark,
}
_KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over the tokens of one model.

    kind: That of its ResponseFormat.
    matcher: At the beginning of a text; each thread has a copy.
    largest_opening: Tokens that a single token may add to what an answer needs to end, at most.
    size: Characters of its source, and states of numbers.
    """

    kind: str
    matcher: Any
    vocabulary: GrammarVocabulary
    closer: Closer
    largest_opening: int
    size: int


class GrammarCompiler:
    """Compiles formats for one model, and keeps those used last. Any thread may call it."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """Raises FormatError: The tokenizer cannot be used."""
        self.vocabulary = GrammarVocabulary(tokenizer_file, vocab_size, end_tokens)
        self._closing_tokens = ClosingTokens(self.vocabulary)
        self._compiled: OrderedDict[ResponseFormat, CompiledGrammar] = OrderedDict()
        self._lock = Lock()
        self._turn = Lock()  # one at a time, as Python's part of it keeps the interpreter from other threads

    def compile(self, wanted: ResponseFormat) -> CompiledGrammar:
        """Raises FormatError: The grammar is wrong, or more than is worked on."""
        if (known := self._known(wanted)) is not None:
            return known
        with self._turn:
            if (known := self._known(wanted)) is not None:  # another thread has compiled it meanwhile
                return known
            size = len(wanted.source) + require_bounded(wanted)
            made = run_with_stack(lambda: self._compile(wanted, size), _STACK_BYTES)
            with self._lock:
                self._compiled[wanted] = made
                while len(self._compiled) > 1 and (
                    len(self._compiled) > _MAX_COMPILED
                    or sum(each.size for each in self._compiled.values()) > _MAX_KEPT
                ):
                    self._compiled.popitem(last=False)
        return made

    def _known(self, wanted: ResponseFormat) -> CompiledGrammar | None:
        with self._lock:
            if wanted in self._compiled:
                self._compiled.move_to_end(wanted)
            return self._compiled.get(wanted)

    def find_fault(self, wanted: ResponseFormat) -> str | None:
        """Why a format cannot be used, and where in it; None where it can."""
        try:
            require_bounded(wanted)
        except FormatError as error:
            return str(error)
        return run_with_stack(lambda: self._fault(wanted, self._matcher(wanted)[1]), _STACK_BYTES)

    def _fault(self, wanted: ResponseFormat, reason: str | None) -> str | None:
        return None if reason is None else f"{reason}{self._place(wanted, reason)}"

    def _compile(self, wanted: ResponseFormat, size: int) -> CompiledGrammar:
        matcher, reason = self._matcher(wanted)
        if (fault := self._fault(wanted, reason)) is not None:
            raise FormatError(f"the {_KINDS[wanted.kind]} of response_format cannot be used: {fault}")
        if wanted.kind == "json_schema":
            opening = largest_opening(json.loads(wanted.source))
        elif wanted.opening is not None:
            opening = wanted.opening
        else:  # a token may begin a whole value of a schema in it
            schemas = schemas_in(wanted.source)
            opening = _OPENING + max((largest_opening(each, is_part=True) for each in schemas), default=0)
        closer = Closer(self.vocabulary, self._closing_tokens, *endings_of(wanted))
        return CompiledGrammar(wanted.kind, matcher, self.vocabulary, closer, opening, size)

    def _matcher(self, wanted: ResponseFormat) -> tuple[Any, str | None]:
        """The library's matcher, and what the library says where the source is wrong."""
        limits = llguidance.LLParserLimits(
            max_grammar_size=_MAX_SYMBOLS, max_items_in_row=_MAX_ITEMS, verbose_errors=False
        )
        try:
            grammar = _LIBRARY_GRAMMARS[wanted.kind](wanted.source)
            matcher = llguidance.LLMatcher(self.vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        except BaseException as error:  # a panic of the library is no Exception
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            return None, first_words(str(error))
        return matcher, first_words(matcher.get_error()) if matcher.is_error() else None

    def _place(self, wanted: ResponseFormat, reason: str) -> str:
        """Where in a schema the first innermost part is that is refused for the same reason."""
        if wanted.kind != "json_schema":
            return ""
        schema, place = json.loads(wanted.source), "#"
        named = {
            key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema
        }
        ends = monotonic() + _LOCATED_S
        for i, (pointer, part) in enumerate(subschemas(schema)):
            if i == _MAX_LOCATED or monotonic() > ends:
                break
            if i and pointer.startswith(place) and isinstance(part, Mapping):
                alone = ResponseFormat("json_schema", json.dumps({**named, **part}))
                if self._matcher(alone)[1] == reason:
                    place = pointer
        return f" (at {place})"
