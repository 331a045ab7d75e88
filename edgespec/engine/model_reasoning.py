"""How a model reasons before it answers: what its chat template and its tokenizer know of the marks around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from edgespec.engine.drafting import under_constraint
from edgespec.engine.reasoning import CLOSE, OPEN
from edgespec.engine.request import Request
from edgespec.engine.thinking_budget import CLOSING, ThinkingBudget
from edgespec.errors import UsageError
from edgespec.manifest import Manifest
from edgespec.tokenization.prompt_encoder import PromptEncoder
from edgespec.tools.tool import ToolUse
from edgespec.types import TokenIds

_TAIL = 16  # tokens at the end of a prompt, in which a template opens the reasoning


@dataclass(frozen=True, slots=True)
class ModelReasoning:
    """Whether a model may reason, where it begins, and what bounds it."""

    encoder: PromptEncoder
    manifest: Manifest

    @property
    def is_possible(self) -> bool:
        """The chat template or the tokenizer knows the marks."""
        marks = (OPEN, CLOSE)
        return (
            self.encoder.can_switch_thinking
            or any(map(self.encoder.spells_in_template, marks))
            or any(mark in self.encoder.tokenizer.added_tokens for mark in marks)
        )

    @property
    def is_opened_by_template(self) -> bool:
        """Prompts may end with the mark that begins the reasoning."""
        return self.encoder.spells_in_template(OPEN)

    def is_open(self, prompt: TokenIds) -> bool:
        """Whether a prompt ends with the mark that begins the reasoning, as its chat template can have it."""
        if not self.is_opened_by_template:
            return False
        # At its very end: the mark may also stand in a message, of which nothing begins.
        tokenizer = self.encoder.tokenizer
        return tokenizer.decode(prompt[-_TAIL:], tokenizer.special_tokens.values()).rstrip().endswith(OPEN)

    def bounded(self, request: Request, num_tokens: int) -> Request:
        """The request, with an end to the reasoning of its answer after num_tokens."""
        tokenizer = self.encoder.tokenizer
        constraint = ThinkingBudget(
            num_tokens,
            self.manifest.vocab_size,
            tokenizer.encode(CLOSING, special=True),
            partial(tokenizer.decode, shown=tokenizer.special_within((OPEN, CLOSE))),
            is_open=self.is_open(request.prompt),
            inner=request.constraint,
        )
        drafters = under_constraint(request.drafters, constraint, len(request.prompt))
        return request._replace(constraint=constraint, drafters=drafters)

    def require_budget_possible(self, use: ToolUse | None, response_format: object, banned: Sequence[str]) -> None:
        """Raises UsageError: The model never reasons, an answer has no place for it, or must not hold its end."""
        if not self.is_possible:
            raise UsageError(
                f"thinking_budget is given, but {self.manifest.name} does not reason before it answers: neither "
                f"its chat template nor its tokenizer has {OPEN}; leave it out or choose a thinking model"
            )
        if response_format is not None or (use is not None and use.choice not in ("auto", "none")):
            other = "response_format" if response_format is not None else "a tool that must be called"
            raise UsageError(
                f"thinking_budget is given with {other}, which an answer has to begin with, so that it has no "
                "reasoning; leave one of them out"
            )
        if kept_out := next((text for text in banned if text and text in CLOSING), None):
            raise UsageError(
                f"{kept_out!r} is banned, and reasoning ends with {CLOSING!r} where thinking_budget is spent; "
                "leave one of them out"
            )
