"""How a model that was trained for embeddings makes one vector of the states of a text's tokens."""

from dataclasses import dataclass

from edgespec.bounds import Index

KINDS = ("last", "mean")


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """The last token's state, or the mean of all tokens' states, behind the model's final norm.

    kind: One of KINDS.
    last_tokens: Special tokens that are put behind a text.
    """

    kind: str
    last_tokens: tuple[Index, ...] = ()
