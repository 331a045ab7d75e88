"""One text for any schedule: a drafter that goes on in its lane changes when, and nothing else."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from double import Double
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder
from threads_left import wait_for_threads_since

from edgespec.decoding.acceptance import Acceptance, equality, rejection
from edgespec.decoding.decoder import Can, Decoder
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import DraftPolicy, Plain, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft import ahead_schedule
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import UNKNOWN_WORTH, DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import CallerLane, Lane, ThreadLane
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.errors import DrafterFault
from edgespec.simulation.schedules import VirtualLane
from edgespec.simulation.synthetic import VOCAB_SIZE, PacedDecoder, synthetic_drafter, synthetic_target
from edgespec.system.clock import VirtualClock
from edgespec.types import Logits, TokenIds, append

slow = pytest.mark.slow
VOCAB = 12
PROMPT = np.array([1, 2, 3, 1, 2], np.int32)


def text(
    target: Decoder, sampler: GumbelSampler, policy: DraftPolicy, num_tokens: int, accept: Acceptance = equality
) -> list[int]:
    blocks = speculative_decode(PROMPT, target, sampler, policy, accept, max_tokens=num_tokens)
    tokens: list[int] = []
    for block in blocks:
        tokens += block.tokens.tolist()
        if len(tokens) >= num_tokens:
            break
    blocks.close()
    return tokens[:num_tokens]


def measured(drafters: list[Drafter], slowed: float = 1.0) -> MeasuredPolicy:
    costs = PassCosts({1: 1.0, 4: 1.1, 24: 1.6}, 0.001)
    paid = {"model": DraftModelStats(DraftCosts(0.2, 0.0), (slowed, slowed))}
    return MeasuredPolicy(drafters, costs, AcceptanceRates({("model", -1): (80.0, 100.0)}), paid)


class Delayed(Double):
    """A table whose passes take now and then a moment, so that lanes meet in every order."""

    def __init__(self, inner: TableDecoder, seed: int) -> None:
        self._inner, self._rng = inner, np.random.default_rng(seed)
        self.vocab_size, self.context_length, self._can = inner.vocab_size, inner.context_length, inner.can

    @property
    def can(self) -> Can:
        return self._can

    @property
    def num_fed(self) -> int:
        return self._inner.num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        self._pause()
        return self._inner.logits(tokens, num_last)

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        self._pause()
        return self._inner.tree_logits(tokens, nodes, parents, num_last)

    def _pause(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.random() * 0.0005)  # as long as the work between two passes


NO_DEADLINE_S = 86_400.0  # no pause of a busy machine is a fault of the drafter
KINDS = ["serial", "pipelined", "hedged"]
CASES = {
    "seed": st.integers(0, 2**31),
    "temperature": st.sampled_from([0.0, 0.8]),
    "likeness": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    "length": st.sampled_from([None, 0, 1, 4, 9]),
    "with_ngram": st.booleans(),
}


@pytest.mark.slow
@settings(max_examples=30)
@given(kind=st.sampled_from(KINDS), **CASES)
def test_one_text_for_all_schedules(
    seed: int, temperature: float, likeness: float, kind: str, length: int | None, with_ngram: bool
) -> None:
    expect_the_plain_text(seed, temperature, likeness, kind, length, with_ngram)


@slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=130)
@given(**CASES)
def test_one_text_for_all_schedules_in_many_cases(
    seed: int, temperature: float, likeness: float, kind: str, length: int | None, with_ngram: bool
) -> None:
    expect_the_plain_text(seed, temperature, likeness, kind, length, with_ngram)


def lane_drafter(drafter: ModelDrafter, kind: str) -> LaneDrafter:
    max_rows = 7 if kind == "hedged" else 0
    return LaneDrafter(drafter, ThreadLane("drafter"), kind != "serial", max_rows, deadline_s=NO_DEADLINE_S)


def expect_the_plain_text(
    seed: int, temperature: float, likeness: float, kind: str, length: int | None, with_ngram: bool
) -> None:
    target = TableDecoder(VOCAB, seed)
    sampler = GumbelSampler(SamplingParams(temperature=temperature, seed=seed), len(PROMPT))
    plain = text(target, sampler, Plain(), 40)
    before = set(threading.enumerate())
    drafter = ModelDrafter(Delayed(TableDecoder(VOCAB, seed + 1, target, likeness), seed), VOCAB)
    ahead = lane_drafter(drafter, kind)
    drafters: list[Drafter] = [ahead, NgramDrafter()] if with_ngram else [ahead]
    policy = measured(drafters) if length is None else FixedLength(drafters, length)
    assert text(Delayed(target, seed + 2), sampler, policy, 40) == plain
    wait_for_threads_since(before)


@pytest.mark.parametrize("kind", ["pipelined", "hedged"])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31), length=st.sampled_from([1, 2, 4, 9]), likeness=st.sampled_from([0.5, 0.9]))
def test_rejection_with_a_fixed_length_has_one_text_whenever_lanes_meet(
    kind: str, seed: int, length: int, likeness: float
) -> None:
    target = TableDecoder(VOCAB, seed)
    sampler = GumbelSampler(SamplingParams(temperature=0.8, seed=seed), len(PROMPT))
    model = TableDecoder(VOCAB, seed + 1, target, likeness)
    sources: list[Drafter] = [
        ModelDrafter(model, VOCAB),
        lane_drafter(ModelDrafter(Delayed(model, seed), VOCAB), kind),
    ]
    texts = [
        text(
            Delayed(target, seed + 2), sampler, FixedLength([each], length, with_distributions=True), 40, rejection
        )
        for each in sources
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("vocab_size", [12, 5000])  # many tokens are sampled in another way
def test_what_a_tree_drafts_is_what_a_chain_does(vocab_size: int) -> None:
    drafter = ModelDrafter(TableDecoder(vocab_size, seed=1), vocab_size)
    sampler = GumbelSampler(SamplingParams(temperature=1.5, seed=3), len(PROMPT)).drafting(0)
    request = DraftRequest(6, with_distributions=True)
    chain = [guess.token for guess in drafter.guesses(PROMPT, request, sampler)]
    found: list[int] = []
    for i in range(6):
        tree = Tree(np.array(found, np.int32), parents=tuple(range(-1, i - 1)))
        found.append(drafter.guesses_after(PROMPT, tree, [i - 1], request, sampler)[0].token)
    assert found == chain


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 7])
@pytest.mark.parametrize("kind", ["serial", "pipelined", "hedged"])
def test_an_answer_can_be_given_up_at_any_moment_and_the_next_one_is_right(kind: str, num_blocks: int) -> None:
    target = TableDecoder(VOCAB, 5)
    drafter = ModelDrafter(Delayed(TableDecoder(VOCAB, 6, target, 0.9), 7), VOCAB)
    ahead = lane_drafter(drafter, kind)
    sampler = GumbelSampler(SamplingParams())
    before = set(threading.enumerate())
    blocks = speculative_decode(PROMPT, target, sampler, measured([ahead]), max_tokens=100)
    for _ in range(num_blocks):
        next(blocks)
    blocks.close()
    wait_for_threads_since(before)
    assert text(target, sampler, measured([ahead]), 40) == text(target, sampler, Plain(), 40)


class Failing(TableDecoder):
    """Fails at its 20th pass, or hangs there."""

    num_passes = 0
    go = threading.Event()
    is_stuck = False

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        Failing.num_passes += 1
        if Failing.num_passes >= 20:
            if self.is_stuck:
                self.go.wait()
            raise ValueError("a broken weight")
        return super().logits(tokens, num_last)

    def interrupt(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize(
    ("can_run_ahead", "is_stuck", "kind"),
    [
        (False, False, ThreadLane),
        (False, True, ThreadLane),
        (True, False, ThreadLane),
        (True, True, ThreadLane),
        (False, False, CallerLane),
    ],
)
def test_a_fault_in_the_lane_reaches_the_caller_and_leaves_no_thread(
    can_run_ahead: bool, is_stuck: bool, kind: Callable[[str], Lane]
) -> None:
    Failing.num_passes, Failing.is_stuck = 0, is_stuck
    Failing.go = threading.Event()
    target = TableDecoder(VOCAB, 5)
    drafter = ModelDrafter(Failing(VOCAB, 5), VOCAB)
    deadline_s = 0.2 if is_stuck else 60.0  # a busy machine may take longer to a fault than the first
    ahead = LaneDrafter(drafter, kind("drafter"), can_run_ahead, deadline_s=deadline_s)
    before = set(threading.enumerate())
    with pytest.raises(DrafterFault, match=r"0\.2 s" if is_stuck else "a broken weight"):
        text(target, GumbelSampler(SamplingParams()), FixedLength([ahead], 4), 100)
    Failing.go.set()
    ahead.pause()
    wait_for_threads_since(before)


class Reading(TableDecoder):
    """Reads a prompt in pieces, and answers once it has read three of them."""

    num_pieces = 0

    @property
    def num_fed(self) -> int:
        return super().num_fed + self.num_pieces

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        while self.num_pieces < 3:
            time.sleep(0.001)
        return super().logits(tokens, num_last)


class Impatient(ThreadLane):
    """The time is up at once as long as its model has read less than it is to read."""

    def __init__(self, decoder: Reading) -> None:
        super().__init__("drafter")
        self._decoder = decoder

    def wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        if self._decoder.num_pieces < 3:
            self._decoder.num_pieces += 1
            return 0
        return super().wait(num_steps, timeout_s)


def test_a_drafter_that_reads_a_long_prompt_is_waited_for() -> None:
    decoder = Reading(VOCAB, 5)
    ahead = LaneDrafter(ModelDrafter(decoder, VOCAB), Impatient(decoder), True, deadline_s=NO_DEADLINE_S)
    target, sampler = TableDecoder(VOCAB, 5), GumbelSampler(SamplingParams())
    assert text(target, sampler, FixedLength([ahead], 4), 20) == text(target, sampler, Plain(), 20)
    assert decoder.num_pieces == 3
    ahead.pause()


class Simulated:
    """A pass of the target takes a second, a row more 3 % of it, and a step of the drafter what is said now."""

    def __init__(self, kind: str, chance: float, step: float, hope: tuple[float, float] | None = None) -> None:
        self.clock, self.step, own = VirtualClock(), step, VirtualClock()
        self.target = PacedDecoder(synthetic_target(), lambda fed, rows: 1 + 0.03 * (rows - 1), self.clock)
        decoder = PacedDecoder(synthetic_drafter(chance), lambda fed, rows: self.step, own)
        self.lane: Lane = VirtualLane("drafter", self.clock, own)
        max_rows = MAX_BRANCHES if kind == "hedged" else 0
        self.drafter = LaneDrafter(ModelDrafter(decoder, VOCAB_SIZE), self.lane, kind != "serial", max_rows)
        self.known = DraftModelStats(DraftCosts(step, 0.0), rows=RowCosts({1: 1.0, MAX_BRANCHES: 1.0}))
        costs = PassCosts({width: 1 + 0.03 * (width - 1) for width in range(1, 26)}, 1.0)
        chances = AcceptanceRates({("model", -1): hope or (50 * chance, 50.0)})
        self.policy: DraftPolicy = MeasuredPolicy(
            [self.drafter], costs, chances, {"model": self.known}, clock=self.clock
        )
        self._tokens = PROMPT

    def speed(self, num_tokens: int) -> float:
        """Tokens a second of the next so many."""
        started, end = self.clock.now, len(self._tokens) + num_tokens
        blocks = speculative_decode(
            self._tokens, self.target, GumbelSampler(SamplingParams()), self.policy, clock=self.clock
        )
        while len(self._tokens) < end:
            self._tokens = append(self._tokens, next(blocks).tokens)
        blocks.close()
        return (len(self._tokens) - end + num_tokens) / (self.clock.now - started)


def simulated(kind: str, chance: float, step: float, length: int | None = None) -> float:
    """Tokens a step of the target."""
    run = Simulated(kind, chance, step)
    if length is not None:
        run.policy = FixedLength([run.drafter], length)
    return run.speed(400)


@pytest.mark.slow
def test_at_once_and_hedged_gain_what_the_closed_forms_promise() -> None:
    best = max(simulated("serial", 0.8, 0.3, length) for length in range(6))
    assert simulated("pipelined", 0.8, 0.3) >= 1.15 * best
    assert simulated("hedged", 0.8, 0.3) >= 1.4 * best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chance", "step"),
    [(0.3, 0.1), pytest.param(0.8, 0.1, marks=slow), pytest.param(0.6, 0.05, marks=slow), (0.8, 1.0)],
)
def test_at_once_loses_to_no_length_in_sequence(chance: float, step: float) -> None:
    best = max(simulated("serial", chance, step, length) for length in range(8))
    assert simulated("pipelined", chance, step) >= 0.97 * best


@pytest.mark.parametrize("kind", ["pipelined", "hedged"])
def test_a_drafter_that_becomes_five_times_slower_is_soon_no_longer_counted_on(kind: str) -> None:
    run = Simulated(kind, 0.8, 0.2)
    assert run.speed(100) > 1.8
    run.step = 1.0
    assert run.speed(300) >= 0.9, "plain decoding yields 1"
    beside = run.known.costs.step * run.known.contention[1]
    assert beside == pytest.approx(1.0, rel=0.05), "it is seen beside the target, mostly"
    assert run.speed(100) >= 0.99


def test_a_drafter_that_becomes_faster_is_counted_on_more() -> None:
    run = Simulated("pipelined", 0.8, 0.3)
    run.speed(100)
    run.step = 0.06
    run.speed(200)
    assert run.known.costs.step == pytest.approx(0.06, rel=0.05)
    assert run.speed(300) >= 0.9 * simulated("pipelined", 0.8, 0.06)


@pytest.mark.parametrize(("chance", "kind"), [(0.3, "hedged"), (0.95, "hedged"), (0.95, "pipelined")])
def test_a_drafter_as_slow_as_the_target_is_left_at_rest(chance: float, kind: str) -> None:
    run = Simulated(kind, chance, 1.0, hope=(4.0, 6.0))
    assert run.speed(60) >= 0.999
    assert max((interval.end_s for interval in run.lane.intervals), default=0.0) < 40


def test_what_drafts_ahead_at_a_small_gain_is_not_given_up_by_chance() -> None:
    """In sequence nothing is to be gained there; the closed form promises 1.066."""
    assert Simulated("pipelined", 0.3, 0.5).speed(400) >= 1.03


def test_a_useless_step_is_not_waited_for() -> None:
    run = Simulated("hedged", 0.8, 1.0)
    request = DraftRequest(3, is_ahead=True, worth=UNKNOWN_WORTH)
    run.drafter.draft_ahead(PROMPT, request, GumbelSampler(SamplingParams()))
    run.clock.sleep(0.9)
    run.drafter.draft_ahead(append(PROMPT, [7, 7]), request, GumbelSampler(SamplingParams()))
    assert run.clock.now == 0.9


def test_a_lane_that_has_branched_to_its_end_serves_a_request_without_branches() -> None:
    run, sampler = Simulated("hedged", 1.0, 0.1), GumbelSampler(SamplingParams())
    run.drafter.draft_ahead(PROMPT, DraftRequest(4, is_ahead=True, worth=UNKNOWN_WORTH), sampler)
    run.clock.sleep(100.0)
    guesses = run.drafter.draft_ahead(PROMPT, DraftRequest(4, is_ahead=True), sampler).draft.tokens
    behind = run.drafter.draft_ahead(append(PROMPT, guesses[:1]), DraftRequest(1, is_ahead=True), sampler)
    assert behind.draft.tokens.tolist() == guesses[1:2].tolist()


def test_slow_planning_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plan, num_plans = Simulated("pipelined", 0.8, 0.3), ahead_schedule.best_pipelined, list[int]()

    def slowly(*placement: Any, **kwargs: Any) -> Any:
        num_plans.append(1)
        run.clock.sleep(0.5)
        return plan(*placement, **kwargs)

    monkeypatch.setattr(ahead_schedule, "best_pipelined", slowly)
    run.speed(600)
    assert 1 < len(num_plans) <= 2 + run.clock.now / 32


def test_the_guess_for_the_targets_own_token_is_judged() -> None:
    """What the lane guesses during a pass says something too, though the target never verified it."""
    run = Simulated("pipelined", 0.8, 0.25)
    sampler = GumbelSampler(SamplingParams())

    def judged_behind(num_draft: int, taken_s: float, emitted: list[int] | None = None) -> bool | None:
        run.drafter.pause()
        request = DraftRequest(num_draft, is_ahead=True, min_tokens=num_draft)
        run.drafter.draft(PROMPT, request, sampler)
        run.clock.sleep(taken_s)
        told = guesses[: num_draft + 1] if emitted is None else emitted
        ahead = run.drafter.draft_ahead(append(PROMPT, told), DraftRequest(4, is_ahead=True), sampler)
        known = ahead.past.tokens[: num_draft + 1].tolist()
        return known == told if len(known) == len(told) else None

    guesses = run.drafter.draft(PROMPT, DraftRequest(4), sampler).tokens.tolist()
    wrong = (guesses[1] + 1) % VOCAB_SIZE
    assert judged_behind(0, 1.1) is True
    assert judged_behind(1, 1.1) is True
    assert judged_behind(1, 1.1, [guesses[0], wrong]) is False
    assert judged_behind(1, 0.1) is None, "there was no guess yet"


def test_prefetched_alternatives_are_used() -> None:
    """The drafter's second choice comes true, and what follows it is ready at once."""
    target = TableDecoder(VOCAB, 5)
    drafter = ModelDrafter(TableDecoder(VOCAB, 6, target, 0.5), VOCAB)
    ahead = LaneDrafter(drafter, ThreadLane("drafter"), True, max_rows=9)
    sampler = GumbelSampler(SamplingParams())
    request = DraftRequest(3, is_ahead=True, min_tokens=3, worth=UNKNOWN_WORTH)
    drafted = ahead.draft(PROMPT, request, sampler).tokens
    ahead.lane.wait(60, 5.0)
    tree = ahead.lane.steps()[-1][0].tree
    alternatives = {other for others in tree.others for other in others}
    alone = [node for node in tree.nodes_run if not tree.others[node]]
    assert all(int(tree.tokens[node]) in alternatives for node in alone), "all is drafted"
    row = drafter.decoder.logits(PROMPT, 1)[0]
    second = sampler.ranked(row, PROMPT, 2)[1]
    assert second != drafted[0]
    told = np.append(PROMPT, np.int32(second))
    assert len(ahead.draft_ahead(told, request, sampler).draft.tokens) == 3
    ahead.pause()


def test_a_long_run_of_accepted_drafts_makes_no_long_tree() -> None:
    """However long the text is that runs through one tree, the lane has no more of it than is ahead."""
    clock, own = VirtualClock(), VirtualClock()
    target = synthetic_target()
    drafter = ModelDrafter(PacedDecoder(synthetic_drafter(1.0), lambda fed, rows: 1.0, own), VOCAB_SIZE)
    ahead = LaneDrafter(drafter, VirtualLane("drafter", clock, own), True)
    sampler, request = GumbelSampler(SamplingParams()), DraftRequest(4, is_ahead=True, min_tokens=4)
    tokens = PROMPT
    for _ in range(100):
        drafted = ahead.draft(tokens, request, sampler).tokens
        tokens = np.concatenate([tokens, drafted])
        tokens = append(tokens, [int(target.logits(tokens, 1)[-1].argmax())])
        clock.sleep(9.0)
        assert ahead.draft_ahead(tokens, request, sampler).draft.tokens.size
        assert len(ahead._tree.tokens) < 20
