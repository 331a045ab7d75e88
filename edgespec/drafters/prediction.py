"""The drafter of a text that the answer is expected to repeat in part, such as a file that is to be edited."""

import numpy as np

from edgespec.drafters.answer_cache import NUM_PROMPT_TOKENS, AnswerIndex
from edgespec.drafters.suffix import draft_of
from edgespec.types import Drafter, DraftRequest, Sampler, TokenIds, Tree


class PredictionDrafter(Drafter):
    """Drafts what follows, in a predicted text, the longest end of the answer that occurs there.

    The predicted text lies after the end of the prompt, so that the first pass can draft its beginning already.
    `[1, 2]` before the prediction `[3, 4, 5]` drafts `[3, 4, 5]`; after `[1, 2, 9, 4]` it drafts `[5]`.
    """

    name = "prediction"

    def __init__(self, prompt: TokenIds, predicted: TokenIds) -> None:
        self._index = AnswerIndex(np.concatenate([prompt[-NUM_PROMPT_TOKENS:], predicted]))

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        return draft_of(self._index.guesses(tokens, request.num_tokens), self.name)
