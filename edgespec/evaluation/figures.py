"""Figures of a benchmark as text, for its table and its page."""

from collections import Counter
from collections.abc import Mapping, Sequence

from edgespec.evaluation.document import OWN_NAME, BenchDocument, PeerInfo, Position, RatioInterval, Summary
from edgespec.evaluation.intervals import MOST_OBSERVATIONS, SMALLEST_GAIN
from edgespec.system.units import format_bytes

_LABEL_CHARACTERS = 36
_UNKNOWN = 100  # an interval whose ends are so many times apart tells nothing, as that of two answers under load
# Where plain decoding ran, by what the document calls it.
_SESSIONS = {
    "own session": "plain decoding in a session of its own",
    "shared session": "plain decoding in the session of speculation, for lack of memory",
}


def ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def interval_text(interval: RatioInterval) -> str:
    """A 95 % interval, such as "0.97–1.04"; empty where there is none, and a word where it tells nothing."""
    if interval and interval[1] > _UNKNOWN * interval[0]:
        return "unknown"
    return "–".join(f"{end:.2f}" for end in interval or ())


def verdict_text(document: BenchDocument) -> str | None:
    """A sentence that says if drafting pays here; None where nothing was decoded."""
    ratio, interval = document["mean_ratio"], document["mean_ratio_interval"]
    if ratio is None:
        return None
    if document["sources"] and document["acceptance_rate"] is None:
        return "nothing was drafted here, so drafting changes nothing: --drafter names another drafter"
    times = f"drafting makes this model {ratio:.2f} times as fast here"
    if interval is None:
        return f"not decided: {times}, by too few answers to tell; give more prompts, or raise --rounds"
    low, high = interval
    slower = [name for name in document["below_one"] if ratio > 1]
    if low > 1:
        return times + f", but {', '.join(slower)} slower" * bool(slower)
    if high < 1:
        return f"{times}, which is slower: leave it out with --drafter none"
    if high / low < (1 + SMALLEST_GAIN) ** 2:
        return f"drafting makes no difference here that a reader notices: {ratio:.2f} times as fast"
    if high > _UNKNOWN * low:
        return (
            "not decided: the speeds lie too far apart; close other programs, and measure again with more prompts"
        )
    return (
        f"not decided: drafting makes this model {low:.2f} to {high:.2f} times as fast here; {_wanted(document)}"
    )


def _wanted(document: BenchDocument) -> str:
    """The prompts that would decide, as far as the spread of these tells."""
    found, enough = len(document["by_prompt"]), document["enough_prompts"]
    if found < 2 or enough is None:
        return "measure more prompts"
    step = 5 if enough < 50 else 10
    about = f"some {step * -(-enough // step)}" if enough < MOST_OBSERVATIONS else f"more than {MOST_OBSERVATIONS}"
    return f"{found} prompts are too few; {about} would be enough"


def decided_text(document: BenchDocument) -> str | None:
    """How many categories are slower or faster by their whole interval; None where there are no intervals."""
    rows = document["categories"]
    known = {name: interval for name, row in rows.items() if (interval := row["ratio_interval"])}
    if not known:
        return None
    slower = [name for name, interval in known.items() if interval[1] < 1.0]
    num_faster = sum(interval[0] > 1.0 for interval in known.values())
    num_open = len(known) - len(slower) - num_faster
    named = ", ".join(f"{name} {rows[name]['ratio']:.3f}" for name in slower)
    parts = [
        f"{len(slower)} wholly below 1.00" + f" ({named})" * bool(slower),
        f"{num_faster} wholly above",
        f"{num_open} include{'s' * (num_open == 1)} 1.00 (not decided)",
    ]
    if unknown := len(rows) - len(known):
        parts.append(f"{unknown} unknown (a single answer)")
    return f"intervals of {len(rows)} categor{'y' if len(rows) == 1 else 'ies'}: {', '.join(parts)}"


def slower_prompts_text(document: BenchDocument) -> str | None:
    """How many prompts are slower than plain decoding by their own intervals, and how many would be by chance."""
    known = [each["ratio_interval"] for each in document["by_prompt"] if each["ratio_interval"]]
    if not known:
        return None
    below = sum(interval[1] < 1.0 for interval in known)
    by_chance = len(known) / 40  # of prompts at 1.00, those whose interval lies below
    return f"{below} of {len(known)} prompts below 1.00 by their own intervals; by chance up to {by_chance:.1f}"


def peer_label(peer: PeerInfo) -> str:
    """A way to decode beside those of the run itself, in a few characters."""
    label = peer["way"] if peer["name"] == OWN_NAME else f"{peer['name']}, {peer['way']}"
    return label if len(label) <= _LABEL_CHARACTERS else f"…{label[1 - _LABEL_CHARACTERS :]}"


def texts_text(document: BenchDocument) -> str:
    """How many answers equal those of plain decoding, and what the others are."""
    counts = document["texts"]
    others = {
        "part at a near-tie": counts["near_tie"],
        "different": counts["different"],
        "differ and were not judged": counts["not_judged"],
    }
    whole = counts["equal"] + sum(others.values())
    named = [f"{count} {text}" for text, count in others.items() if count]
    return ", ".join([f"{counts['equal']} of {whole} answers equal", *named])


def setup_text(document: BenchDocument) -> str | None:
    """The mode, the session of plain decoding, and what was known of the prompts."""
    parts = [
        document.get("mode"),
        _SESSIONS.get(document.get("plain", "")),
        f"acceptance rates {learned} at the start of each round" if (learned := document.get("learned")) else None,
    ]
    return "; ".join(part for part in parts if part) or None


def time_text(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def size_text(num_bytes: float) -> str:
    return format_bytes(num_bytes, decimals=2)


def percent_text(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def middle_half(summary: Summary | None) -> str:
    """The range from the first to the third quartile."""
    return f"{summary['quartile_1']:.2f}–{summary['quartile_3']:.2f}" if summary else ""


def rounds_by_source(sources: Mapping[str, Mapping[str, int]]) -> str:
    """Shares of the rounds that each source drafted, such as "suffix 80%, none 20%"."""
    rounds = Counter({name: counts.get("rounds", 0) for name, counts in sources.items()})
    whole = rounds.total() or 1
    return ", ".join(f"{name} {count / whole:.0%}" for name, count in rounds.most_common())


def drafted_positions(positions: Sequence[Position]) -> list[tuple[int, int]]:
    """Drafts that reached each position and those kept up to it, for positions that any draft reached."""
    return [(each["drafted"], each["kept"]) for each in positions if each["drafted"]]
