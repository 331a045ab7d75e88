"""Between answers memory is looked at too: models are closed for other programs and opened again, in silence."""

import gc
import threading
from dataclasses import replace
from itertools import islice
from time import monotonic

import numpy as np
import pytest
from fake_nvml import Gpu, install_driver
from imitated_machine import MIB, PLENTY, ROOMY, VOCAB, Machine, target
from until import until

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.draft.drafter_sets import BackgroundLoader, drafter_sets
from edgespec.draft.memory_watch import MemoryWatch
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.memory.device_memory import Places
from edgespec.memory.free_memory import HOST
from edgespec.memory.pressure import Level, Pressure

TEXTS = frozenset({"suffix"})
PROMPT = np.array([1, 2, 3, 1, 2], np.int32)
SAMPLER = GumbelSampler(SamplingParams(temperature=0.8, seed=4), len(PROMPT))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.draft.memory_watch._END_S", 60.0)  # of a pool that is closed within a slow look


def idle_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "edgespec memory"]


def started(machine: Machine) -> DrafterPool:
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    return pool


def look(machine: Machine, pool: DrafterPool, free_bytes: int) -> None:
    """Three seconds later so much is free."""
    machine.free_bytes = free_bytes
    machine.clock.sleep(3.0)
    assert pool.look_while_idle()


def answer(pool: DrafterPool, speculation: Speculation, num_blocks: int = 40) -> None:
    """Make an answer, which has the tokens of plain decoding."""
    steps = speculative_decode(PROMPT, target(), SAMPLER, PoolPolicy(pool, speculation), relieve=pool.relieve)
    found = np.concatenate([block.tokens for block in islice(steps, num_blocks)])
    steps.close()
    blocks = speculative_decode(PROMPT, target(), SAMPLER, Plain())
    assert found.tolist() == np.concatenate([each.tokens for each in islice(blocks, len(found))]).tolist()


def test_a_model_is_closed_and_comes_back_between_answers_and_is_reported_with_the_next() -> None:
    machine = Machine()
    pool = started(machine)
    speculation = Speculation(pool.drafters, 3)
    answer(pool, speculation)
    look(machine, pool, 10 * MIB)
    assert (machine.alive, pool.has_models) == (0, False)
    answer(pool, speculation)
    for _ in range(3):
        look(machine, pool, PLENTY)
    assert pool.has_models
    assert machine.reported == [], "nothing is printed into what a user types"
    pool.report_changes()
    assert [line.split()[2] for line in machine.reported] == ["down", "up"]
    answer(pool, speculation)


def test_a_model_is_closed_between_answers_where_a_device_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gpu = Machine(), Gpu("a GPU", 2000 * MIB, total=8192 * MIB)
    install_driver(monkeypatch, gpu)
    model = replace(machine.candidate("model", 40), needed={HOST: 40 * MIB, "cuda": 300 * MIB})
    sets = drafter_sets([[model]], TEXTS, frozenset(), lambda names: 0)
    places = Places(["cuda"], lambda: ROOMY[HOST], machine.reported.append)
    watch = MemoryWatch(
        [each.tier for each in sets],
        free=places,
        place="cuda",
        clock=machine.clock,
        pressure=lambda: machine.pressure,
    )
    pool = DrafterPool(sets, VOCAB, machine.texts, watch, ChangeLog(), BackgroundLoader(machine.executor))
    pool.start(places(), {HOST: 40 * MIB, "cuda": 1000 * MIB})
    assert pool.has_models
    for free_mib, is_open in [(256, True), (255, False), (811, False), (811, False), (812, False), (812, True)]:
        gpu.free = free_mib * MIB
        look(machine, pool, PLENTY)
        assert pool.has_models == is_open, free_mib
    assert pool.take_changes()[0].endswith("267 MB are free within the memory of a GPU, and 268 MB are needed")


def test_pressure_closes_a_model_between_answers_too() -> None:
    machine = Machine(pressure=Pressure(Level.HIGH, "swap grows"))
    pool = started(machine)
    assert pool.look_while_idle()
    assert not pool.has_models
    assert pool.take_changes() == (
        "drafting steps down from suffix+model to suffix: other programs need the memory: swap grows",
    )


def test_memory_that_comes_and_goes_between_answers_opens_a_model_ever_more_seldom() -> None:
    machine = Machine()
    pool = started(machine)
    for _ in range(1200):
        look(machine, pool, 0 if pool.has_models else PLENTY)
    assert 8 <= len(machine.opened) <= 1 + 8 + 3600 // 300


def test_what_was_read_is_forgotten_with_a_model_that_was_opened_again_between_answers() -> None:
    machine = Machine()
    pool = started(machine)
    speculation = Speculation(pool.drafters)
    answer(pool, speculation)
    speculation.models["model"].text.hold(PROMPT)
    for free_bytes in (0, PLENTY, PLENTY, PLENTY):
        look(machine, pool, free_bytes)
    assert pool.has_models
    PoolPolicy(pool, speculation)
    assert len(speculation.models["model"].text.held) == 0, "its cache is empty"


def test_nothing_is_closed_within_a_round_of_an_answer() -> None:
    machine = Machine()
    pool = started(machine)
    policy = PoolPolicy(pool, Speculation(pool.drafters, 3))
    round = policy.propose(PROMPT, 9, SAMPLER)
    look(machine, pool, 0)
    assert pool.has_models, "the answer's own thread looks before its next round"
    tokens = np.concatenate([PROMPT, round.draft.tokens])
    logits = target().logits(tokens, len(round.draft.tokens) + 1)
    policy.observe(round, logits, np.array([1], np.int32), 0.01)
    look(machine, pool, 0)
    assert not pool.has_models
    policy.close()


def test_nothing_is_closed_beside_a_measurement_that_holds_the_drafters() -> None:
    machine = Machine()
    pool = started(machine)
    with pool.hold():
        look(machine, pool, 0)
        assert pool.has_models
    look(machine, pool, 0)
    assert not pool.has_models


def test_a_round_that_fails_does_not_keep_the_models_for_ever() -> None:
    machine = Machine()
    pool = started(machine)
    policy = PoolPolicy(pool, Speculation(pool.drafters, 3))
    policy.propose(PROMPT, 9, SAMPLER)
    policy.close()
    look(machine, pool, 0)
    assert not pool.has_models


def test_an_error_ends_the_watch_and_is_reported_with_the_next_answer() -> None:
    pool = started(Machine())

    def lost() -> None:
        raise OSError("the driver is gone")

    pool.watch.free = lost  # type: ignore[assignment]
    pool.watch.clock = lambda: 100.0
    assert not pool.look_while_idle()
    assert pool.take_changes() == ("memory is not watched between answers any more: OSError: the driver is gone",)


def test_a_thread_looks_until_the_pool_is_closed() -> None:
    machine = Machine()
    pool = started(machine)
    pool.watch_while_idle(0.01)
    pool.watch_while_idle(0.01)
    assert len(idle_threads()) == 1
    assert idle_threads()[0].daemon
    machine.free_bytes = 0
    machine.clock.sleep(3.0)
    until(lambda: not pool.has_models)
    pool.close()
    assert idle_threads() == []


def test_a_pool_that_nobody_holds_leaves_no_thread_and_no_model() -> None:
    machine = Machine()
    pool = started(machine)
    pool.watch_while_idle(0.01)
    assert machine.alive == 1
    del pool
    gc.collect()
    until(lambda: not idle_threads())
    assert machine.alive == 0


def test_no_thread_watches_where_no_model_could_be_closed() -> None:
    pool = Machine().pool()
    pool.start(ROOMY, {})
    pool.watch_while_idle(0.01)
    assert idle_threads() == []
    pool.close()


@pytest.mark.parametrize("length", [3, None])
def test_answers_keep_their_text_beside_a_thread_that_looks_all_the_time(length: int | None) -> None:
    machine = Machine()
    pool = started(machine)
    pool.watch_while_idle(0.0005)
    may_end = threading.Event()

    def flap() -> None:
        num_ticks = 0
        while not may_end.wait(0.001):
            machine.clock.sleep(400.0)  # longer than any cooldown
            num_ticks += 1
            machine.free_bytes = PLENTY if num_ticks % 8 < 6 else 0

    flapping = threading.Thread(target=flap)
    flapping.start()
    speculation = Speculation(pool.drafters, length)
    num_answers, ends_s = 0, monotonic() + 60.0
    while num_answers < 8 or (len(machine.opened) < 2 and monotonic() < ends_s):
        answer(pool, speculation)  # which is compared with plain decoding
        num_answers += 1
    may_end.set()
    flapping.join()
    pool.close()
    assert len(machine.opened) > 1
    assert idle_threads() == []
