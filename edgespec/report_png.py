"""A benchmark's document as one picture, by matplotlib."""

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgespec.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLAIN, _FAST, _DRAFT = "#9aa5b1", "#0b72b9", "#c2701c"
_PEERS = ("#6d9f71", "#3f7d4e", "#a78bba", "#7b5a96", "#c9a227")
_MOST_POSITIONS = 12


def expect_matplotlib() -> None:
    """Raises UsageError: it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("a PNG needs matplotlib, which is not here: pip install matplotlib") from None


def picture(document: Mapping[str, Any]) -> bytes:
    """Bars by category, acceptance by position and costs of passes, as a PNG."""
    expect_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    speeds_inches = 0.6 + max(len(document["categories"]), 1) * (
        0.14 + 0.15 * (2 + len(document.get("peers", ())))
    )
    figure = Figure(figsize=(11, 3.2 + speeds_inches), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[speeds_inches, 2.6])
    _speeds(figure.add_subplot(grid[0, :]), document)
    _acceptance(figure.add_subplot(grid[1, 0]), document)
    _costs(figure.add_subplot(grid[1, 1]), document)
    figure.suptitle(_plain_text(_title(document)), x=0.01, ha="left", fontsize=11)
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def _title(document: Mapping[str, Any]) -> str:
    parts = [document["model"], document.get("host", {}).get("processor") or document["machine"]]
    if document["mean_ratio"] is not None:
        parts.insert(1, f"{document['mean_ratio']:.2f}× the speed of plain decoding")
    return " · ".join([*parts, *([document["measured_at"]] if "measured_at" in document else [])])


def _plain_text(text: str) -> str:
    """Without the signs that matplotlib reads as mathematics."""
    return "".join(each if each.isprintable() else "�" for each in text).replace("$", r"\$")


def _speeds(axes: "Axes", document: Mapping[str, Any]) -> None:
    names = list(document["categories"])
    rows = document["categories"].values()
    series = [
        ("plain", _PLAIN, [row["plain_tokens_per_second"] for row in rows]),
        ("speculative", _FAST, [row["speculative_tokens_per_second"] for row in rows]),
    ]
    for i, peer in enumerate(document.get("peers", ())):
        speeds = [peer["categories"].get(name, 0.0) for name in names]
        series.append((f"{peer['name']}, {peer['way']}", _PEERS[i % len(_PEERS)], speeds))
    height = 0.8 / len(series)
    for i, (label, colour, speeds) in enumerate(series):
        places = [row + (i - (len(series) - 1) / 2) * height for row in range(len(names))]
        drawn = axes.barh(places, speeds, 0.9 * height, color=colour, label=_plain_text(label))
        texts = [f"{speed:.0f}" for speed in speeds]
        if label == "speculative":
            texts = [f"{text}  {row['ratio']:.2f}×" for text, row in zip(texts, rows, strict=True)]
        axes.bar_label(drawn, texts, padding=3, fontsize=7)
    axes.set_yticks(range(len(names)), [_plain_text(name) for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.set_title("Tokens a second by category", loc="left", fontsize=10)
    if names:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _quiet(axes)


def _acceptance(axes: "Axes", document: Mapping[str, Any]) -> None:
    counts = [each for each in document.get("acceptance_by_position", ()) if each["drafted"]][:_MOST_POSITIONS]
    places = range(1, len(counts) + 1)
    axes.bar(places, [100 * each["kept"] / each["drafted"] for each in counts], color=_FAST)
    axes.set_xticks(places)
    axes.set_ylim(0, 100)
    axes.set_title("Percent of drafted tokens kept, by position", loc="left", fontsize=10)
    _quiet(axes)


def _costs(axes: "Axes", document: Mapping[str, Any]) -> None:
    axes.set_title("A pass by its width, in steps; columns: share of passes", loc="left", fontsize=10)
    _quiet(axes)
    passes = document.get("passes")
    if not passes or not passes["step_s"] or not passes["widths"]:
        return
    widths = {int(width): each for width, each in passes["widths"].items()}
    whole = sum(each["passes"] for each in widths.values())
    shares = axes.twinx()
    shares.bar(list(widths), [100 * each["passes"] / whole for each in widths.values()], color=_PLAIN, alpha=0.5)
    shares.set_ylabel("% of passes", fontsize=8)
    _quiet(shares)
    curve = sorted((int(width), ratio) for width, ratio in passes["ratios"].items() if int(width) <= max(widths))
    axes.plot([width for width, _ in curve], [ratio for _, ratio in curve], color=_FAST)
    costs = [each["seconds"] / each["passes"] / passes["step_s"] for each in widths.values()]
    axes.plot(list(widths), costs, "o", color=_DRAFT, markersize=4)
    axes.set_ylim(0)
    axes.set_zorder(shares.get_zorder() + 1)
    axes.patch.set_visible(False)


def _quiet(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
