import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import chromium
import pytest

from edgespec import SamplingParams, UsageError, load
from edgespec.cli.main import main
from edgespec.draft.timeline import Interval
from edgespec.evaluation.benchmark import AnsweredTurn, choose_sample, measure
from edgespec.evaluation.charts import Bar, Point, RangeBar, grouped_bars, lanes, pass_costs, position_bars, ranges
from edgespec.evaluation.document import LARGEST_FIGURE, read_document
from edgespec.evaluation.figures import verdict_text
from edgespec.evaluation.page import page
from edgespec.evaluation.prompts import BenchPrompt
from edgespec.evaluation.results import build_document
from edgespec.evaluation.table import table

HOSTILE = "<script>alert('x')</script>&\x1b[31m"
PROMPTS = [BenchPrompt("a", ("the in the in the in", "second")), BenchPrompt("<b>", ("an on an on",))]
VOID = {"meta", "link", "br", "img", "input", "hr"}


@pytest.fixture(scope="module")
def document(tiny_model: Path) -> dict[str, Any]:
    with load(tiny_model, drafter="ngram", draft_length=3) as engine, load(tiny_model, drafter="none") as plain:
        found = measure(
            engine, PROMPTS, plain=plain, max_tokens=30, sampling=SamplingParams(temperature=0.8), rounds=2
        )
    found["host"] = {"processor": "P"}
    return found


@pytest.fixture
def with_peers(document: dict[str, Any]) -> dict[str, Any]:
    peer = {
        "name": "other", "version": "1", "way": "plain", "file": "m.gguf", "categories": {"a": 5.0},
        "by_category": {}, "failure": None, "mean_ratio": 0.5, "mean_ratio_interval": None,
        "speculative_ratio": None, "speculative_ratio_interval": None, "time_to_first_token_s": 0.1,
        "answers": 2, "same_answers": 1, "peak_rss_bytes": 10**8,
    }  # fmt: skip
    return {**document, "peers": [peer]}


@pytest.fixture
def with_drafters(document: dict[str, Any]) -> dict[str, Any]:
    """A run in which another drafter was measured, which drafted in one category alone."""
    row = {
        "tokens_per_second": 5.0, "ratio": 1.25, "ratio_interval": (1.0, 1.5), "tokens_per_pass": 1.5,
        "acceptance_rate": 0.5, "sources": {"suffix": {"rounds": 3}},
    }  # fmt: skip
    peer = {
        "name": "edgespec", "version": "1", "way": f"--drafter {'long/' * 9}head", "file": "",
        "categories": {"a": 5.0}, "by_category": {"a": row}, "failure": None,
        "mean_ratio": 1.25, "mean_ratio_interval": (1.0, 1.5),
        "speculative_ratio": 1.1, "speculative_ratio_interval": (1.05, 1.15), "time_to_first_token_s": 0.1,
        "answers": 2, "same_answers": 2, "peak_rss_bytes": 10**8,
    }  # fmt: skip
    return {**document, "peers": [peer]}


class Page(HTMLParser):
    """What a page holds, and whether its tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rects(svg: str, style: str) -> Iterator[dict[str, float]]:
    for each in ElementTree.fromstring(svg).iter("rect"):
        if style in each.attrib["class"].split():
            yield {name: float(each.attrib[name].rstrip("%")) for name in ("x", "y", "width", "height")}


def test_counts_of_a_document_agree_with_each_other(document: dict[str, Any]) -> None:
    rows = document["categories"].values()
    assert document["answers"] == 2 * 3 == document["ratios"]["count"]
    assert sum(row["ratios"]["count"] for row in rows) == document["ratios"]["count"]
    for i, place in enumerate(document["acceptance_by_position"]):
        places = [row["acceptance_by_position"] for row in rows]
        assert place["drafted"] == sum(each[i]["drafted"] for each in places if i < len(each))
        assert place["kept"] == sum(each[i]["kept"] for each in places if i < len(each))
    drafted = sum(place["drafted"] for place in document["acceptance_by_position"])
    kept = sum(place["kept"] for place in document["acceptance_by_position"])
    assert drafted == sum(counts["drafted"] for counts in document["sources"].values())
    assert kept == sum(counts["accepted"] for counts in document["sources"].values())
    assert document["acceptance_rate"] == kept / drafted
    rounds = sum(counts["rounds"] for counts in document["sources"].values())
    assert sum(each["passes"] for each in document["passes"]["widths"].values()) == rounds - document["answers"]
    assert max(map(int, document["passes"]["widths"])) == 1 + len(document["acceptance_by_position"])


def test_sample_begins_at_the_end_of_the_first_pass(document: dict[str, Any]) -> None:
    for way in ("plain", "speculative"):
        each = document["sample"][way]
        assert each[0]["start_s"] >= 0
        assert all(one["end_s"] <= other["start_s"] + 1e-5 for one, other in pairwise(each))
    assert {each["num_tokens"] for each in document["sample"]["plain"]} == {1}


def test_page_of_a_saved_document_is_that_of_the_run(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    assert page(read_document(path)) == page(document)
    assert table(read_document(path)) == table(document)


def test_document_of_a_run_that_stalled_is_read_back(document: dict[str, Any], tmp_path: Path) -> None:
    turns = json.loads(json.dumps(document["turns"]))
    for turn in turns:
        stalls = turn["category"] == "<b>" and turn["round"] == 1
        for way in ("plain", "speculative"):
            turn[way] |= {"decoded": 30, "decode_s": 1e5 if stalls and way == "speculative" else 1.0}
    stalled = build_document(document, turns)
    (tmp_path / "run.json").write_text(json.dumps(stalled))
    assert json.dumps(read_document(tmp_path / "run.json")) == json.dumps(stalled)
    assert stalled["worst_ratio_interval"][1] == pytest.approx(LARGEST_FIGURE)
    shown = table(stalled)
    assert "(unknown)" in shown
    assert not re.search(r"–>|–\d{4}", shown)
    assert "the speeds lie too far apart" in shown.splitlines()[0]


SPREAD = {
    "mean_ratio": 1.1, "mean_ratio_interval": None, "by_prompt": [{}] * 3, "enough_prompts": None, "below_one": [],
    "sources": {}, "acceptance_rate": None, "categories": {},
}  # fmt: skip
BOTH = (0.9, 1.34)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"mean_ratio": None}, None),
        ({"mean_ratio_interval": (1.05, 1.15)}, "drafting makes this model 1.10 times as fast here"),
        ({"mean_ratio_interval": (1.05, 1.15), "below_one": ["maths"]}, "as fast here, but maths slower"),
        ({"mean_ratio": 0.9, "mean_ratio_interval": (0.85, 0.95)}, "0.90 times as fast here, which is slower"),
        ({"mean_ratio": 1.0, "mean_ratio_interval": (0.97, 1.03)}, "no difference here that a reader notices"),
        ({"mean_ratio_interval": BOTH, "enough_prompts": 17}, "0.90 to 1.34 times as fast here; 3 prompts are"),
        ({"mean_ratio_interval": BOTH, "enough_prompts": 17}, "prompts are too few; some 20 would be enough"),
        ({"mean_ratio_interval": BOTH, "enough_prompts": 191}, "some 200 would be enough"),
        ({"mean_ratio_interval": BOTH, "enough_prompts": 1030}, "more than 1000 would be enough"),
        ({"mean_ratio_interval": (0.001, 1000), "enough_prompts": 9}, "the speeds lie too far apart"),
        ({"mean_ratio_interval": None}, "1.10 times as fast here, by too few answers to tell"),
        ({"mean_ratio_interval": BOTH, "by_prompt": [{}]}, "here; measure more prompts"),
        ({"mean_ratio_interval": (0.9, 1.3), "sources": {"none": {}}}, "nothing was drafted"),
    ],
)  # fmt: skip
def test_a_verdict_says_in_a_sentence_whether_drafting_pays(figures: dict[str, Any], said: str | None) -> None:
    found = verdict_text({**SPREAD, **figures})
    assert found is said is None or said in found


def test_table_and_page_begin_with_the_verdict(document: dict[str, Any]) -> None:
    verdict = verdict_text(document)
    assert table(document).splitlines()[0] == verdict
    texts = [each.strip() for each in Page(page(document)).texts if each.strip()]
    said = texts.index(f"{verdict[0].upper()}{verdict[1:]}.")
    assert said == 1 + max(i for i, each in enumerate(texts) if each == document["model"])


def test_page_is_well_formed_and_refers_to_nothing_outside(with_peers: dict[str, Any]) -> None:
    text = page(with_peers)
    found = Page(text)
    assert found.open == []
    names = {name for _, attributes in found.tags for name in attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "style", "onload"}
    assert not re.search(r"https?:|url\(|@import|//", text.replace("<!doctype html>", ""))
    assert "script" not in {tag for tag, _ in found.tags}
    charts = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(charts) == 5
    assert all(each["role"] == "img" and each["aria-label"] for each in charts)
    assert (
        sum(tag == "table" for tag, _ in found.tags) == len(charts) + 3
    )  # of the peers, also by category, and the machine


def test_other_drafters_have_their_ratios_by_category(with_drafters: dict[str, Any], tmp_path: Path) -> None:
    found = Page(page(with_drafters))
    assert found.open == []
    assert "1.25× 1.00–1.50" in found.texts
    assert sum(tag == "table" for tag, _ in found.tags) == 5 + 3  # of five charts, the drafters twice, the machine
    shown = table(with_drafters)
    assert "edgespec 1 (--drafter long/" in shown
    assert "1.25× (1.00–1.50) of plain; speculative is 1.10× (1.05–1.15) of it, 2 of 2 answers equal" in shown
    assert "exchange --drafter and --compare" in shown
    (row,) = [line for line in shown.splitlines() if line.startswith("  …")]
    assert re.match(r"  …(/long)+/head +5\.0  1\.250     1\.00–1\.50         1\.50    50%  suffix 100%$", row)
    (tmp_path / "run.json").write_text(json.dumps(with_drafters))
    assert table(read_document(tmp_path / "run.json")) == shown


def test_hostile_names_prompts_and_versions_are_text(with_peers: dict[str, Any]) -> None:
    peer = {**with_peers["peers"][0], "name": HOSTILE, "categories": {HOSTILE: 1.0}, "failure": HOSTILE}
    hostile = {
        **with_peers,
        "model": HOSTILE,
        "drafter": HOSTILE,
        "categories": {HOSTILE: with_peers["categories"]["a"]},
        "sample": {**with_peers["sample"], "prompt": HOSTILE, "answer": HOSTILE, "category": HOSTILE},
        "host": {HOSTILE: HOSTILE},
        "peers": [peer],
    }
    found = Page(page(hostile))
    assert found.open == []
    assert "script" not in {tag for tag, _ in found.tags}
    assert "<script>alert('x')</script>&" in "".join(found.texts)
    assert "\x1b" not in table(hostile)


def test_bars_are_as_long_as_their_figures() -> None:
    groups = {"a": [Bar("plain", 50.0, "50"), Bar("fast", 100.0, "100")], "b": [Bar("plain", 25.0, "25")]}
    widths = [each["width"] for each in rects(grouped_bars(groups, "t"), "bar")]
    assert widths[1] == pytest.approx(2 * widths[0])
    assert widths[1] == pytest.approx(4 * widths[2])


def test_bars_by_position_are_as_high_as_their_shares() -> None:
    heights = [each["height"] for each in rects(position_bars([(40, 40), (20, 10), (10, 1), (0, 0)], "t"), "bar")]
    assert len(heights) == 3
    assert [height / heights[0] for height in heights] == pytest.approx([1.0, 0.5, 0.1])


def test_columns_of_widths_are_as_high_as_their_shares() -> None:
    svg = pass_costs([(1, 1.0), (4, 1.5)], [Point(1, 1.0, 0.2), Point(4, 1.6, 0.8)], "t")
    low, high = (each["height"] for each in rects(svg, "bar"))
    assert high == pytest.approx(4 * low)


def test_lanes_have_one_scale_and_the_same_tokens() -> None:
    def run(num_tokens: int, starts: list[float], pass_s: float) -> list[dict[str, Any]]:
        common = {"lane": "target", "what": "verify", "num_tokens": num_tokens}
        return [{**common, "start_s": start, "end_s": start + pass_s} for start in starts]

    plain, fast = run(1, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1.0), run(2, [0.0, 1.5], 1.5)
    svg = lanes(plain, fast, "t")
    assert ElementTree.fromstring(svg).attrib["data-tokens"] == "4"
    singles, doubles = list(rects(svg, "plain")), list(rects(svg, "fast"))
    assert (len(singles), len(doubles)) == (4, 2)
    assert doubles[1]["x"] == pytest.approx(1.5 * singles[1]["x"])


@pytest.mark.parametrize("low", [1e-3, 0.7, 1.0])
@pytest.mark.parametrize("high", [1.001, 1.9, 30.0])
def test_ranges_lie_within_the_chart(low: float, high: float) -> None:
    svg = ranges([RangeBar("a", 1.0, low, high, low, high)], "t")
    ticks = [each for each in ElementTree.fromstring(svg).iter("text") if each.attrib["class"] == "tick"]
    assert 2 <= len(ticks) <= 12
    for line in ElementTree.fromstring(svg).iter("line"):
        assert 0 <= float(line.attrib["x1"].rstrip("%")) <= float(line.attrib["x2"].rstrip("%")) <= 100


def test_an_interval_is_drawn_whole_or_its_cut_ends_are_marked() -> None:
    def middles(low: float, high: float) -> tuple[list[str], list[float]]:
        chart = ElementTree.fromstring(ranges([RangeBar("a", 1.1, low, high, 1.0, 1.2)], "t"))
        (line,) = [each for each in chart.iter("line") if each.attrib["class"] == "middle"]
        marks = [each.text for each in chart.iter("text") if each.attrib["class"] == "cut"]
        return marks, [float(line.attrib[name].rstrip("%")) for name in ("x1", "x2")]

    assert middles(0.3, 3.9) == ([], pytest.approx([2, 98]))
    assert middles(0.9, 50.0)[0] == ["▶"]
    assert middles(0.001, 1000.0) == (["◀", "▶"], pytest.approx([2, 98]))


def test_document_without_answers_is_shown(document: dict[str, Any]) -> None:
    empty = {
        **document, "categories": {}, "mean_ratio": None, "worst_ratio": None, "ratios": None, "sample": None,
        "acceptance_by_position": [], "passes": {"step_s": None, "ratios": {}, "widths": {}},
        "acceptance_rate": None, "tokens_per_pass": None,
    }  # fmt: skip
    assert "Nothing was decoded" in page(empty)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{}", '{"model": 1}', 100_000 * "[", '{"model": NaN}', "\xff"]
    + [
        json.dumps({"model": "m", "categories": categories, "mean_ratio": 1, "worst_ratio": 1, "machine": "x"})
        for categories in ({"a": 1}, {"a": {}}, ["a"], {"a": {"plain_tokens_per_second": "x"}})
    ],
)
def test_file_that_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="is not a document"):
        read_document(path)


@pytest.mark.parametrize("value", [0, 5e-324, 1e12, 1e308, -1, 10**30, None, "\ud800", [], "missing"])
@pytest.mark.parametrize(
    "place",
    [
        "model",
        "ratios.max",
        "categories.a.ratio",
        "categories.a.acceptance_rate",
        "same_answers",
        "passes.step_s",
        "passes.widths.1.seconds",
        "sample.ratio",
        "sample.plain.0.end_s",
        "acceptance_by_position.0.drafted",
        "host.processor",
    ],
)
def test_hostile_figures_are_shown_or_refused(
    document: dict[str, Any], tmp_path: Path, place: str, value: object
) -> None:
    stated: Any = json.loads(json.dumps(document))
    *path, last = [int(key) if key == "0" else key for key in place.split(".")]
    part = stated
    for key in path:
        part = part[key]
    if value == "missing":
        del part[last]
    else:
        part[last] = value
    path_of_document = tmp_path / "run.json"
    path_of_document.write_text(json.dumps(stated))
    try:
        read = read_document(path_of_document)
    except UsageError:
        return
    assert Page(page(read)).open == []
    assert table(read)


def test_report_writes_the_page_and_nothing_else(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    target = tmp_path / "page.html"
    assert main(["bench", "--report", str(tmp_path / "run.json"), "--html", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text() == page(document)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "page.html"}
    assert main(["bench", "--report", str(tmp_path / "run.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(document))


def test_place_that_cannot_be_written_is_reported_before_anything_runs(tmp_path: Path) -> None:
    assert main(["bench", "no-such-model", "--html", str(tmp_path / "none" / "file")]) == 2
    assert main(["bench", "no-such-model", "--html", str(tmp_path)]) == 2


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc/self, a folder that refuses new files")
def test_what_was_measured_is_printed_where_the_page_cannot_be_written(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(document))
    monkeypatch.setattr("edgespec.cli.bench._require_writable", lambda options: None)
    assert main(["bench", "--report", str(tmp_path / "run.json"), "--json", "--html", "/proc/x.html"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(json.dumps(document))
    assert captured.err.startswith("edgespec: cannot write /proc/x.html (")


def test_model_and_report_exclude_each_other(tmp_path: Path) -> None:
    assert main(["bench", "--report", str(tmp_path / "x"), "--json"]) == 2
    assert main(["bench"]) == 2
    assert main(["bench", "model", "--report", str(tmp_path / "x")]) == 2


def test_a_sample_is_one_whose_gain_its_passes_explain() -> None:
    def turn(ratio: float, per_pass: float) -> Any:
        record = {
            "category": f"{ratio} {per_pass}",
            "plain": {"decoded": 100, "decode_s": ratio},
            "speculative": {"decoded": 100, "decode_s": 1.0},
        }
        stats = SimpleNamespace(passes=1 + round(100 / per_pass))
        timeline = [Interval("target", "verify", 0.0, 1.0, 1)]
        answer = SimpleNamespace(
            completion=SimpleNamespace(text="", timeline=timeline, stats=stats), num_decoded=100
        )
        return AnsweredTurn(record, "", answer, answer)  # type: ignore[arg-type]

    noisy, modest, most = turn(1.65, 1.02), turn(1.1, 1.5), turn(2.1, 2.5)
    chosen = choose_sample([noisy, modest, most])
    assert chosen is not None
    assert chosen["category"] == "2.1 2.5"
    assert choose_sample([noisy]) is not None


def test_the_page_explains_its_figures(document: dict[str, Any]) -> None:
    text = " ".join(Page(page(document)).texts)
    num_prompts = document["categories"]["a"]["prompts"]
    assert f"a ({num_prompts} prompt" in text
    for words in (
        "tokens/s",
        "time of a pass, in passes of one token",
        "share of the passes",
        "One answer, timed once",
    ):
        assert words in text
    assert "half of the answers, those in the middle" in text


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium on the PATH (Debian: chromium)")
def test_a_browser_shows_what_the_figures_of_the_page_are(document: dict[str, Any], tmp_path: Path) -> None:
    written = tmp_path / "bench.html"
    written.write_text(page(document))
    with chromium.browser(tmp_path / "profile") as browser:
        browser.open(written.as_uri())
        shown = " ".join(browser.evaluate("document.body.innerText").split())
        labels = " ".join(
            browser.evaluate(
                "[...document.querySelectorAll('svg text')].map(each => each.textContent).join(' ')"
            ).split()
        )
    assert f"a ({document['categories']['a']['prompts']} prompt" in labels + shown
    assert "half of the answers, those in the middle" in shown
    for words in ("time of a pass, in passes of one token", "share of the passes"):
        assert words in labels + shown
