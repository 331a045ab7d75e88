"""How drafts are made for one answer, where that differs from how its engine was loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgespec.drafters.answer_cache import PredictionDrafter
from edgespec.drafters.text_drafters import constrained
from edgespec.errors import UsageError
from edgespec.policy.limits import MAX_DRAFT_TOKENS
from edgespec.policy.speculation import DraftChoice
from edgespec.tokenization.tokenizer import Tokenizer
from edgespec.types import Drafter, TokenConstraint, TokenIds

_LONG = 16  # characters of a prediction for each token of the context, more than any answer has


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are made for one answer. Where the engine is deterministic, its text stays the same.

        Drafting(drafters=())  # plain decoding
        Drafting(drafters=["suffix"], draft_length=4)
        Drafting(prediction="def area(width, height):")  # the answer may repeat this text

    drafters: Names of open drafters that may draft; None for all of them.
    draft_length: Tokens in a draft, at most 24; None for as many as save time.
    prediction: A text that the answer is expected to repeat in part. Parts of it are drafted, and count as drafted
        by "prediction". It is cut where no answer can reach.

    Raises:
        UsageError: A value has the wrong type or is out of range.
    """

    drafters: Sequence[str] | None = None
    draft_length: int | None = None
    prediction: str = ""

    def __post_init__(self) -> None:
        names, length = self.drafters, self.draft_length
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise UsageError(f"drafters is {names!r}; wanted a list of names")
        if length is not None and (type(length) is not int or not 1 <= length <= MAX_DRAFT_TOKENS):
            raise UsageError(f"draft_length is {length!r}; wanted a whole number from 1 to {MAX_DRAFT_TOKENS}")
        if not isinstance(self.prediction, str):
            raise UsageError(f"prediction is a {type(self.prediction).__name__}; wanted a text")


def choose_drafters(
    drafting: Drafting, open_drafters: Sequence[str], prompt: TokenIds, tokenizer: Tokenizer, context: int
) -> DraftChoice:
    """The drafters of an answer to a prompt.

    Args:
        open_drafters: Names of the engine's drafters.
        context: The engine's context length, in tokens.

    Raises UsageError: A drafter is named that is not open.
    """
    if unknown := [name for name in drafting.drafters or () if name not in open_drafters]:
        there = ", ".join(open_drafters) or "none, as the model was loaded without"
        raise UsageError(f"no drafter '{unknown[0]}' is open; open are: {there}")
    further: tuple[Drafter, ...] = ()
    if drafting.prediction:
        predicted = tokenizer.encode(drafting.prediction[: _LONG * context])[:context]
        further = (PredictionDrafter(prompt, predicted),)
    names = None if drafting.drafters is None else frozenset(drafting.drafters)
    return DraftChoice(names, drafting.draft_length, further)


def under_constraint(choice: DraftChoice, constraint: TokenConstraint, num_prompt: int) -> DraftChoice:
    """The drafters of an answer that has to match a grammar: what it forces is drafted too, and drafts are cut."""
    return replace(choice, adapt=partial(constrained, constraint=constraint, num_prompt=num_prompt))
