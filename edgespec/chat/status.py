"""Words about an answer: after it, below the input, and on whether drafting helps. Prints nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec import Stats
from edgespec.system.printable import one_line
from edgespec.system.units import format_count, format_speed

_NOT_DRAFTING = "none"
CUT = ("length", "cancelled", "timeout")  # ends after which an answer can go on
_LOOPED = "the answer repeated itself, so it does not tell whether drafting helps"


def format_answer(
    stats: Stats, finish_reason: str | None, *, has_looped: bool = False, drops_oldest: bool = False
) -> list[str]:
    """How fast an answer came and what drafting did for it, in parts; a loop is easy to draft."""
    speed = f"{format_speed(stats.decode_tokens_per_second)} tokens/s" if stats.decode_tokens_per_second else ""
    drafting = _LOOPED if has_looped else _format_drafting(stats)
    stop = format_stop(finish_reason, drops_oldest=drops_oldest)
    return list(filter(None, [speed, drafting, f"{stop}; /go continues" if finish_reason in CUT else stop]))


def _format_drafting(stats: Stats) -> str:
    if not stats.num_drafted:
        return f"drafting is off: {reason_off(stats)}"
    gain, speed = stats.gain, stats.decode_tokens_per_second
    if gain is None or not speed:
        return "drafting is on (more: /stats)"
    if not (gain.is_shown or gain.is_loss):
        return "drafting made little difference"
    saved_s = (gain.value - 1.0) * stats.num_decoded / speed
    return f"drafting {'saved' if gain.is_shown else 'lost'} {format_speed(abs(saved_s), 0)} s"


def format_stop(finish_reason: str | None, *, drops_oldest: bool = False, is_once: bool = False) -> str:
    """Why an answer ended, unless it ended by itself, and what to do.

    drops_oldest: Whether the conversation makes room for the next answer by itself.
    is_once: It is the answer to the only prompt, so that no command of the chat can follow.
    """
    ways = "/compact, /clear or /set overflow drop-oldest"
    full = "the next message drops the oldest ones" if drops_oldest else ways
    again = "/retry tries again; /set loops keep lets such answers continue"
    if is_once:
        full, again = "--context sets its length", "--loops keep lets such answers continue"
    return {
        "stop": "",
        "tool_calls": "",
        "length": "stopped at the token limit (max-tokens)",
        "loop": f"stopped: it repeated itself ({again})",
        "context": f"stopped because the context is full ({full})",
    }.get(finish_reason or "", "stopped")


def reason_off(stats: Stats) -> str:
    """Why no pass of an answer had a draft."""
    if stats.downgrades:
        return one_line(stats.downgrades[-1], 200)
    if stats.drafter == _NOT_DRAFTING:
        return "--drafter none was chosen, or no drafter could be loaded"
    if not stats.undrafted:
        return "the answer was too short" if stats.num_emitted else "nothing was written"
    return max(stats.undrafted, key=lambda reason: stats.undrafted[reason])


def format_origin_shares(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Each origin of tokens with a text of its share, the target first."""
    ordered = sorted(counts.items(), key=lambda each: (each[0] != "target", -each[1]))
    total = sum(counts.values())
    return [(origin, f"{one_line(origin, 40)} {count / total:.0%}") for origin, count in ordered]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The values that the line below the input shows.

    num_context: None where the model cannot be sent the messages, as the next one says.
    """

    model: str
    devices: tuple[str, str]
    drafter: str
    num_context: int | None
    context_length: int
    stats: Stats | None = None
    has_looped: bool = False
    hint: str = ""

    @property
    def context(self) -> str:
        if self.num_context is None:
            return f"context ?/{self.context_length}"
        if self.num_context > self.context_length:  # what a further message takes beside its text
            return f"context {self.context_length}/{self.context_length}, full"
        return f"context {self.num_context}/{self.context_length}"

    @property
    def gain(self) -> str:
        gain = self.stats.gain if self.stats and not self.has_looped else None
        return f"{gain.value:.2f} times as fast" if gain else ""

    @property
    def speed(self) -> str:
        speed = self.stats.decode_tokens_per_second if self.stats else None
        return f"{format_speed(speed, 0)} tokens/s" if speed else ""

    @property
    def drafting(self) -> str:
        if self.stats is None:
            off = self.drafter == _NOT_DRAFTING
            return "drafting is off" if off else f"drafter: {one_line(self.drafter, 60)}"
        if self.has_looped:
            return "the answer repeated itself"
        if not self.stats.num_drafted:
            return f"drafting is off: {reason_off(self.stats)}"
        names = "+".join(name for name, each in self.stats.sources.items() if each["drafted"])
        device = self.stats.drafter_device
        where = f" on {device}" if device not in (None, self.devices[0]) else ""
        return f"{one_line(names, 40)}{where}: {self.stats.acceptance_rate:.0%} of guesses right"


def format_status(status: Status, columns: int) -> str:
    """The status in one line of at most so many columns; the parts that matter most come first.

    Where the name of the model leaves no room for figures, it is left out.
    """
    model = f"{one_line(status.model, 40)} on {status.devices[0]}"
    begin = [part for part in (status.hint, model, status.context) if part]
    if len(" · ".join(begin)) <= columns:
        return _join_fitting([*begin, status.drafting, status.gain, status.speed], columns)
    parts = [status.hint, status.context, status.speed, status.gain, status.drafting]
    line = _join_fitting(parts, columns)
    first = status.hint or status.context
    return line or first[: max(0, columns - 1)] + "…"


def _join_fitting(parts: Sequence[str], columns: int) -> str:
    """The parts up to the first one that does not fit."""
    line = ""
    for part in filter(None, parts):
        longer = f"{line} · {part}" if line else part
        if len(longer) > columns:
            break
        line = longer
    return line


def format_report(
    stats: Stats, downgrades: Sequence[str], devices: tuple[str, str], *, has_looped: bool = False
) -> list[str]:
    """Lines on whether drafting helps, what drafts, and what does not and why."""
    lines = [_LOOPED if has_looped else _format_gain(stats)]
    if stats.decode_tokens_per_second:
        lines.append(
            f"{format_speed(stats.decode_tokens_per_second)} tokens/s: the model ran {stats.passes} times for "
            f"{format_count(stats.num_emitted, 'token')} ({stats.tokens_per_pass:.2f} tokens per pass)"
        )
    if stats.time_to_first_token_s is not None:
        speed = stats.prefill_tokens_per_second
        read = f", prompt read at {format_speed(speed, 0)} tokens/s" if speed else ""
        lines.append(f"first token after {stats.time_to_first_token_s:.2f} s{read}")
    where = f", drafter on {stats.drafter_device}" if stats.drafter_device else ""
    overlap = f", both busy for {stats.overlap:.0%} of the time" if stats.overlap else ""
    lines.append(f"model on {devices[0]}{where}; schedule: {stats.schedule}{overlap}")
    drafted = {name: each for name, each in stats.sources.items() if each["drafted"]}
    for name, each in drafted.items():
        lines.append(
            f"{one_line(name, 40)}: {each['drafted']} tokens drafted in {each['rounds']} passes, "
            f"{each['accepted']} accepted ({each['accepted'] / each['drafted']:.0%})"
        )
    lines += _format_acceptance(stats)
    silent = sorted({*stats.drafter.split("+")} - {_NOT_DRAFTING, *drafted})
    lines += [f"{one_line(name, 40)}: nothing drafted in this answer" for name in silent]
    for reason, count in sorted(stats.undrafted.items(), key=lambda each: -each[1]):
        lines.append(f"{count} of {stats.passes} passes had no draft: {reason}")
    return lines + [f"changed in this chat: {one_line(line, 300)}" for line in downgrades]


def _format_gain(stats: Stats) -> str:
    if not stats.num_drafted:
        return f"drafting is off: {reason_off(stats)}"
    gain = stats.gain
    if gain is None:
        return "drafting is on; what it saves is not known yet: that takes more passes with and without drafts"
    verdict = "helped" if gain.is_shown else "slowed this down" if gain.is_loss else "made little difference"
    return (
        f"drafting {verdict}: about {gain.value:.2f} times the speed of plain decoding in this answer (another "
        "answer may differ by 6 %; edgespec bench measures many)"
    )


def _format_acceptance(stats: Stats) -> list[str]:
    """How much of what each source guessed was right, now and before, and what to check where that fell."""
    lines = []
    for name, change in sorted(stats.acceptance.items()):
        before = "" if change.before is None else f", {change.before:.0%} in earlier answers"
        lines.append(f"{one_line(name, 40)}: {change.now:.0%} of its guesses were right lately{before}")
        if change.is_notable and change.before is not None and change.now < change.before:
            lines.append("  fewer than before: another drafter may suit such texts better (/drafter)")
    return lines
