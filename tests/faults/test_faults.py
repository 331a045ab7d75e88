"""Faults while an answer is made: what the user sees, that no token changes, and that the next answer is right.

docs/faults.md says of each fault which tests provoke it; here are those that belong to no module's own tests.
"""

import gc
import shutil
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fault_answers import HOT, PROMPT, joined
from faulty import SCHEDULES, drafted_engine, edit_graph, plain_engine, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec import Chunk, EdgeSpecError, SamplingParams, UsageError, load
from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.sampling import GumbelSampler
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.suffix import SuffixDrafter
from edgespec.manifest import Manifest
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits, TokenIds, append

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_thread_stays")]  # a module of many models or processes


# F9: logits that are no numbers, from real graphs


def first_new(token_ids: tuple[int, ...], prompt: TokenIds) -> int:
    """Where an answer first has a token that neither its prompt nor its first three have."""
    seen = {*map(int, prompt), *token_ids[:3]}
    return next(i for i, token in enumerate(token_ids) if token not in seen)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_target_without_numbers_is_an_error_and_the_next_answer_is_right(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    with load(tiny_model, drafter="none", deterministic=False) as sound:
        whole = sound.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        at = first_new(whole, sound.encode(PROMPT))
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    edit_graph(folder, poisoned(kind, whole[at]))
    with load(folder, drafter="none", deterministic=False) as engine:
        stream, shown = engine.stream(PROMPT, sampling=HOT, max_tokens=30), list[Chunk]()
        with pytest.raises(EdgeSpecError, match="its weights or the run are damaged"):
            shown.extend(stream)
        assert joined(shown) == whole[: at + 1], "all that was sound is shown"
        assert list(stream) == []
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=at).token_ids == whole[:at]


@pytest.mark.parametrize(("kind", "schedule"), [("nan", "serial"), ("inf", "pipelined")])
def test_drafter_without_numbers_is_parked_and_no_token_changes(
    tiny_model: Path, tiny_drafter: Path, tmp_path: Path, kind: str, schedule: str
) -> None:
    with load(tiny_model, drafter="none", deterministic=False) as sound:
        whole = sound.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        at = first_new(whole, sound.encode(PROMPT))
    folder = Path(shutil.copytree(tiny_drafter, tmp_path / "poisoned"))
    edit_graph(folder, poisoned(kind, whole[at]))
    said: list[str] = []
    with load(
        tiny_model,
        drafter=str(folder),
        draft_length=3,
        schedule=schedule,
        deterministic=True,
        report=said.append,
    ) as engine:
        answers = [engine.generate(PROMPT, sampling=HOT, max_tokens=30)]
        while engine.open_drafters:  # how soon it drafts behind that token depends on times
            answers.append(engine.generate(PROMPT, sampling=HOT, max_tokens=30))
        after = engine.generate(PROMPT, sampling=HOT, max_tokens=30)
    assert {answer.token_ids for answer in (*answers, after)} == {whole}
    assert answers[-1].stats.num_drafted > 0 == after.stats.num_drafted
    (line,) = [line for answer in (*answers, after) for line in answer.stats.downgrades]
    assert "no longer drafts in this session" in line
    assert "damaged" in line
    assert line in said


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bans_that_leave_no_token_park_no_drafter(manifest: Manifest, tokenizer: Tokenizer, schedule: str) -> None:
    """They are the fault of a request, after which others are drafted for as before."""
    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    options: dict[str, Any] = {"response_format": {"type": "regex", "regex": "[ab]{4}[cd]"}, "banned": ["c", "d"]}
    shown = []
    for engine in (
        plain_engine(manifest, tokenizer, table),
        drafted_engine(manifest, tokenizer, table, TableDecoder(tiny.VOCAB, 4, table), schedule=schedule),
    ):
        chunks: list[Chunk] = []
        with engine:
            with pytest.raises(UsageError, match="no token may follow"):
                chunks.extend(engine.stream(PROMPT, **options))
            shown.append(joined(chunks))
            last = engine.generate(PROMPT, max_tokens=20)
    assert shown[0] == shown[1] != ()
    assert last.stats.num_drafted > 0 == len(last.stats.downgrades)


# F10: where answers end, whatever was drafted beyond


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.8]),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    schedule=st.sampled_from(SCHEDULES),
    length=st.sampled_from([None, 1, 2, 4, 9]),
    max_tokens=st.integers(1, 20),
    end_tokens=st.lists(st.integers(0, 19), max_size=3),
    stop=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), max_size=2),
)
def test_answers_end_where_plain_decoding_ends_them(
    manifest: Manifest,
    tokenizer: Tokenizer,
    seed: int,
    temperature: float,
    likeness: float,
    schedule: str,
    length: int | None,
    max_tokens: int,
    end_tokens: list[int],
    stop: list[tuple[int, int]],
) -> None:
    """End tokens, stop strings and counts fall into drafts, behind them and between them."""
    params = SamplingParams(temperature=temperature, seed=seed)
    table = TableDecoder(tiny.VOCAB, seed, context_length=200)
    endless = replace(manifest, eos_token_ids=())
    whole = plain_engine(endless, tokenizer, table).generate(PROMPT, sampling=params, max_tokens=20)
    # Those that the answer comes to, so that they matter.
    ends = tuple({whole.token_ids[i] for i in end_tokens})
    strings = [whole.text[start : start + size] for start, size in stop]
    stated = replace(manifest, eos_token_ids=ends)
    wanted = plain_engine(stated, tokenizer, table).generate(
        PROMPT, sampling=params, max_tokens=max_tokens, stop=[text for text in strings if text]
    )
    drafter = TableDecoder(tiny.VOCAB, seed + 1, table, likeness)
    with drafted_engine(stated, tokenizer, table, drafter, length=length, schedule=schedule) as engine:
        chunks = list(
            engine.stream(PROMPT, sampling=params, max_tokens=max_tokens, stop=[text for text in strings if text])
        )
    text, last = "".join(chunk.text for chunk in chunks), chunks[-1]
    assert (text, joined(chunks), last.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
    assert joined(chunks) == whole.token_ids[: len(joined(chunks))]
    assert last.stats is not None
    assert last.stats.num_emitted == len(joined(chunks)) == sum(len(chunk.origins) for chunk in chunks)
    assert last.stats.num_accepted <= last.stats.num_drafted
    assert last.stats.passes <= max(1, wanted.stats.passes)


# F16: a seed repeats its text, also when an answer before it was ended in the midst


@pytest.mark.parametrize(
    # What is drafted ahead hangs on time, and with it what rejection keeps.
    ("schedule", "rule"),
    [*((schedule, equality) for schedule in SCHEDULES), ("serial", rejection)],
)
def test_a_seed_repeats_its_text_after_an_interrupted_round(
    manifest: Manifest, tokenizer: Tokenizer, schedule: str, rule: Acceptance
) -> None:
    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    near = TableDecoder(tiny.VOCAB, 4, table)
    with drafted_engine(manifest, tokenizer, table, near, schedule=schedule, accept=rule) as engine:
        whole = engine.generate(PROMPT, sampling=HOT, max_tokens=40)
        assert whole.stats.num_accepted > 0
        for num_chunks in (0, 1, 3):
            stream = engine.stream(PROMPT, sampling=HOT, max_tokens=40)
            cut = joined(list(islice(stream, num_chunks)))
            stream.close()
            again = engine.generate(PROMPT, sampling=HOT, max_tokens=40)
            assert again.token_ids == whole.token_ids
            assert cut == whole.token_ids[: len(cut)]


# F19: what drafts from the text, after a text that went back


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 3), min_size=1, max_size=9)), min_size=2, max_size=8
    )
)
def test_what_was_taken_back_leaves_no_trace_in_what_is_drafted_from_the_text(
    steps: list[tuple[int, list[int]]],
) -> None:
    """Texts that are each cut back by some tokens and go on otherwise, as in a cascade or a new answer."""
    tokens, sampler = np.zeros(0, np.int32), GumbelSampler(SamplingParams())
    kept = SuffixDrafter()
    for num_back, more in steps:
        tokens = append(tokens[: max(0, len(tokens) - num_back)], more)
        draft, fresh = (each.draft(tokens, DraftRequest(6), sampler) for each in (kept, SuffixDrafter()))
        assert (draft.tokens.tolist(), draft.buckets) == (fresh.tokens.tolist(), fresh.buckets)
        assert set(draft.tokens.tolist()) <= set(tokens.tolist())


# F21: whoever reads an answer fails, or leaves


class Left(Exception):
    pass


@pytest.mark.parametrize("is_closed", [True, False], ids=["with", "without"])
def test_a_reader_that_raises_ends_its_answer_and_has_its_error_once(
    manifest: Manifest, tokenizer: Tokenizer, is_closed: bool
) -> None:
    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    with drafted_engine(
        manifest, tokenizer, table, TableDecoder(tiny.VOCAB, 4, table), schedule="pipelined"
    ) as engine:
        whole = engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids

        def read() -> None:
            stream = engine.stream(PROMPT, sampling=HOT, max_tokens=300)
            if is_closed:
                with stream:
                    for _ in stream:
                        raise Left
            for _ in stream:
                raise Left

        with pytest.raises(Left) as raised:
            read()
        assert raised.value.__context__ is None
        del raised
        gc.collect()
        assert engine._caches.queue._holders == []
        fed = table.num_fed
        time.sleep(0.02)
        assert table.num_fed == fed, "nobody goes on with it"
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids == whole


class Broken(TableDecoder):
    """Fails from its sixth pass on."""

    __slots__ = ("num_passes",)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.num_passes = getattr(self, "num_passes", 0) + 1
        if self.num_passes > 5:
            raise RuntimeError("the device was lost")
        return super().logits(tokens, num_last)


def test_a_report_that_raises_reaches_the_reader_once(manifest: Manifest, tokenizer: Tokenizer) -> None:
    """It is told of a parked drafter at the end of an answer; by then all of that is with its reader."""
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        raise Left

    table = TableDecoder(tiny.VOCAB, 3, context_length=400)
    wanted = plain_engine(manifest, tokenizer, table).generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
    with drafted_engine(manifest, tokenizer, table, Broken(tiny.VOCAB, 4, table), report=report) as engine:
        with pytest.raises(Left):
            engine.generate(PROMPT, sampling=HOT, max_tokens=30)
        assert len(told) == 1
        assert "the device was lost" in told[0]
        assert engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids == wanted
    assert len(told) == 1


# F26: drafters that change between answers


def test_what_changes_between_answers_is_reported_as_the_next_one_begins(
    manifest: Manifest, tokenizer: Tokenizer
) -> None:
    table, told = TableDecoder(tiny.VOCAB, 3, context_length=400), list[str]()
    drafter = TableDecoder(tiny.VOCAB, 4, table)
    with drafted_engine(manifest, tokenizer, table, drafter, report=told.append) as engine:
        wanted = engine.generate(PROMPT, sampling=HOT, max_tokens=30).token_ids
        engine._drafting.pool.changes.add("drafting steps down")  # as the thread that looks between answers does
        assert told == [], "a user may be typing"
        with engine.stream(PROMPT, sampling=HOT, max_tokens=30) as answer:
            assert told == ["drafting steps down"], "before its first chunk"
            chunks = list(answer)
        assert told == ["drafting steps down"]
        assert chunks[-1].stats is not None
        assert chunks[-1].stats.downgrades == ("drafting steps down",)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == wanted
