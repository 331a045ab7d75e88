import errno
import json
import re
import shutil
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from time import sleep
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest

from edgespec import Chunk, Engine, SamplingParams, UsageError, load
from edgespec.cli.arguments import load_engine
from edgespec.cli.main import main
from edgespec.engine.generation import AnswerWriter
from edgespec.errors import DiskFull, MemoryExhausted
from edgespec.evaluation.benchmark import measure, schedule
from edgespec.evaluation.document import AnswerRecord, BenchDocument, BenchSetup, PeerInfo, TurnRecord
from edgespec.evaluation.exactness import compare_texts, judge_tokens
from edgespec.evaluation.journal import Journal, read_journal
from edgespec.evaluation.prompts import BenchPrompt, own_prompts, read_prompts
from edgespec.evaluation.results import build_document, speed_of
from edgespec.evaluation.table import table
from edgespec.evaluation.timed_answer import TimedAnswer, time_answer
from edgespec.export.convert import export_model
from edgespec.manifest import read_manifest, write_manifest
from edgespec.setup.profile import read_learned_stats
from edgespec.system.system_info import peak_rss_bytes
from edgespec.text.chat_template import Message


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


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs the device /dev/zero")
def test_prompts_without_end_are_refused() -> None:
    with pytest.raises(UsageError, match="more than 67 MB"):
        read_prompts(Path("/dev/zero"), None)


@pytest.mark.slow
def test_both_ways_of_decoding_are_measured(tiny_model: Path, prompts: Path) -> None:
    with load(tiny_model, drafter="ngram", draft_length=3) as engine, load(tiny_model, drafter="none") as plain:
        document = measure(
            engine,
            read_prompts(prompts, None),
            plain=plain,
            max_tokens=30,
            sampling=SamplingParams(temperature=0.8),
            rounds=2,
        )
    assert set(document["categories"]) == {"a", "b"}
    assert document["deterministic"]
    assert "deterministic mode is on; to measure with it off: --no-deterministic" in table(document)
    for row in document["categories"].values():
        speeds = row["plain_tokens_per_second"], row["speculative_tokens_per_second"]
        assert row["ratio"] == pytest.approx(speeds[1] / speeds[0])
        low, high = row["ratio_interval"] or (0.0, 0.0)
        assert low <= row["ratio"] <= high
        assert row["tokens_per_pass"] >= 1
        assert set(row["drafters"]) <= {"ngram"}
    ratios = [row["ratio"] for row in document["categories"].values()]
    assert document["worst_ratio"] == min(ratios)
    assert document["mean_ratio"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
    assert "mean ratio" in table(document)
    assert "plain decoding in a session of its own" in table(document)
    assert sum(counts["rounds"] for counts in document["categories"]["a"]["sources"].values()) >= 3


def test_all_time_from_the_first_token_to_the_last_counts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who waits 20 ms for each piece of text has waited for it, whatever the passes took."""
    add = AnswerWriter.add

    def add_slowly(*arguments: Any) -> Chunk:
        sleep(0.02)
        return add(*arguments)

    monkeypatch.setattr(AnswerWriter, "add", add_slowly)
    with load(tiny_model, drafter="none") as engine:
        timed = time_answer(engine, [Message("user", "an on")], 6, SamplingParams())
    num_tokens = len(timed.completion.token_ids)
    assert timed.num_decoded == num_tokens - 1
    assert timed.decode_s >= 0.02 * timed.num_decoded
    assert timed.first_s >= 0.02
    pass_speed = timed.record()["pass_tokens_per_second"]
    assert pass_speed is not None
    assert pass_speed > (speed_of(timed.record()) or 0)


@pytest.mark.parametrize("learned", ["fresh", "stored"])
def test_rounds_begin_with_the_same_acceptance_rates_and_store_nothing(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: Literal["fresh", "stored"]
) -> None:
    model = tmp_path / "model"
    export_model(tiny_gguf, model, precision="fp32")
    with load(model) as engine:
        engine.generate("the in the in the in", max_tokens=40)
    stored = (model / "experience.json").read_bytes()
    known = read_learned_stats(model).chances
    assert known
    begun: list[dict[Any, Any]] = []

    def note(engine: Engine, *more: Any) -> TimedAnswer:
        begun.append(dict(engine.speculation.rates))
        return time_answer(engine, *more)

    monkeypatch.setattr("edgespec.evaluation.benchmark.time_answer", note)
    some = [BenchPrompt("a", ("the in the in",)), BenchPrompt("b", ("an on an on",))]
    with load(model) as engine:
        measure(engine, some, max_tokens=40, sampling=SamplingParams(), rounds=2, learned=learned)
        after = dict(engine.speculation.rates)
    pairs = list(pairwise(begun))[2::2]  # each answer twice, after the two of the warm-up
    of_speculation = [
        pair[place.first(0) == "plain"] for pair, place in zip(pairs, schedule(some, 2), strict=True)
    ]
    assert of_speculation[0] == of_speculation[2] == (known if learned == "stored" else {})
    assert after != of_speculation[2]
    assert (model / "experience.json").read_bytes() == stored


def test_interrupted_run_goes_on_where_it_was(
    tiny_model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    some = read_prompts(prompts, None)
    asked = {"max_tokens": 8}

    def run(rounds: int, stop_after: int | None = None) -> BenchDocument | None:
        seen = 0

        def report(line: str) -> None:
            nonlocal seen
            seen += "answered" in line
            if seen == stop_after:
                raise KeyboardInterrupt

        with load(tiny_model, drafter="ngram") as engine, suppress(KeyboardInterrupt):
            return measure(
                engine,
                some,
                max_tokens=8,
                sampling=SamplingParams(),
                rounds=rounds,
                journal=Journal(path, asked),
                report=report,
            )
        return None

    assert run(2, stop_after=4) is None
    half = Journal(path, asked)
    assert len(half.units) == 4
    kept = list(half.units.values())
    whole = run(2)
    assert whole is not None
    assert whole["answers"] == 2 * 4  # two turns and two single ones, twice
    assert list(Journal(path, asked).units.values())[:4] == kept
    again = read_journal(path)
    assert again is not None
    assert again.document()["by_prompt"] == whole["by_prompt"]
    with pytest.raises(UsageError, match="was begun with max_tokens 8"):
        Journal(path, {"max_tokens": 9})
    monkeypatch.setattr("edgespec.evaluation.benchmark.system_info", lambda: {"onnxruntime": "9.0"})
    with pytest.raises(
        UsageError, match=r'was begun with onnxruntime "1.*and this run has "9\.0"; name another file'
    ):
        run(3)


def test_a_full_disk_is_no_wrong_name_of_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DiskFull, match=r"no room in .*\(No space left on device\); free some space"):
        Journal(tmp_path / "run.jsonl", {})


def test_a_run_that_a_full_disk_ended_begins_with_the_same_command(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    Journal(tmp_path / "run.jsonl", {}).add({"round": 0, "prompt": 3, "turns": [], "peers": []})
    assert list(Journal(tmp_path / "run.jsonl", {}).units) == [(0, 3)]


def test_a_journal_without_answers_names_a_command_that_can_be_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run the same bench with --resume '.*/my run\.jsonl'$"):
        Journal(tmp_path / "my run.jsonl", {}).document()


def test_journal_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, {}).add({"round": 0, "prompt": 3, "turns": [], "peers": []})
    with path.open("a") as file:
        file.write('{"unit": {"rou')
    assert list(Journal(path, {}).units) == [(0, 3)]
    Journal(path, {}).add({"round": 1, "prompt": 3, "turns": [], "peers": []})
    assert list(Journal(path, {}).units) == [(0, 3), (1, 3)]


@pytest.mark.parametrize("text", ["[]\n", "{}\n", "x\ny\n", '{"kind": "edgespec bench journal"}\n[]\n3\n'])
def test_file_that_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"run\.jsonl is not a file of --resume"):
        Journal(path, {})


def test_bench_goes_on_with_a_file_and_shows_it(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    options = ["--prompts", str(prompts), "--per-category", "1", "--max-tokens", "8", "--rounds", "1"]
    command = ["bench", str(tiny_model), *options, "--resume", str(file)]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    second = capsys.readouterr()
    assert (second.out, "nothing is measured" in second.err) == (first, True)
    assert main(["bench", "--report", str(file)]) == 0
    assert capsys.readouterr().out == first
    assert main([*command, "--temperature", "1"]) == 2
    assert "was begun with temperature 0.0, and this run has 1.0" in capsys.readouterr().err


def test_bench_does_not_go_on_with_a_drafter_that_was_trained_further(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path, prompts: Path, tmp_path: Path
) -> None:
    drafters = [shutil.copytree(tiny_drafter, tmp_path / name) for name in ("head", "other")]
    options = ["--prompts", str(prompts), "--per-category", "1", "--max-tokens", "4", "--draft-length", "2"]
    options += ["--drafter", str(drafters[0]), "--compare", str(drafters[1]), "--resume", str(tmp_path / "run")]
    command = ["bench", str(tiny_model), *options, "--rounds"]
    assert main([*command, "1"]) == 0
    for folder in drafters:
        manifest = read_manifest(folder)
        weights, record = folder / manifest.weights, manifest.files[manifest.weights]
        content = weights.read_bytes()
        weights.write_bytes(trained := content[:-1] + bytes([content[-1] ^ 1]))
        changed = replace(record, sha256=sha256(trained).hexdigest())
        write_manifest(folder, replace(manifest, files={**manifest.files, manifest.weights: changed}))
        capsys.readouterr()
        assert main([*command, "2"]) == 2
        wanted = rf'was begun with drafter_sha256 \[".*{record.sha256}.*has \[.*"{changed.sha256}'
        assert re.search(wanted, capsys.readouterr().err)
        weights.write_bytes(content)
        write_manifest(folder, manifest)


def test_both_modes_are_measured_next_to_each_other(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path
) -> None:
    options = ["--prompts", str(prompts), "--max-tokens", "8", "--rounds", "1", "--both-modes", "--json"]
    assert main(["bench", str(tiny_model), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["peers"]
    ways = {document["mode"], row["way"].removeprefix("speculative, ")}
    assert ways == {"deterministic", "not deterministic"}
    assert row["mean_ratio"]
    assert row["failure"] is None


@pytest.mark.slow
def test_several_drafters_are_measured_in_one_run(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tiny_drafter: Path, prompts: Path, tmp_path: Path
) -> None:
    both = f"suffix+{tiny_drafter}"
    options = ["--prompts", str(prompts), "--max-tokens", "16", "--rounds", "1", "--draft-length", "2"]
    compared = ["--drafter", both, "--compare", str(tiny_drafter), "--compare", "suffix"]
    command = ["bench", str(tiny_model), *options, *compared, "--resume", str(tmp_path / "run.jsonl")]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    model, text = document["peers"]
    assert (model["way"], text["way"]) == (f"--drafter {tiny_drafter}", "--drafter suffix")
    for row in (model, text):
        assert (row["failure"], row["same_answers"]) == (None, row["answers"])
        assert row["by_category"].keys() == document["categories"].keys()
        for each in row["by_category"].values():
            low, high = each["ratio_interval"] or (each["ratio"], each["ratio"])  # a single answer has none
            assert 0 < low <= each["ratio"] <= high
    drafted = {row["way"]: {*row["by_category"]["a"]["sources"]} - {"none"} for row in (model, text)}
    assert drafted == {model["way"]: {"tiny-int4"}, text["way"]: {"suffix"}}
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n  --drafter suffix") == len(document["categories"])
    assert main([*command, "--compare", "ngram"]) == 2
    assert "was begun with compare [" in capsys.readouterr().err


def test_a_peer_is_compared_with_plain_decoding_and_with_speculation() -> None:
    """Where each answer takes a quarter of the time of plain decoding, ratios are 4 and those to it a quarter."""
    fast = {"decoded": 100, "decode_s": 0.25, "first_token_s": 0.1, "is_equal": True, "passes": 50}
    peer: PeerInfo = {"name": "n", "way": "w", "version": "1", "file": "", "peak_rss_bytes": 1, "failure": None}
    ratios = {"a": (1.5, 1.7, 1.6), "b": (0.9, 1.2, 1.1)}
    turns = [
        turn(ratio, name, prompt, peers={"n (w)": fast})
        for name, each in ratios.items()
        for prompt, ratio in enumerate(each, 10 * (name == "b"))
    ]
    document = build_document(SETUP, turns, [peer])
    (row,) = document["peers"]
    assert row["mean_ratio"] == pytest.approx(4.0)
    assert row["speculative_ratio"] == pytest.approx((document["mean_ratio"] or 0) / 4)
    assert row["speculative_ratio_interval"] == pytest.approx(
        [end / 4 for end in document["mean_ratio_interval"] or ()]
    )
    for each in row["by_category"].values():
        assert (each["ratio"], each["tokens_per_pass"]) == pytest.approx((4.0, 2.0))
        assert each["ratio_interval"] == pytest.approx((4.0, 4.0))
    assert [line.split()[:3] for line in table(document).splitlines() if line.startswith("  ")] == [
        ["n,", "w", "400.0"]
    ] * 2
    # A later turn has most of its prompt cached.
    later = [turn(1.5, turn=1, peers={"n (w)": {**fast, "first_token_s": 0.01}})] * 9
    assert build_document(SETUP, [*turns, *later], [peer])["peers"][0]["time_to_first_token_s"] == 0.1


@pytest.mark.parametrize(
    ("drafters", "why"),
    [
        (["none"], "plain decoding is part of every run"),
        (["auto"], "--drafter names it already"),
        (["ngram", "ngram"], "--compare has it twice"),
    ],
)
def test_drafters_that_are_measured_anyway_are_refused(
    capsys: pytest.CaptureFixture[str], drafters: list[str], why: str
) -> None:
    named = [word for drafter in drafters for word in ("--compare", drafter)]
    assert main(["bench", "no-such-model", *named]) == 2
    assert why in capsys.readouterr().err


def test_plain_decoding_shares_a_session_where_memory_is_short(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(options: Namespace, **settings: Any) -> Engine:
        if settings.get("drafter") == "none":
            raise MemoryExhausted("no room")
        return load_engine(options, **settings)

    monkeypatch.setattr("edgespec.cli.bench.load_engine", refuse)
    assert main(["bench", str(tiny_model), "--prompts", str(prompts), "--max-tokens", "8", "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert "in the session of speculation, for lack of memory" in out
    assert "there is no memory for a second session" in err
    assert "no room" in err


def turn(ratio: float, category: str = "a", prompt: int = 0, number: int = 0, **more: Any) -> TurnRecord:
    def answer(seconds: float) -> AnswerRecord:
        return {"decoded": 100, "decode_s": seconds, "first_token_s": 0.1}

    record: TurnRecord = {
        "category": category,
        "prompt": prompt,
        "turn": 0,
        "round": number,
        "first": "plain",
        "text": "equal",
        "plain": answer(1.0),
        "speculative": answer(1 / ratio),
        "peers": {},
    }
    return {**record, **more}  # type: ignore[typeddict-item]


SETUP: BenchSetup = {"model": "m", "machine": "x"}


def test_categories_that_are_slower_are_named() -> None:
    turns = [turn(0.9 + 0.001 * i, "slow", i) for i in range(5)] + [
        turn(1.0 + 0.1 * i, "b", 9 + i) for i in range(5)
    ]
    document = build_document(SETUP, turns)
    assert document["below_one"] == ["slow"]
    assert (document["worst"] or {})["category"] == "slow"
    assert (
        "intervals of 2 categories: 1 wholly below 1.00 (slow 0.902), 1 wholly above, 0 include 1.00 (not decided)"
        in table(document)
    )
    turns += [turn(0.9 + 0.05 * i, "even", 20 + i) for i in range(5)] + [turn(1.5, "once", 30)]
    assert (
        "intervals of 3 categories: 0 wholly below 1.00, 1 wholly above, 1 includes 1.00 (not decided), "
        "1 unknown (a single answer)"
    ) in table(build_document(SETUP, [each for each in turns if each["category"] != "slow"]))


def test_prompts_that_are_slower_in_every_round_are_counted() -> None:
    turns = [turn(0.9 + 0.001 * number, prompt=0, number=number) for number in range(3)]
    turns += [turn(0.9 + 0.2 * number, prompt=1, number=number) for number in range(3)]
    assert "1 of 2 prompts below 1.00 by their own intervals" in table(build_document(SETUP, turns))


@pytest.mark.parametrize(("plausible", "speed"), [(31, 0.5), (20, None)])
def test_nonsense_has_no_speed(plausible: int, speed: float | None) -> None:
    reply = {"decoded": 100, "decode_s": 2.0, "first_token_s": 0.1, "is_equal": False}
    judged = {**reply, "judged": 32, "plausible": plausible}
    peer: PeerInfo = {"name": "n", "way": "w", "version": "1", "file": "", "peak_rss_bytes": 1, "failure": None}
    turns = [turn(1.0, prompt=0, peers={"n (w)": judged}), turn(1.0, prompt=1, peers={"n (w)": reply})]
    (row,) = build_document(SETUP, turns, [peer])["peers"]
    assert row["mean_ratio"] == speed
    assert (row["failure"] is None) == (speed is not None)
    assert bool(row["categories"]) == (speed is not None)


def test_tokens_of_the_model_are_plausible_and_others_are_not(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine:
        prompt = np.array(engine.encode("an on an on"), np.int32)
        made = engine.generate("an on an on", max_tokens=20)
        assert not judge_tokens(engine.target, prompt, made.token_ids).is_nonsense
        assert judge_tokens(engine.target, prompt, made.token_ids).judged == len(made.token_ids)
        rows = engine.target.logits(prompt, 1)
        assert judge_tokens(engine.target, prompt, [int(rows[-1].argmin())] * 5).is_nonsense


def test_texts_that_part_where_tokens_are_far_apart_are_different(tiny_model: Path) -> None:
    with load(tiny_model, drafter="none") as engine:
        prompt = np.array(engine.encode("an on an on"), np.int32)
        made = engine.generate("an on an on", max_tokens=6).token_ids
        worst = int(engine.target.logits(prompt, 1)[-1].argmin())
        assert compare_texts(engine.target, prompt, made, made) == "equal"
        assert compare_texts(engine.target, prompt, made, [worst, *made[1:]]) == "different"
        assert compare_texts(engine.target, prompt, made, made[:-1]) == "different"


def test_bench_prints_one_document(capsys: pytest.CaptureFixture[str], tiny_model: Path, prompts: Path) -> None:
    options = ["--prompts", str(prompts), "--per-category", "1", "--max-tokens", "8", "--json"]
    assert main(["bench", str(tiny_model), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"model", "categories", "mean_ratio", "worst_ratio", "machine"} <= document.keys()


@pytest.mark.slow
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


def test_prompt_too_long_is_left_out_and_a_long_answer_reported_as_it_comes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.evaluation.benchmark._EVERY_S", 0.0)
    monkeypatch.setattr("edgespec.evaluation.benchmark._LONG_S", 0.0)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "the in " * 3000}) + "\n" + json.dumps({"prompt": "the"}) + "\n")
    reported: list[str] = []
    with load(tiny_model) as engine:
        measure(engine, read_prompts(path, None), max_tokens=5, sampling=SamplingParams(), report=reported.append)
    assert sum("left out one prompt" in line for line in reported) == 1
    assert any("measuring 2 prompts in 1 round, each with and without drafts" in line for line in reported)
    assert "1 of 2 answered, round 1 of 1, about 0 min left" in reported
    assert "2 of 2 answered, round 1 of 1" in reported
    assert {"prompt 1 of 2: 2 passes of the model", "prompt 2 of 2: 2 passes of the model"} & {*reported}


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
