"""The embedding and the vocabulary head of a head: its own, or those of its target."""

from dataclasses import replace

from edgespec.errors import SourceError
from edgespec.export.families import DecoderConfig
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.roles import Reader, read_tokens, require_shapes, require_vocabulary, sort_rows
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.types import TokenIds


def read_embedding(
    source: HeadSource, reader: Reader, target: LoadedSource, hidden_size: int
) -> tuple[StoredTensor, tuple[str, ...]]:
    """The head's own embedding, or its target's; what was borrowed."""
    if (own := reader.optional("embed_tokens.weight")) is not None:
        require_vocabulary(source, target, own.rows)
        require_shapes(source, {"embedding": own}, {"embedding": (own.rows, hidden_size)})
        return own, ()
    return _of_target(source, "embedding", target.tensors["embedding"], hidden_size), ("embedding",)


def read_vocabulary_head(
    source: HeadSource, reader: Reader, target: LoadedSource, hidden_size: int
) -> tuple[StoredTensor | None, TokenIds | None]:
    """The head's own vocabulary head and the token of each of its rows, ascending; None where all have one.

    Raises SourceError: Tokens or rows are missing. A trimmed vocabulary head that is not in the file cannot be
        made up: it would draft at random (sglang pull request 27908).
    """
    size, own = target.config.vocab_size, reader.optional("lm_head.weight")
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
    require_shapes(source, {"head": own}, {"head": (own.rows, hidden_size)})
    if tokens is None:
        return own, None
    own, tokens = sort_rows(own, tokens)
    return own, None if own.rows == size else tokens


def borrow_vocabulary_head(source: HeadSource, target: LoadedSource, hidden_size: int) -> StoredTensor:
    return _of_target(source, "vocabulary head", target.head, hidden_size)


def _of_target(source: HeadSource, what: str, tensor: StoredTensor, hidden_size: int) -> StoredTensor:
    if tensor.columns != hidden_size:
        raise SourceError(
            f"{source.path} has no {what}, and that of the target is for states of {tensor.columns} numbers, the "
            f"head's have {hidden_size}; choose another head"
        )
    return tensor


def with_logits_of(target: LoadedSource, config: DecoderConfig) -> DecoderConfig:
    """With the scale and the cap that the target puts on the logits of its vocabulary head."""
    return replace(config, logit_scale=target.config.logit_scale, logit_cap=target.config.logit_cap)
