"""An answer is one text with drafters that draft a block in one pass, whatever the schedule and the acceptance."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_heads
import numpy as np
import pytest
import tiny
import tiny_heads
from head_answers import SAMPLED, answers
from head_folders import write_head_folder
from made_heads import MadeHead, Reference
from tiny_blocks import BlockCase, block_states, deepseek

from edgespec import SamplingParams, load
from edgespec.export.convert import export_model
from edgespec.setup.pair import write_pair
from edgespec.types import TokenIds, append

PROMPTS = ("the in the an on er in the", "in the an")
TARGET = tiny.random_weights()


@pytest.fixture(scope="module")
def texts(tiny_with_states: Path) -> list[TokenIds]:
    """Prompts with the target's own answers, greedy and sampled."""
    with load(tiny_with_states, drafter="none", deterministic=True) as engine:
        return [
            append(engine._encoder.encode(prompt), answer.token_ids)
            for prompt in PROMPTS
            for answer in [
                engine.generate(prompt, sampling=sampling, max_tokens=40)
                for sampling in (SamplingParams(), SAMPLED)
            ]
        ]


def fit_block(case: BlockCase, texts: list[TokenIds]) -> BlockCase:
    """A head whose vocabulary head knows the first token of each block in some texts of the tiny target."""
    w = {name: np.asarray(each, np.float64) for name, each in case.tensors().items()}
    rows, following = [], []
    for text in texts:
        features = tiny.reference_states(TARGET, text)[0]
        for place in range(1, len(text) - 1):
            block = np.append(text[place], [case.config["mask_token_id"]] * (case.num_tokens - 1))
            rows.append(block_states(case, w, w["embed_tokens.weight"][block], features[:place])[:1])
            following.append(text[place + 1 : place + 2])
    head = tiny_heads.fit_vocabulary_head(rows, following)
    return replace(case, change={"lm_head.weight": np.ascontiguousarray(head.T, np.float32)})


def fit_parallel(made: MadeHead, texts: list[TokenIds]) -> MadeHead:
    """A P-EAGLE head whose vocabulary head knows the first token of each draft in texts of the tiny target."""
    reference = Reference(made, np.zeros(0), np.zeros(0))
    reference._head = np.eye(tiny.HIDDEN)  # rows are the states that it reads
    features = [tiny.reference_states(TARGET, text)[0] for text in texts]
    states = [
        reference.rows(text[1:], reference.fuse(read[:-1]))[0] for text, read in zip(texts, features, strict=True)
    ]
    head = tiny_heads.fit_vocabulary_head([each[:-1] for each in states], [text[2:] for text in texts])
    return replace(made, tensors={**made.tensors, "lm_head.weight": np.ascontiguousarray(head.T, np.float32)})


@pytest.fixture(scope="module")
def pairs(
    tiny_with_states: Path, tiny_gguf: Path, texts: list[TokenIds], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp("blocks") / kind for kind in ("block", "masks", "parallel")}
    for kind, folder in folders.items():
        shutil.copytree(tiny_with_states, folder / "target")
        source = tmp_path_factory.mktemp("sources") / kind
        if kind == "block":
            case = fit_block(deepseek(markov=None, confidence="without"), texts)
            write_head_folder(folder / "drafter", case.write(source), tiny_gguf)
        elif kind == "masks":
            made = made_heads.eagle3("specforge", layers=(0,), rows=tiny.VOCAB, num_proposed=4)
            write_head_folder(folder / "drafter", fit_parallel(made, texts).write(source), tiny_gguf)
        else:
            tiny.write_huggingface(source, TARGET)
            stated = json.loads((source / "config.json").read_text())
            (source / "config.json").write_text(json.dumps(stated | {"pard_token": 5}))
            export_model(source, folder / "drafter", precision="fp32")
        write_pair(folder)
    return folders


@pytest.fixture(scope="module")
def plain(tiny_with_states: Path) -> list[tuple[int, ...]]:
    return answers(PROMPTS, tiny_with_states, drafter="none", deterministic=True)[0]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("length", [3, pytest.param("auto", marks=SLOW)])
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("block", "serial"),
        pytest.param("block", "pipelined", marks=SLOW),
        pytest.param("parallel", "serial", marks=SLOW),
        ("parallel", "pipelined"),
        pytest.param("masks", "serial", marks=SLOW),
        ("masks", "pipelined"),
    ],
)
def test_one_text_whatever_the_schedule(
    pairs: dict[str, Path], plain: list[tuple[int, ...]], kind: str, schedule: str, length: int | str
) -> None:
    found, drafted, accepted = answers(
        PROMPTS, pairs[kind], drafter=str(pairs[kind]), schedule=schedule, draft_length=length, deterministic=True
    )
    assert found == plain
    if length == 3:
        assert accepted > drafted / 8 > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "parallel"])
def test_rejection_sampling_gives_one_text_each_time(pairs: dict[str, Path], kind: str) -> None:
    options: dict[str, Any] = {"acceptance": "rejection", "draft_length": 3, "deterministic": True}
    first, again, ahead = (
        answers(PROMPTS, pairs[kind], drafter=str(pairs[kind]), schedule=schedule, **options)
        for schedule in ("serial", "serial", "pipelined")
    )
    assert first[2] > 5
    assert [again[0], ahead[0]] == [first[0]] * 2


def test_a_parallel_drafter_hedges_without_its_masks(pairs: dict[str, Path], plain: list[tuple[int, ...]]) -> None:
    found, _, accepted = answers(
        PROMPTS,
        pairs["parallel"],
        drafter=str(pairs["parallel"]),
        schedule="hedged",
        draft_length=3,
        deterministic=True,
    )
    assert (found, accepted > 20) == (plain, True)
