"""Models are let go and opened again, faults are parked, and the text is that of plain decoding."""

from collections.abc import Callable
from itertools import islice

import pytest
from fake_nvml import Gpu, install_driver
from imitated_machine import MIB, PLENTY, ROOMY, VOCAB, Machine, target
from pool_answers import PROMPT, tokens_of

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, Plain, speculative_decode
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.drafter_sets import BackgroundLoader, Candidate, DrafterSet, OpenModel, drafter_sets
from edgespec.draft.memory_watch import MemoryWatch
from edgespec.draft.pool import ChangeLog, DrafterPool
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.errors import MemoryExhausted, VocabularyMismatch
from edgespec.memory.device_memory import Places
from edgespec.memory.free_memory import HOST, RESERVE_BYTES, FreeMemory, Reserve, device_reserve, machine_reserve
from edgespec.memory.pressure import NO_PRESSURE, Level, Pressure
from edgespec.system.cancel import Cancel


def names_of(sets: list[DrafterSet]) -> list[str]:
    return [each.name for each in sets]


def set_names_of(chains: list[list[Candidate]], *texts: str) -> list[str]:
    return names_of(drafter_sets(chains, frozenset(texts), frozenset({"suffix", "lookahead"}), len))


def test_from_all_that_was_named_to_plain_decoding() -> None:
    machine = Machine()
    big, small, tiny = (machine.candidate(name, size) for name, size in (("big", 9), ("small", 3), ("tiny", 1)))
    assert set_names_of([], "suffix") == ["suffix", "ngram", "plain decoding"]
    assert set_names_of([], "ngram") == ["ngram", "plain decoding"]
    assert set_names_of([]) == ["plain decoding"]
    assert set_names_of([], "lookahead") == ["lookahead", "ngram", "plain decoding"]
    assert set_names_of([[big]]) == ["big", "lookahead+suffix", "suffix", "ngram", "plain decoding"]
    assert set_names_of([[big], [small]], "suffix")[:3] == ["suffix+big+small", "suffix+small", "lookahead+suffix"]
    assert set_names_of([[big, small, tiny]])[:4] == ["big", "small", "tiny", "lookahead+suffix"]


def test_models_that_fit_are_opened_and_the_others_are_reported() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("big", 900), machine.candidate("small", 100))
    pool.start({HOST: FreeMemory(RESERVE_BYTES + 300 * MIB, "a test")}, {HOST: 100 * MIB})
    assert machine.opened == ["small"]
    (line,) = machine.reported
    assert line.startswith("drafting steps down from suffix+big+small to suffix+small: the first needs 1.0 GB")
    assert pool.take_changes() == (line,)
    assert pool.take_changes() == ()


def test_a_model_that_is_refused_memory_at_loading_is_done_without() -> None:
    machine = Machine(refuses={"big"})
    pool = machine.pool(machine.candidate("big", 900), machine.candidate("small", 100))
    pool.start(ROOMY, {})
    assert [drafter.name for drafter in pool.drafters()] == ["suffix", "small"]


def test_another_error_at_loading_is_an_error() -> None:
    machine = Machine(errors={"big": VocabularyMismatch("other tokens")})
    with pytest.raises(VocabularyMismatch):
        machine.pool(machine.candidate("big", 900)).start(ROOMY, {})


def test_it_steps_down_and_frees_the_model_and_climbs_back_and_opens_it_again() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    drafters = pool.drafters()  # a policy holds them
    assert machine.alive == 1
    assert machine.look(pool, 10 * MIB) == ["suffix"]
    assert machine.alive == 0, "nobody holds the session"
    assert machine.num_closed == 1
    assert not pool.has_models
    assert [
        drafter.draft(PROMPT, DraftRequest(3), GumbelSampler(SamplingParams())).source for drafter in drafters
    ][1] == "none"
    assert machine.look(pool, 240 * MIB) == ["suffix"], "not enough for the model"
    assert machine.look(pool, 400 * MIB) == ["suffix"], "not for long enough"
    assert machine.look(pool, 400 * MIB, 3.0) == ["suffix", "model"]
    assert machine.opened == ["model", "model"]
    news = pool.take_changes()
    assert [line.split(":")[0] for line in news] == [
        "drafting steps down from suffix+model to suffix",
        "drafting steps up from suffix to suffix+model",
    ]
    pool.report_changes()
    assert machine.reported == list(news)


def test_what_cannot_be_opened_again_for_want_of_memory_is_tried_ever_more_seldom() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    machine.look(pool, 0)
    machine.look(pool, PLENTY)
    pool.take_changes()
    tries: list[float] = []
    model = pool.drafter_sets[0].models[0]
    refused = model.open

    def counted(cancel: Cancel, report: Callable[[str], None]) -> OpenModel:
        tries.append(machine.clock.now)
        return refused(cancel, report)

    object.__setattr__(model, "open", counted)
    machine.refuses.add("model")
    for _ in range(3000):
        machine.look(pool, PLENTY, 0.2)
    assert 4 <= len(tries) <= 9
    assert len(pool.take_changes()) <= 2, "the same is not reported again and again"


SLOW = pytest.mark.slow
LONG_S = 1200
# Patience doubles from 2 to 300 s, and from then on there is a climb in as long.
MOST_CLIMBS = 8 + LONG_S // 300


@pytest.mark.parametrize(
    "period_s", [0.2, pytest.param(5.0, marks=SLOW), 30.0, pytest.param(60.0, marks=SLOW), 250.0]
)
def test_memory_that_comes_and_goes_moves_the_drafters_seldom(period_s: float) -> None:
    """Half of each period there is room for all, and in the other half for nothing."""
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    while machine.clock.now < LONG_S:
        machine.free_bytes = PLENTY if machine.clock.now % period_s < period_s / 2 else 0
        machine.clock.sleep(0.1)
        pool.look(10)
    assert len(machine.opened) <= 1 + min(MOST_CLIMBS, LONG_S / period_s)
    assert len(pool.take_changes()) <= 4 * MOST_CLIMBS
    assert machine.alive == len(machine.opened) - machine.num_closed


def test_memory_that_is_taken_as_soon_as_a_model_is_open_opens_it_ever_more_seldom() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    while machine.clock.now < LONG_S:
        machine.free_bytes = 0 if pool.has_models else PLENTY
        machine.clock.sleep(0.1)
        pool.look(10)
    assert 8 <= len(machine.opened) <= 1 + MOST_CLIMBS
    assert machine.num_closed == len(machine.opened)


def test_a_model_that_fails_to_open_again_is_quarantined() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    machine.look(pool, 0)
    machine.errors["model"] = OSError("the file is gone")
    for _ in range(30):
        machine.look(pool, PLENTY, 5.0)
    assert [drafter.name for drafter in pool.drafters()] == ["suffix"]
    assert sum("the file is gone" in line for line in pool.take_changes()) == 1


def test_what_is_closed_opens_nothing_again() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    machine.look(pool, 10 * MIB)
    pool.close()
    machine.look(pool, PLENTY)
    machine.look(pool, PLENTY, 3.0)
    assert machine.opened == ["model"]


def test_work_at_loading_starts_over_without_a_model_that_leaves_it_no_memory() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})

    def measured() -> list[str]:
        if machine.alive:
            raise MemoryExhausted("no room beside the model")
        return list(pool.decoders)

    assert pool.with_relief(measured) == []
    with pytest.raises(MemoryExhausted, match="never"):
        pool.with_relief(never)


def never() -> None:
    raise MemoryExhausted("never")


def test_at_the_bottom_there_is_nothing_to_free() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    assert [pool.relieve() for _ in range(4)] == [True, True, False, False]
    assert pool.drafters() == []


def growing(machine: Machine, pool: DrafterPool) -> None:
    """What the target holds doubles from 100 tokens on, at a MiB a token."""
    pool.watch.growth_bytes = lambda held, wanted: (wanted > 100) * (held <= 100) * 100 * MIB


def test_a_cache_that_is_to_grow_is_made_room_for() -> None:
    machine = Machine(free_bytes=140 * MIB)
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    growing(machine, pool)
    pool.look(10)
    assert [drafter.name for drafter in pool.drafters()] == ["suffix"], "148 MiB were to be free"
    assert not machine.alive


def test_a_cache_that_has_no_room_to_grow_is_an_error_before_it_is_asked_for() -> None:
    machine = Machine(free_bytes=70 * MIB)
    pool = machine.pool(texts=frozenset())
    growing(machine, pool)
    pool.look(20)
    with pytest.raises(
        MemoryExhausted,
        match=r"104 tokens need 105 MB more of KV cache, and 73 MB are free within a test: 100 tokens fit",
    ):
        pool.look(40)
    machine.free_bytes = 120 * MIB
    pool.look(40)
    machine.free_bytes = 0
    pool.look(90)


HIGH = Pressure(Level.HIGH, "programs waited for memory in 50% of the last 10 seconds")
SOME = Pressure(Level.SOME, "programs waited for memory in 15% of the last 10 seconds")


def test_high_pressure_closes_a_model_however_much_is_free() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("big", 900), machine.candidate("small", 100))
    pool.start(ROOMY, {})
    machine.pressure = HIGH
    assert machine.look(pool, PLENTY) == ["suffix", "small"], "one at a time"
    assert machine.alive == 1
    assert machine.look(pool, PLENTY, 9.0) == ["suffix", "small"], "what closing the first has changed shows later"
    assert machine.look(pool, PLENTY, 2.0) == ["suffix"]
    for _ in range(100):
        assert machine.look(pool, PLENTY, 5.0) == ["suffix"], "text drafters hold too little to matter"
    news = pool.take_changes()
    assert [line.split(":")[0] for line in news] == [
        "drafting steps down from suffix+big+small to suffix+small",
        "drafting steps down from suffix+small to suffix",
    ]
    assert news[0].endswith("other programs need the memory: " + HIGH.sign)


def test_no_model_is_opened_again_while_programs_wait_for_memory() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    machine.look(pool, 0)
    machine.pressure = SOME
    for _ in range(50):
        assert machine.look(pool, PLENTY, 5.0) == ["suffix"]
    machine.pressure = NO_PRESSURE
    assert machine.look(pool, PLENTY, 0.2) == ["suffix"], "not for long enough"
    assert machine.look(pool, PLENTY, 3.0) == ["suffix", "model"]


def test_some_pressure_closes_nothing() -> None:
    machine = Machine(pressure=SOME)
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    for _ in range(50):
        assert machine.look(pool, PLENTY, 5.0) == ["suffix", "model"]


@pytest.mark.parametrize("reserve", [machine_reserve(16 << 30), machine_reserve(4 << 30), device_reserve(8 << 30)])
def test_a_model_leaves_the_reserve_and_text_drafters_need_none_of_it(reserve: Reserve) -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.watch.free = lambda: {HOST: FreeMemory(machine.free_bytes, "a test", reserve=reserve)}
    pool.start({HOST: FreeMemory(reserve.opening_bytes + 201 * MIB, "a test", reserve=reserve)}, {})
    assert machine.look(pool, reserve.floor_bytes) == ["suffix", "model"]
    assert machine.look(pool, reserve.floor_bytes - 1) == ["suffix"]
    for free_bytes in (RESERVE_BYTES, reserve.opening_bytes + 200 * MIB - 1):
        assert machine.look(pool, free_bytes, 5.0) == machine.look(pool, free_bytes, 5.0) == ["suffix"]
    machine.look(pool, reserve.opening_bytes + 200 * MIB)
    assert machine.look(pool, reserve.opening_bytes + 200 * MIB, 5.0) == ["suffix", "model"]


@pytest.mark.parametrize(("missing", "name"), [(0, "suffix+model"), (1, "suffix")])
def test_a_model_is_loaded_where_the_reserve_remains(missing: int, name: str) -> None:
    machine, reserve = Machine(), machine_reserve(16 << 30)
    pool = machine.pool(machine.candidate("model", 200))
    free_bytes = reserve.opening_bytes + (500 + 201) * MIB - missing  # the target, suffix and the model
    pool.start({HOST: FreeMemory(free_bytes, "a test", reserve=reserve)}, {HOST: 500 * MIB})
    assert pool.drafter_set.name == name
    if missing:
        (line,) = machine.reported
        assert "needs 211 MB beside the 524 MB of the target and 1.1 GB in reserve, and 1.8 GB are free" in line


def on_cuda(name: str, needed_mib: int, machine: Machine) -> Candidate:
    candidate = machine.candidate(name, needed_mib)
    return Candidate(name, {HOST: 40 * MIB, "cuda": needed_mib * MIB}, candidate.open)


def test_a_drafter_on_a_device_is_let_go_when_its_driver_tells_less_and_no_token_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, gpu = Machine(), Gpu("NVIDIA H200", 900 * MIB, total=1024 * MIB)
    install_driver(monkeypatch, gpu)
    sets = drafter_sets([[on_cuda("model", 300, machine)]], frozenset({"suffix"}), frozenset(), lambda names: MIB)
    pool = DrafterPool(
        sets,
        VOCAB,
        machine.texts,
        watch=MemoryWatch(
            [each.tier for each in sets],
            free=Places(["cuda"], lambda: ROOMY[HOST], machine.reported.append),
            place="host",
            clock=machine.clock,
            pressure=lambda: machine.pressure,
        ),
        changes=ChangeLog(machine.reported.append),
        loader=BackgroundLoader(machine.executor),
    )
    pool.start(pool.watch.free(), {HOST: 40 * MIB, "cuda": 400 * MIB})
    assert pool.drafter_set.name == "suffix+model"
    policy = PoolPolicy(pool, Speculation(pool.drafters, 3))
    sampler = GumbelSampler(SamplingParams(temperature=0.8, seed=4), len(PROMPT))
    blocks, models = list[Block](), list[bool]()
    for block in islice(speculative_decode(PROMPT, target(), sampler, policy, relieve=pool.relieve), 90):
        blocks.append(block)
        models.append(pool.has_models)
        gpu.free = (10 if 30 < len(blocks) < 60 else 900) * MIB  # another program's
        machine.clock.sleep(0.2)
    assert [model for i, model in enumerate(models) if not i or model != models[i - 1]] == [True, False, True]
    assert machine.num_closed == 1
    found = tokens_of(blocks)
    assert found == tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), len(found))))
    news = pool.take_changes()
    assert [line.split(":")[0].split()[2] for line in news] == ["down", "up"]
    assert news[0].endswith("10 MB are free within the memory of NVIDIA H200, and 50 MB are needed")


def test_a_cache_on_a_device_grows_by_what_that_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gpu = Machine(free_bytes=0), Gpu("it", 70 * MIB)
    install_driver(monkeypatch, gpu)
    pool = machine.pool(texts=frozenset())
    pool.watch.free, pool.watch.place = (
        Places(["cuda"], lambda: ROOMY[HOST], print),
        "cuda",
    )
    growing(machine, pool)
    with pytest.raises(MemoryExhausted, match="73 MB are free within the memory of it"):
        pool.look(40)
    gpu.free = 120 * MIB
    pool.look(40)
