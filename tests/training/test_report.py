"""What a trained head is expected to gain."""

from pathlib import Path

import pytest

import edgespec.training.train
from edgespec.cli.main import main
from edgespec.cli.train import _format
from edgespec.config.presets import Preset
from edgespec.manifest import Origin
from edgespec.setup.home import ModelHome
from edgespec.setup.profile import Profile
from edgespec.setup.snapshot import LocalSource
from edgespec.training.objective import INT8_BYTES, TrainingReport, estimate_draft_cost, expected_gain


def profile(step_s: float, two_rows: float) -> Profile:
    widths = {1: step_s, 2: step_s * two_rows, 4: 2 * step_s, 8: 4 * step_s}
    return Profile(passes_s={64: widths}, prefill_s=step_s, transfer_s=0.0)


def made_report() -> TrainingReport:
    texts = {"texts": 900, "answer_tokens": 100_000, "held_out_texts": 37, "compared_texts": 12}
    drafts = {"compared_drafts": 2105, "drafts": 230_000, "trained_drafts": 1_150_000}
    rest = {"training_s": 840.0, "precision": "bf16", "agreement": (0.352, 0.31), "coverage": 0.95, "gain": None}
    return TrainingReport(**texts, **drafts, **rest)  # type: ignore[arg-type]


def test_a_report_says_on_what_was_compared_and_how_often_each_draft_was_seen() -> None:
    first, _, last = _format(made_report())
    assert first.startswith(
        "agreement by position on 2105 drafts in 12 of 37 held-out texts: 35.2%, 31.0%; 95.0% of"
    )
    assert last.endswith("100000 tokens of answers; each of 230000 drafts was seen 5.0 times, all runs together")


def test_a_drafted_token_costs_what_is_read_and_what_is_around_it() -> None:
    assert estimate_draft_cost(8, 80 * INT8_BYTES, profile(1e6, 1)) == pytest.approx(0.1)
    assert estimate_draft_cost(8, 80 * INT8_BYTES, profile(0.01, 1)) == pytest.approx(0.2)


def test_a_second_row_that_is_free_pays_where_a_dear_one_does_not() -> None:
    rates = [0.36, 0.34, 0.34]
    free = expected_gain(rates, 0.2, profile(0.01, 1.0))
    assert free.draft_length == 1
    assert free.times == pytest.approx(1.36 / 1.2)
    dear = expected_gain(rates, 0.2, profile(0.01, 1.3))
    assert (dear.draft_length, dear.times, dear.tokens_per_pass) == (0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("model", "file", "origin", "words"),
    [
        ("org/g", "m.gguf", Origin(repository="org/g", revision="abc"), "org/g:m.gguf --revision abc"),
        ("org--name", "", Origin(repository="org/name", revision="abc"), "org/name --revision abc"),
        ("smollm2-135m", "m.gguf", Origin(repository="org/g", revision="abc"), "smollm2-135m"),
        ("poet", "m.gguf", Origin(repository="org/g", revision="abc"), "smollm2-135m"),
        ("ollama:tiny:1b", "sha256-1b", Origin(name="ollama:tiny:1b"), "ollama:tiny:1b"),
        ("m.gguf", "m.gguf", Origin(), "{path}"),
    ],
)
def test_after_a_training_the_target_is_named_by_where_it_came_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    file: str,
    origin: Origin,
    words: str,
) -> None:
    path = tmp_path / file
    if file:
        path.touch()
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    ModelHome(tmp_path / "home").presets.write(Preset(name="poet", model="smollm2-135m:int8"))
    monkeypatch.setattr(ModelHome, "source_of", lambda home, model: LocalSource(path=path, origin=origin))
    monkeypatch.setattr(edgespec.training.train, "require_torch", lambda: None)
    monkeypatch.setattr(edgespec.training.train, "train", lambda *given, **named: made_report())
    assert main(["train", model, "--output", "h"]) == 0
    said = f"use it with: edgespec export {words.format(path=path)} --drafter h --output PAIR\n"
    assert capsys.readouterr().err.endswith(said)
