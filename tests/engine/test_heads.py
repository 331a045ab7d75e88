"""An answer is one text with a drafting head and without, whatever its kind, the schedule and the acceptance."""

import json
import shutil
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_heads
from head_answers import SAMPLED, answers

from edgespec import Message, SamplingParams, load
from edgespec.cli.main import main
from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.decoder import Decoder
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.decoding.sampling import GumbelSampler
from edgespec.decoding.scheduler import Plain, Proposal, speculative_decode
from edgespec.decoding.tree import Worth
from edgespec.draft.draft_model import DraftCosts
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.model_rates import NUM_CLASSES, nodes_key, typical_probability
from edgespec.errors import ModelError, UsageError, VocabularyMismatch
from edgespec.runtimes.head_parts import HeadGraph
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.setup.pair import write_pair
from edgespec.types import Sampler, TokenIds, append

PROMPTS = ("the in the an on er in the", "in the an", "an er on the the")
TARGET = tiny.random_weights()


@pytest.fixture(scope="module")
def texts(tiny_with_states: Path) -> list[TokenIds]:
    """Prompts with the target's own answers, greedy and sampled."""
    found = []
    with load(tiny_with_states, drafter="none", deterministic=False) as engine:
        for prompt in PROMPTS:
            for sampling in (SamplingParams(), SAMPLED):
                answer = engine.generate(prompt, sampling=sampling, max_tokens=40)
                found.append(append(engine._encoder.encode(prompt), answer.token_ids))
    return found


@pytest.fixture(scope="module")
def pairs(
    tiny_with_states: Path,
    texts: list[TokenIds],
    plain: list[tuple[int, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Pair folders by the kind of head, which knows some of the target's texts; rows are proved by now."""
    folders = {kind: tmp_path_factory.mktemp("pairs") / kind for kind in ("recurrent", "steps")}
    for kind, folder in folders.items():
        shutil.copytree(tiny_with_states, folder / "target")
        if kind == "recurrent":
            weights = tiny_heads.fit_recurrent(TARGET, tiny_heads.recurrent_weights(1), texts)
            tiny_heads.write_recurrent(folder / "drafter", tiny_with_states, weights, name="eagle")
        else:
            weights = tiny_heads.fit_steps(TARGET, tiny_heads.step_weights(1), texts)
            tiny_heads.write_steps(folder / "drafter", tiny_with_states, weights, name="speculator")
        write_pair(folder)
    return folders


@pytest.fixture(scope="module")
def plain(tiny_with_states: Path) -> list[tuple[int, ...]]:
    return answers(PROMPTS, tiny_with_states, drafter="none", deterministic=True)[0]


@pytest.mark.parametrize(
    ("kind", "schedule", "length"),
    [
        ("recurrent", "serial", 3),
        ("recurrent", "pipelined", 3),
        ("recurrent", "hedged", 3),
        ("steps", "serial", 3),
        ("steps", "hedged", 3),
        pytest.param("recurrent", "serial", "auto", marks=pytest.mark.slow),
        pytest.param("recurrent", "pipelined", "auto", marks=pytest.mark.slow),
        pytest.param("recurrent", "hedged", "auto", marks=pytest.mark.slow),
        pytest.param("steps", "serial", "auto", marks=pytest.mark.slow),
        pytest.param("steps", "pipelined", 3, marks=pytest.mark.slow),
    ],
)
def test_one_text_whatever_the_schedule(
    pairs: dict[str, Path], plain: list[tuple[int, ...]], kind: str, schedule: str, length: int | str
) -> None:
    if (kind, schedule) == ("steps", "hedged"):
        with pytest.raises(UsageError, match="speculator has no tree graph for its device"):
            load(pairs[kind], schedule=schedule, drafter=str(pairs[kind]))
        return
    found, drafted, accepted = answers(
        PROMPTS, pairs[kind], drafter=str(pairs[kind]), schedule=schedule, draft_length=length, deterministic=True
    )
    assert found == plain
    if length == 3:
        assert accepted > drafted / 4 > 10


def test_a_head_that_does_not_pay_is_not_run_and_its_states_are_not_asked_for(
    tiny_with_states: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights are hardly ever right. Trials, which take a hundredth of the time, are what is left of it."""
    tiny_heads.write_recurrent(tmp_path / "head", tiny_with_states, tiny_heads.recurrent_weights(1), name="eagle")
    counts = Counter[str]()

    def counted(kind: type, name: str) -> None:
        whole = getattr(kind, name)

        def run(*arguments: Any, **more: Any) -> Any:
            counts[f"{kind.__name__}.{name}"] += 1
            return whole(*arguments, **more)

        monkeypatch.setattr(kind, name, run)

    with load(tiny_with_states, drafter=str(tmp_path / "head"), deterministic=False) as engine:
        engine.generate(PROMPTS[0], max_tokens=100)
        for kind, name in ((HiddenStates, "write"), (HeadGraph, "__call__"), (OnnxDecoder, "run")):
            counted(kind, name)
        for prompt in PROMPTS[1:]:
            engine.generate(prompt, max_tokens=100)
    passes, states, runs = (
        counts[each] for each in ("OnnxDecoder.run", "HiddenStates.write", "HeadGraph.__call__")
    )
    assert passes > 100
    assert states < passes / 10
    assert runs < passes / 10


@pytest.mark.parametrize("kind", ["steps", pytest.param("recurrent", marks=pytest.mark.slow)])
def test_rejection_sampling_gives_one_text_each_time(pairs: dict[str, Path], kind: str) -> None:
    options: dict[str, Any] = {"acceptance": "rejection", "draft_length": 3, "deterministic": True}
    first, *others = (
        answers(PROMPTS, pairs[kind], drafter=str(pairs[kind]), schedule=schedule, **options)
        for schedule in ("serial", "serial", "pipelined")
    )
    assert first[2] > 20
    assert [each[0] for each in others] == [first[0]] * 2


def test_figures_name_the_head_and_bench_and_plan_know_it(
    pairs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = str(shutil.copytree(pairs["recurrent"], tmp_path / "pair"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "in the an"}\n')
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--rounds", "1", "--max-tokens", "30", "--json"]
    assert main(["bench", pair, "--drafter", pair, "--draft-length", "2", *options]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert '"eagle": {"' in json.dumps(measured)
    assert main(["plan", pair, "--json"]) == 0
    assert "eagle" in {option["drafter"] for option in json.loads(capsys.readouterr().out)["options"]}
    assert main(["models", "verify", pair]) == 0


def test_head_without_its_target_is_refused_with_the_way_out(
    pairs: dict[str, Path],
    tiny_model: Path,
    tiny_with_states: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = pairs["recurrent"] / "drafter"
    made = tiny_heads.recurrent_weights(1)
    tiny_heads.write_recurrent(tmp_path / "wide", tiny_with_states, made, target_hidden_size=tiny_heads.H + 1)
    tiny_heads.write_recurrent(tmp_path / "foreign", tiny_with_states, made, vocab_sha256="0" * 64)
    cases: list[tuple[Path, str | None, type[Exception], str]] = [
        (head, None, ModelError, r"eagle is a drafting head \(eagle3\), .* writes no text .* drafter="),
        (
            tiny_model,
            str(head),
            ModelError,
            r"layers 0, 1, 2 of its target, and tiny gives none; make the pair with: edgespec export tiny\.gguf "
            "--drafter HEAD",
        ),
        (tiny_with_states, str(tmp_path / "wide"), ModelError, "of 65 numbers, and those of the target have 64"),
        (tiny_with_states, str(tmp_path / "foreign"), VocabularyMismatch, "made for another vocabulary"),
        (tiny_with_states, f"{head},suffix", UsageError, "for which nothing else drafts"),
        (tiny_with_states, f"{tiny_model},{head}", UsageError, "for which nothing else drafts"),
    ]
    for target, drafter, error, words in cases:
        with pytest.raises(error, match=words):
            load(target, drafter=drafter or "auto")
    for command, *more in (["chat", "--prompt", "the"], ["plan"]):
        assert main([command, str(head), *more]) == 3
        assert "is a drafting head" in capsys.readouterr().err
        assert main([command, str(tiny_model), "--drafter", str(head), *more]) == 3
        assert "make the pair with" in capsys.readouterr().err


def test_head_that_drafts_ahead_is_serial_where_time_would_decide_the_text(pairs: dict[str, Path]) -> None:
    lines: list[str] = []
    options: dict[str, Any] = {"acceptance": "rejection", "draft_length": 2, "deterministic": True}
    with load(pairs["recurrent"], schedule="pipelined", report=lines.append, **options):
        assert any("the schedule is serial, not pipelined" in line for line in lines)


def test_a_second_turn_is_drafted_too(pairs: dict[str, Path], tiny_with_states: Path) -> None:
    found = []
    for options in ({"drafter": "none"}, {"drafter": str(pairs["recurrent"]), "draft_length": 2}):
        with load(tiny_with_states, deterministic=True, **options) as engine:
            first = engine.generate(PROMPTS[0], max_tokens=30)
            turns = [Message("user", PROMPTS[0]), Message("assistant", first.text), Message("user", "on the")]
            second = engine.generate(turns, max_tokens=30)
            found.append([first.token_ids, second.token_ids])
    assert found[0] == found[1]
    assert second.stats.num_drafted > 10


def test_answer_after_one_that_was_stopped_in_its_midst_is_the_same(
    pairs: dict[str, Path], plain: list[tuple[int, ...]]
) -> None:
    with load(pairs["recurrent"], drafter=str(pairs["recurrent"]), schedule="pipelined", draft_length=3) as engine:
        for prompt, wanted in zip(PROMPTS, plain[::2], strict=True):
            with engine.stream(PROMPTS[0], max_tokens=40) as chunks:
                next(iter(chunks))
            assert engine.generate(prompt, max_tokens=40).token_ids == wanted


class Trees(Plain):
    """Verifies a tree of a head's guesses in each pass."""

    def __init__(self, head: Decoder, worth: Worth, depth: int) -> None:
        self._drafter, self._worth, self._depth = ModelDrafter(head, head.vocab_size), worth, depth
        self.num_branched = 0  # trees in which a next best choice was drafted on from

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        request = DraftRequest(min(self._depth, max_tokens), worth=self._worth)
        draft = self._drafter.draft(tokens, request, sampler).best(self._worth)
        trunk = len(draft.trunk().tokens)
        self.num_branched += any(parent >= trunk for parent in draft.parents or ())
        return Proposal(tokens, draft)


@pytest.mark.slow
def test_trees_of_a_head_change_no_text_whatever_their_shape(
    pairs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.draft.draft_model.may_pay", lambda ratios: True)
    num_branched = []
    with load(pairs["recurrent"], schedule="serial", deterministic=False) as engine:
        head, prompt = engine._drafting.pool.decoders["eagle"], engine._encoder.encode(PROMPTS[0])
        for params, (row, depth) in product((SamplingParams(), SAMPLED), ((0.02, 5), (0.005, 2), (0.9, 5))):
            sampler, texts = GumbelSampler(params, num_prompt=len(prompt)), []
            chances = [typical_probability(each) for each in range(NUM_CLASSES)]
            pass_times = [1 + row * width for width in range(1, MAX_DRAFT_TOKENS + 2)]
            trees = Trees(head, Worth((0.9,), [0.0] * 4, pass_times, chances), depth)
            for policy in (Plain(), trees):
                blocks = speculative_decode(prompt, engine.target, sampler, policy, max_tokens=24)
                texts.append(np.concatenate([block.tokens for block in islice(blocks, 24)])[:24].tolist())
            assert texts[0] == texts[1]
            num_branched.append(trees.num_branched)
    assert [num > 0 for num in num_branched] == [True, True, False] * 2


def test_target_verifies_trees_where_rows_are_cheap_and_the_text_stays(
    pairs: dict[str, Path], plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for may_pay in (False, True):
        monkeypatch.setattr("edgespec.draft.draft_model.may_pay", lambda ratios, found=may_pay: found)
        drafter = str(pairs["recurrent"])
        with load(pairs["recurrent"], drafter=drafter, schedule="serial", deterministic=False) as engine:
            assert isinstance(engine.target, OnnxTreeDecoder) == engine.speculation.has_trees == may_pay
            assert engine._drafting.pool.decoders["eagle"].can.trees == may_pay
            # Where its steps are believed to be cheap, the head drafts until they are found to be dear here.
            engine.speculation.ratios = {1: 1.0, 32: 1.3}
            engine.speculation.models["eagle"].costs = DraftCosts(0.01, 0.0)
            for prompt, wanted in zip(PROMPTS, plain[::2], strict=True):
                assert engine.generate(prompt, max_tokens=40).token_ids == wanted
            assert any(source == nodes_key("eagle") for source, _ in engine.speculation.rates) == may_pay
    with load(pairs["recurrent"], drafter=drafter, deterministic=True) as engine:
        assert not engine.speculation.has_trees
