"""Speculation against plain decoding of the same model, on somebody's prompts.

Every turn is answered by both, one right after the other and each first every other time, so that a ratio
compares neighbours in time on a machine whose speed moves; peers, if any, answer between. All are told the same
conversation: where there are more turns, that of plain decoding. A first answer of each warms up and is left out.
"""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgespec.answers import Completion
from edgespec.bench_tally import Tally, spread
from edgespec.chat_template import Message
from edgespec.engine import Engine
from edgespec.errors import ContextOverflow, EdgeSpecError, UsageError
from edgespec.host import peak_rss_bytes
from edgespec.prompts import BenchPrompt
from edgespec.sampling import SamplingParams
from edgespec.timeline import Interval

VERSION = 1
_WARM_UP_TOKENS = 32
_SAMPLE_PASSES = 240
_SAMPLE_CHARACTERS = 400


class PeerAnswer(NamedTuple):
    """What another runtime made of a prompt; decoding is what came after the first token."""

    text: str
    num_decoded: int
    decode_s: float
    first_s: float


class Peer(Protocol):
    """Another runtime with the same weights, in one of its ways to decode."""

    @property
    def name(self) -> str: ...

    @property
    def way(self) -> str:
        """plain, or what it calls its speculation."""
        ...

    @property
    def version(self) -> str: ...

    def answer(self, tokens: Sequence[int], max_tokens: int) -> PeerAnswer:
        """Greedily. Raises EdgeSpecError: it failed, and will not do better."""
        ...

    def peak_rss_bytes(self) -> int: ...


@dataclass(slots=True)
class _PeerTally:
    """Decoding by a peer, by category, and how many of its answers are those of plain decoding."""

    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    firsts_s: list[float] = field(default_factory=list)
    answers: int = 0
    same: int = 0
    failure: str | None = None

    def add(self, category: str, answer: PeerAnswer, plain: Completion) -> None:
        if answer.num_decoded > 0 and answer.decode_s > 0:
            self.tokens[category] += answer.num_decoded
            self.seconds[category] += answer.decode_s
        self.firsts_s.append(answer.first_s)
        self.answers += 1
        self.same += answer.text.strip() == plain.text.strip()


class _Turn(NamedTuple):
    """A turn answered by both, and what it showed."""

    category: str
    prompt: str
    plain: Completion
    speculative: Completion

    @property
    def ratio(self) -> float | None:
        slow, fast = (each.stats.decode_tokens_per_second for each in (self.plain, self.speculative))
        return fast / slow if slow and fast else None


def measure(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    rounds: int = 1,
    peers: Sequence[Peer] = (),
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Decoding speed by category, plain and speculative, as the document of `edgespec bench --json`.

    Raises:
        UsageError: No prompt fits the context.
    """
    run = _Run(engine, max_tokens, sampling, peers, report)
    run.warm_up(prompts[0].turns[0])
    turns = [turn for number in range(rounds) for turn in run.round(prompts, number)]
    if not turns:
        raise UsageError("every prompt was left out; none fits the context of this model")
    return {
        **_speculation(turns, run, report),
        "machine": f"{platform.machine()} {platform.system()}, {engine.device_names[0]}",
        "version": VERSION,
        "drafter": engine.speculation.name,
        "devices": list(engine.device_names),
        "prompts": len(prompts),
        "rounds": rounds,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "memory": _memory(engine),
        "sample": _sample(turns),
        "peers": [_peer_row(peer, run.by_peer[i], run.plain) for i, peer in enumerate(peers)],
    }


@dataclass(slots=True)
class _Run:
    """Both at work on the same conversations, tallied by category."""

    engine: Engine
    max_tokens: int
    sampling: SamplingParams
    peers: Sequence[Peer]
    report: Callable[[str], None]
    plain: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    speculative: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    by_peer: list[_PeerTally] = field(default_factory=list)
    _plain_first: bool = True

    def __post_init__(self) -> None:
        self.by_peer += [_PeerTally() for _ in self.peers]

    def warm_up(self, text: str) -> None:
        """An answer of each that is not counted; a prompt that does not fit is told of when its turn comes."""
        messages = [Message("user", text)]
        num_tokens = min(_WARM_UP_TOKENS, self.max_tokens)
        try:
            plain, _ = self._both(messages, num_tokens, is_cold=False)
        except ContextOverflow:
            return
        self._peers(None, messages, num_tokens, plain)

    def round(self, prompts: Sequence[BenchPrompt], number: int) -> Iterator[_Turn]:
        """Every turn once. Only the first round forgets each prompt before it is read, to time the first token."""
        for i, prompt in enumerate(prompts):
            messages: list[Message] = []
            for text in prompt.turns:
                messages.append(Message("user", text))
                try:
                    turn = _Turn(
                        prompt.category, text, *self._both(messages, self.max_tokens, is_cold=number == 0)
                    )
                except ContextOverflow as error:
                    if number == 0:
                        self.report(f"left out one prompt of {prompt.category}: {error}")
                    break
                self.plain[prompt.category].add(turn.plain, is_cold=number == 0)
                self.speculative[prompt.category].add(turn.speculative, is_cold=number == 0)
                self._peers(prompt.category, messages, self.max_tokens, turn.plain)
                yield turn
                messages.append(Message("assistant", turn.plain.text))
            self.report(f"{i + 1} of {len(prompts)} prompts" + (f", round {number + 1}" if number else ""))

    def _both(
        self, messages: Sequence[Message], max_tokens: int, *, is_cold: bool
    ) -> tuple[Completion, Completion]:
        """Of plain decoding and of the engine as it is."""
        self._plain_first = not self._plain_first
        pair = [self.engine.plain(), self.engine]
        answers = []
        for which in pair if self._plain_first else reversed(pair):
            if is_cold:
                _forget(self.engine)
            answers.append(which.generate(messages, max_tokens=max_tokens, sampling=self.sampling))
        return (answers[0], answers[1]) if self._plain_first else (answers[1], answers[0])

    def _peers(
        self, category: str | None, messages: Sequence[Message], max_tokens: int, plain: Completion
    ) -> None:
        """Each peer in turn, in an order that moves on by one each time; category is None for a warm-up."""
        tokens = [int(token) for token in self.engine.encode(messages)] if self.peers else []
        order = [*zip(self.peers, self.by_peer, strict=True)]
        start = self.by_peer[0].answers % len(order) if order else 0
        for peer, tally in order[start:] + order[:start]:
            if tally.failure is not None:
                continue
            try:
                answer = peer.answer(tokens, max_tokens)
            except EdgeSpecError as error:
                tally.failure = str(error)
                self.report(f"{peer.name} ({peer.way}) is left out from here on: {error}")
                continue
            if category is not None:
                tally.add(category, answer, plain)


def _forget(engine: Engine) -> None:
    """Let the target hold nothing that a prompt begins with, by a pass over another token."""
    held = 1 + (engine.plain().encode("a")[0] % (engine.target.vocab_size - 1))
    engine.target.logits(np.array([held], np.int32), 1)


def _speculation(turns: Sequence[_Turn], run: _Run, report: Callable[[str], None]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = defaultdict(list)
    for turn in turns:
        if turn.ratio is not None:
            ratios[turn.category].append(turn.ratio)
    categories = {
        name: _row(run.plain[name], fast, ratios[name])
        for name, fast in run.speculative.items()
        if run.plain[name].tokens_per_second and fast.tokens_per_second
    }
    for name in run.speculative.keys() - categories.keys():
        report(f"nothing to compare in {name}: no answer went beyond its first pass, which is not decoding")
    by_category = [row["ratio"] for row in categories.values()]
    slow, fast = _all(run.plain.values()), _all(run.speculative.values())
    return {
        "model": run.engine.manifest.name,
        "categories": categories,
        "mean_ratio": sum(by_category) / len(by_category) if by_category else None,
        "worst_ratio": min(by_category, default=None),
        "ratios": spread([ratio for each in ratios.values() for ratio in each]),
        "answers": len(turns),
        "same_answers": sum(turn.plain.token_ids == turn.speculative.token_ids for turn in turns),
        "tokens_per_pass": fast.tokens / fast.passes if fast.passes else None,
        "acceptance_rate": fast.kept / fast.drafted if fast.drafted else None,
        "acceptance_by_position": _positions(fast.positions),
        "time_to_first_token_s": _firsts(slow, fast),
        "sources": fast.sources,
        "passes": _passes(run.engine, slow, fast),
    }


def _row(slow: Tally, fast: Tally, ratios: Sequence[float]) -> dict[str, Any]:
    return {
        "plain_tokens_per_second": slow.tokens_per_second,
        "speculative_tokens_per_second": fast.tokens_per_second,
        "ratio": fast.tokens_per_second / slow.tokens_per_second,
        "ratios": spread(ratios),
        "tokens_per_pass": fast.tokens / fast.passes if fast.passes else None,
        "acceptance_rate": fast.kept / fast.drafted if fast.drafted else None,
        "acceptance_by_position": _positions(fast.positions),
        "time_to_first_token_s": _firsts(slow, fast),
        "drafters": _by_accepted(fast.sources),
        "sources": fast.sources,
    }


def _all(tallies: Iterable[Tally]) -> Tally:
    whole = Tally()
    for each in tallies:
        whole.merge(each)
    return whole


def _positions(counts: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    return [{"drafted": drafted, "kept": kept} for drafted, kept in counts]


def _firsts(slow: Tally, fast: Tally) -> dict[str, float | None]:
    """Medians over answers whose prompt was read from its beginning."""
    return {
        "plain": median(slow.firsts_s) if slow.firsts_s else None,
        "speculative": median(fast.firsts_s) if fast.firsts_s else None,
    }


def _passes(engine: Engine, slow: Tally, fast: Tally) -> dict[str, Any]:
    """What passes took by width, and how often each was chosen.

    step_s: a pass of plain decoding.
    ratios: what the gate holds a pass for, in steps, by width.
    """
    steps, seconds = slow.widths.get(1, (0, 0.0))
    return {
        "step_s": seconds / steps if steps else None,
        "ratios": {str(width): ratio for width, ratio in sorted(engine.speculation.ratios.items())},
        "widths": {
            str(width): {"passes": passes, "seconds": taken_s}
            for width, (passes, taken_s) in sorted(fast.widths.items())
        },
    }


def _by_accepted(sources: Mapping[str, Mapping[str, int]]) -> list[str]:
    drafting = [name for name, counts in sources.items() if counts["drafted"]]
    return sorted(drafting, key=lambda name: -sources[name]["accepted"])


def _memory(engine: Engine) -> dict[str, Any]:
    """Of this process, with all that it loaded; and of the target what its folder states."""
    manifest = engine.manifest
    return {
        "process_peak_rss_bytes": peak_rss_bytes(),
        "target_weights_bytes": manifest.weights_bytes,
        "target_kv_cache_bytes_per_token": manifest.kv_cache.bytes_per_token,
    }


def _sample(turns: Sequence[_Turn]) -> dict[str, Any] | None:
    """The answer whose gain is nearest the median: when each lane worked, from the end of the first pass on."""
    rated = [(turn.ratio, turn) for turn in turns if turn.ratio is not None]
    if not rated:
        return None
    middle = median(ratio for ratio, _ in rated)
    ratio, turn = min(rated, key=lambda each: abs(each[0] - middle))
    return {
        "category": turn.category,
        "prompt": _shortened(turn.prompt),
        "answer": _shortened(turn.speculative.text),
        "ratio": ratio,
        "plain": _lanes(turn.plain.timeline),
        "speculative": _lanes(turn.speculative.timeline),
    }


def _shortened(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1] + "…"


def _lanes(timeline: Sequence[Interval]) -> list[dict[str, Any]]:
    """Intervals behind the first pass of the target, in seconds since its end."""
    passes = sorted(each.end_s for each in timeline if each.lane == "target")
    since, until = passes[0], passes[:_SAMPLE_PASSES][-1]
    return [
        {
            "lane": each.lane,
            "what": each.what,
            "start_s": round(max(0.0, each.start_s - since), 6),
            "end_s": round(each.end_s - since, 6),
            "num_tokens": each.num_tokens,
        }
        for each in sorted(timeline, key=lambda each: each.start_s)
        if since < each.end_s <= until
    ]


def _peer_row(peer: Peer, tally: _PeerTally, plain: Mapping[str, Tally]) -> dict[str, Any]:
    """Its tokens a second by category, and the mean of its ratios to our plain decoding there."""
    speeds = {name: tally.tokens[name] / tally.seconds[name] for name in tally.tokens}
    ratios = [
        speed / plain[name].tokens_per_second for name, speed in speeds.items() if plain[name].tokens_per_second
    ]
    return {
        "name": peer.name,
        "way": peer.way,
        "version": peer.version,
        "categories": speeds,
        "mean_ratio": sum(ratios) / len(ratios) if ratios else None,
        "time_to_first_token_s": median(tally.firsts_s) if tally.firsts_s else None,
        "answers": tally.answers,
        "same_answers": tally.same,
        "peak_rss_bytes": peer.peak_rss_bytes(),
        "failure": tally.failure,
    }
