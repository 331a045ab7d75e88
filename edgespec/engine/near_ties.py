"""How near two tokens have to be for --exact to decide between them in passes of one token: measured once.

That is how much the cut of a text into passes changes the lead of a likeliest token on a device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Decoder, empty_cache
from edgespec.errors import EdgeSpecError
from edgespec.setup.open_model import known_stats
from edgespec.setup.profile import write_learned_stats
from edgespec.setup.setup import Setup
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.types import TokenIds, append

# Times the largest change that was measured, on some hundred places of a few texts; an answer has more of them.
_SAFETY = 1.5
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Translate into French: The library closes at six, but the reading room stays open until nine.",
    "List ten animals, one on each line, and say of each where it lives.",
)


def find_near_tie(setup: Setup, decoder: Decoder, encoder: PromptEncoder) -> float:
    """The lead below which other passes may choose another token, for --exact.

    It is measured once and saved in the target's folder.
    """
    target, placement, report = setup.memory.target, setup.placement, setup.wish.report
    known = setup.known.width_changes.get(placement.machine)
    if known is None:
        report(f"measuring how much logits depend on the width of passes: {target.manifest.name}")
        known = measure_width_change(decoder, _texts(encoder, decoder.context_length))
        if target.manifest.is_ours:
            stats = known_stats(target)
            changes = {**stats.width_changes, placement.machine: known}
            write_learned_stats(target.folder, replace(stats, width_changes=changes), report)
    return _SAFETY * known


def _texts(encoder: PromptEncoder, context_length: int) -> list[TokenIds]:
    """Prompts that leave most of the context to their answers."""
    texts = []
    for prompt in _PROMPTS:
        try:
            tokens = encoder.encode(prompt)
        except EdgeSpecError:  # the template of a tiny context
            continue
        texts.append(tokens[: max(1, context_length // 2)])
    return texts


_WIDTHS = (2, 3, 5, 8)
_NUM_TOKENS = 40  # of an answer to each prompt
_Distances = npt.NDArray[np.float64]


def measure_width_change(decoder: Decoder, prompts: Sequence[TokenIds]) -> float:
    """The largest change of the distance between the two likeliest tokens, over greedy answers to prompts.

    An answer of passes of one token is read again in passes of each width, keys and values included.
    """
    largest = 0.0
    for prompt in prompts:
        num_tokens = min(_NUM_TOKENS, decoder.context_length - len(prompt))
        text, pairs, distances = _answer(decoder, prompt, num_tokens)
        for width in _WIDTHS:
            wide = np.array(list(_read(decoder, text, len(prompt), pairs, width)))
            largest = max(largest, float(np.abs(wide - distances[1 : 1 + len(wide)]).max(initial=0.0)))
    return largest


def _answer(
    decoder: Decoder, prompt: TokenIds, num_tokens: int
) -> tuple[TokenIds, npt.NDArray[np.intp], _Distances]:
    """The text, and of each row after the prompt its two likeliest tokens and their distance."""
    empty_cache(decoder, prompt)
    text, pairs, distances = prompt, [], []
    for _ in range(num_tokens):
        row = decoder.logits(text, 1)[0]
        pair = np.argpartition(-row, 1)[:2]
        pair = pair[np.argsort(-row[pair], kind="stable")]
        pairs.append(pair)
        distances.append(float(row[pair[0]]) - float(row[pair[1]]))
        text = append(text, [int(pair[0])])
    return text, np.array(pairs), np.array(distances)


def _read(
    decoder: Decoder, text: TokenIds, num_prompt: int, pairs: npt.NDArray[np.intp], width: int
) -> Iterator[float]:
    """Distances of the pairs after each token of the answer, read in passes of a width."""
    empty_cache(decoder, text)
    decoder.logits(text[:num_prompt], 1)
    for start in range(num_prompt, len(text) - width, width):
        rows = decoder.logits(text[: start + width], width)
        for row, (one, other) in zip(rows, pairs[start - num_prompt + 1 :], strict=False):
            yield float(row[one]) - float(row[other])
