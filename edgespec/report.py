"""A benchmark's document for reading: as a table, and as a page that stands by itself.

Names, prompts and answers in it are whatever somebody wrote: the template escapes them, and a terminal gets them
without control characters.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.errors import UsageError
from edgespec.report_svg import Bar, Point, Range, grouped_bars, lanes, pass_costs, position_bars, ranges

Document = Mapping[str, Any]
_LARGEST_BYTES = 1 << 26
# A mean of fewer passes says little on a machine that others use.
_FEW = 5
# What a document of another shape makes of the code below.
MISSHAPEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class Table(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False


class Tile(NamedTuple):
    figure: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """A chart with its words, and the same figures as a table."""

    title: str
    note: str
    svg: str = ""
    legend: Sequence[tuple[str, str]] = ()
    quotes: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    is_wide: bool = False


class _Unsound(ValueError):
    """What is wrong with a document, in words."""


def read_document(path: Path) -> Document:
    """What `edgespec bench --json` printed.

    Raises:
        UsageError: The file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise _Unsound(f"it holds more than {_LARGEST_BYTES >> 20} MiB")
        document = json.loads(content.decode("utf-8-sig"), parse_constant=_refuse)
        if not isinstance(document, dict):
            raise _Unsound("it holds no object")
        if not {"model", "categories", "mean_ratio", "worst_ratio", "machine"} <= document.keys():
            raise _Unsound("it lacks what each has, such as model and categories")
        page(document)
        table(document)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no document of edgespec bench --json: it is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is no document of edgespec bench --json: no JSON ({error})") from None
    except _Unsound as error:
        raise UsageError(f"{path} is no document of edgespec bench --json: {error}") from None
    except MISSHAPEN as error:
        why = f"a figure is missing or of another kind ({type(error).__name__}: {error!s:.150})"
        raise UsageError(f"{path} is no document of edgespec bench --json: {why}") from None
    found: Document = document
    return found


def _refuse(constant: str) -> float:
    raise _Unsound(f"{constant} is no figure")


def table(document: Document) -> str:
    """The document for a terminal."""
    if not document["categories"]:
        return "nothing was decoded: no answer went beyond its first pass; allow more with --max-tokens"
    width = max(len(printable(name)) for name in document["categories"])
    head = f"{'plain':>7}  {'drafted':>7}  {'ratio':>5}  {'middle half':>11}  {'a pass':>6}  {'kept':>5}"
    lines = [f"{'':{width}}  {head}  rounds by source"]
    for name, row in document["categories"].items():
        lines.append(
            f"{printable(name):{width}}  {row['plain_tokens_per_second']:7.1f}  "
            f"{row['speculative_tokens_per_second']:7.1f}  {row['ratio']:5.2f}  {_middle(row.get('ratios')):>11}  "
            f"{_or_blank(row['tokens_per_pass'], '.2f'):>6}  {_or_blank(row['acceptance_rate'], '.0%'):>5}  "
            f"{printable(_shares(row.get('sources', {})))}"
        )
    lines.append(
        f"mean ratio {document['mean_ratio']:.3f}, worst {document['worst_ratio']:.3f}{_median(document)}"
    )
    return "\n".join([*lines, *_peer_lines(document), *_further_lines(document)])


def _median(document: Document) -> str:
    found = document.get("ratios")
    return "" if not found else f"; of {found['count']} answers median {found['median']:.3f} ({_middle(found)})"


def _peer_lines(document: Document) -> list[str]:
    lines = []
    for peer in document.get("peers", ()):
        said = f"{_times(peer['mean_ratio'])} of plain" if peer["mean_ratio"] else "no answers"
        said += f", {peer['same_answers']} of {peer['answers']} answers the same, {_mb(peer['peak_rss_bytes'])}"
        said += f"; {peer['failure']}" if peer["failure"] else ""
        lines.append(printable(f"{peer['name']} {peer['version']} ({peer['way']}): {said}"))
    lines += [printable(f"not here: {each['name']} ({each['install']})") for each in document.get("absent", ())]
    return lines


def _further_lines(document: Document) -> list[str]:
    lines = []
    if first := document.get("time_to_first_token_s"):
        lines.append(
            f"first token after {_ms(first['plain'])} plain, {_ms(first['speculative'])} speculative (medians)"
        )
    if counts := _positions(document):
        shares = " ".join(f"{kept / drafted:.0%}" for drafted, kept in counts[:12])
        lines.append(f"kept by position: {shares}")
    if memory := document.get("memory"):
        lines.append(f"most memory of this process, models included: {_mb(memory['process_peak_rss_bytes'])}")
    return lines


def printable(text: str) -> str:
    """Nothing in it steers a terminal."""
    return "".join(each if each.isprintable() else "�" for each in text)


def _or_blank(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _middle(found: Mapping[str, float] | None) -> str:
    return "" if not found else f"{found['quartile_1']:.2f}–{found['quartile_3']:.2f}"


def _shares(sources: Mapping[str, Mapping[str, int]]) -> str:
    rounds = {name: counts["rounds"] for name, counts in sources.items()}
    whole = sum(rounds.values()) or 1
    return ", ".join(
        f"{name} {rounds[name] / whole:.0%}" for name in sorted(rounds, key=lambda name: -rounds[name])
    )


def page(document: Document) -> str:
    """The document as one HTML file that refers to nothing outside itself."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(
        resources.files("edgespec").joinpath("report.html").read_text(encoding="utf-8")
    )
    # The charts alone are markup: an XML writer escaped what is in them.
    cards = [{**vars(card), "svg": Markup(card.svg)} for card in _filled(_cards(document))]
    return template.render(doc=document, tiles=_tiles(document), cards=cards)


def _tiles(document: Document) -> list[Tile]:
    tiles = []
    if document["mean_ratio"] is not None:
        tiles += [
            Tile(_times(document["mean_ratio"]), "speed of plain decoding, mean of the categories"),
            Tile(_times(document["worst_ratio"]), "in the worst category"),
        ]
    if found := document.get("ratios"):
        tiles.append(
            Tile(_times(found["median"]), f"median of {found['count']} answers, half in {_middle(found)}")
        )
    if document.get("tokens_per_pass"):
        tiles.append(Tile(f"{document['tokens_per_pass']:.2f}", "tokens a pass of the target"))
    if document.get("acceptance_rate") is not None:
        tiles.append(Tile(f"{document['acceptance_rate']:.0%}", "of drafted tokens kept"))
    if (first := document.get("time_to_first_token_s")) and first["speculative"]:
        tiles.append(Tile(_ms(first["speculative"]), f"to the first token (plain {_ms(first['plain'])})"))
    if memory := document.get("memory"):
        tiles.append(Tile(_mb(memory["process_peak_rss_bytes"]), "most memory of the process, models included"))
    if document.get("answers"):
        tiles.append(
            Tile(f"{document['same_answers']} of {document['answers']}", "answers equal to plain decoding's")
        )
    return tiles


def _filled(cards: list[Card]) -> list[Card]:
    """With the last of an odd number of narrow cards as wide as two, so that none stands alone in its row."""
    narrow = [i for i, card in enumerate(cards) if not card.is_wide]
    if len(narrow) % 2:
        cards[narrow[-1]] = replace(cards[narrow[-1]], is_wide=True)
    return cards


def _cards(document: Document) -> list[Card]:
    cards = []
    if document["categories"]:
        cards.append(_speed_card(document))
        if any(row.get("ratios") for row in document["categories"].values()):
            cards.append(_gain_card(document))
    if _positions(document):
        cards.append(_acceptance_card(document))
    if (passes := document.get("passes")) and passes["step_s"] and passes["widths"]:
        cards.append(_cost_card(passes))
    if sample := document.get("sample"):
        cards.append(_sample_card(sample))
    if document.get("peers") or document.get("absent"):
        cards.append(_peer_card(document))
    return [*cards, _host_card(document)]


def _speed_card(document: Document) -> Card:
    peers = [peer for peer in document.get("peers", ()) if peer["categories"]]
    groups = {}
    for name, row in document["categories"].items():
        plain, fast = row["plain_tokens_per_second"], row["speculative_tokens_per_second"]
        groups[name] = [
            Bar("plain", plain, f"{plain:.0f}"),
            Bar("fast", fast, f"{fast:.0f} · {_times(row['ratio'])}"),
            *(
                Bar(_peer_style(i), peer["categories"][name], f"{peer['categories'][name]:.0f}")
                for i, peer in enumerate(peers)
                if name in peer["categories"]
            ),
        ]
    legend = [("plain", "edgespec, plain"), ("fast", "edgespec, speculative")]
    legend += [(_peer_style(i), f"{peer['name']}, {peer['way']}") for i, peer in enumerate(peers)]
    return Card(
        title="Tokens a second by category",
        note="Decoding after the first token; all answered the same prompts in turn.",
        svg=grouped_bars(groups, "Tokens a second by category"),
        legend=legend,
        tables=[_speed_table(document, peers)],
        is_wide=bool(peers),
    )


def _peer_style(number: int) -> str:
    return f"peer{1 + number % 5}"


def _speed_table(document: Document, peers: Sequence[Document]) -> Table:
    head = ["category", "plain", "speculative", "ratio", "a pass", "kept", "rounds by source"]
    head += [f"{peer['name']}, {peer['way']}" for peer in peers]
    rows = [
        [
            name,
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speculative_tokens_per_second']:.1f}",
            f"{row['ratio']:.3f}",
            _or_blank(row["tokens_per_pass"], ".2f"),
            _or_blank(row["acceptance_rate"], ".0%"),
            _shares(row.get("sources", {})),
            *(_or_blank(peer["categories"].get(name), ".1f") for peer in peers),
        ]
        for name, row in document["categories"].items()
    ]
    return Table("These figures as a table", head, rows)


def _gain_card(document: Document) -> Card:
    rows, cells = [], []
    for name, row in document["categories"].items():
        found = row["ratios"]
        rows.append(
            Range(name, found["median"], found["quartile_1"], found["quartile_3"], found["min"], found["max"])
        )
        cells.append([name, str(found["count"]), *(f"{getattr(rows[-1], key):.3f}" for key in Range._fields[1:])])
    return Card(
        title="Gain over plain decoding, answer by answer",
        note="Dot: median. Thick line: the middle half of the answers. Thin line: all of them. Dashed: no gain.",
        svg=ranges(rows, "Gain over plain decoding by category"),
        tables=[
            Table(
                "These figures as a table",
                ["category", "answers", "median", "quartile 1", "quartile 3", "least", "most"],
                cells,
            )
        ],
    )


def _positions(document: Document) -> list[tuple[int, int]]:
    counts = [(each["drafted"], each["kept"]) for each in document.get("acceptance_by_position", ())]
    return [(drafted, kept) for drafted, kept in counts if drafted]


def _acceptance_card(document: Document) -> Card:
    counts = _positions(document)
    rows = [
        [str(i + 1), str(drafted), str(kept), f"{kept / drafted:.0%}"] for i, (drafted, kept) in enumerate(counts)
    ]
    return Card(
        title="Drafted tokens kept, by position",
        note="Of the drafts that are at least so long, the percentage kept up to there. Paler: fewer such drafts.",
        svg=position_bars(counts, "Percentage of drafted tokens kept by position in the draft"),
        tables=[Table("These figures as a table", ["position", "drafts", "kept", "share"], rows)],
    )


def _cost_card(passes: Document) -> Card:
    step_s = passes["step_s"]
    whole = sum(each["passes"] for each in passes["widths"].values())
    points = [
        Point(int(width), each["seconds"] / each["passes"] / step_s, each["passes"] / whole, each["passes"] < _FEW)
        for width, each in passes["widths"].items()
        if each["passes"]
    ]
    widest = max(point.width for point in points)
    curve = sorted((int(width), float(ratio)) for width, ratio in passes["ratios"].items())
    curve = [each for each in curve if each[0] <= max(widest, 8)]
    rows = [
        [
            str(point.width),
            str(passes["widths"][str(point.width)]["passes"]),
            f"{point.share:.1%}",
            _ms(point.cost * step_s),
            f"{point.cost:.2f}",
        ]
        for point in points
    ]
    return Card(
        title="What a pass takes by its width, and widths chosen",
        note=f"In passes of one token ({_ms(step_s)}). Line: what the gate reckons with. Dots: measured here, "
        f"hollow where fewer than {_FEW} passes were. "
        "Dashed: as dear as single passes. Columns: how often each width was run.",
        svg=pass_costs(
            curve, points, "Cost of a pass by its width in tokens, and how often each width was chosen"
        ),
        tables=[Table("These figures as a table", ["width", "passes", "share", "time", "in steps"], rows)],
    )


def _sample_card(sample: Document) -> Card:
    rows = [
        [
            each["lane"],
            each["what"],
            *(f"{1e3 * each[edge]:.1f}" for edge in ("start_s", "end_s")),
            str(each["num_tokens"]),
        ]
        for each in sample["speculative"]
    ]
    return Card(
        title="A sample answer, pass by pass",
        note=f"The answer nearest the median gain ({_times(sample['ratio'])}), of {sample['category']}: a "
        "stretch of typical yield, the same tokens by plain decoding and by speculation. A block is a pass of the "
        "target, and its figure the tokens that it gave.",
        svg=lanes(sample["plain"], sample["speculative"], "When each lane worked on a sample answer"),
        legend=[("plain", "a pass, one token"), ("fast", "a pass of speculation"), *_drafts(sample)],
        quotes=[("Prompt", sample["prompt"]), ("Answer", sample["answer"])],
        tables=[
            Table("The intervals of speculation as a table", ["lane", "work", "from ms", "to ms", "tokens"], rows)
        ],
        is_wide=True,
    )


def _drafts(sample: Document) -> list[tuple[str, str]]:
    has_lane = any(each["lane"] != "target" for each in sample["speculative"])
    return [("draft", "a model drafts")] if has_lane else []


def _peer_card(document: Document) -> Card:
    rows = [
        [
            f"{peer['name']} {peer['version']}",
            peer["way"],
            peer.get("file", ""),
            _or_blank(peer["mean_ratio"], ".3f"),
            _ms(peer["time_to_first_token_s"]),
            f"{peer['same_answers']} of {peer['answers']}",
            _mb(peer["peak_rss_bytes"]),
            peer["failure"] or "",
        ]
        for peer in document.get("peers", ())
    ]
    rows += [[each["name"], "not here", each["install"], *5 * [""]] for each in document.get("absent", ())]
    head = ["runtime", "way", "file", "to our plain", "first token", "same answer", "most memory", "problem"]
    return Card(
        title="Other runtimes in the same run",
        note="Greedy, each in its own process, on the same prompt tokens and as many threads. Where answers "
        "differ from ours, its arithmetic does; that also changes how well a text can be drafted.",
        tables=[Table("Figures", head, rows)],
        is_wide=True,
    )


def _host_card(document: Document) -> Card:
    rows = [
        ["machine", document["machine"]],
        *([key, str(text)] for key, text in document.get("host", {}).items()),
    ]
    if memory := document.get("memory"):
        rows.append(["weights of the target", _mb(memory["target_weights_bytes"])])
        rows.append(["its KV cache", f"{memory['target_kv_cache_bytes_per_token'] / 1e3:.1f} kB a token"])
    return Card(
        title="Machine and versions",
        note="Ratios compare neighbours in time; absolute figures hold for this machine in this hour.",
        tables=[Table("Measured with", [], rows, is_text=True)],
        is_wide=True,
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def _mb(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "–"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
