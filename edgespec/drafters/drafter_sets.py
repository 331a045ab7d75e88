"""Sets of drafters, from all that a user named to plain decoding, with the memory of each. Loads nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.decoders import Decoder
from edgespec.drafters.lanes import Lane
from edgespec.memory.estimate import sum_bytes
from edgespec.memory.free_memory import HOST
from edgespec.memory.ladder import Bytes, Tier
from edgespec.system.cancel import Cancel
from edgespec.types import Drafter, Report


class OpenModel(NamedTuple):
    """A loaded drafter model: its drafter, its decoder, and the lane in which it works."""

    drafter: Drafter
    decoder: Decoder
    lane: Lane


@dataclass(frozen=True, eq=False)
class Candidate:
    """A drafter model that can be loaded, together with the models that draft for it."""

    name: str
    needed: Bytes
    open: Callable[[Cancel, Report], OpenModel]  # loads it; ends soon once its cancel is set


class DrafterSet(NamedTuple):
    """Draft models, and the names of drafters that draft from the text."""

    models: tuple[Candidate, ...]
    texts: frozenset[str]
    texts_bytes: int

    @property
    def name(self) -> str:
        return "+".join([*sorted(self.texts), *(model.name for model in self.models)]) or "plain decoding"

    @property
    def tier(self) -> Tier:
        needed = sum_bytes([{HOST: self.texts_bytes}, *(model.needed for model in self.models)])
        return Tier(self.name, needed, has_models=bool(self.models))


def drafter_sets(
    chains: Sequence[Sequence[Candidate]],
    texts: frozenset[str],
    fallback: frozenset[str],
    texts_bytes: Callable[[frozenset[str]], int],
) -> list[DrafterSet]:
    """Sets from all that was asked for to plain decoding, each smaller than the one before.

    Args:
        chains: The candidates of each chain, from the largest to the smallest.
        texts: Names of the drafters from the text that were asked for.
        fallback: Names of more such drafters for when no model drafts.
        texts_bytes: Bytes that such drafters take, by their names.
    """
    sets: list[tuple[tuple[Candidate, ...], frozenset[str]]] = []
    left = [list(chain) for chain in chains]
    while left:
        sets.append((tuple(chain[0] for chain in left), texts))
        del max(left, key=lambda chain: sum(chain[0].needed.values()))[0]
        left = [chain for chain in left if chain]
    if chains or texts:
        without_models = texts | fallback if chains else texts
        smaller = without_models - {"lookahead"}
        sets += [((), each) for each in (without_models, smaller, frozenset({"ngram"})) if each]
    sets.append(((), frozenset()))
    return [DrafterSet(*each, texts_bytes(each[1])) for each in dict.fromkeys(sets)]
