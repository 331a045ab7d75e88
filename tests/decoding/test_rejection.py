"""Both rules give the target's distribution: counts of the real loop and sampler against formulas of their own.

Seeds are fixed, so a test passes always or never. A chi-square is held to the 99.9 % point for its degrees of
freedom, by the approximation of Wilson and Hilferty (1931).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
import pytest
from double import Double
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder

from edgespec.decoding.acceptance import Acceptance, equality, rejection, residual
from edgespec.decoding.decoder import Decoder
from edgespec.decoding.noise import gumbel_noise
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.decoding.tree import Tree
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftModelStats
from edgespec.draft.drafter import Drafter
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.ngram import NgramDrafter
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.simulation.schedules import VirtualLane, virtual_devices
from edgespec.simulation.synthetic import PacedDecoder
from edgespec.system.clock import VirtualClock
from edgespec.types import Distribution, Logits, Sampler, TokenIds, append

pytestmark = pytest.mark.slow  # a module of many models or processes

NEVER = -1e9  # as logit
PROMPT = np.array([0, 2], np.int32)
RULES: list[Acceptance] = [equality, rejection]


@dataclass
class RowsDecoder(Double):
    """Logits that the last token alone decides, rows[last]."""

    rows: np.ndarray  # [vocab_size, vocab_size]
    context_length: int = 1 << 20
    num_fed: int = 0

    @property
    def vocab_size(self) -> int:
        return len(self.rows)

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        return self.rows[tokens[-num_last:]]

    def tree_logits(
        self, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int], num_last: int | None = None
    ) -> Logits:
        return self.rows[append(tokens[-1:], nodes)][-(num_last or len(nodes) + 1) :]


def log(*probs: float) -> np.ndarray:
    return np.array([np.log(p) if p else NEVER for p in probs], np.float32)


SHAPES = {
    "alike": (log(0.4, 0.25, 0.15, 0.1, 0.07, 0.03), log(0.3, 0.3, 0.2, 0.1, 0.05, 0.05)),
    "q lacks the mode of p": (log(0.5, 0.2, 0.1, 0.1, 0.06, 0.04), log(0, 0.3, 0.3, 0.2, 0.1, 0.1)),
    "p lacks the favourite of q": (log(0, 0.4, 0.3, 0.15, 0.1, 0.05), log(0.6, 0.1, 0.1, 0.1, 0.06, 0.04)),
    "flat p, sharp q": (log(0.18, 0.17, 0.17, 0.16, 0.16, 0.16), log(0.9, 0.05, 0.02, 0.01, 0.01, 0.01)),
    "nothing in common": (log(0.6, 0.3, 0.1, 0, 0, 0), log(0, 0, 0, 0.2, 0.3, 0.5)),
}
PROCESSORS = {
    "plain": {"temperature": 1.0},
    "top-k": {"temperature": 0.8, "top_k": 4},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 0.7, "min_p": 0.15},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
    },
}
PAIRS = list(zip(SHAPES, PROCESSORS, strict=True))


def processed(row: np.ndarray, prefix: TokenIds, params: SamplingParams) -> np.ndarray:
    """Probabilities after all processors, written down once more and slowly, [vocab_size]."""
    logits = row.astype(np.float64)
    for token in range(len(logits)):
        if token in prefix:
            logits[token] *= params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        count = list(prefix[len(PROMPT) :]).count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    p = np.exp((logits - logits.max()) / params.temperature)
    if params.top_k:
        p[p < np.sort(p)[-min(params.top_k, len(p))]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def expect_distribution(counts: np.ndarray, p: np.ndarray, largest: float = 1.0) -> None:
    """Chi-square below its 99.9 % point, nothing impossible, and each frequency within largest of p."""
    assert not counts[p == 0].any()
    statistic, bound = chi_square(counts, p)
    assert statistic < bound
    assert np.abs(counts / counts.sum() - p).max() <= largest


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """The statistic and its 99.9 % point."""
    expected = counts.sum() * p[p > 0]
    freedom = len(expected) - 1
    point = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts[p > 0] - expected) ** 2 / expected).sum()), float(point)


def first_tokens(rule: Acceptance, shape: str, params: SamplingParams, num_seeds: int) -> np.ndarray:
    """The first token by seed, behind a drafted token, [num_seeds]."""
    target, drafter = SHAPES[shape]
    rows, found = np.stack([target, target]), np.zeros(num_seeds, int)
    q = GumbelSampler(params, len(PROMPT)).distribution(drafter, PROMPT)
    for seed in range(num_seeds):
        sampler = GumbelSampler(params, len(PROMPT), seed)
        if rule is rejection:
            draft = Tree(np.array([sampler.apart(2).pick(q, 2)]), distributions=(q,))
        else:
            draft = Tree(np.array([sampler(drafter, PROMPT)]))
        found[seed] = rule(PROMPT, draft, rows, sampler)[0]
    return found


class Seeds:
    """The noise of many seeds at once, written down once more: SplitMix64 of seed, position and token."""

    def __init__(self, seeds: np.ndarray) -> None:
        self._seeds = seeds.astype(np.uint64)  # [num_seeds]

    def apart(self, domain: int) -> "Seeds":
        return Seeds(mixed(mixed(mixed(mixed(np.array([domain], np.uint64)) ^ self._seeds))))

    def _keys(self, position: int) -> np.ndarray:
        return mixed(mixed(self._seeds) ^ np.uint64(position))

    def uniform(self, position: int) -> np.ndarray:
        bits = mixed(self._keys(position) ^ np.uint64(2**63)) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def pick(self, distribution: Distribution, position: int) -> np.ndarray:
        """A token by seed, [num_seeds]."""
        bits = mixed(distribution.ids.astype(np.uint64) ^ self._keys(position)[:, None])
        uniform = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
        with np.errstate(divide="ignore"):
            scores = np.log(distribution.weights.astype(np.float64))
        return distribution.ids[np.argmax(scores - np.log(-np.log(uniform)), 1)]


def mixed(x: np.ndarray) -> np.ndarray:
    """A step of SplitMix64, whose arithmetic wraps at 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def first_tokens_at_once(rule: Acceptance, shape: str, params: SamplingParams, num_seeds: int) -> np.ndarray:
    """The rules, applied to all seeds at once, 100 times as fast, [num_seeds]."""
    seeds, position = Seeds(np.arange(num_seeds)), len(PROMPT)
    p, q = (GumbelSampler(params, position).distribution(row, PROMPT) for row in SHAPES[shape])
    if rule is equality:
        return seeds.pick(p, position)
    drafted = seeds.apart(2).pick(q, 2)
    chances = [np.array([each.probability(token) for token in range(len(SHAPES[shape][0]))]) for each in (p, q)]
    is_accepted = seeds.apart(2**63).uniform(position) * chances[1][drafted] < chances[0][drafted]
    return np.where(is_accepted, drafted, seeds.apart(2**63 + 1).pick(residual(p, q), position))


def expect_first_tokens(
    rule: Acceptance, shape: str, processor: str, num_seeds: int, num_draws: int, largest: float = 1.0
) -> None:
    """Many draws follow the target, and the draws of num_seeds seeds are those of the real rule and sampler."""
    params, target = SamplingParams(**PROCESSORS[processor]), SHAPES[shape][0]
    drawn = first_tokens_at_once(rule, shape, params, num_draws)
    assert np.array_equal(first_tokens(rule, shape, params, num_seeds), drawn[:num_seeds])
    counts = np.bincount(drawn, minlength=len(target))
    expect_distribution(counts, processed(target, PROMPT, params), largest)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("shape", "processor"), PAIRS)
def test_200_000_first_tokens_follow_the_target(rule: Acceptance, shape: str, processor: str) -> None:
    expect_first_tokens(rule, shape, processor, 1000, 200_000, largest=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "processor"), [each for each in product(SHAPES, PROCESSORS) if each not in PAIRS]
)
def test_every_shape_with_every_processor(shape: str, processor: str) -> None:
    expect_first_tokens(rejection, shape, processor, 500, 50_000, largest=0.01)


# Three tokens, so that the whole of a short text can be counted: what follows each token, for target and drafter.
TARGET = np.stack([log(0.6, 0.3, 0.1), log(0.1, 0.2, 0.7), log(0.45, 0.1, 0.45)])
DRAFTER = np.stack([log(0.3, 0.3, 0.4), log(0.3, 0.6, 0.1), log(0, 0.5, 0.5)])


def target_and_sources(kind: str) -> tuple[Decoder, list[Drafter]]:
    """On one virtual clock, where the drafter makes two tokens and a half while the target makes one."""
    model = ModelDrafter(RowsDecoder(DRAFTER), 3)
    cascade = ModelDrafter(RowsDecoder(DRAFTER), 3, speculation=Speculation(lambda: [NgramDrafter()], 2))
    free: list[Drafter] = [NgramDrafter(), SuffixDrafter()]
    clock, own = VirtualClock(), VirtualClock()
    paced = ModelDrafter(PacedDecoder(RowsDecoder(DRAFTER), lambda fed, rows: 0.4, own), 3)
    ahead = LaneDrafter(paced, VirtualLane("drafter", clock, own), can_run_ahead=True)
    kinds = {"model": [model], "free": free, "cascade": [cascade], "both": [*free[1:], model], "ahead": [ahead]}
    return PacedDecoder(RowsDecoder(TARGET), lambda fed, rows: 1.0, clock), kinds[kind]


def texts(
    rule: Acceptance, kind: str, length: int, params: SamplingParams, num_tokens: int, num_texts: int
) -> np.ndarray:
    """A text of num_tokens tokens by seed, [num_texts, num_tokens]; without drafts for the kind "plain"."""
    found = np.zeros((num_texts, num_tokens), int)
    for seed in range(num_texts):
        sampler = GumbelSampler(params, len(PROMPT), seed)
        if kind == "plain":
            blocks = speculative_decode(PROMPT, RowsDecoder(TARGET), sampler, Plain(), rule)
        else:
            target, sources = target_and_sources(kind)
            policy = FixedLength(sources, length, with_distributions=rule is rejection)
            blocks = speculative_decode(PROMPT, target, sampler, policy, rule)
        tokens = islice((token for block in blocks for token in block.tokens), num_tokens)
        found[seed] = np.fromiter(tokens, int, num_tokens)
    return found


def text_probabilities(params: SamplingParams, num_tokens: int) -> np.ndarray:
    joint = np.zeros((3,) * num_tokens)
    for text in product(range(3), repeat=num_tokens):
        prefix, chance = PROMPT, 1.0
        for token in text:
            chance *= processed(TARGET[prefix[-1]], prefix, params)[token]
            prefix = append(prefix, [token])
        joint[text] = chance
    return joint


def expect_texts(rule: Acceptance, kind: str, length: int, params: SamplingParams, num_texts: int) -> None:
    counts = np.zeros((3,) * 3, int)
    np.add.at(counts, tuple(texts(rule, kind, length, params, 3, num_texts).T), 1)
    expect_distribution(counts.ravel(), text_probabilities(params, 3).ravel())


KINDS = ["model", "free", "cascade", "both", "ahead"]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_texts_of_three_tokens_without_drafts_follow_the_target(processor: str) -> None:
    expect_texts(equality, "plain", 0, SamplingParams(**PROCESSORS[processor]), 2000)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(("rule", "kind"), [*((equality, kind) for kind in KINDS), (rejection, "free")])
def test_where_equality_judges_each_text_is_that_without_drafts(
    rule: Acceptance, kind: str, processor: str
) -> None:
    """So what drafts changes nothing of their distribution either; a draft from the text is judged by equality."""
    params = SamplingParams(**PROCESSORS[processor])
    plain = texts(equality, "plain", 0, params, 8, 40)
    for length in (1, 3):
        assert np.array_equal(texts(rule, kind, length, params, 8, 40), plain)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", ["model", "cascade", "both", "ahead"])
def test_texts_of_three_tokens_under_rejection_follow_the_target(processor: str, kind: str) -> None:
    """Drafts of one token and of three in turn, so that each kind and each processor has both."""
    length = (1, 3)[(KINDS.index(kind) + list(PROCESSORS).index(processor)) % 2]
    expect_texts(rejection, kind, length, SamplingParams(**PROCESSORS[processor]), 600)


WIDTH_COSTS = {1: 1.0, 2: 1.05, 4: 1.2, 8: 1.5, 32: 3.0}
NUM_ANSWERS = 200
NUM_TOKENS = 150  # of an answer: fifty texts of three, each behind the last token of the one before


def adaptive_answers(schedule: str, params: SamplingParams, num_answers: int) -> Iterator[TokenIds]:
    """Answers of NUM_TOKENS under the adaptive policy, which learns from each to the next, in virtual time."""
    devices = virtual_devices()
    widths, seconds = list(WIDTH_COSTS), list(WIDTH_COSTS.values())
    target = devices.pace_target(RowsDecoder(TARGET), lambda fed, rows: float(np.interp(rows, widths, seconds)))
    between = RowsDecoder(np.log((np.exp(TARGET) + np.exp(DRAFTER)) / 2))  # right more often, so longer drafts pay
    paced = devices.pace_drafter(between, lambda fed, rows: 0.15)
    max_rows = 7 if schedule == "hedged" else 0
    drafter = LaneDrafter(ModelDrafter(paced, 3), devices.lane, schedule != "serial", max_rows)
    costs, rates, models = PassCosts(dict(WIDTH_COSTS), 1.0), AcceptanceRates(), dict[str, DraftModelStats]()
    for seed in range(num_answers):
        policy = MeasuredPolicy([drafter], costs, rates, models, with_distributions=True, clock=devices.clock)
        sampler = GumbelSampler(params, len(PROMPT), seed)
        blocks = speculative_decode(PROMPT, target, sampler, policy, rejection, clock=devices.clock)
        tokens = islice((token for block in blocks for token in block.tokens), NUM_TOKENS)
        yield np.fromiter(tokens, np.int32, NUM_TOKENS)
        blocks.close()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["serial", "pipelined", "hedged"])
def test_texts_under_the_adaptive_policy_follow_the_target(schedule: str) -> None:
    """Answers are cut into texts of three tokens, which are counted by the token before them."""
    params = SamplingParams(temperature=0.9)
    answers = np.stack(list(adaptive_answers(schedule, params, NUM_ANSWERS)))
    before = np.concatenate([np.full((len(answers), 1), PROMPT[-1]), answers[:, 2:-1:3]], 1)
    counts = np.zeros((3,) * 4, int)
    np.add.at(counts, (before.ravel(), *(answers[:, i::3].ravel() for i in range(3))), 1)
    chances = np.stack([processed(row, PROMPT, params) for row in TARGET])
    for first in range(3):
        joint = chances[first][:, None, None] * chances[:, :, None] * chances[None]
        expect_distribution(counts[first].ravel(), joint.ravel())


def _always(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
    return append(draft.tokens, [0])


def _corrected_from_p(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
    """Samples from all of p once a draft was refused."""
    assert draft.distributions is not None
    p, q = sampler.distribution(logits[0], tokens), draft.distributions[0]
    token = int(draft.tokens[0])
    ratio = p.probs[p.ids == token].sum() / q.probs[q.ids == token].sum()
    is_accepted = np.random.default_rng(sampler.apart(1).pick(p, 0)).random() < ratio
    return np.array([token if is_accepted else sampler.apart(7).pick(p, len(tokens))])


def _with_the_noise_of_the_draft(tokens: TokenIds, draft: Tree, logits: Logits, sampler: Sampler) -> TokenIds:
    """Decides with the noise of the draft."""
    drafting = sampler.drafting(0)  # as FixedLength has it
    assert isinstance(sampler, GumbelSampler)
    assert isinstance(drafting, GumbelSampler)
    noise = gumbel_noise(drafting.seed or 0, len(tokens), draft.tokens[:1])
    number = float(np.exp(-np.exp(-noise[0])))
    one_number = _OneNumber(sampler.params, sampler.num_prompt, sampler.seed, number=number)
    return rejection(tokens, draft, logits, one_number)


@dataclass(frozen=True)
class _OneNumber(GumbelSampler):
    number: float = 0.0

    def least(self, logits: np.ndarray, tokens: TokenIds, token: int) -> float:
        return 0.0

    def uniform(self, position: int) -> float:
        return self.number

    def apart(self, domain: int) -> GumbelSampler:
        return self


@pytest.mark.parametrize("wrong", [_always, _corrected_from_p, _with_the_noise_of_the_draft])
def test_wrong_rules_are_recognised(wrong: Acceptance) -> None:
    target, drafter = (np.tile(row, (6, 1)) for row in SHAPES["alike"])
    policy = FixedLength([ModelDrafter(RowsDecoder(drafter), 6)], 1, with_distributions=True)
    params, counts = SamplingParams(temperature=1.0), np.zeros(6, int)
    for seed in range(1500):
        sampler = GumbelSampler(params, seed=seed)
        counts[wrong(PROMPT, policy.propose(PROMPT, 9, sampler).draft, target[:2], sampler)[0]] += 1
    statistic, bound = chi_square(counts, processed(target[0], PROMPT, params))
    assert statistic > bound


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 2**64 - 1),
)


def run(
    rule: Acceptance, params: SamplingParams, drafters: Callable[[], list[Drafter]], length: int
) -> Iterator[int]:
    target = TableDecoder(12, seed=1)
    policy = FixedLength(drafters(), length, with_distributions=rule is rejection)
    blocks = speculative_decode(PROMPT, target, GumbelSampler(params, len(PROMPT)), policy, rule, 40)
    return (int(token) for block in islice(blocks, 40) for token in block.tokens)


def near() -> list[Drafter]:
    return [ModelDrafter(TableDecoder(12, seed=2, near=TableDecoder(12, seed=1)), 12)]


@settings(max_examples=30)
@given(params=sampling_params, length=st.integers(0, 6))
def test_certain_drafts_give_the_text_of_equality(params: SamplingParams, length: int) -> None:
    texts = [list(run(rule, params, lambda: [NgramDrafter(), SuffixDrafter()], length)) for rule in RULES]
    assert texts[0] == texts[1]


@settings(max_examples=15)
@given(seed=st.integers(0, 2**64 - 1), length=st.integers(0, 6), penalty=st.sampled_from([1.0, 1.3]))
def test_greedy_is_that_of_equality(seed: int, length: int, penalty: float) -> None:
    params = SamplingParams(seed=seed, repetition_penalty=penalty)
    assert list(run(rejection, params, near, length)) == list(run(equality, params, near, length))


@settings(max_examples=15)
@given(params=sampling_params, length=st.integers(0, 6))
def test_same_seed_drafter_and_length_give_the_same_text(params: SamplingParams, length: int) -> None:
    assert list(run(rejection, params, near, length)) == list(run(rejection, params, near, length))


def test_perfect_drafter_is_accepted_whole() -> None:
    policy = FixedLength([ModelDrafter(TableDecoder(12, seed=1), 12)], 4, with_distributions=True)
    sampler = GumbelSampler(SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.3))
    blocks = speculative_decode(PROMPT, TableDecoder(12, seed=1), sampler, policy, rejection)
    assert {(block.num_draft, len(block.tokens)) for block in islice(blocks, 40)} == {(4, 5)}


def test_tree_is_judged_by_equality() -> None:
    tree = Tree(np.array([1, 2, 0], np.int32), parents=(-1, -1, 1))
    rows = np.tile(log(0.2, 0.3, 0.5), (4, 1))
    for seed in range(20):
        sampler = GumbelSampler(SamplingParams(temperature=1.0, seed=seed))
        assert np.array_equal(rejection(PROMPT, tree, rows, sampler), equality(PROMPT, tree, rows, sampler))


def test_residual_is_what_q_lacks_of_p() -> None:
    p = Distribution(np.array([1, 4, 7]), np.array([0.3, 0.5, 0.2]))
    q = Distribution(np.array([4, 7, 9]), np.array([0.1, 0.6, 0.3]))
    left = residual(p, q)
    assert left.ids.tolist() == [1, 4, 7]
    assert left.probs == pytest.approx([0.3 / 0.7, 0.4 / 0.7, 0.0])
    assert np.array_equal(residual(p, p).probs, p.probs)
