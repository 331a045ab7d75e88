"""Greedy text is that of plain decoding on a target whose keys, values and rows depend on the cut into passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import pytest
from double import Double
from hypothesis import given, settings
from hypothesis import strategies as st
from table_decoder import TableDecoder
from table_runs import PROMPT, VOCAB, drafters_of

from edgespec.decoding.decoder import Decoder, reusable_prefix
from edgespec.decoding.greedy import PlainChoices, Reruns
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import DraftPolicy, Plain, Proposal, speculative_decode
from edgespec.draft.measured import FixedLength
from edgespec.engine.near_ties import measure_width_change
from edgespec.types import Logits, Sampler, TokenIds

CHANGE = 0.2  # of a logit, at most
KINDS = ["near", "wild", "ngram", "perfect"]


@dataclass
class Rounding(Double):
    """Rows of a table, changed by how each position of the text was run, as by a real cache and real kernels."""

    change: float = CHANGE
    table: TableDecoder = field(default_factory=lambda: TableDecoder(VOCAB, seed=1))
    vocab_size: int = VOCAB
    context_length: int = 1 << 20
    num_fed: int = 0
    held: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    history: list[int] = field(default_factory=list)  # of each position held: how it and all before it were run

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        start = reusable_prefix(self.held, tokens, num_last)
        del self.history[start:]
        width = min(len(tokens) - start, 3)  # kernels of wide passes are one
        for position in range(start, len(tokens)):
            before = self.history[-1] if self.history else 0
            self.history.append(crc32(f"{before} {tokens[position]} {width}".encode()))
        self.held, self.num_fed = tokens, self.num_fed + len(tokens) - start
        rows = self.table.logits(tokens, num_last)
        return rows + np.stack([self._noise(seed) for seed in self.history[-num_last:]])

    def _noise(self, seed: int) -> np.ndarray:
        noise = np.random.default_rng(seed).uniform(-0.5, 0.5, VOCAB) * self.change
        return noise.astype(np.float32)


def text(
    target: Decoder,
    policy: DraftPolicy,
    params: SamplingParams,
    change: float | None,
    num_tokens: int = 60,
    times_given: Callable[[], int] = lambda: 1,
) -> tuple[list[int], Reruns]:
    sampler = GumbelSampler(params, len(PROMPT))
    exact = None if change is None else PlainChoices(target, sampler, change, times_given)
    tokens: list[int] = []
    for block in speculative_decode(PROMPT, exact or target, sampler, policy, max_tokens=num_tokens):
        tokens += block.tokens.tolist()
        if len(tokens) >= num_tokens:
            break
    return tokens[:num_tokens], exact.reruns if exact else Reruns()


GREEDY = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), length=st.integers(1, 6), params=GREEDY, seed=st.integers(0, 99))
def test_text_is_that_of_plain_decoding(kind: str, length: int, params: SamplingParams, seed: int) -> None:
    plain, _ = text(Rounding(), Plain(), params, None)
    drafted, _ = text(
        Rounding(), FixedLength(drafters_of(kind, seed), length), params, 2 * CHANGE
    )  # of two logits
    assert drafted == plain


def test_text_differs_where_near_ties_are_left_as_they_are() -> None:
    plain, _ = text(Rounding(), Plain(), SamplingParams(), None, 200)
    drafted, _ = text(Rounding(), FixedLength(drafters_of("near"), 4), SamplingParams(), None, 200)
    assert drafted != plain


def test_what_a_cache_holds_from_before_does_not_matter() -> None:
    """A conversation's second turn starts from a cache that drafting filled in the first."""
    plain, _ = text(Rounding(), Plain(), SamplingParams(), None)
    used = Rounding()
    for stop in range(1, len(PROMPT) + 1):  # in other passes than those that read a prompt
        used.logits(PROMPT[:stop], 1)
    policies = Plain(), FixedLength(drafters_of("perfect"), 3)
    assert [text(used, policy, SamplingParams(), CHANGE)[0] for policy in policies] == [plain, plain]


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_answer_did_to_the_cache_meanwhile_does_not_matter(kind: str) -> None:
    """An answer that had to let its cache go finds that of another text, or its own text read in other passes."""
    target, num_given = Rounding(), [1]

    class Interrupted(FixedLength):
        def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
            if len(tokens) % 5 == 0:
                target.logits(tokens[::-1].copy(), 1)
                target.logits(tokens, len(tokens))
                num_given[0] += 1
            return super().propose(tokens, max_tokens, sampler)

    plain, _ = text(Rounding(), Plain(), SamplingParams(), None, 200)
    policy = Interrupted(drafters_of(kind), 3)
    assert text(target, policy, SamplingParams(), 2 * CHANGE, 200, lambda: num_given[0])[0] == plain


def test_each_token_is_run_again_once_at_most() -> None:
    _, reruns = text(Rounding(), FixedLength(drafters_of("near"), 4), SamplingParams(), CHANGE)
    assert 0 < reruns.num_tokens <= reruns.num_passes <= 60


def test_nothing_is_run_again_without_drafts_or_where_no_token_is_near() -> None:
    assert text(Rounding(), Plain(), SamplingParams(), CHANGE)[1] == Reruns()
    exact_rows = Rounding(change=0.0)
    assert text(exact_rows, FixedLength(drafters_of("near"), 4), SamplingParams(), 0.0)[1] == Reruns()


def test_a_wrong_bound_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    policy = FixedLength(drafters_of("near"), 4)
    text(Rounding(change=1.0), policy, SamplingParams(), 0.3, 200)
    assert "is not that of plain decoding" in caplog.text


@pytest.mark.parametrize("change", [0.0, 0.05, CHANGE])
def test_measured_change_is_what_the_cut_changes(change: float) -> None:
    prompts: Sequence[TokenIds] = [PROMPT, PROMPT[::-1].copy(), PROMPT[:2]]
    measured = measure_width_change(Rounding(change=change), prompts)
    assert 0.6 * change <= measured <= 2 * change
