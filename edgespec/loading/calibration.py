"""The texts that an export runs through a model to measure the range of its activations."""

from collections.abc import Iterable

import numpy as np

from edgespec.tokenization.prompt_encoder import PromptEncoder
from edgespec.types import TokenIds

# Values do not come to more with a longer past; the first position of a text has the largest of all.
_LENGTH = 256
_MOST_TOKENS = 4096


def calibration_texts(prompts: Iterable[str], encoder: PromptEncoder) -> list[TokenIds]:
    """Encode prompts in the chat template, one after the other, cut into texts of up to 256 tokens.

    Raises ConversationError or ModelError: The chat template refuses them, or cannot be rendered.
    """
    encoded: list[TokenIds] = []
    for prompt in prompts:
        encoded.append(encoder.encode(prompt))
        if sum(map(len, encoded)) >= _MOST_TOKENS:
            break
    tokens = np.concatenate(encoded)[:_MOST_TOKENS]
    length = min(_LENGTH, encoder.context_length)
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]
