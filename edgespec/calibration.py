"""The text that an export shows to a model to see which values its activations take."""

from collections.abc import Iterable

import numpy as np

from edgespec.prompt_encoder import PromptEncoder
from edgespec.types import TokenIds

# Values do not come to more with a longer past; the first position of a text has the largest of all.
_LENGTH = 256
_MOST_TOKENS = 4096


def calibration_texts(prompts: Iterable[str], encoder: PromptEncoder) -> list[TokenIds]:
    """Prompts as the model is asked them, one behind the other, cut into texts of up to 256 tokens.

    Raises:
        ModelError: The chat template does not render them.
    """
    asked: list[TokenIds] = []
    for prompt in prompts:
        asked.append(encoder.encode(prompt))
        if sum(map(len, asked)) >= _MOST_TOKENS:
            break
    tokens = np.concatenate(asked)[:_MOST_TOKENS]
    length = min(_LENGTH, encoder.context_length)
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]
