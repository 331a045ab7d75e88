"""The schedules on a machine that one does not own: the real loop, gate and drafter, in virtual time.

Target and drafter are synthetic, so that nothing but their pace and how often drafts are kept is assumed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.chances import Chances
from edgespec.clock import VirtualClock
from edgespec.costs import DraftCosts, PassCosts
from edgespec.drafters import ModelDrafter
from edgespec.gate import LONGEST_DRAFT, FixedGate, MeasuredGate
from edgespec.machine import Machine, bound
from edgespec.paid import PaidSource
from edgespec.recording import Recording
from edgespec.runtimes.paced import PacedDecoder
from edgespec.runtimes.synthetic import synthetic_drafter, synthetic_target
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Gate, Plain, serial
from edgespec.types import NOTHING, Ask, Draft, Drafter, Logits, Sampler, TokenIds

NUM_TOKENS = 4000
SCHEDULES = ("plain", "serial", "pipelined", "hedged")
_PROMPT = np.zeros(1, np.int32)
# Until the gate has found its feet.
_WARM_UP_SHARE = 0.1


class Speed(NamedTuple):
    tokens_per_second: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated.

    acceptance: The chance that a drafted token is kept, if all before it were.
    draft_length: Tokens a draft in sequence; unless given, what the gate measures to be best.
    recording: Where a real drafter was right, and how much it drafted in each round; its end is the end.
    """

    machine: Machine
    acceptance: float
    draft_length: int | None = None
    recording: Recording | None = None
    num_tokens: int = NUM_TOKENS
    seed: int = 0


def simulate(scenario: Scenario) -> dict[str, Speed]:
    """The speed of each schedule."""
    return {schedule: _speed(scenario, schedule) for schedule in SCHEDULES}


def best_possible(scenario: Scenario) -> float:
    """Tokens a second that no schedule exceeds in the long run; with a recording, as its drafts were kept."""
    chances = scenario.recording.chances if scenario.recording else []
    known = chances or [scenario.acceptance]
    return bound(scenario.machine, lambda position: known[min(position, len(known) - 1)])


def _speed(scenario: Scenario, schedule: str) -> Speed:
    recording, clock = scenario.recording, VirtualClock()
    wanted = recording.num_tokens if recording else scenario.num_tokens
    num_first = 0 if recording else int(_WARM_UP_SHARE * wanted)
    num_tokens = num_passes = since_tokens = since_passes = 0
    since_s = 0.0
    for num_emitted in _emitted(scenario, schedule, clock):
        num_tokens, num_passes = num_tokens + num_emitted, num_passes + 1
        if num_tokens <= num_first:
            since_tokens, since_passes, since_s = num_tokens, num_passes, clock()
        if num_tokens >= wanted:
            break
    num_tokens -= since_tokens
    return Speed(num_tokens / (clock() - since_s), num_tokens / (num_passes - since_passes))


def _emitted(scenario: Scenario, schedule: str, clock: VirtualClock) -> Iterator[int]:
    """Tokens of each pass."""
    machine = scenario.machine
    target = PacedDecoder(
        synthetic_target(scenario.seed), lambda num_fed, rows: machine.verify_s(num_fed), clock.sleep, clock
    )
    gate = _gate(scenario, schedule, clock)
    for block in serial(_PROMPT, target, GumbelSampler(SamplingParams()), gate, clock=clock):
        yield len(block.tokens)


def _gate(scenario: Scenario, schedule: str, clock: VirtualClock) -> Gate:
    if schedule == "plain":
        return Plain()
    machine, recording = scenario.machine, scenario.recording
    known = [None, *recording.known] if recording else []
    decoder = PacedDecoder(
        synthetic_drafter(scenario.acceptance, scenario.seed, known),
        lambda num_fed, rows: machine.draft_s,
        clock.sleep,
        clock,
    )
    drafter = ModelDrafter(decoder, decoder.vocab_size)
    if schedule == "serial" and scenario.draft_length is not None:
        return FixedGate([drafter], scenario.draft_length)
    if schedule == "serial" and recording is not None:
        return _Recorded(drafter, recording.lengths)
    ratios = {width: machine.ratio(width - 1) for width in range(1, LONGEST_DRAFT + 2)}
    paid = {drafter.name: PaidSource(DraftCosts(machine.step, 0.0))}
    return MeasuredGate([drafter], PassCosts(ratios, machine.target_s), Chances(), paid, clock=clock)


class _Recorded:
    """Drafts as much in each round as a real gate did."""

    def __init__(self, drafter: Drafter, lengths: Sequence[int]) -> None:
        self._drafter = drafter
        self._lengths = iter(lengths)

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        num_tokens = next(self._lengths, 0)
        return self._drafter.draft(tokens, Ask(num_tokens), sampler) if num_tokens else NOTHING

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        pass

    def close(self) -> None:
        pass
