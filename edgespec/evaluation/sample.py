"""The answer of a benchmark whose gain is nearest the median, pass by pass, for the page.

A pass of several tokens takes no less time than a pass of one. So a gain above the tokens per pass of its answer
is an error of timing, and such an answer is shown only if there is no other.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from edgespec.drafters.timeline import Interval
from edgespec.evaluation.document import Sample, TurnRecord, Work
from edgespec.evaluation.results import ratio_of
from edgespec.evaluation.timed_answer import TimedAnswer

_SAMPLE_PASSES = 240
_SAMPLE_CHARACTERS = 400


class AnsweredTurn(NamedTuple):
    """A turn of a conversation, answered both ways."""

    record: TurnRecord
    prompt: str
    plain: TimedAnswer
    speculative: TimedAnswer


def choose_sample(turns: Sequence[AnsweredTurn]) -> Sample | None:
    """The turn whose gain is nearest the median, with what each lane did after the first pass."""
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
