import json
from pathlib import Path

import pytest

from edgespec import SamplingParams, UsageError, load
from edgespec.cli.main import main
from edgespec.evaluation.benchmark import measure
from edgespec.evaluation.prompts import own_prompts, read_prompts
from edgespec.evaluation.table import table
from edgespec.system.system_info import peak_rss_bytes

pytestmark = pytest.mark.usefixtures("one_template_process")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"category": "a", "turns": ["the in the in the in", "second"]},
        {"category": "b", "prompt": "an on an on"},
        {"category": "a", "turns": ["re re re re"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_prompts_are_counted_by_category(prompts: Path) -> None:
    assert [prompt.category for prompt in read_prompts(prompts, None)] == ["a", "b", "a"]
    assert [prompt.turns for prompt in read_prompts(prompts, 1)] == [
        ("the in the in the in", "second"),
        ("an on an on",),
    ]


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "not json\n", "[1]\n", 100_000 * "[", '{"turns": []}\n', '{"turns": 3}\n']
    + [f'{{"prompt": "a", "category": {category}}}' for category in ("null", "[1]", '"\\u001b[31m"', '"a\\nb"')],
)
def test_file_that_holds_no_prompts_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UsageError):
        read_prompts(tmp_path / "bad.jsonl", None)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="a system without it")
def test_prompts_without_end_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 64 MiB"):
        read_prompts(Path("/dev/zero"), None)


def test_both_ways_of_decoding_are_measured(tiny_model: Path, prompts: Path) -> None:
    with load(tiny_model, drafter="ngram", draft_length=3) as engine:
        document = measure(
            engine, read_prompts(prompts, None), max_tokens=30, sampling=SamplingParams(temperature=0.8)
        )
    assert set(document["categories"]) == {"a", "b"}
    assert document["deterministic"]
    assert "deterministic mode is on; to measure with it off: --no-deterministic" in table(document)
    for row in document["categories"].values():
        assert row["ratio"] == row["speculative_tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["tokens_per_pass"] >= 1
        assert set(row["drafters"]) <= {"ngram"}
    ratios = [row["ratio"] for row in document["categories"].values()]
    assert document["worst_ratio"] == min(ratios)
    assert "mean ratio" in table(document)
    assert sum(counts["rounds"] for counts in document["categories"]["a"]["sources"].values()) >= 3


def test_bench_prints_one_document(capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path) -> None:
    options = ["--prompts", str(prompts), "--per-category", "1", "--max-tokens", "8", "--json"]
    assert main(["bench", str(tiny_model), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"model", "categories", "mean_ratio", "worst_ratio", "machine"} <= document.keys()


def test_answers_of_one_token_are_reported_as_nothing_to_compare(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path
) -> None:
    options = ["--prompts", str(prompts), "--max-tokens", "1"]
    assert main(["bench", str(tiny_model), *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("nothing was decoded")
    assert {"nothing to compare in a", "nothing to compare in b"} <= {
        line.removeprefix("edgespec: ").partition(":")[0] for line in err.splitlines()
    }
    assert main(["bench", str(tiny_model), *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["categories"], document["mean_ratio"]) == ({}, None)


def test_prompt_too_long_for_the_context_is_left_out_and_reported(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "the in " * 3000}) + "\n" + json.dumps({"prompt": "the"}) + "\n")
    reported: list[str] = []
    with load(tiny_model) as engine:
        measure(engine, read_prompts(path, None), max_tokens=5, sampling=SamplingParams(), report=reported.append)
    assert sum("left out one prompt" in line for line in reported) == 1


def test_prompts_keep_their_line_separators_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [prompt.turns for prompt in read_prompts(path, None)] == [("a\u2028b",), ("c",)]
    path.write_text('{"prompt": null}')
    with pytest.raises(UsageError, match="line 1: it has neither prompt nor turns"):
        read_prompts(path, None)


def test_peak_of_memory_is_of_this_process() -> None:
    assert 10 << 20 < peak_rss_bytes() < 64 << 30


def test_own_prompts_are_two_of_each_kind() -> None:
    categories = [prompt.category for prompt in own_prompts()]
    assert {categories.count(name) for name in categories} == {2}
    assert own_prompts(1) == own_prompts()[::2]
