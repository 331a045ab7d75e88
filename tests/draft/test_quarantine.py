"""A drafter at fault is parked, and what it would have drafted is nothing."""

import re
import threading
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.quarantine import GuardedDrafter, nonsense
from edgespec.errors import DrafterFault, MemoryExhausted
from edgespec.types import Distribution, Logits, Sampler, TokenIds

VOCAB = 12
TEXT = np.array([1, 2, 3, 1, 2], np.int32)
SAMPLER = GumbelSampler(SamplingParams())
GOOD = Tree(np.array([3, 1], np.int32), (0, 0), source="stub")


class Stub(Drafter):
    """Drafts what it is told, or raises it."""

    name = "stub"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        raise ZeroDivisionError("no rows")


def guarded(*answers: Any) -> tuple[GuardedDrafter, list[tuple[str, str]]]:
    faults: list[tuple[str, str]] = []
    return GuardedDrafter(Stub(*answers), VOCAB, lambda name, reason: faults.append((name, reason))), faults


def ids(*tokens: int, dtype: type = np.int32) -> Any:
    return np.array(tokens, dtype)


NONSENSE = {
    "negative": (Tree(ids(1, -1), (0, 0)), "the token -1, wanted 0 to 11"),
    "beyond the vocabulary": (Tree(ids(1, 12), (0, 0)), "the token 12"),
    "more than asked for": (Tree(ids(1, 2, 3, 4, 5), (0,) * 5), "5 tokens ahead, wanted at most 4"),
    "another type": (Tree(ids(1, dtype=np.int64), (0,)), "int64"),
    "floats": (Tree(ids(1, dtype=np.float32), (0,)), "float32"),
    "another shape": (Tree(ids(1, 2).reshape(1, 2), (0,)), r"\[1, 2\]"),
    "no array": (Tree([1, 2], (0, 0)), "list"),  # type: ignore[arg-type]
    "no draft": (None, "NoneType"),
    "too little evidence": (Tree(ids(1, 2), (0,)), "buckets is of 1 tokens, wanted 2"),
    "too many distributions": (Tree(ids(1), (0,), distributions=(Distribution(ids(1), ids(1)),) * 2), "of 2"),
    "a distribution of other tokens": (
        Tree(ids(1), (0,), distributions=(Distribution(ids(99), ids(1)),)),
        "drew",
    ),
    "a deep tree": (Tree(ids(1, 2, 3, 4, 5), (0,) * 5, (-1, 0, 1, 2, 3)), "5 tokens ahead"),
    "a tree without a root": (Tree(ids(1, 2), (0, 0), (1, 0)), "parents"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_parks_with_its_reason_once(kind: str) -> None:
    draft, said = NONSENSE[kind]
    drafter, faults = guarded(draft, GOOD)
    for _ in range(3):
        assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT
    assert drafter.is_quarantined
    ((name, reason),) = faults
    assert name == "stub"

    assert re.search(said, reason)


@pytest.mark.parametrize("error", [ValueError("bad\nrow"), AssertionError("a bug"), RuntimeError("ONNX Runtime")])
def test_what_it_raises_parks_it(error: Exception) -> None:
    drafter, faults = guarded(error, GOOD)
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT
    assert faults == [("stub", f"{type(error).__name__}: {str(error).replace(chr(10), ' ')}")]


def test_what_it_raises_while_it_learns_parks_it() -> None:
    drafter, faults = guarded(GOOD)
    drafter.learn(TEXT, NO_DRAFT, np.zeros((1, VOCAB), np.float32))
    assert faults == [("stub", "ZeroDivisionError: no rows")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_is_no_fault(error: BaseException) -> None:
    drafter, faults = guarded(error, GOOD)
    with pytest.raises(type(error)):
        drafter.draft(TEXT, DraftRequest(4), SAMPLER)
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is GOOD
    assert not faults


def of_a_lane() -> DrafterFault:
    fault = DrafterFault("its lane failed")
    fault.__cause__ = MemoryExhausted("no room")
    return fault


@pytest.mark.parametrize("error", [MemoryExhausted("no room"), MemoryError(), of_a_lane()])
def test_want_of_memory_is_no_fault(error: Exception) -> None:
    calls: list[int] = []
    drafter = GuardedDrafter(
        Stub(error, GOOD), VOCAB, lambda *fault: pytest.fail("a fault"), lambda: calls.append(1)
    )
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is GOOD
    assert calls == [1]


def test_what_is_taken_away_drafts_nothing_until_it_is_given_back() -> None:
    drafter, _ = guarded(GOOD)
    inner = drafter._drafter
    assert inner is not None
    drafter.take()
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT
    drafter.put_back(inner)
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is GOOD


def test_it_is_not_taken_away_while_it_drafts() -> None:
    entered, may_end = threading.Event(), threading.Event()

    class Slow(Stub):
        def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
            entered.set()
            assert may_end.wait(60)
            return GOOD

    drafter = GuardedDrafter(Slow(), VOCAB, lambda *fault: None)
    drafting = threading.Thread(target=drafter.draft, args=(TEXT, DraftRequest(4), SAMPLER))
    drafting.start()
    assert entered.wait(60)
    taking = threading.Thread(target=drafter.take)
    taking.start()
    taking.join(0.05)
    assert taking.is_alive()
    may_end.set()
    taking.join(120)
    drafting.join(120)
    assert drafter.draft(TEXT, DraftRequest(4), SAMPLER) is NO_DRAFT


def test_real_drafts_make_sense() -> None:
    for length in range(1, 9):
        assert (
            nonsense(NgramDrafter().draft(TEXT, DraftRequest(length), SAMPLER), DraftRequest(length), VOCAB)
            is None
        )
