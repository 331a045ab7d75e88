"""A benchmark's document as one HTML file that refers to nothing outside itself. Its text is in page.html.

Names, prompts and answers may hold anything: the template escapes them.
"""

from importlib import resources

from edgespec.evaluation import figures
from edgespec.evaluation.charts import Bar, Point, RangeBar, grouped_bars, lanes, pass_costs, position_bars, ranges
from edgespec.evaluation.document import BenchDocument, PassFigures
from edgespec.system.printable import one_line

_NUM_PEER_STYLES = 5
# The mean of fewer passes says little on a machine that other programs use.
_FEW = 5
_SHORTEST_CURVE = 8  # tokens
_CATEGORY_CHARACTERS = 22  # before the count, which a chart must have room for
_VERDICTS = (figures.decided_text, figures.slower_prompts_text, figures.texts_text, figures.setup_text)


def page(document: BenchDocument) -> str:
    """The document as one HTML file."""
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "ratio": figures.ratio_text,
        "time": figures.time_text,
        "size": figures.size_text,
        "percent": figures.percent_text,
        "middle_half": figures.middle_half,
        "interval": figures.interval_text,
        "rounds_by_source": figures.rounds_by_source,
        "peer_label": figures.peer_label,
    }
    source = resources.files("edgespec.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        doc=document,
        # An XML writer escaped all text in the charts.
        charts={name: Markup(svg) for name, svg in _charts(document).items()},
        positions=figures.drafted_positions(document["acceptance_by_position"]),
        few=_FEW,
        verdict=figures.verdict_text(document),
        verdicts=[text for describe in _VERDICTS if (text := describe(document))],
    )


def _charts(document: BenchDocument) -> dict[str, str]:
    """Charts by name, where the document has what they show."""
    svgs = {}
    if document["categories"]:
        svgs["speed"] = _speed_chart(document)
        if gains := _gains(document):
            svgs["gain"] = ranges(gains, "Gain over plain decoding by category, with 95 % intervals")
    if counts := figures.drafted_positions(document["acceptance_by_position"]):
        svgs["positions"] = position_bars(
            counts, "Percentage of drafted tokens accepted, by position in the draft"
        )
    passes = document["passes"]
    if passes["step_s"] and passes["widths"]:
        svgs["passes"] = _cost_chart(passes, passes["step_s"])
    if sample := document["sample"]:
        svgs["sample"] = lanes(sample["plain"], sample["speculative"], "A sample answer, pass by pass")
    return svgs


def _gains(document: BenchDocument) -> list[RangeBar]:
    """The mean of all categories and each of them: the interval is thick, the range of answers thin."""
    known = [
        (_with_count(name, row["prompts"]), row["ratio"], row["ratio_interval"], row["ratios"])
        for name, row in document["categories"].items()
    ]
    mean = document["mean_ratio"]
    if len(known) > 1 and mean:
        known.insert(0, ("mean of the categories", mean, document["mean_ratio_interval"], document["ratios"]))
    return [
        RangeBar(name, ratio, *(interval or (ratio, ratio)), found["min"], found["max"])
        for name, ratio, interval, found in known
        if found
    ]


def _with_count(name: str, num_prompts: int) -> str:
    return f"{one_line(name, _CATEGORY_CHARACTERS)} ({num_prompts} prompt{'' if num_prompts == 1 else 's'})"


def _speed_chart(document: BenchDocument) -> str:
    groups = {}
    for name, row in document["categories"].items():
        plain, fast = row["plain_tokens_per_second"], row["speculative_tokens_per_second"]
        bars = [
            Bar("plain", plain, f"{plain:.0f} tokens/s"),
            Bar("fast", fast, f"{fast:.0f} tokens/s · {figures.ratio_text(row['ratio'])}"),
        ]
        for i, peer in enumerate(document["peers"]):
            if speed := peer["categories"].get(name):
                bars.append(Bar(f"peer{1 + i % _NUM_PEER_STYLES}", speed, f"{speed:.0f} tokens/s"))
        groups[_with_count(name, row["prompts"])] = bars
    return grouped_bars(groups, "Tokens per second by category")


def _cost_chart(passes: PassFigures, step_s: float) -> str:
    whole = sum(each["passes"] for each in passes["widths"].values())
    points = [
        Point(width, each["seconds"] / each["passes"] / step_s, each["passes"] / whole, each["passes"] < _FEW)
        for width, each in passes["widths"].items()
    ]
    widest = max(_SHORTEST_CURVE, *passes["widths"])
    curve = sorted(each for each in passes["ratios"].items() if each[0] <= widest)
    return pass_costs(curve, points, "Cost of a pass by its tokens, and how often each number was run")
