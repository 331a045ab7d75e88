"""How often drafted tokens are accepted, by their source and by what each guess rests on.

Knows nothing of drafters and costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.decoding.tree import Tree
from edgespec.types import TokenIds

# By source and bucket. Of the suffix automaton: greedy answers of SmolLM2-135M (75) and of Qwen2.5-Coder-1.5B (19)
# to prompts of Spec-Bench and code edits. First answers of SmolLM2 are 3.3 % faster with Qwen's, and Qwen's 0.6 %
# with those of SmolLM2 (docs/log/draft-policy.md).
_SUFFIX = dict(
    enumerate(
        (0.16, 0.26, 0.6, 0.35, 0.5, 0.8, 0.35, 0.65, 0.82, 0.25, 0.78, 0.9, 0.38, 0.83, 0.95, 0.9, 0.95, 0.97)
    )
)
# A prediction has the same buckets, and its user expects the answer to follow it. What a grammar forces comes
# true, but for the way in which a few texts are cut into tokens.
STARTING_RATES: Mapping[str, Mapping[int, float]] = {
    "suffix": _SUFFIX,
    "prediction": _SUFFIX,
    "grammar": {0: 0.98},
}
STARTING_WEIGHT = 12.0  # tokens that such a rate counts as


Key = tuple[str, int]  # source and bucket

_DECAY = 0.98  # weight that an answer's past keeps at each token that is judged
_LONG_DECAY = 0.998
_PRIOR_WEIGHT = 12.0  # how many tokens of this answer the earlier ones count as
# A source of which nothing is known: as if one token of three had been accepted. A new bucket starts from the mean
# of its source.
_UNKNOWN_RATE, _UNKNOWN_WEIGHT = 1 / 3, 3.0
_ALL = -1  # the bucket of a whole source
_MAX_POSITION = 15
# A change of acceptance is notable from this much and this many standard deviations on, if this many tokens were
# judged before.
_MIN_CHANGE, _MIN_DEVIATIONS, _MIN_BEFORE = 0.1, 3.0, 50.0


@dataclass(frozen=True, slots=True)
class AcceptanceChange:
    """How often a source's next token was right, verified or not, in an answer and in the answers before it.

    now: In the last 50 tokens or so of the answer that could be judged.
    before: None where too few were judged.
    num_judged: Tokens that now rests on.
    """

    now: float
    before: float | None
    num_judged: float

    @property
    def is_notable(self) -> bool:
        """True if the difference is larger than chance explains."""
        if self.before is None or abs(self.now - self.before) < _MIN_CHANGE:
            return False
        # Tokens that follow each other are alike, so they count for half.
        deviation = (2 * max(self.before * (1 - self.before), 0.05) / self.num_judged) ** 0.5
        return bool(abs(self.now - self.before) > _MIN_DEVIATIONS * deviation)


@dataclass(slots=True)
class _Count:
    accepted: float
    judged: float

    @property
    def rate(self) -> float:
        return self.accepted / self.judged

    def add(self, is_accepted: bool, decay: float) -> None:
        self.accepted = decay * self.accepted + is_accepted
        self.judged = decay * self.judged + 1


def runs_of(name: str) -> str:
    """The name under which whole rounds of a drafter's trees are counted, by the highest bucket of their nodes."""
    return f"{name}, run"


@dataclass(slots=True)
class AcceptanceRates:
    """Running shares of accepted tokens: counts of this answer, with all earlier ones as their prior.

    A token after one that was not accepted was not judged and says nothing.

    past: Tokens accepted and judged in earlier answers, by key.
    """

    past: dict[Key, tuple[float, float]] = field(default_factory=dict)
    _assumed: dict[Key, tuple[float, float]] = field(default_factory=dict)
    _long: dict[Key, _Count] = field(default_factory=dict)
    _recent: dict[Key, _Count] = field(default_factory=dict)
    _found: dict[str, dict[int, float]] = field(default_factory=dict)  # rates that no token has changed since
    _derived: dict[str, list[int]] = field(
        default_factory=dict
    )  # those of them that any token of the source changes

    def rate(self, source: str, bucket: int) -> float:
        """The chance that a token is accepted if all before it in its draft were."""
        found = self._found.get(source)
        return found[bucket] if found and bucket in found else self._find(source, bucket)

    def rates(self, source: str, buckets: Sequence[int]) -> list[float]:
        found = self._found.setdefault(source, {})
        return [found[bucket] if bucket in found else self._find(source, bucket) for bucket in buckets]

    def _find(self, source: str, bucket: int) -> float:
        """The rate, computed; looking it up in _found takes a fifth of the time."""
        key = (source, bucket)
        long = self._long.get(key)
        prior, recent = (long or self._initial(key)).rate, self._recent.get(key)
        if recent is not None:
            prior = (recent.accepted + _PRIOR_WEIGHT * prior) / (recent.judged + _PRIOR_WEIGHT)
        self._found.setdefault(source, {})[bucket] = prior
        if not (long or key in self.past or bucket in STARTING_RATES.get(source, ())):
            self._derived.setdefault(source, []).append(bucket)
        return prior

    def spread(self, source: str, bucket: int) -> float:
        """Standard deviation of what the rate may be in this answer."""
        rate, recent = self.rate(source, bucket), self._recent.get((source, bucket))
        known = self._long.get((source, bucket)) or self._initial((source, bucket))
        num_judged = min(_PRIOR_WEIGHT, known.judged) + (recent.judged if recent else 0.0)
        return float((rate * (1 - rate) / (num_judged + 1)) ** 0.5)

    def counts(self, source: str) -> tuple[float, float]:
        """How many tokens of a source were accepted and judged; older ones count less."""
        known = self._long.get((source, _ALL))
        return (known.accepted, known.judged) if known else self.past.get((source, _ALL), (0.0, 0.0))

    def changes(self) -> dict[str, AcceptanceChange]:
        """By source, the share of its guesses that was accepted lately and before this answer."""
        found = {}
        for source in {source for source, _ in self._recent}:
            recent = [count for (name, _), count in self._recent.items() if name == source]
            judged = sum(count.judged for count in recent)
            accepted, all_judged = self.past.get((source, _ALL), (0.0, 0.0))
            before = accepted / all_judged if all_judged >= _MIN_BEFORE else None
            found[source] = AcceptanceChange(sum(count.accepted for count in recent) / judged, before, judged)
        return found

    def judge(self, draft: Tree, emitted: TokenIds) -> None:
        """Count the tokens of a draft, verified or not, up to the first that differs from the target's."""
        if draft.parents is not None:
            for node, is_accepted in draft.judged(emitted):
                self.observe(draft.source, draft.buckets[node], is_accepted)
            return
        for guess, bucket, token in zip(draft.tokens.tolist(), draft.buckets, emitted.tolist(), strict=False):
            self.observe(draft.source, bucket, guess == token)
            if guess != token:
                return

    def observe(self, source: str, bucket: int, is_accepted: bool) -> None:
        key = (source, bucket)
        if found := self._found.get(source):
            for changed in (bucket, _ALL, *self._derived.pop(source, ())):
                found.pop(changed, None)
        for counted in (key, (source, _ALL)):
            long = self._long.get(counted)
            if long is None:
                long = self._long[counted] = self._initial(counted)
            long.add(is_accepted, _LONG_DECAY)
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = _Count(0.0, 0.0)
        recent.add(is_accepted, _DECAY)

    def assume(self, source: str, counts: tuple[float, float], bucket: int = _ALL) -> None:
        """Give a source or bucket that nothing is known of a prior: numbers of tokens accepted and judged."""
        self._assumed.setdefault((source, bucket), counts)
        self._found.pop(source, None)

    def snapshot(self) -> Mapping[Key, tuple[float, float]]:
        """The counts that the next answer starts from: all that was counted, and nothing that was assumed."""
        return self.past | {key: (count.accepted, count.judged) for key, count in self._long.items()}

    def _initial(self, key: Key) -> _Count:
        if known := self.past.get(key) or self._assumed.get(key):
            return _Count(*known)
        if (rate := STARTING_RATES.get(key[0], {}).get(key[1])) is not None:
            return _Count(STARTING_WEIGHT * rate, STARTING_WEIGHT)
        source = (key[0], _ALL)
        counted = self.past.get(source) or self._assumed.get(source)
        unknown = _UNKNOWN_RATE * _UNKNOWN_WEIGHT, _UNKNOWN_WEIGHT
        whole = self._long.get(source) or _Count(*(counted or unknown))
        return _Count(_UNKNOWN_WEIGHT * whole.accepted / whole.judged, _UNKNOWN_WEIGHT)


def position_bucket(position: int) -> int:
    """The bucket of a token by its position in the draft, where nothing else is known of it."""
    return min(position, _MAX_POSITION)
