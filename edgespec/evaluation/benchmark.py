"""Speculation compared with plain decoding of the same model, on the user's prompts.

Plain decoding has a session of its own, as with --drafter none. Every turn is answered both ways, one right after
the other, so that a ratio compares neighbours in time on a machine whose speed varies. Who is first alternates by
prompt and by round; peers, if any, answer in between. All continue the same conversation, which holds the answers
of plain decoding. Each round has an order of its own, and begins with the same acceptance rates: nothing is known
of the prompts from an earlier round, or from an earlier run. A first answer of each warms up and is not counted.
"""

import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from statistics import median
from time import monotonic
from typing import Literal, NamedTuple

from edgespec import ContextOverflow, Engine, Interval, Message, Report, SamplingParams, UsageError
from edgespec.evaluation.document import BenchDocument, BenchSetup, Sample, Text, TurnRecord, Work
from edgespec.evaluation.exactness import compare_texts
from edgespec.evaluation.journal import Journal, Unit, gather
from edgespec.evaluation.peer import Panel, Peer, Rates
from edgespec.evaluation.prompts import BenchPrompt
from edgespec.evaluation.results import build_document, ratio_of
from edgespec.evaluation.timed_answer import TimedAnswer, clear_cache, settle, time_answer
from edgespec.system.system_info import peak_rss_bytes, system_info
from edgespec.system.units import format_count

VERSION = 2
_EVERY_S = 5.0  # between two lines of progress within an answer
_LONG_S = 90.0  # from which on the time left is told
_WARM_UP_TOKENS = 32
# Answers that differ from plain decoding are read again at several widths, which takes a hundred passes each.
_MOST_JUDGED = 12
_SAMPLE_PASSES = 240
_SAMPLE_CHARACTERS = 400

First = Literal["plain", "speculative"]
Learned = Literal["fresh", "stored"]


class Scheduled(NamedTuple):
    """A prompt of a round, and how many prompts of its category come before it in the file."""

    round: int
    prompt: int
    num_before: int

    def first(self, turn: int) -> First:
        """Who answers a turn first: alternately by prompt of a category, by turn and by round."""
        return "speculative" if (self.num_before + turn + self.round) % 2 else "plain"


def schedule(prompts: Sequence[BenchPrompt], rounds: int) -> Iterator[Scheduled]:
    """Each prompt once a round; rounds have different orders, which are the same in every run."""
    counts: dict[str, int] = defaultdict(int)
    num_before = []
    for prompt in prompts:
        num_before.append(counts[prompt.category])
        counts[prompt.category] += 1
    for number in range(rounds):
        shuffled = list(range(len(prompts)))
        Random(number).shuffle(shuffled)
        for i in shuffled:
            yield Scheduled(number, i, num_before[i])


def mode_of(engine: Engine) -> str:
    """The mode of an engine as the document names it: whether its text depends on the drafter."""
    return "deterministic" if engine.is_deterministic else "not deterministic"


def measure(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    plain: Engine | None = None,
    max_tokens: int,
    sampling: SamplingParams,
    rounds: int = 1,
    learned: Learned = "fresh",
    peers: Sequence[Peer] = (),
    journal: Journal | None = None,
    report: Report = lambda line: None,
) -> BenchDocument:
    """Decoding speed by category, plain and speculative, as the document of `edgespec bench --json`.

    Nothing that the engine learns meanwhile is stored.

    Args:
        plain: The engine that decodes plainly; without one, the session of the other does.
        learned: The acceptance rates with which each round begins.
        journal: Takes each prompt as it is answered, and has those that are not answered again.

    Raises UsageError: No prompt fits the context, or the journal was begun on another machine or with other files.
    """
    speculation = engine.speculation
    speculation.save = lambda learned: None
    rates = dict(speculation.rates) if learned == "stored" else {}
    plain_engine = plain or engine.plain()
    panel = Panel(peers, plain_engine, report)
    compared = [peer.engine for peer in panel.own]
    setup = _describe_setup(engine, prompts, plain, compared, max_tokens, sampling, rounds, learned)
    run = _BenchRun(plain_engine, engine, max_tokens, sampling, rates, panel, report)
    done = list(journal.units.values()) if journal else []
    known_texts = [turn["text"] for unit in done for turn in unit["turns"]]
    run.num_judged_before = known_texts.count("near_tie") + known_texts.count("different")
    if journal:
        journal.begin(_with_memory(setup, engine))
    num_prompts = rounds * len(prompts)  # each of one turn or several
    counts = f"{format_count(len(prompts), 'prompt')} in {format_count(rounds, 'round')}"
    report(f"measuring {counts}, each with and without drafts; one more answer comes before, to warm up")
    run.warm_up(prompts[0].turns[0])
    begun_s, num_before = monotonic(), len(done)
    for place in schedule(prompts, rounds):
        if journal and journal.is_done(place.round, place.prompt):
            continue
        run.told = f"prompt {len(done) + 1} of {num_prompts}"
        unit = run.answer(prompts[place.prompt], place)
        done.append(unit)
        if journal:
            journal.add(unit)
        left_s = (monotonic() - begun_s) / (len(done) - num_before) * (num_prompts - len(done))
        left = f", about {left_s / 60:.0f} min left" if left_s > _LONG_S else ""
        report(f"{len(done)} of {num_prompts} answered, round {place.round + 1} of {rounds}{left}")
    turns, known_peers = gather(done)
    if not turns:
        raise UsageError("every prompt was left out; none fits the context of this model")
    setup = _with_memory(setup, engine)
    if journal:
        journal.begin(setup)
    document = build_document(setup, turns, known_peers, choose_sample(run.turns))
    for name in dict.fromkeys(turn["category"] for turn in turns):
        if name not in document["categories"]:
            report(f"nothing to compare in {name}: no answer went beyond its first pass, which is not decoding")
    return document


def _describe_setup(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    plain: Engine | None,
    compared: Sequence[Engine],
    max_tokens: int,
    sampling: SamplingParams,
    rounds: int,
    learned: Learned,
) -> BenchSetup:
    """The setup of a run; compared: Engines of --compare, other arguments as in measure()."""
    return {
        "model": engine.manifest.name,
        "weights_sha256": engine.manifest.weights_sha256,
        "machine": f"{platform.machine()} {platform.system()}, {engine.device_names[0]}",
        "version": VERSION,
        "drafter": engine.speculation.name,
        "drafter_sha256": [each for one in (engine, *compared) for each in one.drafter_sha256],
        "devices": list(engine.device_names),
        "deterministic": engine.is_deterministic,
        "prompts": len(prompts),
        "rounds": rounds,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "plain": "own session" if plain else "shared session",
        "mode": mode_of(engine),
        "learned": learned,
        "pass_ratios": dict(engine.speculation.ratios),
        "measured_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": system_info(),
    }


def _with_memory(setup: BenchSetup, engine: Engine) -> BenchSetup:
    return {
        **setup,
        "pass_ratios": dict(engine.speculation.ratios),
        "memory": {
            "process_peak_rss_bytes": peak_rss_bytes(),
            "target_weights_bytes": engine.manifest.weights_bytes,
            "target_kv_cache_bytes_per_token": engine.manifest.kv_cache.bytes_per_token,
        },
    }


class AnsweredTurn(NamedTuple):
    """A turn of a conversation, answered both ways."""

    record: TurnRecord
    prompt: str
    plain: TimedAnswer
    speculative: TimedAnswer


@dataclass(slots=True)
class _BenchRun:
    """Answers prompts both ways and by every peer, and notes what that took."""

    plain: Engine
    engine: Engine
    max_tokens: int
    sampling: SamplingParams
    rates: Rates  # acceptance rates with which a round begins
    panel: Panel
    report: Report
    turns: list[AnsweredTurn] = field(default_factory=list)
    judged: dict[tuple[int, int, tuple[int, ...]], Text] = field(default_factory=dict)
    num_judged_before: int = 0  # in the part of the run that was done earlier
    told: str = "warming up"  # which answer is made
    _round: int | None = None
    _told_s: float = field(default_factory=monotonic)

    def warm_up(self, text: str) -> None:
        """Answer once without counting it; a prompt that is too long is reported when it is measured."""
        messages, num_tokens = [Message("user", text)], min(_WARM_UP_TOKENS, self.max_tokens)
        try:
            self._answer_both(messages, num_tokens, "plain")
        except ContextOverflow:
            return
        self.panel.ask(messages, num_tokens)

    def answer(self, prompt: BenchPrompt, place: Scheduled) -> Unit:
        """Answer every turn of a prompt once, from a cache that holds nothing of it."""
        self._told_s = monotonic()
        if place.round != self._round:
            self._round = place.round
            self.engine.speculation.rates = dict(self.rates)
            for peer in self.panel.own:
                peer.begin_round()
        for engine in self._engines:
            clear_cache(engine)
        for peer in self.panel.own:
            peer.begin_prompt()
        records = list[TurnRecord]()
        messages: list[Message] = []
        for i, text in enumerate(prompt.turns):
            messages.append(Message("user", text))
            try:
                plain, speculative = self._answer_both(messages, self.max_tokens, place.first(i))
            except ContextOverflow as error:
                if not place.round:
                    self.report(f"left out one prompt of {prompt.category}: {error}")
                break
            replies = self.panel.ask(messages, self.max_tokens)
            record: TurnRecord = {
                "category": prompt.category,
                "prompt": place.prompt,
                "turn": i,
                "round": place.round,
                "first": place.first(i),
                "text": self._compare(place.prompt, i, messages, plain, speculative),
                "plain": plain.record(),
                "speculative": speculative.record(),
                "peers": self.panel.judge(prompt.category, messages, replies, plain),
            }
            records.append(record)
            self.turns.append(AnsweredTurn(record, text, plain, speculative))
            messages.append(Message("assistant", plain.completion.text))
        return {"round": place.round, "prompt": place.prompt, "turns": records, "peers": self.panel.infos()}

    @property
    def _engines(self) -> list[Engine]:
        """One of each session."""
        return [self.engine] if self.plain.target is self.engine.target else [self.plain, self.engine]

    def _answer_both(
        self, messages: Sequence[Message], max_tokens: int, first: First
    ) -> tuple[TimedAnswer, TimedAnswer]:
        """The answers of plain decoding and of speculation, in this order whichever was asked first."""
        order = 1 if first == "plain" else -1
        answers = []
        for which in (self.plain, self.engine)[::order]:
            if len(self._engines) == 1:
                clear_cache(which)
            settle()
            answers.append(time_answer(which, messages, max_tokens, self.sampling, self._tell))
        plain, speculative = answers[::order]
        return plain, speculative

    def _tell(self, num_chunks: int) -> None:
        """Report every few seconds how far a long answer is."""
        if monotonic() - self._told_s > _EVERY_S:
            self._told_s = monotonic()
            self.report(f"{self.told}: {num_chunks} pass{'es' * (num_chunks != 1)} of the model")

    def _compare(
        self, prompt: int, turn: int, messages: Sequence[Message], plain: TimedAnswer, speculative: TimedAnswer
    ) -> Text:
        """Compare the texts; answers that differ as in an earlier round are not measured again."""
        one, two = plain.completion.token_ids, speculative.completion.token_ids
        if one == two:
            return "equal"
        key = (prompt, turn, two)
        if key not in self.judged:
            # At a temperature the margin of two tokens depends on the noise that was drawn too.
            if self.sampling.temperature or self.num_judged_before + len(self.judged) >= _MOST_JUDGED:
                return "not_judged"
            self.judged[key] = compare_texts(self.plain.target, self.plain.encode(messages), one, two)
        return self.judged[key]


def choose_sample(turns: Sequence[AnsweredTurn]) -> Sample | None:
    """The turn whose gain is nearest the median, with what each lane did after the first pass.

    A pass of several tokens takes no less time than a pass of one. So a gain above the tokens per pass of its
    answer is an error of timing, and such an answer is chosen only if there is no other.
    """
    rated = [(ratio, turn) for turn in turns if (ratio := ratio_of(turn.record))]
    if not rated:
        return None
    middle = median(ratio for ratio, _ in rated)
    ratio, turn = min(rated, key=lambda each: (each[0] > tokens_per_pass(each[1]), abs(each[0] - middle)))
    return {
        "category": turn.record["category"],
        "prompt": _shorten(turn.prompt),
        "answer": _shorten(turn.speculative.completion.text),
        "ratio": ratio,
        "tokens_per_pass": tokens_per_pass(turn),
        "plain": _work(turn.plain.completion.timeline),
        "speculative": _work(turn.speculative.completion.timeline),
    }


def tokens_per_pass(turn: AnsweredTurn) -> float:
    """Mean tokens in a pass of the speculative answer, without its first pass, which reads the prompt."""
    return turn.speculative.num_decoded / max(1, turn.speculative.completion.stats.passes - 1)


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
