"""Passes that are refused memory run narrower, or after a model was closed, and no token changes."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imitated_machine import MIB, PLENTY, ROOMY, VOCAB, Machine, target
from pool_answers import PROMPT, answer, tokens_of
from table_decoder import TableDecoder

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.pool_policy import PoolPolicy
from edgespec.draft.speculation import Speculation
from edgespec.errors import MemoryExhausted
from edgespec.memory.free_memory import HOST, FreeByPlace, FreeMemory
from edgespec.types import Logits, TokenIds


@pytest.mark.slow
@settings(max_examples=60)
@given(
    frees=st.lists(st.integers(0, 600), min_size=5, max_size=60),
    length=st.sampled_from([2, 5, None]),
    seed=st.integers(0, 2**32),
)
def test_no_token_is_lost_or_changed_whatever_memory_does(frees: list[int], length: int | None, seed: int) -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("big", 300), machine.candidate("small", 50))
    pool.start(ROOMY, {})
    moments = iter(frees)

    def rooms() -> FreeByPlace:
        machine.clock.sleep(1.0)
        return {HOST: FreeMemory(next(moments, 600) * MIB, "a test")}

    pool.watch.free = rooms
    found = answer(pool, length, num_blocks=len(frees), seed=seed)  # which is compared with plain decoding
    assert len(found) >= len(frees), "each pass gives a token"


class Tight(TableDecoder):
    """Refuses memory for passes of more rows than it has room for."""

    __slots__ = ("most_rows", "num_refused")

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        if num_last > self.most_rows:
            self.num_refused += 1
            raise MemoryExhausted("no room for a pass")
        return super().logits(tokens, num_last)


def tight(most_rows: int) -> Tight:
    decoder = Tight(VOCAB, seed=1)
    decoder.most_rows, decoder.num_refused = most_rows, 0
    return decoder


def test_a_wide_pass_without_room_is_run_narrow_and_drafting_steps_down() -> None:
    machine = Machine()
    pool = machine.pool()
    sampler = GumbelSampler(SamplingParams(), len(PROMPT))
    policy, decoder = PoolPolicy(pool, Speculation(pool.drafters, 4)), tight(1)
    found = tokens_of(list(islice(speculative_decode(PROMPT, decoder, sampler, policy, relieve=pool.relieve), 40)))
    assert found == tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), 40)))
    assert decoder.num_refused <= 2, "it does not ask again for what it was refused"
    news = pool.take_changes()
    assert "was refused memory and run without the draft" in news[0]
    assert news[1].startswith("drafting steps down from suffix to ")
    assert pool.drafters() == []


@pytest.mark.slow
def test_a_plain_pass_without_room_frees_the_model_and_is_run_again() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200), texts=frozenset())
    pool.start(ROOMY, {})

    class Beside(TableDecoder):
        __slots__ = ()

        def logits(self, tokens: TokenIds, num_last: int) -> Logits:
            if 20 < len(tokens) < 24 and machine.alive:  # which collects garbage
                raise MemoryExhausted("no room beside the model")
            return super().logits(tokens, num_last)

    sampler = GumbelSampler(SamplingParams(), len(PROMPT))
    policy = PoolPolicy(pool, Speculation(pool.drafters, 2))
    steps = speculative_decode(PROMPT, Beside(VOCAB, seed=1), sampler, policy, relieve=pool.relieve)
    found = tokens_of(list(islice(steps, 40)))
    assert found == tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), len(found))))
    assert not machine.alive


def test_a_plain_pass_without_room_is_an_error_where_nothing_can_be_freed() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200))
    pool.start(ROOMY, {})
    policy, decoder = PoolPolicy(pool, Speculation(pool.drafters, 4)), tight(0)
    sampler = GumbelSampler(SamplingParams(), len(PROMPT))
    with pytest.raises(MemoryExhausted, match="no room for a pass"):
        next(speculative_decode(PROMPT, decoder, sampler, policy, relieve=pool.relieve))
    decoder.most_rows = 9
    again = PoolPolicy(pool, Speculation(pool.drafters, 4))
    found = tokens_of(list(islice(speculative_decode(PROMPT, decoder, sampler, again, relieve=pool.relieve), 20)))
    assert found == tokens_of(list(islice(speculative_decode(PROMPT, target(), sampler, Plain()), len(found))))


def test_what_was_learned_of_a_model_serves_when_it_is_back() -> None:
    machine = Machine()
    pool = machine.pool(machine.candidate("model", 200), texts=frozenset())
    pool.start(ROOMY, {})
    speculation = Speculation(pool.drafters)
    policy = PoolPolicy(pool, speculation)
    sampler = GumbelSampler(SamplingParams(), len(PROMPT))
    steps = speculative_decode(PROMPT, target(), sampler, policy)
    list(islice(steps, 30))
    policy.close()
    learned = AcceptanceRates(dict(speculation.rates)).rate("model", 0)
    speculation.models["model"].text.hold(PROMPT)
    machine.look(pool, 0)
    machine.look(pool, PLENTY)
    machine.look(pool, PLENTY, 3.0)
    next(steps)
    assert len(speculation.models["model"].text.held) == 0, "its cache is empty"
    assert AcceptanceRates(dict(speculation.rates)).rate("model", 0) == learned
