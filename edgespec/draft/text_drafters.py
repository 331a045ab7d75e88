"""Drafters that draft from the text of an answer, by the names that users give them.

Where an answer has to match a grammar: the tokens that must follow, and drafts cut to what may.
"""

from collections.abc import Collection, Sequence
from pkgutil import resolve_name

from edgespec.config.drafter_names import TEXT
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.lookahead import Lookahead, Window
from edgespec.types import Logits, Sampler, TokenConstraint, TokenIds


def make_text_drafters(
    names: Collection[str], window: Window | None = None, cached: Collection[Drafter] = ()
) -> list[Drafter]:
    """New drafters for one answer, whose text they hold; and those with these names that all answers share.

    window: Of lookahead, where it is among the names.
    """
    wanted = {*names, "suffix"} if "auto" in names else names
    drafters: list[Drafter] = [resolve_name(made_by)() for name, made_by in TEXT.items() if name in wanted]
    if window is not None and "lookahead" in names:
        drafters.append(Lookahead(window))
    return [*drafters, *(each for each in cached if each.name in names)]


class ForcedDrafter(Drafter):
    """Drafts the tokens that follow whatever the model says, such as the keys of a JSON object."""

    name = "grammar"

    def __init__(self, constraint: TokenConstraint, num_prompt: int) -> None:
        """num_prompt: Tokens of every text that are the prompt."""
        self._constraint, self._num_prompt = constraint, num_prompt

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        forced = self._constraint.forced(tokens[self._num_prompt :], request.num_tokens)
        return Tree(forced, (0,) * len(forced), source=self.name) if len(forced) else NO_DRAFT


class ConstrainedDrafter(Drafter):
    """A drafter from the text whose chains are cut before the first token that may not follow.

    Trees stay whole, as their drafter learns from all of their rows. Drafter models need no cut: they draft by the
    rule that the target chooses by.
    """

    def __init__(self, drafter: Drafter, constraint: TokenConstraint, num_prompt: int) -> None:
        self._drafter, self._constraint, self._num_prompt = drafter, constraint, num_prompt

    @property
    def name(self) -> str:
        return self._drafter.name

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        draft = self._drafter.draft(tokens, request, sampler)
        if draft.parents is not None or not len(draft.tokens):
            return draft
        num_allowed = self._constraint.num_allowed(tokens[self._num_prompt :], draft.tokens)
        return draft.cut(num_allowed) if num_allowed else NO_DRAFT

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        self._drafter.learn(tokens, draft, logits)


def constrained(drafters: Sequence[Drafter], constraint: TokenConstraint, num_prompt: int) -> list[Drafter]:
    """The drafters of one answer under a constraint; none of none, where decoding is to be plain."""
    if not drafters:
        return []
    cut = [ConstrainedDrafter(each, constraint, num_prompt) if each.can.is_free else each for each in drafters]
    return [ForcedDrafter(constraint, num_prompt), *cut]
