"""What a chat says of itself: after each answer, below the input, and of whether drafting helps. Words only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.printable import in_a_line
from edgespec.stats import Stats

_NOT_DRAFTING = "none"


def after_answer(stats: Stats, finish_reason: str | None) -> list[str]:
    """What an answer took and what drafting gave, in parts."""
    parts = []
    if stats.decode_tokens_per_second:
        parts.append(f"{stats.decode_tokens_per_second:.1f} tokens/s")
    if stats.estimated_gain is not None:
        parts.append(f"{stats.estimated_gain:.2f}x plain (estimated)")
    parts.append(drafting(stats))
    if ended := why(finish_reason):
        parts.append(ended)
    return parts


def why(finish_reason: str | None) -> str:
    """Why an answer ended, where it did not end by itself."""
    return {
        "stop": "",
        "length": "stopped at the token limit (--max-tokens, /set max_tokens)",
        "context": "stopped because the context is full (/set overflow drop-oldest, or /clear)",
    }.get(finish_reason or "", "stopped")


def drafting(stats: Stats) -> str:
    """What drafted, or why nothing did."""
    if not stats.num_drafted:
        return f"no drafts: {why_off(stats)}"
    drafted = {name: each for name, each in stats.sources.items() if each["drafted"]}
    by = ", ".join(f"{in_a_line(name, 40)} {each['accepted']}/{each['drafted']}" for name, each in drafted.items())
    return f"{stats.acceptance_rate:.0%} of drafts kept ({by})"


def why_off(stats: Stats) -> str:
    """Why no pass of an answer had a draft."""
    if stats.downgrades:
        return in_a_line(stats.downgrades[-1], 200)
    if stats.drafter == _NOT_DRAFTING:
        return "--drafter none, or nothing is left that could draft"
    if not stats.undrafted:
        return "the answer was over before there was anything to draft"
    return max(stats.undrafted, key=lambda reason: stats.undrafted[reason])


def origin_shares(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Origins of tokens, the target first, each with its share in words."""
    ordered = sorted(counts.items(), key=lambda each: (each[0] != "target", -each[1]))
    total = sum(counts.values())
    return [(origin, f"{in_a_line(origin, 40)} {count / total:.0%}") for origin, count in ordered]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the line below the input is made of."""

    model: str
    devices: tuple[str, str]
    drafter: str
    num_context: int
    context_length: int
    overflow: str
    stats: Stats | None = None
    keys: str = ""


def standing_line(standing: Standing, columns: int) -> str:
    """The parts that matter most, as many as fit."""
    stats = standing.stats
    parts = [
        standing.keys,
        f"{in_a_line(standing.model, 40)} on {standing.devices[0]}",
        context_of(standing),
        _drafter_of(standing),
        f"{stats.estimated_gain:.2f}x plain (est.)" if stats and stats.estimated_gain is not None else "",
        f"{stats.decode_tokens_per_second:.0f} tokens/s" if stats and stats.decode_tokens_per_second else "",
    ]
    return fitted([part for part in parts if part], columns)


def context_of(standing: Standing) -> str:
    return f"context {standing.num_context}/{standing.context_length}"


def _drafter_of(standing: Standing) -> str:
    stats = standing.stats
    if stats is None:
        off = standing.drafter == _NOT_DRAFTING
        return "drafts off" if off else f"drafts by {in_a_line(standing.drafter, 60)}"
    if not stats.num_drafted:
        return f"drafts off: {why_off(stats)}"
    names = "+".join(name for name, each in stats.sources.items() if each["drafted"])
    devices = f" on {stats.drafter_device}" if stats.drafter_device not in (None, standing.devices[0]) else ""
    return f"{in_a_line(names, 40)}{devices} {stats.acceptance_rate:.0%} kept"


def fitted(parts: Sequence[str], columns: int) -> str:
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if len(longer) > columns:
            return longer[: max(0, columns - 1)] + "…" if not line or len(line) < columns // 2 else line
        line = longer
    return line


def report_lines(stats: Stats, downgrades: Sequence[str], devices: tuple[str, str]) -> list[str]:
    """Whether drafting helps, what drafts, and what does not and why."""
    lines = [_helps(stats)]
    if stats.decode_tokens_per_second:
        lines.append(
            f"{stats.decode_tokens_per_second:.1f} tokens/s, {stats.tokens_per_pass:.2f} tokens a pass, "
            f"{stats.passes} passes for {stats.num_emitted} tokens"
        )
    if stats.time_to_first_token_s is not None:
        lines.append(
            f"first token after {stats.time_to_first_token_s:.2f} s"
            + (f", prompt read at {stats.prefill_tokens_per_second:.0f} tokens/s"
               if stats.prefill_tokens_per_second else "")
        )  # fmt: skip
    where = f", drafter on {stats.drafter_device}" if stats.drafter_device else ""
    lines.append(f"target on {devices[0]}{where}; schedule {stats.schedule}, both at work {stats.overlap:.0%}")
    lines += _source_lines(stats.sources)
    for reason, count in sorted(stats.undrafted.items(), key=lambda each: -each[1]):
        lines.append(f"{count} of {stats.passes} passes without a draft: {reason}")
    named = {part for part in stats.drafter.split("+") if part != _NOT_DRAFTING}
    for name in sorted(named - {name for name, each in stats.sources.items() if each["drafted"]}):
        lines.append(f"{in_a_line(name, 40)} is listened to and drafted nothing in this answer")
    lines += [f"given up: {in_a_line(line, 300)}" for line in downgrades]
    return lines


def _helps(stats: Stats) -> str:
    if not stats.num_drafted:
        return f"drafting is off: {why_off(stats)}"
    gain = stats.estimated_gain
    if gain is None:
        return "drafting is on; too few passes to say what plain decoding would have taken"
    verdict = "helps" if gain > 1.02 else "costs" if gain < 0.98 else "changes little"
    return f"drafting {verdict}: {gain:.2f} times plain decoding (estimated from this answer's own passes)"


def _source_lines(sources: Mapping[str, Mapping[str, int]]) -> list[str]:
    return [
        f"{in_a_line(name, 40)}: {each['rounds']} passes, {each['drafted']} drafted, {each['accepted']} kept "
        f"({each['accepted'] / each['drafted']:.0%})"
        for name, each in sources.items()
        if each["drafted"]
    ]
