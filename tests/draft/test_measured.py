"""The measured policy against a machine with known costs: seconds are made up, decisions are not."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from pass_times import CPU, GPU

from edgespec.decoding.decoder import EVEN_WIDTHS
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates, position_bucket
from edgespec.draft.costs import ContextCosts, PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats
from edgespec.draft.drafter import Drafter, DrafterCan, DraftRequest
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_rates import ModelRates
from edgespec.draft.option import DraftSource, Promise
from edgespec.simulation.machines import Machine
from edgespec.simulation.schedules import Scenario, run, virtual_devices
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, Sampler, TokenIds

GREEDY = GumbelSampler(SamplingParams())


class Guesser(Drafter):
    """Knows what is said next, and tells it with a given chance a token."""

    name = ""
    can = DrafterCan()

    def __init__(
        self,
        truth: TokenIds,
        chance: float,
        *,
        ms: float = 0.0,
        read_ms: float = 0.0,
        max_unread: int | None = None,
        clock: VirtualClock,
        seed: int = 0,
    ) -> None:
        self.name = f"{chance}"
        self.num_read, self.limit, self._read_ms = 0, 10**6, read_ms
        self.can = DrafterCan(is_free=ms == 0.0, max_unread=max_unread)
        self.chance = chance
        self._truth, self._ms, self.clock = truth, ms, clock
        self._rng = np.random.default_rng(seed)

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        right = self._truth[len(tokens) :][: request.num_tokens]
        keeps = self._rng.random(len(right)) < self.chance
        limit = request.max_unread or self.can.max_unread or 10**6
        if limit > self.limit:  # it has skipped what it is to read now
            self.num_read = 0
        unread = max(0, min(len(tokens) - self.num_read, limit) - 1)
        self.num_read, self.limit = len(tokens), limit
        self.clock.now += (len(right) * self._ms + unread * self._read_ms) / 1e3
        evidence = tuple(min(i, 15) if self._ms else 0 for i in range(len(right)))
        return Tree(np.where(keeps, right, right + 1).astype(np.int32), evidence, source=self.name)

    def learn(self, tokens: TokenIds, draft: Tree, logits: Logits) -> None:
        pass


class Doubting(Guesser):
    """Is sure of most tokens, by its chance; a draft ends behind another one, which is right half of the time.

    tells: It says how sure it is.
    """

    tells = True

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        right = self._truth[len(tokens) :][: request.num_tokens]
        chances = np.where(self._rng.random(len(right)) < self.chance, 0.98, 0.5)
        is_right = self._rng.random(len(right)) < chances
        reached = np.cumprod(chances)
        length = min(int(np.sum(reached >= request.min_probability)) + 1, len(right))
        self.clock.now += length * self._ms / 1e3
        ids = np.where(is_right, right, right + 1).astype(np.int32)[:length]
        told = tuple(reached[:length].tolist()) if self.tells and request.min_probability else ()
        return Tree(ids, tuple(map(position_bucket, range(length))), source=self.name, chances=told)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


TRUTH = np.arange(60_000, dtype=np.int32) % 997


def speed(
    policy: MeasuredPolicy | FixedLength,
    verify_ms: dict[int, float],
    clock: VirtualClock,
    start: int = 1,
    num_rounds: int = 1500,
) -> float:
    """Tokens per second of a simulated run, relative to plain decoding."""
    end, begun = start, clock.now
    for _ in range(num_rounds):
        round = policy.propose(TRUTH[:end], 30, GREEDY)
        draft = round.draft
        wrong = np.flatnonzero(draft.tokens != TRUTH[end : end + len(draft.tokens)])
        emitted = TRUTH[end : end + 1 + (int(wrong[0]) if len(wrong) else len(draft.tokens))]
        verify_s = verify_ms[len(draft.tokens) + 1] / 1e3
        clock.now += verify_s
        policy.observe(round, np.zeros((0, 0), np.float32), emitted, verify_s)
        end += len(emitted)
    return (end - start) / (clock.now - begun) * verify_ms[1] / 1e3


slow = pytest.mark.slow
MODEL = DraftCosts(4 / 22, 0.0)


def policy_of(*drafters: Guesser, known: DraftCosts = MODEL, costs: PassCosts | None = None) -> MeasuredPolicy:
    paid = {drafter.name: DraftModelStats(replace(known)) for drafter in drafters if not drafter.can.is_free}
    return MeasuredPolicy(drafters, costs or PassCosts(), AcceptanceRates(), paid, clock=drafters[0].clock)


PADDED = {width: 100 * (1.0 + 0.3 * ((width + 1) // 2 * 2 - 2)) for width in range(1, 32)}


def doubted(clock: VirtualClock, *, tells: bool) -> tuple[Doubting, MeasuredPolicy]:
    drafter = Doubting(TRUTH, 0.8, ms=5.0, clock=clock)
    drafter.tells = tells
    costs = PassCosts({1: 1.0, 2: 1.0, 4: 1.6, 6: 2.2, 8: 2.8}, widths=EVEN_WIDTHS)
    return drafter, policy_of(drafter, costs=costs)


def test_a_draft_is_cut_before_a_doubtful_token_that_needs_a_longer_pass() -> None:
    found = {}
    for tells in (True, False):
        clock = VirtualClock()
        found[tells] = speed(doubted(clock, tells=tells)[1], PADDED, clock)
    assert found[True] > 1.03 * found[False]


def test_of_a_draft_that_is_cut_its_drafter_has_read_the_rest_too(clock: VirtualClock) -> None:
    drafter, policy = doubted(clock, tells=True)
    speed(policy, PADDED, clock, num_rounds=50)
    rounds = (policy.propose(TRUTH[:900], 30, GREEDY) for _ in range(100))
    round = next(each for each in rounds if len(each.offers[0].tokens) > len(each.draft.tokens))
    policy.observe(round, np.zeros((0, 0), np.float32), TRUTH[900:901], 0.1)
    held = policy.models[drafter.name].text.held
    assert held[900:].tolist() == round.offers[0].tokens[:-1].tolist()


@pytest.mark.parametrize(
    ("verify_ms", "ms"),
    [
        pytest.param(CPU, 0.0, id="cpu-0"),
        pytest.param(CPU, 5.0, id="cpu-5", marks=slow),
        pytest.param(CPU, 20.0, id="cpu-20", marks=slow),
        pytest.param(GPU, 0.0, id="gpu-0", marks=slow),
        pytest.param(GPU, 5.0, id="gpu-5", marks=slow),
        pytest.param(GPU, 20.0, id="gpu-20"),
    ],
)
def test_useless_drafts_cost_less_than_three_percent(
    verify_ms: dict[int, float], ms: float, clock: VirtualClock
) -> None:
    assert speed(policy_of(Guesser(TRUTH, 0.0, ms=ms, clock=clock)), verify_ms, clock) > 0.97


LIKELY = [("cpu", 4.0, 0.8), ("gpu", 0.0, 0.3)]  # the others are slow


@pytest.mark.parametrize(
    ("verify_ms", "ms", "chance"),
    [
        pytest.param(
            verify_ms, ms, chance, id=f"{name}-{ms}-{chance}", marks=() if (name, ms, chance) in LIKELY else slow
        )
        for name, verify_ms in (("cpu", CPU), ("gpu", GPU))
        for ms in (0.0, 4.0)
        for chance in (0.3, 0.6, 0.8, 0.95)
    ],
)
def test_measured_length_is_near_the_best_fixed_one(
    verify_ms: dict[int, float], ms: float, chance: float, clock: VirtualClock
) -> None:
    guesser = Guesser(TRUTH, chance, ms=ms, clock=clock)
    lengths = (0, 1, 2, 3, 4, 6, 8, 11)
    best = max(speed(FixedLength([guesser], k), verify_ms, clock, num_rounds=600) for k in lengths)
    assert speed(policy_of(guesser), verify_ms, clock) > 0.9 * best


@pytest.mark.parametrize("ms", [0.0, 4.0])
def test_it_recovers_when_the_text_becomes_predictable(ms: float, clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.0, ms=ms, clock=clock)
    policy = policy_of(guesser)
    speed(policy, CPU, clock, num_rounds=400)
    guesser.chance = 0.95
    assert speed(policy, CPU, clock, start=500, num_rounds=800) > 1.3


@pytest.mark.parametrize("ms", [0.0, 4.0])
def test_drafts_that_become_useless_are_given_up(ms: float, clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.95, ms=ms, clock=clock)
    policy = policy_of(guesser)
    assert speed(policy, CPU, clock, num_rounds=300) > 1.3
    guesser.chance = 0.0
    speed(policy, CPU, clock, start=3000, num_rounds=60)  # in which it finds out
    assert speed(policy, CPU, clock, start=3100, num_rounds=1000) > 0.97


@pytest.mark.parametrize(
    ("chance", "ms"),
    [(0.0, 0.0), pytest.param(0.0, 4.0, marks=slow), pytest.param(0.9, 0.0, marks=slow), (0.9, 4.0)],
)
def test_a_host_that_stalls_changes_little(chance: float, ms: float, clock: VirtualClock) -> None:
    """Passes that take a hundred times as long now and then say nothing of what drafting is worth."""

    def stalling(seed: int) -> dict[int, float]:
        rng = np.random.default_rng(seed)

        class Stalling(dict[int, float]):
            def __getitem__(self, width: int) -> float:
                return super().__getitem__(width) * (100 if rng.random() < 0.01 else 1)

        return Stalling(CPU)

    guesser = Guesser(TRUTH, chance, ms=ms, clock=clock)
    policy = policy_of(guesser)
    steady = speed(policy_of(Guesser(TRUTH, chance, ms=ms, clock=clock)), CPU, clock)
    speed(policy, stalling(1), clock, num_rounds=600)
    assert speed(policy, CPU, clock, start=10_000, num_rounds=800) > 0.97 * min(1.0, steady)
    if chance:
        assert speed(policy, CPU, clock, start=20_000, num_rounds=800) > 0.9 * steady


def test_a_model_that_pays_is_run_from_its_first_answer_on(clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.9, ms=3, read_ms=0.5, clock=clock)
    policy = policy_of(guesser, known=DraftCosts(3 / 22, 0.5 / 22))
    assert speed(policy, CPU, clock, start=20, num_rounds=100) > 1.3


def test_a_long_text_is_not_read_for_a_short_answer(clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.8, ms=3, read_ms=0.5, clock=clock)
    policy = policy_of(guesser, known=DraftCosts(3 / 22, 0.5 / 22))
    assert speed(policy, CPU, clock, start=4000, num_rounds=30) > 0.98
    assert guesser.num_read == 0, "reading 4000 tokens takes as long as 90 passes"


def test_a_long_text_is_read_in_a_long_answer(clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.8, ms=3, read_ms=0.5, clock=clock)
    policy = policy_of(guesser, known=DraftCosts(3 / 22, 0.5 / 22))
    assert speed(policy, CPU, clock, start=400, num_rounds=150) > 1.1
    assert guesser.num_read > 400, "reading 400 tokens takes as long as nine passes"


class Rested(Guesser):
    """Has to read what came after its rest alone."""

    is_expected = True

    def expect_drafts(self, expected: bool) -> bool:
        was_expected, self.is_expected = self.is_expected, expected
        if expected and not was_expected:
            self.num_read = 10**6  # until it drafts
        return was_expected


def test_a_rest_makes_no_model_dear_to_try_again(clock: VirtualClock) -> None:
    guesser = Rested(TRUTH, 0.0, ms=3, read_ms=0.13, max_unread=4096, clock=clock)
    policy = policy_of(guesser, known=DraftCosts(3 / 22, 0.13 / 22))
    speed(policy, CPU, clock, start=100, num_rounds=200)
    guesser.chance = 0.8
    for start in (600, 1100):
        again = MeasuredPolicy([guesser], PassCosts(), policy.rates, policy.models, clock=clock)
        guesser.num_read = 0
        gain = speed(again, CPU, clock, start=start, num_rounds=120)
    assert gain > 1.1, "what it would read is a token, not the text"


def test_a_model_that_reads_the_end_of_a_text_alone_drafts_in_a_short_answer(clock: VirtualClock) -> None:
    guesser = Guesser(TRUTH, 0.8, ms=3, read_ms=0.5, max_unread=16, clock=clock)
    policy = policy_of(guesser, known=DraftCosts(3 / 22, 0.5 / 22))
    assert speed(policy, CPU, clock, start=4000, num_rounds=30) > 1.2


class Reader(Guesser):
    """Is right more often where it has read all of a text."""

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        self.chance = 0.44 if request.max_unread else 0.62
        return super().draft(tokens, request, sampler)


@pytest.mark.parametrize(("num_rounds", "wanted", "reads_all"), [(12, 1.1, False), (150, 1.3, True)])
def test_of_a_long_prompt_a_head_reads_the_end_until_the_rest_may_pay(
    num_rounds: int, wanted: float, reads_all: bool, clock: VirtualClock
) -> None:
    """Reading all at once makes the short answer slower than plain decoding."""
    verify_ms = {width: 22.0 + 6 * max(0, width - 2) for width in range(1, 40)}
    head = Reader(TRUTH, 0.5, ms=1.4, read_ms=0.12, max_unread=4096, clock=clock)
    policy = policy_of(head, known=DraftCosts(1.4 / 22, 0.12 / 22))
    speed(policy, verify_ms, clock, start=20, num_rounds=100)
    again = MeasuredPolicy([head], policy.costs, policy.rates, policy.models, clock=clock)
    assert speed(again, verify_ms, clock, start=900, num_rounds=num_rounds) > wanted
    assert (head.limit > 64) == reads_all


def test_what_a_draft_takes_is_told_from_what_reading_takes() -> None:
    costs = DraftCosts(0.25, 0.02)
    rng = np.random.default_rng(3)
    for _ in range(400):
        num_tokens, num_unread = int(rng.integers(1, 8)), int(rng.choice([1, 2, 4, 300]))
        costs.observe(num_tokens, num_unread, 0.1 * num_tokens + 0.005 * (num_unread - 1))
    assert abs(costs.step - 0.1) < 0.02
    assert abs(costs.row - 0.005) < 0.001


def test_the_better_of_two_sources_is_heard(clock: VirtualClock) -> None:
    poor, good = Guesser(TRUTH, 0.2, clock=clock), Guesser(TRUTH, 0.9, clock=clock)
    policy = policy_of(poor, good)
    alone = speed(policy_of(good), CPU, clock)
    assert speed(policy, CPU, clock) > 0.95 * alone


class Promising:
    """A source whose promises are made up."""

    def __init__(self, *, is_free: bool) -> None:
        self.drafter = Guesser(TRUTH, 0.5, ms=0.0 if is_free else 1.0, clock=VirtualClock())

    def trial(self, option: Promise, best: Promise, tokens: TokenIds) -> None:
        return None

    hopeful = trial


@pytest.mark.parametrize(
    ("text", "model", "chosen"),
    [
        (1.2, 1.25, "text"),
        (1.2, 1.28, "model"),
        (1.3, 1.2, "text"),
        (1.02, 1.08, "model"),  # the text alone would not beat plain decoding by its own margin
        (1.02, 1.05, "plain"),
    ],
)
def test_a_model_drafts_where_it_promises_more_than_the_text_by_a_margin(
    text: float, model: float, chosen: str
) -> None:
    sources = {name: Promising(is_free=name == "text") for name in ("text", "model")}
    options = {
        "plain": Promise(1.0),
        "text": Promise(text, 1, cast(DraftSource, sources["text"]), min_gain=1.03),
        "model": Promise(model, 1, cast(DraftSource, sources["model"]), min_gain=1.06),
    }
    policy = policy_of(sources["text"].drafter)
    found = policy._choose(options["plain"], [options["text"], options["model"]], TRUTH[:1])
    assert found is options[chosen]


def test_free_sources_learn_though_another_is_run(clock: VirtualClock) -> None:
    policy = policy_of(Guesser(TRUTH, 0.5, clock=clock), Guesser(TRUTH, 0.95, clock=clock))
    speed(policy, CPU, clock, num_rounds=500)
    assert abs(policy.rates.rate("0.5", 0) - 0.5) < 0.2


def test_costs_follow_the_machine_and_keep_the_ratios() -> None:
    costs = PassCosts()
    for slowdown in [1.0] * 300 + [1.5] * 300:
        for width in (1, 4):
            costs.observe(width, slowdown * CPU[width] / 1e3)
    assert costs.pass_s(1) == pytest.approx(1.5 * CPU[1] / 1e3, rel=0.05)
    assert costs.ratio(4) == pytest.approx(CPU[4] / CPU[1], rel=0.05)


FAR = ContextCosts.between(128, {1: 0.02, 2: 0.022, 16: 0.05}, 4128, {1: 0.04, 2: 0.08, 16: 0.22})


def test_costs_behind_a_text_are_what_was_measured_there() -> None:
    near, far = (
        PassCosts({1: 1.0, 2: 1.1, 16: 2.5}, context_costs=FAR),
        PassCosts({1: 1.0, 2: 1.1, 16: 2.5}, context_costs=FAR),
    )
    near.context_length, far.context_length = 100, 4128
    assert [near.ratio(width) for width in (1, 2, 9, 16)] == pytest.approx([1.0, 1.1, 1.8, 2.5])
    assert [far.ratio(width) for width in (1, 2, 9, 16)] == pytest.approx([1.0, 2.0, 3.75, 5.5])
    far.context_length = 2128
    assert far.ratio(2) == pytest.approx((0.022 + 0.08) / (0.02 + 0.04))


def test_what_is_seen_behind_a_long_text_says_nothing_of_a_short_one() -> None:
    costs = PassCosts({1: 1.0, 2: 1.1, 16: 2.5}, context_costs=FAR)
    costs.context_length = 4128
    for _ in range(200):
        for width, taken_s in ((1, 0.04), (2, 0.08), (3, 0.09), (16, 0.22)):
            costs.observe(width, taken_s)
    costs.context_length = 0
    assert [costs.ratio(width) for width in (1, 2, 16)] == pytest.approx([1.0, 1.1, 2.5])
    assert costs.ratio(3) == pytest.approx(1.2, abs=0.05)


def test_policy_drafts_less_where_attention_makes_rows_dear() -> None:
    """A draft of one token costs a tenth of a step behind a short text, and a whole one behind a long text."""
    lengths = []
    for num_held in (100, 4128):
        clock = VirtualClock()
        policy = MeasuredPolicy(
            [Guesser(TRUTH, 0.5, clock=clock)],
            PassCosts({1: 1.0, 2: 1.1, 16: 2.5}, context_costs=FAR),
            AcceptanceRates(),
        )
        policy.rates.assume("0.5", (50.0, 100.0))
        lengths.append(len(policy.propose(TRUTH[:num_held], 16, GREEDY).draft.tokens))
    assert lengths[0] > 1
    assert lengths[1] == 0


def test_policy_drafts_less_where_rows_read_more_experts_and_long_where_all_are_read_anyhow() -> None:
    """Rows of a mixture read the union of their experts: of 64 those that 8 for each row hit."""

    def length(ratios: dict[int, float], chance: float) -> int:
        drafter = Guesser(TRUTH, chance, clock=VirtualClock())
        policy = MeasuredPolicy([drafter], PassCosts(ratios), AcceptanceRates())
        policy.rates.assume(f"{chance}", (100 * chance, 100.0))
        return len(policy.propose(TRUTH[:100], 16, GREEDY).draft.tokens)

    dense = {width: 1 + 0.1 * (width - 1) for width in range(1, 17)}
    mixture = {width: 0.3 + 0.7 * 8 * (1 - (1 - 8 / 64) ** width) for width in dense}
    for chance in (0.3, 0.5, 0.7):
        assert length(mixture, chance) == 0 < length(dense, chance)
    assert 0 < length(mixture, 0.8) < length(dense, 0.8)
    assert length(mixture, 0.9) > length(dense, 0.9)


@pytest.mark.parametrize("schedule", ["pipelined", pytest.param("hedged", marks=slow)])
def test_of_a_draft_made_ahead_no_more_is_run_than_pays(schedule: str) -> None:
    """A drafter that takes no time and is rarely right, for a target whose passes grow by a third a token."""
    machine = Machine(target_s=0.1, draft_s=0.0006, ratios=(1, 1.3))
    found = run(Scenario(machine=machine, acceptance=0.1, num_tokens=600), schedule, virtual_devices())
    assert found.tokens_per_second > 0.99 * 10


def test_what_was_not_reached_is_not_counted() -> None:
    class Sure(Guesser):
        def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
            return Tree(np.array([1, 2, 3], np.int32), (0, 1, 2), source="sure")

    policy = policy_of(Sure(TRUTH, 1.0, clock=VirtualClock()))
    round = policy.propose(TRUTH[:1], 9, GREEDY)
    policy.observe(round, np.zeros((0, 0), np.float32), np.array([1, 9], np.int32), 0.1)
    assert policy.rates.rate("sure", 0) > policy.rates.rate("sure", 1)
    assert set(policy.rates.snapshot()) == {("sure", -1), ("sure", 0), ("sure", 1)}


class Counted(Guesser):
    """Counts the drafts that are asked of it."""

    num_asked = 0

    def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
        self.num_asked += 1
        return super().draft(tokens, request, sampler)


@pytest.mark.parametrize("has_text", [False, True])
def test_a_model_that_does_not_pay_is_hardly_weighed(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, *, has_text: bool
) -> None:
    looks = 0

    def chain(rates: ModelRates, num_tokens: int) -> list[float]:
        nonlocal looks
        looks += 1
        return [0.0] * num_tokens

    monkeypatch.setattr(ModelRates, "chain", chain)
    text = [Guesser(TRUTH, 0.3, clock=clock)] if has_text else []
    speed(policy_of(*text, Guesser(TRUTH, 0.0, ms=4.0, clock=clock)), CPU, clock, num_rounds=1000)
    assert looks < 150, "a look takes as long as a hundredth of a fast pass"


def test_a_model_that_rests_is_told_and_has_a_pass_before_it_drafts_again(clock: VirtualClock) -> None:
    class Head(Counted):
        told = (True,)
        woke_s, num_early = -1.0, 0

        def expect_drafts(self, is_expected: bool) -> bool:
            was_expected, self.told = self.told[-1], (*self.told, is_expected)
            if not was_expected:
                self.woke_s = clock.now
            return was_expected

        def draft(self, tokens: TokenIds, request: DraftRequest, sampler: Sampler) -> Tree:
            self.num_early += not self.told[-1] or clock.now == self.woke_s
            return super().draft(tokens, request, sampler)

    model = Head(TRUTH, 0.0, ms=4.0, max_unread=64, clock=clock)
    policy = policy_of(model)
    speed(policy, CPU, clock, num_rounds=1000)
    assert False in model.told
    assert 0 < model.num_asked <= model.told.count(True) + 8
    assert model.num_early == 0
    policy.close()
    assert model.told[-1], "an answer that is told what to draft begins with all states"
    again = MeasuredPolicy([model], policy.costs, policy.rates, policy.models, clock=clock)
    assert not model.told[-1], "of the next answer not even the prompt's states are asked for"
    model.chance = 0.95
    speed(again, CPU, clock, start=10_000, num_rounds=600)
    assert model.told[-1]
    assert speed(again, CPU, clock, start=15_000, num_rounds=300) > 1.3, "a trial shows that it pays now"


@slow
def test_trials_that_lead_nowhere_become_rare(clock: VirtualClock) -> None:
    model = Counted(TRUTH, 0.0, ms=4.0, clock=clock)
    policy = policy_of(model)
    asked = []
    for i in range(4):
        speed(policy, CPU, clock, start=10_000 * i + 1, num_rounds=1000)
        asked.append(model.num_asked)
    first, later = asked[0], asked[3] - asked[2]
    assert 0 < later < first / 3
    model.chance = 0.95
    speed(policy, CPU, clock, start=50_000, num_rounds=600)
    assert speed(policy, CPU, clock, start=55_000, num_rounds=300) > 1.3, "a trial shows that it pays now"


class Ticking(VirtualClock):
    """A clock by which each look at it takes so long."""

    def __init__(self, tick_s: float) -> None:
        super().__init__()
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


@pytest.mark.parametrize(("tick_ms", "pays"), [(0.0, True), (0.4, False)])
def test_the_time_that_weighing_takes_is_a_cost_of_the_model(tick_ms: float, *, pays: bool) -> None:
    """A draft of one token that gains a tenth of a step, in which weighing takes a twentieth or none."""
    clock = Ticking(tick_ms / 1e3)
    pass_ms = {width: 4.0 * (1 + 0.1 * (width > 1) + 2.0 * max(0, width - 2)) for width in range(1, 32)}
    known = DraftCosts(0.9 / 4, 0.0)
    model = Counted(TRUTH, 0.46, ms=0.9, clock=clock)
    policy = policy_of(model, known=known)
    policy.rates.past[(model.name, 0)] = policy.rates.past[(model.name, -1)] = (230.0, 500.0)
    speed(policy, pass_ms, clock, num_rounds=400)
    assert (model.num_asked > 200) == pays
