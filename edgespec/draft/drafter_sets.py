"""Sets of drafters, from all that a user named to plain decoding, with the memory of each.

Also the thread that loads drafter models while answers are made, and gives up those that are unwanted. Knows
neither how much memory is free nor who drafts.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from edgespec.config.drafter_names import FRUGAL
from edgespec.decoding.decoder import Decoder
from edgespec.draft.drafter import Drafter
from edgespec.draft.lanes import Lane
from edgespec.draft.memory_watch import Tier
from edgespec.memory.estimate import sum_bytes
from edgespec.memory.free_memory import HOST, Bytes, return_freed
from edgespec.system.cancel import Cancel
from edgespec.types import Report


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
    """Draft models, the names of drafters that draft from the text, and the memory that all of these take."""

    models: tuple[Candidate, ...]
    texts: frozenset[str]
    tier: Tier

    @property
    def name(self) -> str:
        return "+".join([*sorted(self.texts), *(model.name for model in self.models)]) or "plain decoding"


PLAIN = DrafterSet((), frozenset(), Tier({}))


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
        sets += [((), each) for each in (without_models, smaller, FRUGAL) if each]
    sets.append(((), frozenset()))
    found = []
    for models, names in dict.fromkeys(sets):
        needed = sum_bytes([{HOST: texts_bytes(names)}, *(model.needed for model in models)])
        found.append(DrafterSet(models, names, Tier(needed, has_models=bool(models))))
    return found


class Load(NamedTuple):
    """A candidate that is being loaded, and the messages that loading it reports."""

    candidate: Candidate
    cancel: Cancel
    lines: list[str]
    future: Future[OpenModel]


@dataclass(slots=True)
class BackgroundLoader:
    """Loads one candidate after another in a thread of its own. Only one thread at a time may use it.

    executor: A thread that starts with the first candidate and ends with close.
    """

    executor: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "edgespec loading"))
    _load: Load | None = field(init=False, default=None)

    @property
    def candidate(self) -> Candidate | None:
        """The candidate that is being loaded, or is loaded and not taken yet."""
        return self._load.candidate if self._load else None

    def begin(self, candidate: Candidate) -> None:
        assert self._load is None
        cancel, lines = Cancel(), list[str]()
        future = self.executor.submit(candidate.open, cancel, lines.append)
        self._load = Load(candidate, cancel, lines, future)

    def take(self) -> Load | None:
        """The load that is done, once; None while the candidate is being loaded, or if it was given up."""
        if self._load is None or not self._load.future.done():
            return None
        if self._load.cancel.is_set:
            self.end()
            return None
        done, self._load = self._load, None
        return done

    def give_up(self) -> None:
        """Cancel the load without waiting; the next can begin once take has noticed its end."""
        if self._load:
            self._load.cancel.set()

    def end(self) -> bool:
        """Cancel the load and wait until its memory is free. Returns whether anything was loading."""
        if self._load is None:
            return False
        self._load.cancel.set()
        if self._load.future.exception() is None:
            self._load.future.result().lane.stop()
        self._load = None
        return_freed()
        return True

    def close(self) -> None:
        """Cancel the load and end the thread."""
        self.end()
        self.executor.shutdown()
