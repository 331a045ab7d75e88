"""The command that shows what edgespec did for its user, from counts in the model home."""

import argparse
import re
from dataclasses import asdict
from datetime import date, timedelta

import edgespec
from edgespec import UsageError
from edgespec.cli.arguments import model_home, print_result
from edgespec.cli.table import table

_COUNTED = "answers of chat and serve are counted, and those of programs that call load(…, usage=True)"
_PERIOD = re.compile(r"(\d{1,5})([dw])")


def add_stats(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=_first_day,
        help="count from this day on: 7d, 4w or 2026-11-30 (default: all)",
    )
    parser.add_argument("--delete", action="store_true", help="delete all counts")
    parser.set_defaults(run=_stats)


def _first_day(text: str) -> date:
    """The day of a date, or the first of so many days or weeks up to today."""
    try:
        if found := _PERIOD.fullmatch(text):
            first = date.today() - timedelta(int(found[1]) * (7 if found[2] == "w" else 1) - 1)
        else:
            first = date.fromisoformat(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a day; wanted 7d, 4w or a date such as 2026-11-30"
        ) from None
    if first > date.today():
        raise argparse.ArgumentTypeError(f"'{text}' begins after today; today alone is 1d")
    return first


def _stats(options: argparse.Namespace) -> None:
    file = edgespec.UsageFile((home := model_home()).path)
    if options.delete:
        if options.since:
            raise UsageError("--delete forgets all counts, also those before --since; leave out one of them")
        had_any = file.delete()
        print_result(options, {"deleted": had_any}, f"deleted {file.path}" if had_any else "there are no counts")
        return
    since = str(options.since or "")
    # A month that has ended counts from its first day on.
    counts: dict[edgespec.UsageKey, edgespec.Usage] = {}
    for key, each in file.read().items():
        if key.day >= since[: len(key.day)]:
            named = key._replace(model=home.current_name(key.model))
            counts[named] = counts.get(named, edgespec.Usage()) + each
    total = sum(counts.values(), edgespec.Usage())
    rows = [{**key._asdict(), **asdict(each)} for key, each in counts.items()]
    document = {"path": str(file.path), "since": since or None, "total": asdict(total), "counts": rows}
    print_result(options, document, *_lines(counts, total, since))


def _lines(counts: "dict[edgespec.UsageKey, edgespec.Usage]", total: "edgespec.Usage", since: str) -> list[str]:
    if not counts:
        return [f"nothing was counted{f' since {since}' if since else ' yet'}; {_COUNTED}"]
    first = min(key.day for key in counts)
    lines = [
        f"{total.tokens:,} tokens in {total.answers:,} answer{'s' * (total.answers != 1)} since {since or first}; "
        f"{_share(total)} of them drafted correctly",
        _saved_line(total),
    ]
    for name in ("model", "device", "day"):
        sums: dict[str, edgespec.Usage] = {}
        for key, each in counts.items():
            part = getattr(key, name)
            sums[part] = sums.get(part, edgespec.Usage()) + each
        head = [name.upper(), "ANSWERS", "TOKENS", "BY DRAFTS", "TIME SAVED"]
        lines += ["", *table(None, [], head, *(_row(each, sums[each]) for each in sorted(sums)))]
    return lines


def _row(name: str, usage: "edgespec.Usage") -> list[str]:
    saved = _duration(usage.saved_s) if usage.measured else "not measured"
    return [name, f"{usage.answers:,}", f"{usage.tokens:,}", _share(usage), saved]


def _saved_line(total: "edgespec.Usage") -> str:
    if not total.measured:
        return "the time that drafting saved is not known"
    plain_s = total.decode_s + total.saved_s
    saved = f"drafting saved about {_duration(total.saved_s)} of {_duration(plain_s)}"
    if round(total.saved_s, 1) < 0:
        saved = f"drafting lost about {_duration(-total.saved_s)}, where plain decoding takes {_duration(plain_s)}"
    return f"{saved} (measured in {total.measured:,} of the answers)"


def _share(usage: "edgespec.Usage") -> str:
    return f"{usage.accepted / usage.tokens:.0%}" if usage.tokens else "0%"


def _duration(seconds: float) -> str:
    """2 h 5 min, 3 min 20 s, 42 s or 0.4 s."""
    if abs(seconds) < 9.95:
        return f"{round(seconds, 1) + 0.0:.1f} s"  # no -0.0
    sign, whole = "-" if seconds < 0 else "", round(abs(seconds))
    if whole < 60:
        return f"{sign}{whole} s"
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60} s"
    return f"{sign}{whole // 3600} h {whole // 60 % 60} min"
