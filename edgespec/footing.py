"""Ways to draft, from all that a user named to plain decoding, and what each takes of memory. Opens nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.budget import total
from edgespec.cancel import Cancel
from edgespec.headroom import HOST
from edgespec.ladder import Bytes, Rung
from edgespec.lanes import Lane
from edgespec.types import Decoder, Drafter

Report = Callable[[str], None]


class OpenModel(NamedTuple):
    """A model drafter that is open, its decoder, and the lane in which it works."""

    drafter: Drafter
    decoder: Decoder
    lane: Lane


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model drafter that can be opened, with those that draft for it; a cancel that is set ends that soon."""

    name: str
    needed: Bytes
    open: Callable[[Cancel, Report], OpenModel]


class Footing(NamedTuple):
    """A way to draft: models, and the names of what drafts from the text."""

    models: tuple[Candidate, ...]
    texts: frozenset[str]
    texts_bytes: int

    @property
    def name(self) -> str:
        return "+".join([*sorted(self.texts), *(model.name for model in self.models)]) or "plain decoding"

    @property
    def rung(self) -> Rung:
        return Rung(self.name, total([{HOST: self.texts_bytes}, *(model.needed for model in self.models)]))


def footings(
    chains: Sequence[Sequence[Candidate]],
    texts: frozenset[str],
    fallback: frozenset[str],
    texts_bytes: Callable[[frozenset[str]], int],
) -> list[Footing]:
    """From all that was asked for to plain decoding.

    Args:
        chains: Of each chain its candidates, in whose place the next one is smaller.
        texts: What is asked to draft from the text.
        fallback: What drafts from it as well when no model does.
        texts_bytes: What drafting from the text takes, by names.
    """
    ways: list[tuple[tuple[Candidate, ...], frozenset[str]]] = []
    left = [list(chain) for chain in chains]
    while left:
        ways.append((tuple(chain[0] for chain in left), texts))
        del max(left, key=lambda chain: sum(chain[0].needed.values()))[0]
        left = [chain for chain in left if chain]
    if chains or texts:
        ways += [((), texts | fallback if chains else texts), ((), frozenset({"ngram"}))]
    ways.append(((), frozenset()))
    return [Footing(*way, texts_bytes(way[1])) for way in dict.fromkeys(ways)]
