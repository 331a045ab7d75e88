"""Speculation compared with plain decoding of the same model, on somebody's prompts.

Every turn is answered both ways, one right after the other and each first every other time, so that a ratio
compares neighbours in time on a machine whose speed varies; peers, if any, answer in between. All continue the
same conversation, which holds the answers of plain decoding. A first answer of each warms up and is not counted.
"""

import platform
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.timeline import Interval
from edgespec.engine.answers import Completion
from edgespec.engine.engine import Engine
from edgespec.errors import ContextOverflow, UsageError
from edgespec.evaluation.document import BenchDocument, Category, Figures, Passes, PeerRow, Sample, Work
from edgespec.evaluation.prompts import BenchPrompt
from edgespec.evaluation.tally import Tallies, Tally, summary
from edgespec.system.system_info import peak_rss_bytes, system_info
from edgespec.tokenization.chat_template import Message
from edgespec.types import Report

VERSION = 1
_WARM_UP_TOKENS = 32
_SAMPLE_PASSES = 240
_SAMPLE_CHARACTERS = 400


class Peer(Protocol):
    """Another runtime that answers the same prompts in between, and counts what that took."""

    def answer(self, category: str | None, tokens: Sequence[int], max_tokens: int, plain: str) -> None:
        """Answer greedily; plain is the text of plain decoding, and category None for a warm-up."""

    def row(self, plain: Mapping[str, float]) -> PeerRow:
        """Its part of the document; plain is the speed of plain decoding by category."""


class _Turn(NamedTuple):
    """A turn of a conversation, answered both ways."""

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
    report: Report = lambda line: None,
) -> BenchDocument:
    """Decoding speed by category, plain and speculative, as the document of `edgespec bench --json`.

    Raises UsageError: No prompt fits the context.
    """
    measured_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = _Run(engine, max_tokens, sampling, deque(peers), report)
    run.warm_up(prompts[0].turns[0])
    turns = [turn for number in range(rounds) for turn in run.answer_all(prompts, number)]
    if not turns:
        raise UsageError("every prompt was left out; none fits the context of this model")
    ratios = [(turn.category, turn.ratio) for turn in turns if turn.ratio is not None]
    categories: dict[str, Category] = {}
    for name, fast in run.speculative.by_category.items():
        slow = run.plain.by_category[name]
        if slow.tokens_per_second and fast.tokens_per_second:
            categories[name] = _category(slow, fast, [ratio for category, ratio in ratios if category == name])
        else:
            report(f"nothing to compare in {name}: no answer went beyond its first pass, which is not decoding")
    by_category = [row["ratio"] for row in categories.values()]
    plain_speeds = {name: tally.tokens_per_second for name, tally in run.plain.by_category.items()}
    manifest = engine.manifest
    return {
        **_figures(run.plain.total, run.speculative.total, [ratio for _, ratio in ratios]),
        "model": manifest.name,
        "categories": categories,
        "mean_ratio": sum(by_category) / len(by_category) if by_category else None,
        "worst_ratio": min(by_category, default=None),
        "answers": len(turns),
        "same_answers": sum(turn.plain.token_ids == turn.speculative.token_ids for turn in turns),
        "passes": _passes(engine, run.plain.total, run.speculative.total),
        "machine": f"{platform.machine()} {platform.system()}, {engine.device_names[0]}",
        "version": VERSION,
        "drafter": engine.speculation.name,
        "devices": list(engine.device_names),
        "deterministic": engine.is_deterministic,
        "prompts": len(prompts),
        "rounds": rounds,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "memory": {
            "process_peak_rss_bytes": peak_rss_bytes(),
            "target_weights_bytes": manifest.weights_bytes,
            "target_kv_cache_bytes_per_token": manifest.kv_cache.bytes_per_token,
        },
        "sample": _sample(turns),
        "measured_at": measured_at,
        "host": system_info(),
        "peers": [peer.row(plain_speeds) for peer in peers],
    }


@dataclass(slots=True)
class _Run:
    """Answers prompts both ways and by every peer, and adds up what that took."""

    engine: Engine
    max_tokens: int
    sampling: SamplingParams
    peers: deque[Peer]
    report: Report
    plain: Tallies = field(default_factory=Tallies)
    speculative: Tallies = field(default_factory=Tallies)
    _order: int = 1  # 1 where plain decoding comes first, else -1

    def warm_up(self, text: str) -> None:
        """Answer once without counting it; a prompt that is too long is reported when it is measured."""
        messages = [Message("user", text)]
        num_tokens = min(_WARM_UP_TOKENS, self.max_tokens)
        try:
            plain, _ = self._answer_both(messages, num_tokens, is_cold=False)
        except ContextOverflow:
            return
        self._ask_peers(None, messages, num_tokens, plain)

    def answer_all(self, prompts: Sequence[BenchPrompt], number: int) -> Iterator[_Turn]:
        """Answer every turn once. Only in round 0 is the cache cleared first, to time the first token."""
        is_cold = number == 0
        for i, prompt in enumerate(prompts):
            messages: list[Message] = []
            for text in prompt.turns:
                messages.append(Message("user", text))
                try:
                    plain, speculative = self._answer_both(messages, self.max_tokens, is_cold=is_cold)
                except ContextOverflow as error:
                    if is_cold:
                        self.report(f"left out one prompt of {prompt.category}: {error}")
                    break
                self.plain.add(prompt.category, plain, is_cold=is_cold)
                self.speculative.add(prompt.category, speculative, is_cold=is_cold)
                self._ask_peers(prompt.category, messages, self.max_tokens, plain)
                yield _Turn(prompt.category, text, plain, speculative)
                messages.append(Message("assistant", plain.text))
            self.report(f"{i + 1} of {len(prompts)} prompts" + (f", round {number + 1}" if number else ""))

    def _answer_both(
        self, messages: Sequence[Message], max_tokens: int, *, is_cold: bool
    ) -> tuple[Completion, Completion]:
        """The answers of plain decoding and of the engine as it is, in this order whichever was asked first."""
        self._order = -self._order
        answers = []
        for which in (self.engine.plain(), self.engine)[:: self._order]:
            if is_cold:
                _clear_cache(self.engine)
            answers.append(which.generate(messages, max_tokens=max_tokens, sampling=self.sampling))
        plain, speculative = answers[:: self._order]
        return plain, speculative

    def _ask_peers(
        self, category: str | None, messages: Sequence[Message], max_tokens: int, plain: Completion
    ) -> None:
        if self.peers:
            tokens = [int(token) for token in self.engine.encode(messages)]
            for peer in self.peers:
                peer.answer(category, tokens, max_tokens, plain.text)
            self.peers.rotate(-1)  # another one is first the next time


def _clear_cache(engine: Engine) -> None:
    """Run a pass over a token that no prompt begins with, so that nothing of a prompt is cached."""
    other = 1 + (engine.plain().encode("a")[0] % (engine.target.vocab_size - 1))
    engine.target.logits(np.array([other], np.int32), 1)


def _figures(slow: Tally, fast: Tally, ratios: Sequence[float]) -> Figures:
    return {
        "ratios": summary(ratios),
        "tokens_per_pass": fast.tokens / fast.passes if fast.passes else None,
        "acceptance_rate": fast.accepted / fast.drafted if fast.drafted else None,
        "acceptance_by_position": fast.positions,
        "time_to_first_token_s": {"plain": slow.first_token_s, "speculative": fast.first_token_s},
        "sources": fast.sources,
    }


def _category(slow: Tally, fast: Tally, ratios: Sequence[float]) -> Category:
    drafting = [name for name, counts in fast.sources.items() if counts["drafted"]]
    return {
        **_figures(slow, fast, ratios),
        "plain_tokens_per_second": slow.tokens_per_second,
        "speculative_tokens_per_second": fast.tokens_per_second,
        "ratio": fast.tokens_per_second / slow.tokens_per_second,
        "drafters": sorted(drafting, key=lambda name: -fast.sources[name]["accepted"]),
    }


def _passes(engine: Engine, slow: Tally, fast: Tally) -> Passes:
    steps, seconds = slow.widths.get(1, (0, 0.0))
    return {
        "step_s": seconds / steps if steps else None,
        "ratios": dict(sorted(engine.speculation.ratios.items())),
        "widths": {
            width: {"passes": passes, "seconds": taken_s}
            for width, (passes, taken_s) in sorted(fast.widths.items())
        },
    }


def _sample(turns: Sequence[_Turn]) -> Sample | None:
    """The answer whose gain is nearest the median, with what each lane did after the first pass."""
    rated = [(turn.ratio, turn) for turn in turns if turn.ratio is not None]
    if not rated:
        return None
    middle = median(ratio for ratio, _ in rated)
    ratio, turn = min(rated, key=lambda each: abs(each[0] - middle))
    return {
        "category": turn.category,
        "prompt": _shorten(turn.prompt),
        "answer": _shorten(turn.speculative.text),
        "ratio": ratio,
        "plain": _work(turn.plain.timeline),
        "speculative": _work(turn.speculative.timeline),
    }


def _shorten(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARACTERS else text[: _SAMPLE_CHARACTERS - 1] + "…"


def _work(timeline: Sequence[Interval]) -> list[Work]:
    """Intervals after the first pass of the target, in seconds since its end."""
    passes = sorted(each.end_s for each in timeline if each.lane == "target")
    since, until = passes[0], passes[:_SAMPLE_PASSES][-1]
    return [
        {
            "lane": each.lane,
            "what": each.work,
            "start_s": round(max(0.0, each.start_s - since), 6),
            "end_s": round(each.end_s - since, 6),
            "num_tokens": each.num_tokens,
        }
        for each in sorted(timeline, key=lambda each: each.start_s)
        if since < each.end_s <= until
    ]
