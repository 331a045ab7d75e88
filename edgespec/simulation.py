"""The schedules on a machine that one does not own: the real loop, gate and drafter, in virtual time.

Target and drafter are synthetic, so that nothing but their pace and how often drafts are kept is assumed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgespec.chances import Chances
from edgespec.clock import Clock, VirtualClock
from edgespec.costs import DraftCosts, PassCosts
from edgespec.drafters import ModelDrafter
from edgespec.gate import LONGEST_DRAFT, FixedGate, MeasuredGate
from edgespec.hedges import Hedges
from edgespec.lane_drafter import LaneDrafter
from edgespec.lanes import Lane, ThreadLane, VirtualLane
from edgespec.machine import Machine, bound
from edgespec.paid import PaidSource
from edgespec.recording import Recording
from edgespec.runtimes.paced import PacedDecoder
from edgespec.runtimes.synthetic import WINDOW, synthetic_drafter, synthetic_target
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Gate, Plain, serial
from edgespec.types import NOTHING, Ask, Draft, Drafter, Logits, Sampler, TokenIds

SCHEDULES = ("plain", "serial", "pipelined", "hedged")
# The same for all, for then they decode the same text with the same drafts, and what chance gives to one it gives
# to all. So many tokens take up to 15 s of a processor, most of them for hedging.
NUM_TOKENS = 4000
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
    num_tokens: Of each schedule's run.
    recording: Where a real drafter was right, and how much it drafted in each round; its end is the end.
    """

    machine: Machine
    acceptance: float
    draft_length: int | None = None
    recording: Recording | None = None
    num_tokens: int = NUM_TOKENS
    seed: int = 0


def simulate(scenario: Scenario, report: Callable[[str], None] = lambda line: None) -> dict[str, Speed]:
    """The speed of each schedule; which one is at work is reported."""
    speeds = {}
    for schedule in SCHEDULES:
        report(f"simulating {schedule}")
        speeds[schedule] = run(scenario, schedule, virtual_devices())
    return speeds


def best_possible(scenario: Scenario) -> float:
    """Tokens a second that no schedule exceeds with the drafts of these runs, but for what their ends cut off."""
    recording = scenario.recording
    known = (recording.chances if recording else []) or [drawn_acceptance(scenario)]
    return bound(scenario.machine, lambda position: known[min(position, len(known) - 1)])


def drawn_acceptance(scenario: Scenario) -> float:
    """The share of the measured text at which the drafter is right: scenario.acceptance, but for chance."""
    target, drafter = synthetic_target(scenario.seed), synthetic_drafter(scenario.acceptance, scenario.seed)
    tokens, are_right = _PROMPT.tolist(), []
    for _ in range(_num_wanted(scenario)):
        token, guess = (
            decoder.row_of(tuple(tokens[-WINDOW:]), len(tokens)).argmax() for decoder in (target, drafter)
        )
        tokens.append(int(token))
        are_right.append(token == guess)
    return float(np.mean(are_right[_num_first(scenario) :]))


def _num_wanted(scenario: Scenario) -> int:
    return scenario.recording.num_tokens if scenario.recording else scenario.num_tokens


def _num_first(scenario: Scenario) -> int:
    """Tokens that are not measured."""
    return 0 if scenario.recording else int(_WARM_UP_SHARE * scenario.num_tokens)


def run(scenario: Scenario, schedule: str, devices: "Devices") -> Speed:
    """The speed of one schedule, of SCHEDULES, on given devices."""
    clock, wanted, num_first = devices.clock, _num_wanted(scenario), _num_first(scenario)
    num_tokens = num_passes = since_tokens = since_passes = 0
    since_s = clock()
    for num_emitted in _emitted(scenario, schedule, devices):
        num_tokens, num_passes = num_tokens + num_emitted, num_passes + 1
        if num_tokens <= num_first:
            since_tokens, since_passes, since_s = num_tokens, num_passes, clock()
        if num_tokens >= wanted:
            break
    num_tokens -= since_tokens
    return Speed(num_tokens / (clock() - since_s), num_tokens / (num_passes - since_passes))


class Devices(NamedTuple):
    """Where target and drafter spend their time; sleeping is real where no way to sleep is named."""

    clock: Clock
    lane: Lane
    lane_clock: Clock
    sleep: Callable[[float], None] | None = None
    lane_sleep: Callable[[float], None] | None = None


def virtual_devices() -> Devices:
    clock, own = VirtualClock(), VirtualClock()
    return Devices(clock, VirtualLane("drafter", clock, own), own, clock.sleep, own.sleep)


def real_devices() -> Devices:
    """Two threads that sleep."""
    return Devices(perf_counter, ThreadLane("drafter"), perf_counter)


def _emitted(scenario: Scenario, schedule: str, devices: Devices) -> Iterator[int]:
    """Tokens of each pass."""
    machine = scenario.machine
    text = synthetic_target(scenario.seed)
    target = PacedDecoder(text, lambda num_fed, rows: machine.verify_s(num_fed), devices.sleep, devices.clock)
    gate = _gate(scenario, schedule, devices)
    for block in serial(_PROMPT, target, GumbelSampler(SamplingParams()), gate, clock=devices.clock):
        yield len(block.tokens)


def _gate(scenario: Scenario, schedule: str, devices: Devices) -> Gate:
    if schedule == "plain":
        return Plain()
    machine, recording = scenario.machine, scenario.recording
    known = [None, *recording.known] if recording else []
    decoder = PacedDecoder(
        synthetic_drafter(scenario.acceptance, scenario.seed, known),
        lambda num_fed, rows: machine.draft_s,
        devices.lane_sleep,
        devices.lane_clock,
    )
    drafter = LaneDrafter(
        ModelDrafter(decoder, decoder.vocab_size),
        devices.lane,
        can_run_ahead=schedule != "serial",
        hedges=Hedges() if schedule == "hedged" else None,
    )
    if schedule == "serial" and scenario.draft_length is not None:
        return FixedGate([drafter], scenario.draft_length)
    if schedule == "serial" and recording is not None:
        return _Recorded(drafter, recording.lengths)
    ratios = {width: machine.ratio(width - 1) for width in range(1, LONGEST_DRAFT + 2)}
    paid = {drafter.name: PaidSource(DraftCosts(machine.step, 0.0))}
    return MeasuredGate([drafter], PassCosts(ratios, machine.target_s), Chances(), paid, clock=devices.clock)


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
