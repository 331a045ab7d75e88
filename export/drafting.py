"""Drafters out of a target: which of its layers are kept, and which tokens a smaller head knows."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgespec.errors import UsageError
from edgespec.types import TokenIds

_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What to make for drafting beside the model, or of it.

    keep, skip: Layers of a graph of its own over the model's weights file, or those left out of it; with neither
        there is no such graph.
    num_tokens: Trim the drafting head to as many tokens of the vocabulary, those that corpus has most; without
        such a graph it is the model's own head that is trimmed.
    """

    keep: frozenset[int] | None = None
    skip: frozenset[int] | None = None
    num_tokens: int | None = None
    corpus: Path | None = None

    def expect_sound(self) -> None:
        """Raises UsageError: a number without its text, a text without its number, or one that cannot be read."""
        if (self.num_tokens is None) != (self.corpus is None):
            raise UsageError(
                "a trimmed head takes --vocab-subset, how many tokens, and --vocab-corpus, a text that shows "
                "which; give both"
            )
        if self.num_tokens is not None and self.num_tokens < 1:
            raise UsageError(f"the head would keep {self.num_tokens} tokens; wanted one at least")
        if self.corpus is None:
            return
        try:
            is_file = self.corpus.is_file() and os.access(self.corpus, os.R_OK)
        except (OSError, ValueError):  # a name too long, a NUL
            is_file = False
        if not is_file:
            raise UsageError(
                f"{self.corpus} is no regular file that can be read; give a text file with --vocab-corpus"
            )

    def layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Those that the drafter keeps of a model; None where no such drafter was asked for.

        Raises:
            UsageError: No layer is left, none is left out, or the model has no such layer.
        """
        if self.keep is None and self.skip is None:
            return None
        named = self.skip if self.keep is None else self.keep
        assert named is not None
        if max(named) >= num_layers:
            raise UsageError(
                f"there is no layer {max(named)} in a model that has 0 to {num_layers - 1}; choose among these"
            )
        layers = frozenset(range(num_layers)) - named if self.keep is None else named
        if not layers or len(layers) == num_layers:
            raise UsageError(
                f"the layers {sorted(named)} leave the drafter {len(layers)} of a model that has 0 to "
                f"{num_layers - 1}; keep one at least and leave one out"
            )
        return tuple(sorted(layers))


def parse_layers(text: str, what: str) -> frozenset[int]:
    """`0-5,9` is {0, 1, 2, 3, 4, 5, 9}.

    Raises:
        UsageError: text is no such list.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{what} is '{text}'; wanted numbers and ranges of layers, as in 0-5,9")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def expect_few(num_tokens: int, always: Sequence[int], size: int) -> None:
    """Raises UsageError: so many tokens are not more than those that are always kept, or not fewer than all."""
    if not len(set(always)) < num_tokens < size:
        raise UsageError(
            f"the head would keep {num_tokens} tokens; wanted {len(set(always)) + 1} to {size - 1} "
            "with --vocab-subset"
        )


def frequent_tokens(
    tokenizer: Tokenizer, text: str, num_tokens: int, always: Sequence[int], size: int
) -> TokenIds:
    """The tokens that a text has most, and always some, in ascending order, [num_tokens].

    Frequency-ranked drafting (Zhao et al., FR-Spec, arXiv:2502.14856). Those that the text lacks come in order
    of their ids, which byte-pair vocabularies give to frequent pieces first.

    Raises:
        UsageError: num_tokens is less than what always takes, or more than the vocabulary has.
    """
    expect_few(num_tokens, always, size)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    counts = np.bincount(np.asarray(ids, np.int64), minlength=size)
    counts[list(always)] = len(ids) + 1
    ranked = np.argsort(-counts, kind="stable")
    return np.sort(ranked[:num_tokens]).astype(np.int32)
