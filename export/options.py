"""The options of an export: precision, form and length, and the layers and tokens that a drafter keeps."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from edgespec.errors import UsageError
from edgespec.export.precision import BLOCK_SIZES, FORMS, PRECISIONS
from edgespec.system.text_files import read_text
from edgespec.types import TokenIds

_LEAST_CONTEXT = 64
_LARGEST_CORPUS = 1 << 30  # bytes
_RANGE = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Trimming:
    """The drafter to make beside a model, or of it: the layers and the tokens that it keeps.

    keep, skip: The layers to keep in, or leave out of, a second graph over the model's weights file; with neither
        there is no second graph.
    num_tokens: The size of a trimmed head, of the most frequent tokens in corpus. It belongs to the second graph
        or, without one, to the model itself.
    """

    keep: frozenset[int] | None = None
    skip: frozenset[int] | None = None
    num_tokens: int | None = None
    corpus: Path | None = None

    def require_valid(self) -> None:
        """Raises UsageError: Only one of num_tokens and corpus is given, or the corpus cannot be read."""
        if (self.num_tokens is None) != (self.corpus is None):
            raise UsageError(
                "a trimmed head takes --vocab-subset, the number of tokens, and --vocab-corpus, a text to count "
                "them in; give both"
            )
        if self.num_tokens is not None and self.num_tokens < 1:
            raise UsageError(f"the head would keep {self.num_tokens} tokens; wanted at least one")
        if self.corpus is None:
            return
        try:
            is_file = self.corpus.is_file() and os.access(self.corpus, os.R_OK)
        except (OSError, ValueError):  # a name too long, a NUL
            is_file = False
        if not is_file:
            raise UsageError(
                f"{self.corpus} is not a regular file that can be read; give a text file with --vocab-corpus"
            )

    def layers(self, num_layers: int) -> tuple[int, ...] | None:
        """The layers of the model that the drafter keeps; None without keep and skip.

        Raises UsageError: All layers would be kept, or none, or the model has no such layer.
        """
        named = self.skip if self.keep is None else self.keep
        if named is None:
            return None
        require_layers(named, num_layers)
        layers = frozenset(range(num_layers)) - named if self.keep is None else named
        if not layers or len(layers) == num_layers:
            raise UsageError(
                f"the layers {sorted(named)} leave the drafter {len(layers)} of a model that has 0 to "
                f"{num_layers - 1}; keep at least one and leave one out"
            )
        return tuple(sorted(layers))


def require_context(length: int | None) -> None:
    """Raises UsageError: A longest text is so short that it holds no conversation, or is no number of tokens."""
    if length is not None and not (type(length) is int and length >= _LEAST_CONTEXT):
        raise UsageError(
            f"--context-length is {length!r}, wanted {_LEAST_CONTEXT} or more tokens: a prompt in a chat template "
            "takes some 30 alone"
        )


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The wishes for the folder of a model.

    precision: One of PRECISIONS; auto picks one and says why.
    form: The kind of device to lay the graphs out for, one of FORMS.
    block_size: The number of rounded weights that share a scale, one of BLOCK_SIZES.
    hidden_layers: Layers whose hidden states the graph outputs too.
    context_length: The longest text in tokens; the model's own length unless given, and with longrope that of
        its first training.
    adapter: A LoRA adapter to merge: a folder of PEFT, or a GGUF file.
    """

    precision: str = "source"
    form: str = "cpu"
    block_size: int = BLOCK_SIZES[0]
    trimming: Trimming = Trimming()
    hidden_layers: tuple[int, ...] = ()
    context_length: int | None = None
    adapter: Path | None = None

    def resolved(self) -> "ExportOptions":
        """These options with the precision that is written, where the form has one of its own.

        Raises UsageError: A value is unknown, or the form does not support the precision or the options.
        """
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise UsageError(f"block size is {self.block_size}; choose one of {sizes}")
        if self.precision not in PRECISIONS:
            raise UsageError(f"unknown precision '{self.precision}'; choose one of {', '.join(PRECISIONS)}")
        self.trimming.require_valid()
        require_context(self.context_length)
        if self.form not in FORMS:
            raise UsageError(f"unknown form '{self.form}'; choose one of {', '.join(FORMS)}")
        if self.form != "npu":
            if self.precision == "w8a16":
                raise UsageError(
                    "w8a16 is a precision of the npu form; name an NPU (--device npu, or --drafter-device npu for "
                    "a drafter), or choose --precision int8"
                )
            return self
        if self.trimming != Trimming() or self.hidden_layers:
            raise UsageError("the npu form has no drafters and no hidden states; leave these options out")
        if self.precision not in ("auto", "source", "fp16", "fp32", "w8a16"):
            raise UsageError(
                f"the npu form supports fp16, fp32 or w8a16, not {self.precision}; choose one of these"
            )
        return self if self.precision in ("fp32", "w8a16") else replace(self, precision="fp16")


def require_layers(layers: Iterable[int], num_layers: int) -> None:
    """Raises UsageError: The model has no such layer."""
    if (last := max(layers, default=0)) >= num_layers:
        raise UsageError(f"there is no layer {last} in a model that has 0 to {num_layers - 1}; choose among these")


def parse_layers(text: str, what: str) -> frozenset[int]:
    """Parse numbers and ranges: `0-5,9` is {0, 1, 2, 3, 4, 5, 9}. Raises UsageError: It is another text."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f"{what} is '{text}'; wanted numbers and ranges of layers, as in 0-5,9")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def require_head_size(num_tokens: int, always: Sequence[int], size: int) -> None:
    """Raises UsageError: There is no room beside the tokens that are always kept, or keeps all."""
    if not len(set(always)) < num_tokens < size:
        raise UsageError(
            f"the head would keep {num_tokens} tokens; wanted {len(set(always)) + 1} to {size - 1} "
            "with --vocab-subset"
        )


def frequent_tokens(tokenizer: str, trimming: Trimming, always: Sequence[int], size: int) -> TokenIds:
    """The most frequent tokens of a corpus and those that are always kept, in ascending order, [num_tokens].

    tokenizer: The content of a tokenizer.json.

    Frequency-ranked drafting (Zhao et al., FR-Spec, arXiv:2502.14856). Tokens that the text lacks are ranked by
    id, since byte-pair vocabularies number frequent pieces first. Raises UsageError as require_head_size does.
    """
    assert trimming.num_tokens is not None
    assert trimming.corpus is not None
    require_head_size(trimming.num_tokens, always, size)
    try:
        text = read_text(trimming.corpus, _LARGEST_CORPUS)
    except ValueError as error:
        raise UsageError(f"{trimming.corpus} is not the text of a corpus: {error}") from None
    ids = Tokenizer.from_str(tokenizer).encode(text, add_special_tokens=False).ids
    counts = np.bincount(np.asarray(ids, np.int64), minlength=size)
    counts[list(always)] = len(ids) + 1
    ranked = np.argsort(-counts, kind="stable")
    return np.sort(ranked[: trimming.num_tokens]).astype(np.int32)
