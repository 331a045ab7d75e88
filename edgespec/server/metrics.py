"""Counts of the server's work since it started, as Prometheus reads them. One thread, that of the event loop."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from edgespec import Stats, __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Labels = tuple[tuple[str, str], ...]
_COUNTED = {
    "requests": "HTTP requests that have ended.",
    "prompt_tokens": "Tokens of prompts.",
    "completion_tokens": "Tokens of answers.",
    "passes": "Passes of targets.",
    "spec_draft_tokens": "Drafted tokens that a pass checked, by drafter.",
    "spec_accepted_tokens": "Drafted tokens that were accepted, by drafter.",
}
_TIMED = {
    "request_seconds": "Time of HTTP requests.",
    "first_token_seconds": "Time of first passes, which read the prompt.",
}


@dataclass(slots=True)
class _Histogram:
    """Seconds, counted in buckets."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def samples(self, name: str, labels: Labels) -> Iterator[str]:
        running = 0
        for bound, count in zip((*map(str, _BUCKETS_S), "+Inf"), self.counts, strict=True):
            running += count
            yield _sample(f"{name}_bucket", (*labels, ("le", bound)), running)
        yield _sample(f"{name}_sum", labels, self.total_s)
        yield _sample(f"{name}_count", labels, running)


@dataclass(slots=True)
class Metrics:
    """Counters of requests, tokens and drafts."""

    _counts: dict[str, Counter[Labels]] = field(default_factory=lambda: {name: Counter() for name in _COUNTED})
    _times: dict[str, dict[Labels, _Histogram]] = field(default_factory=lambda: {name: {} for name in _TIMED})

    def count_request(self, path: str, status: int, taken_s: float) -> None:
        self._count("requests", (("path", path), ("status", str(status))), 1)
        self._times["request_seconds"].setdefault((("path", path),), _Histogram()).add(taken_s)

    def count_answer(self, model: str, prompt_tokens: int, stats: Stats) -> None:
        """Count an answer that has ended."""
        labels = (("model", model),)
        self.count_tokens(model, prompt_tokens, stats.num_emitted)
        self._count("passes", labels, stats.passes)
        for drafter, counts in stats.sources.items():
            if counts["drafted"]:
                drafted = (*labels, ("drafter", drafter))
                self._count("spec_draft_tokens", drafted, counts["drafted"])
                self._count("spec_accepted_tokens", drafted, counts["accepted"])
        if stats.time_to_first_token_s is not None:
            self._times["first_token_seconds"].setdefault(labels, _Histogram()).add(stats.time_to_first_token_s)

    def count_tokens(self, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count what was read and written for an answer, which may have been cut short."""
        labels = (("model", model),)
        self._count("prompt_tokens", labels, prompt_tokens)
        self._count("completion_tokens", labels, completion_tokens)

    def text(self, gauges: Iterable[tuple[str, str, float]]) -> str:
        """All figures in Prometheus' text format; gauges are names, explanations and values of this moment."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _count(self, name: str, labels: Labels, number: int) -> None:
        self._counts[name][labels] += number

    def _lines(self, gauges: Iterable[tuple[str, str, float]]) -> Iterator[str]:
        yield from _head("edgespec_info", "gauge", "The version of edgespec.")
        yield _sample("edgespec_info", (("version", __version__),), 1)
        for name, what, value in gauges:
            yield from _head(f"edgespec_{name}", "gauge", what)
            yield _sample(f"edgespec_{name}", (), value)
        for name, what in _COUNTED.items():
            yield from _head(f"edgespec_{name}_total", "counter", what)
            yield from (_sample(f"edgespec_{name}_total", *each) for each in sorted(self._counts[name].items()))
        for name, what in _TIMED.items():
            yield from _head(f"edgespec_{name}", "histogram", what)
            for labels, histogram in sorted(self._times[name].items()):
                yield from histogram.samples(f"edgespec_{name}", labels)


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
