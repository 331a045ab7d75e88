"""A drafter at fault is quarantined for good, and the text is that of plain decoding."""

import threading
from collections.abc import Callable
from time import perf_counter

import numpy as np
import pytest
from imitated_machine import ROOMY, VOCAB, Machine, target
from pool_answers import answer
from table_decoder import TableDecoder

from edgespec.decoding.tree import Tree
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import ThreadLane
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.types import Logits, Sampler, TokenIds


class Broken(Drafter):
    """Drafts well for a while, then does what it is told."""

    name = ""
    can = DrafterCan(is_free=False)

    def __init__(self, fault: Callable[[Tree], Tree], num_good: int = 5, name: str = "broken") -> None:
        self.name = name
        self._inner = ModelDrafter(TableDecoder(VOCAB, seed=2, near=target()), VOCAB, name)
        self._fault = fault
        self._num_good = num_good

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        draft = self._inner.draft(tokens, request, sampler)
        self._num_good -= 1
        return draft if self._num_good >= 0 else self._fault(draft)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        pass


def raising(draft: Tree) -> Tree:
    raise RuntimeError("it broke")


FAULTS: dict[str, Callable[[Tree], Tree]] = {
    "raises": raising,
    "beyond the vocabulary": lambda draft: draft._replace(tokens=draft.tokens + VOCAB),
    "negative": lambda draft: draft._replace(tokens=draft.tokens - VOCAB),
    "too many": lambda draft: Tree(np.zeros(90, np.int32), (0,) * 90, source="broken"),
    "floats": lambda draft: draft._replace(tokens=draft.tokens.astype(np.float64)),  # type: ignore[arg-type]
    "no evidence": lambda draft: draft._replace(buckets=()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_is_quarantined_for_good_and_the_answer_goes_on(fault: str) -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("broken", 1, lambda: Broken(FAULTS[fault])), texts=frozenset())
    pool.start(ROOMY, {})
    answer(pool, 3, num_blocks=20)
    assert not machine.alive
    (line,) = pool.take_changes()
    assert line.startswith("broken no longer drafts in this session: ")
    answer(pool, 3, num_blocks=20, seed=5)
    assert pool.drafters() == []
    assert machine.opened == ["broken"]
    assert pool.take_changes() == ()


class Hanging(TableDecoder):
    """Hangs until it is let go."""

    __slots__ = ("may_go_on",)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if len(tokens) > 12:
            assert self.may_go_on.wait(120)
        return super().logits(tokens, num_last)


def test_a_drafter_that_hangs_is_quarantined_at_its_deadline() -> None:
    decoder = Hanging(VOCAB, seed=2, near=target())
    decoder.may_go_on = threading.Event()
    drafter = LaneDrafter(ModelDrafter(decoder, VOCAB, "slow"), ThreadLane("test"), deadline_s=0.05)
    machine = Machine()
    pool = machine.pool(machine.candidate("slow", 1, lambda: drafter), texts=frozenset())
    pool.start(ROOMY, {})
    started = perf_counter()
    answer(pool, 3)
    assert perf_counter() - started < 60
    (line,) = pool.take_changes()
    assert line.startswith("slow no longer drafts in this session: DrafterFault: it has not answered for")
    decoder.may_go_on.set()
    drafter.lane.stop()


def test_a_faulty_drafter_from_the_text_is_quarantined_too() -> None:
    made: list[Broken] = []

    def texts(names: frozenset[str]) -> list[Drafter]:
        made.append(Broken(raising, 0, "suffix"))
        return [made[-1]]

    machine = Machine()
    pool = machine.pool()
    pool.from_text = texts
    answer(pool, 3)
    assert pool.drafters() == []
    assert len(pool.take_changes()) == 1
