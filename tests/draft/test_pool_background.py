"""Models are opened while answers are made, and join between two blocks."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice

import pytest
from imitated_machine import PLENTY, ROOMY, Machine, target
from pool_answers import PROMPT, tokens_of

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.draft.drafter_sets import Candidate, OpenModel
from edgespec.draft.pool import DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.system.cancel import Cancel


def wait_for_load(pool: DrafterPool) -> None:
    if load := pool.loader._load:
        wait([load.future])


@dataclass
class Slow:
    """A machine on which a model takes until it is let go on, once it was opened at loading."""

    machine: Machine
    may_end: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    heeds_cancel: bool = True

    def candidate(self, name: str, needed_mib: int) -> Candidate:
        quick = self.machine.candidate(name, needed_mib)

        def opened(cancel: Cancel, report: Callable[[str], None]) -> OpenModel:
            if name in self.machine.opened:
                self.begun.set()
                with cancel.on_set(self.may_end.set if self.heeds_cancel else int):
                    assert self.may_end.wait(60)
                if self.heeds_cancel:
                    cancel.require_unset()
            return quick.open(cancel, report)

        return Candidate(name, quick.needed, opened)

    def pool_that_opens(self) -> DrafterPool:
        """A pool whose model was closed and is being opened again."""
        self.machine.executor = ThreadPoolExecutor(1, "edgespec opening")
        pool = self.machine.pool(self.candidate("model", 200), texts=frozenset())
        pool.start(ROOMY, {})
        self.machine.look(pool, 0)
        for after_s in (0.2, 3.0, 3.0, 3.0):
            self.machine.look(pool, PLENTY, after_s)
        assert self.begun.wait(60)
        return pool


def opening_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("edgespec opening")]


def test_blocks_go_on_while_a_model_is_opened_and_it_joins_between_two_of_them() -> None:
    slow = Slow(Machine())
    pool = slow.pool_that_opens()
    policy = PoolPolicy(pool, Speculation(pool.drafters, 3))
    sampler = GumbelSampler(SamplingParams(temperature=0.8, seed=4), len(PROMPT))
    steps = speculative_decode(PROMPT, target(), sampler, policy, relieve=pool.relieve)
    blocks = list(islice(steps, 40))
    assert not slow.may_end.is_set(), "none of them waited"
    assert {block.draft.source for block in blocks} <= {"suffix", "none"}
    assert pool.drafter_set.name == "suffix"
    slow.may_end.set()
    wait_for_load(pool)
    blocks += islice(steps, 40)
    assert "model" in {block.draft.source for block in blocks[40:]}
    assert pool.drafter_set.name == "model"
    found = tokens_of(blocks)
    assert (
        found
        == tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), len(found))))[
            : len(found)
        ]
    )
    steps.close()
    pool.close()
    assert opening_threads() == []


@pytest.mark.parametrize("heeds_cancel", [True, False])
def test_what_is_closed_while_it_opens_a_model_leaves_neither_thread_nor_model(heeds_cancel: bool) -> None:
    slow = Slow(Machine(), heeds_cancel=heeds_cancel)
    pool = slow.pool_that_opens()
    num_closed = slow.machine.num_closed
    if not heeds_cancel:
        threading.Timer(0.05, slow.may_end.set).start()
    pool.close()
    assert opening_threads() == []
    assert slow.machine.alive == 0
    assert slow.machine.num_closed == num_closed + (not heeds_cancel), "its lane is stopped"
    assert [drafter.name for drafter in pool.drafters()] == ["suffix"]


def test_memory_that_is_short_again_ends_the_opening_and_a_later_one_serves() -> None:
    slow = Slow(Machine())
    pool = slow.pool_that_opens()
    pool.take_changes()
    assert slow.machine.look(pool, 0) == ["suffix"]
    assert slow.may_end.is_set(), "it was ended"
    for _ in range(20):
        wait_for_load(pool)
        slow.machine.look(pool, PLENTY, 5.0)
    assert pool.drafter_set.name == "model"
    moves = [line.split(":")[0].split()[2:] for line in pool.take_changes()]
    assert moves == [["up", "from", "suffix", "to", "model"]], "the climb that failed is not reported"
    pool.close()


def test_a_pass_without_room_ends_the_opening_and_waits_for_its_memory() -> None:
    slow = Slow(Machine())
    pool = slow.pool_that_opens()
    assert pool.relieve()
    assert slow.may_end.is_set()
    assert slow.machine.alive == 0
    assert pool.loader.candidate is None
    pool.close()


def test_a_model_that_fails_in_the_background_is_quarantined_with_its_reason() -> None:
    slow = Slow(Machine())
    pool = slow.pool_that_opens()
    slow.machine.errors["model"] = OSError("the file is gone")
    slow.may_end.set()
    wait_for_load(pool)
    assert slow.machine.look(pool, PLENTY) == ["suffix"]
    assert any(
        "model no longer drafts in this session: OSError: the file is gone" in each for each in pool.take_changes()
    )
    pool.close()
