"""A drafter from the text is known everywhere by one line in a table."""

import numpy as np
import pytest

from edgespec.config.drafter_names import TEXT, parse
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.text_source import make_text_drafters
from edgespec.types import Sampler, TokenIds


def test_each_name_makes_a_drafter_of_that_name() -> None:
    assert [each.name for each in make_text_drafters(TEXT, None)] == list(TEXT)
    assert [each.name for each in make_text_drafters({"auto"}, None)] == ["suffix"]


class LastTwo(Drafter):
    """Drafts the last two tokens again."""

    name = "last-two"

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        again = tokens[-2:][: request.num_tokens]
        return Tree(again, (0,) * len(again), source=self.name)


def test_a_drafter_is_known_by_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXT, LastTwo.name, f"{__name__}:LastTwo")
    names = parse("last-two+suffix").simple
    assert names == {"last-two", "suffix"}
    drafter = make_text_drafters(names, None)[-1]
    draft = drafter.draft(np.array([1, 2, 3], np.int32), DraftRequest(8), GumbelSampler(SamplingParams()))
    assert draft.tokens.tolist() == [2, 3]
