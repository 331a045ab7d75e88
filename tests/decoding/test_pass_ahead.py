"""A plain pass that begins before it is asked for gives the tokens of passes in turn."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from threading import Event
from typing import Any

import numpy as np
import pytest
from double import Double
from table_decoder import TableDecoder

from edgespec.decoding.decoder import BEST, LOGITS, Argmax, Can, Pass, Rows
from edgespec.decoding.greedy import BestRows
from edgespec.decoding.pass_ahead import PassAhead
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import DraftPolicy, Plain, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.speculation import Speculation
from edgespec.errors import MemoryExhausted
from edgespec.types import Logits, TokenIds, append

PROMPT = np.arange(6, dtype=np.int32)
SAMPLER = GumbelSampler(SamplingParams())
WAIT_S = 10


class Chooser(Double):
    """A table that chooses; a pass over held_at tokens waits for an interrupt, one over fails_at fails once."""

    can = Can(best=True)
    vocab_size, context_length, num_fed = 40, 500, 0

    def __init__(self, *, fails_at: int = 0, held_at: int = 0, damaged_at: int = 0) -> None:
        self.table = TableDecoder(40, 0)
        self.fails_at, self.held_at, self.damaged_at = fails_at, held_at, damaged_at
        self.lengths: list[int] = []
        self.begun: dict[int, Event] = {}
        self.let_go = Event()
        self.num_interrupts = 0

    def has_begun(self, length: int) -> bool:
        return self.begun.setdefault(length, Event()).wait(WAIT_S)

    def interrupt(self) -> None:
        self.num_interrupts += 1
        self.let_go.set()

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self.num_fed += num_last
        return self.table.logits(tokens, num_last)

    def run(self, given: Pass) -> Rows:
        length = len(given.tokens)
        self.lengths.append(length)
        self.begun.setdefault(length, Event()).set()
        if length == self.held_at:
            assert self.let_go.wait(WAIT_S)
        if length == self.fails_at:
            self.fails_at = 0
            raise MemoryExhausted("out of memory while running a pass")
        rows = self.logits(given.tokens, given.num_rows)
        is_sound = np.full(len(rows), length != self.damaged_at)
        return Rows(best=Argmax(rows.argmax(1), is_sound)) if given.wants is BEST else Rows(rows)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not [each for each in threading.enumerate() if each.name.startswith("edgespec pass")]


def always(text: TokenIds) -> bool:
    return True


def text(target: Chooser, num_tokens: int, policy: DraftPolicy, goes_on: Callable[[TokenIds], bool]) -> list[int]:
    with closing(PassAhead(target, goes_on)) as ahead:
        blocks = speculative_decode(PROMPT, BestRows(ahead), SAMPLER, policy)
        with closing(blocks):
            found = np.concatenate([block.tokens for block in islice(blocks, num_tokens)])
    return [int(token) for token in found[:num_tokens]]


def plain(num_tokens: int) -> list[int]:
    blocks = speculative_decode(PROMPT, TableDecoder(40, 0), SAMPLER, Plain())
    return [int(block.tokens[0]) for block in islice(blocks, num_tokens)]


@pytest.mark.parametrize("goes_on", [always, lambda text: len(text) % 3 > 0, lambda text: False])
def test_the_text_is_that_of_passes_in_turn_and_each_runs_once(goes_on: Callable[[TokenIds], bool]) -> None:
    target = Chooser()
    assert text(target, 40, Plain(), goes_on) == plain(40)
    assert target.lengths[:40] == [*range(6, 46)]
    assert len(target.lengths) <= 41


def test_a_pass_begins_before_it_is_asked_for_and_no_other_before_that_one_is() -> None:
    target = Chooser()
    with closing(PassAhead(target, always)) as ahead:
        first = ahead.run(Pass(PROMPT, wants=BEST))
        assert first.best
        assert target.has_begun(7)
        num_fed = ahead.num_fed
        following = np.append(PROMPT, first.best.ids).astype(np.int32)
        ahead.run(Pass(following, wants=BEST))
        assert (num_fed, ahead.num_fed) == (1, 2), "what was asked for counts"
        assert target.has_begun(8)
    assert target.lengths == [6, 7, 8]


def test_a_draft_ends_the_pass_that_ran_in_vain() -> None:
    target = Chooser(held_at=7)
    drafter = ModelDrafter(TableDecoder(40, 1, near=TableDecoder(40, 0)), 40)
    policy = Speculation(lambda: [drafter], draft_length=3).policy()
    found = text(target, 30, policy, always)
    assert found == plain(30)

    target = Chooser(held_at=7)
    with closing(PassAhead(target, always)) as ahead:
        ahead.run(Pass(PROMPT, wants=BEST))
        assert target.has_begun(7)
        other = np.append(PROMPT, [3, 4]).astype(np.int32)
        best = ahead.run(Pass(other, num_last=2, wants=BEST)).best
    assert best
    assert best.ids.tolist() == target.table.logits(other, 2).argmax(1).tolist()
    assert target.num_interrupts >= 1


def test_a_pass_that_fails_ahead_fails_when_it_is_asked_for_and_runs_again() -> None:
    target = Chooser(fails_at=10)
    relieved = []
    with closing(PassAhead(target, always)) as ahead:
        blocks = speculative_decode(
            PROMPT, BestRows(ahead), SAMPLER, Plain(), relieve=lambda: not relieved.append(True)
        )
        with closing(blocks):
            found = [int(block.tokens[0]) for block in islice(blocks, 20)]
    assert found == plain(20)
    assert relieved == [True]


def test_nothing_runs_ahead_of_a_row_that_is_not_finite_or_of_the_end_of_the_context() -> None:
    target = Chooser(damaged_at=9)
    with closing(PassAhead(target, always)) as ahead:
        tokens = np.append(PROMPT, [1, 2, 3]).astype(np.int32)
        best = ahead.run(Pass(tokens, wants=BEST)).best
        assert best
        assert not best.is_sound[0]
        target.context_length = ahead.context_length = len(PROMPT)
        ahead.run(Pass(PROMPT, wants=BEST))
    assert target.lengths == [9, 6]


def test_closing_ends_a_pass_that_runs() -> None:
    target = Chooser(held_at=7)
    with closing(PassAhead(target, always)) as ahead:
        ahead.run(Pass(PROMPT, wants=BEST))
        assert target.has_begun(7)
    assert (target.lengths, target.num_interrupts) == ([6, 7], 1)


@pytest.mark.parametrize(
    "other",
    [
        {"tree": Tree(np.array([3], np.int32)), "num_last": 1},
        {"num_last": 2},
        {"wants": LOGITS},
        {"num_prompt": 3},
    ],
    ids=["a draft", "two rows", "logits", "another prompt"],
)
def test_a_pass_that_asks_for_more_than_what_runs_ahead_has_a_run_of_its_own(other: dict[str, Any]) -> None:
    target = Chooser()
    with closing(PassAhead(target, lambda text: len(text) == 7)) as ahead:
        first = ahead.run(Pass(PROMPT, wants=BEST)).best
        assert first
        assert target.has_begun(7)
        given = Pass(append(PROMPT, first.ids.tolist()), **{"wants": BEST, **other})
        rows, expected = ahead.run(given), target.table.logits(given.tokens, given.num_rows)
    assert target.lengths == [6, 7, len(given.tokens)]
    found = rows.best.ids if rows.best else rows.logits.argmax(1)
    assert found.tolist() == expected.argmax(1).tolist()
