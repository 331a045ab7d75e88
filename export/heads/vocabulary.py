"""The embedding and the vocabulary head of a head: its own, or those of its target."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edgespec.errors import SourceError, VocabularyMismatch
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.head_tensors import Reader
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import Index, StoredTensor
from edgespec.types import TokenIds

# Rows by which a vocabulary may be padded; two that differ by more are different ones.
_MAX_PADDING = 1024
_HEAD = "vocabulary head"


class HeadVocabulary(NamedTuple):
    """The embedding and the vocabulary head of a drafting head.

    tokens: The target's token of each row of the vocabulary head, ascending; None where each token has a row.
    borrowed: Which of both are the target's, for messages.
    """

    embedding: StoredTensor
    head: StoredTensor
    tokens: TokenIds | None
    borrowed: tuple[str, ...]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Both by role; where they are one matrix, as the target's may be, only the embedding."""
        shared = {"embedding": self.embedding}
        return shared if self.head is self.embedding else {**shared, "head": self.head}

    @property
    def has_own_head(self) -> bool:
        return _HEAD not in self.borrowed

    @property
    def own_order(self) -> Index | None:
        """The order in which the stored rows of matrices are read that have one for each row of its own head."""
        return self.head.row_order if self.has_own_head else None


def read_vocabulary(
    reader: Reader, target: LoadedSource, settings: SourceSettings, hidden_size: int
) -> HeadVocabulary:
    """Embedding and vocabulary head of a head, of which those that it lacks are its target's.

    settings: Those that state the number of tokens.

    Raises:
        SourceError: Tokens or rows are missing, or the target's are for states of another size.
        VocabularyMismatch: The head was made for another vocabulary.
    """
    source, stated = reader.source, settings.get("vocab_size")
    require_vocabulary(source, target, None if stated is None else settings.count("vocab_size"))
    embedding, borrowed = _read_embedding(reader, target, hidden_size)
    head, tokens = _read_vocabulary_head(reader, target, hidden_size)
    if head is None:
        head, borrowed = _of_target(source, _HEAD, target.head, hidden_size), (*borrowed, _HEAD)
    return HeadVocabulary(embedding, head, tokens, borrowed)


def _read_embedding(
    reader: Reader, target: LoadedSource, hidden_size: int
) -> tuple[StoredTensor, tuple[str, ...]]:
    """The head's own embedding, or its target's; what was borrowed."""
    if (own := reader.optional("embed_tokens.weight")) is not None:
        require_vocabulary(reader.source, target, own.rows)
        return reader.take("embed_tokens.weight", columns=hidden_size), ()
    return _of_target(reader.source, "embedding", target.tensors["embedding"], hidden_size), ("embedding",)


def _read_vocabulary_head(
    reader: Reader, target: LoadedSource, hidden_size: int
) -> tuple[StoredTensor | None, TokenIds | None]:
    """The head's own vocabulary head and the token of each of its rows, ascending; None where all have one.

    Raises SourceError: Tokens or rows are missing. A trimmed vocabulary head that is not in the file cannot be
        made up: it would draft at random (sglang pull request 27908).
    """
    source, size, own = reader.source, target.config.vocab_size, reader.optional("lm_head.weight")
    if own is None:
        stated = source.settings.get("draft_vocab_size")
        if stated is not None and stated != size:
            raise SourceError(
                f"{source.path} has no tensor lm_head.weight, though its draft_vocab_size is {stated}: its "
                f"vocabulary head is missing, and the target's has {size} rows; fetch it again or choose another"
            )
        return None, None
    tokens = read_tokens(source, own.rows, size)
    if tokens is None and own.rows != size:
        raise SourceError(
            f"{source.path}: its vocabulary head has {own.rows} rows, the target has {size} tokens, and there is "
            "neither d2t nor t2d to say which token each row is of; fetch it again or choose another head"
        )
    own = reader.take("lm_head.weight", columns=hidden_size)
    if tokens is None:
        return own, None
    order = np.argsort(tokens)
    if not np.array_equal(order, np.arange(len(order))):
        own, tokens = replace(own, row_order=order.astype(np.intp)), tokens[order]
    return own, None if own.rows == size else tokens


def _of_target(source: HeadSource, what: str, tensor: StoredTensor, hidden_size: int) -> StoredTensor:
    if tensor.columns != hidden_size:
        raise SourceError(
            f"{source.path} has no {what}, and that of the target is for states of {tensor.columns} numbers, the "
            f"head's have {hidden_size}; choose another head"
        )
    return tensor


def read_markov(
    reader: Reader, config: DecoderConfig, vocabulary: HeadVocabulary, *, is_needed: object = False
) -> dict[str, StoredTensor]:
    """The matrices of low rank that bias logits by the token before (DSpark); empty where the head has none."""
    name = "markov_head.{}.weight".format
    embedding = reader.optional(name("markov_w1"), config.vocab_size, is_needed=is_needed)
    if embedding is None:
        return {}
    head = reader.take(name("markov_w2"), vocabulary.head.rows, embedding.columns)
    return {"markov_embedding": embedding, "markov_head": replace(head, row_order=vocabulary.own_order)}


def with_logits_of(target: LoadedSource, config: DecoderConfig) -> DecoderConfig:
    """The layers, with the scale and the cap that the target puts on the logits of its vocabulary head."""
    return replace(config, logit_scale=target.config.logit_scale, logit_cap=target.config.logit_cap)


def require_vocabulary(source: HeadSource, target: LoadedSource, size: int | None, padding: int = 0) -> None:
    """Raises VocabularyMismatch: A head is for another number of tokens than its target has, beside padding."""
    if size is not None and abs(size - target.config.vocab_size) > padding:
        raise VocabularyMismatch(
            f"{source.path} is a head for a vocabulary of {size} tokens, and {target.source.name} has "
            f"{target.config.vocab_size}; it was made for another model: name a head that was made for this one"
        )


def read_tokens(source: HeadSource, num_rows: int, vocab_size: int) -> TokenIds | None:
    """The target's token of each row of the vocabulary head in the order of the rows, [num_rows].

    d2t is added to the number of a row; t2d marks the tokens that have a row. None without either.

    Raises SourceError: They contradict each other, or a token stands twice or is not in the vocabulary.
    """
    d2t, t2d = source.integers.get("d2t"), source.integers.get("t2d")
    if d2t is None and t2d is None:
        return None
    if t2d is not None:
        if t2d.count != vocab_size:
            raise VocabularyMismatch(
                f"{source.path}: t2d has {t2d.count} entries, and the target {vocab_size} tokens; the head was "
                "made for another model"
            )
        marked = np.flatnonzero(t2d.values())
    tokens = marked if d2t is None else d2t.values() + np.arange(d2t.count)
    problem = None
    if len(tokens) != num_rows:
        problem = f"name {len(tokens)} tokens, and its vocabulary head has {num_rows} rows"
    elif tokens.min() < 0 or tokens.max() >= vocab_size:
        problem = f"name tokens up to {tokens.max()}, and the target has {vocab_size}"
    elif len(np.unique(tokens)) != num_rows:
        problem = "name a token twice"
    elif t2d is not None and not np.array_equal(np.sort(tokens), marked):
        problem = "contradict each other"
    if problem is not None:
        raise SourceError(f"{source.path}: its lists of tokens (d2t, t2d) {problem}; the file is damaged")
    return tokens.astype(np.int32)


def fit_vocabulary(source: HeadSource, heads: list[StoredTensor], target: LoadedSource) -> TokenIds | None:
    """Cut vocabulary heads, in place, to the target's tokens; returns the tokens of their rows if they have fewer.

    Raises:
        VocabularyMismatch: They have more or fewer rows than padding explains.
        SourceError: They have different numbers of rows.
    """
    require_same_rows(source, heads)
    rows, wanted = heads[0].rows, target.config.vocab_size
    require_vocabulary(source, target, rows, _MAX_PADDING)
    if rows > wanted:
        heads[:] = [head.part(0, wanted) for head in heads]
    return np.arange(rows, dtype=np.int32) if rows < wanted else None


def require_same_rows(source: HeadSource, heads: list[StoredTensor]) -> None:
    """Raises SourceError: Vocabulary heads of one drafting head have different numbers of rows."""
    other = next((head for head in heads if head.rows != heads[0].rows), None)
    if other is not None:
        raise SourceError(
            f"{source.path}: vocabulary head {heads[0].name} has {heads[0].rows} rows and {other.name} has "
            f"{other.rows}; the file is damaged, fetch it again"
        )


def last_known_token(source: HeadSource, embedding: StoredTensor, target: LoadedSource) -> int | None:
    """The last token that has a row in a head's embedding, where the target has more tokens; else None.

    Raises VocabularyMismatch: It has more or fewer rows than padding explains.
    """
    require_vocabulary(source, target, embedding.rows, _MAX_PADDING)
    return embedding.rows - 1 if embedding.rows < target.config.vocab_size else None
