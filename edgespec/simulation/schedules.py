"""The schedules on another machine: the real loop, policy and drafter with synthetic models, in virtual time.

In a lane of virtual time nobody waits. Nothing is assumed but the speed of both models and how often drafts are
accepted.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, Proposal, speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.lanes import Job, Lane, StepTime
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.measured import FixedLength, MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.pass_estimate import NUM_WIDTHS
from edgespec.draft.timeline import Interval
from edgespec.simulation.machines import Machine, bound
from edgespec.simulation.recording import Recording
from edgespec.simulation.synthetic import WINDOW, Pace, PacedDecoder, synthetic_drafter, synthetic_target
from edgespec.system.cancel import Flag
from edgespec.system.clock import Clock, VirtualClock
from edgespec.types import Sampler, TokenIds

SCHEDULES = ("plain", "serial", "pipelined", "hedged")
# All schedules decode one text with one set of drafts, so that chance favours none of them. So many tokens take up
# to 15 s of a processor, mostly for hedging.
NUM_TOKENS = 4000
_PROMPT = np.zeros(1, np.int32)
_WARM_UP_SHARE = 0.1  # of the tokens, while the policy measures
_LONGEST_S = 1e6  # of a draft: in virtual time nobody waits


class Speed(NamedTuple):
    """The speed of a schedule."""

    tokens_per_second: float
    tokens_per_pass: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulation.

    acceptance: The chance that a drafted token is accepted, if all before it were.
    draft_length: Tokens of a serial draft; unless given, chosen by the policy.
    recording: Where a real drafter was right, and how much it drafted in each round; replaces num_tokens.
    num_tokens: Length of each schedule's text.
    """

    machine: Machine
    acceptance: float
    draft_length: int | None = None
    recording: Recording | None = None
    num_tokens: int = NUM_TOKENS
    seed: int = 0


def simulate(scenario: Scenario, report: Callable[[str], None] = lambda line: None) -> dict[str, Speed]:
    """The speed of each schedule; reports which one runs."""
    speeds = {}
    for schedule in SCHEDULES:
        report(f"simulating {schedule}")
        speeds[schedule] = run(scenario, schedule, virtual_devices())
    return speeds


def best_possible(scenario: Scenario) -> float:
    """A bound of tokens a second for the drafts of these runs; the end of a run may exceed it a little."""
    recording = scenario.recording
    rates = (recording.acceptance_by_position if recording else []) or [text_acceptance(scenario)]
    return bound(scenario.machine, lambda position: rates[min(position, len(rates) - 1)])


def text_acceptance(scenario: Scenario) -> float:
    """The share of the measured text that the drafter guesses; scenario.acceptance but for chance."""
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
    """Tokens before the measured ones."""
    return 0 if scenario.recording else int(_WARM_UP_SHARE * scenario.num_tokens)


def run(
    scenario: Scenario,
    schedule: str,
    devices: "Devices",
    policy_of: Callable[[Drafter], DraftPolicy] | None = None,
) -> Speed:
    """The speed of one of SCHEDULES, by default under its own policy."""
    clock, wanted, num_first = devices.clock, _num_wanted(scenario), _num_first(scenario)
    num_tokens = num_passes = since_tokens = since_passes = 0
    since_s = clock()
    for block in decode(scenario, schedule, devices, policy_of):
        num_tokens, num_passes = num_tokens + len(block.tokens), num_passes + 1
        if num_tokens <= num_first:
            since_tokens, since_passes, since_s = num_tokens, num_passes, clock()
        if num_tokens >= wanted:
            break
    num_tokens -= since_tokens
    return Speed(num_tokens / (clock() - since_s), num_tokens / (num_passes - since_passes))


class Devices(NamedTuple):
    """The clock of an answer, the lane of its drafter, and what gives the decoder of each model its pace."""

    clock: Clock
    lane: Lane
    pace_target: Callable[[Decoder, Pace], Decoder]
    pace_drafter: Callable[[Decoder, Pace], Decoder]


def virtual_devices() -> Devices:
    """Clocks and a lane in virtual time, in which nobody waits."""
    clock, own = VirtualClock(), VirtualClock()
    paced = partial(PacedDecoder, clock=clock), partial(PacedDecoder, clock=own)
    return Devices(clock, VirtualLane("drafter", clock, own), *paced)


def decode(
    scenario: Scenario, schedule: str, devices: Devices, policy_of: Callable[[Drafter], DraftPolicy] | None = None
) -> Generator[Block, None, None]:
    """The passes of one of SCHEDULES, without end."""
    machine = scenario.machine
    text = synthetic_target(scenario.seed)
    target = devices.pace_target(text, lambda num_fed, rows: machine.verify_s(num_fed))
    policy_of = policy_of or partial(policy_for, scenario, schedule, devices)
    policy: DraftPolicy = Plain() if schedule == "plain" else policy_of(_drafter(scenario, schedule, devices))
    return speculative_decode(_PROMPT, target, GumbelSampler(SamplingParams()), policy, clock=devices.clock)


def _drafter(scenario: Scenario, schedule: str, devices: Devices) -> Drafter:
    machine, recording = scenario.machine, scenario.recording
    outcomes = [None, *recording.outcomes] if recording else []
    decoder = devices.pace_drafter(
        synthetic_drafter(scenario.acceptance, scenario.seed, outcomes),
        lambda num_fed, rows: machine.draft_s * machine.draft_ratio(rows),
    )
    return LaneDrafter(
        ModelDrafter(decoder, decoder.vocab_size),
        devices.lane,
        can_run_ahead=schedule != "serial",
        max_rows=MAX_BRANCHES if schedule == "hedged" else 0,
        deadline_s=_LONGEST_S,
    )


def policy_for(scenario: Scenario, schedule: str, devices: Devices, drafter: Drafter) -> DraftPolicy:
    """The policy of a schedule that drafts."""
    machine, recording = scenario.machine, scenario.recording
    if schedule == "serial" and scenario.draft_length is not None:
        return FixedLength([drafter], scenario.draft_length)
    if schedule == "serial" and recording is not None:
        return _RecordedPolicy(drafter, recording.lengths)
    ratios = {width: machine.ratio(width - 1) for width in range(1, NUM_WIDTHS + 1)}
    row_costs = {rows: machine.draft_ratio(rows) for rows in range(1, MAX_BRANCHES + 1)}
    models = {drafter.name: DraftModelStats(DraftCosts(machine.step, 0.0), rows=RowCosts(row_costs))}
    return MeasuredPolicy(
        [drafter], PassCosts(ratios, machine.target_s), AcceptanceRates(), models, clock=devices.clock
    )


class _RecordedPolicy(Plain):
    """Drafts as many tokens in each round as were recorded."""

    def __init__(self, drafter: Drafter, lengths: Sequence[int]) -> None:
        self._drafter = drafter
        self._lengths = iter(lengths)

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        return Proposal(tokens, self._drafter.draft(tokens, DraftRequest(next(self._lengths, 0)), sampler))


_MAX_INTERVALS = 100_000


class VirtualLane:
    """A lane in virtual time, without a thread. Its decoders sleep on its own clock, which times each step.

    Steps are run when they are asked for, so that every run is alike.
    """

    def __init__(self, name: str, clock: VirtualClock, own: VirtualClock) -> None:
        self._name = name
        self._clock, self._own = clock, own
        self._steps: Iterator[Any] = iter(())
        self._work = "draft"
        self._cancel = Flag()
        self._done: list[Any] = []
        self._ends: list[float] = []  # when each of them ended
        self._started = 0.0
        self._is_over = True
        self.intervals: deque[Interval] = deque(maxlen=_MAX_INTERVALS)

    def start(self, job: Job) -> None:
        self._end()
        self._cancel = Flag()
        self._steps, self._work = job.steps(self._cancel), job.work
        self._done, self._ends, self._is_over = [], [], False
        self._started = self._own.now = self._clock.now

    def wait(self, num_steps: int, timeout_s: float | None = None) -> int:
        end = inf if timeout_s is None else self._clock.now + timeout_s
        while not self._is_over and len(self._done) < num_steps and self._own.now <= end:
            self._step()
        if num_steps > 0 and self._done:
            self._clock.now = max(self._clock.now, min(end, self._ends[:num_steps][-1]))
        self._run()
        return self._num_by_now()

    def steps(self, first: int = 0) -> list[tuple[Any, StepTime]]:
        self._run()
        begun_s, ends = self._ends[first - 1] if first else self._started, self._ends[first : self._num_by_now()]
        return list(zip(self._done[first:], map(StepTime, [begun_s, *ends], ends), strict=False))

    def now(self) -> float:
        return self._clock.now

    @property
    def step_s(self) -> float:
        num_ended = self._num_by_now()
        return self._clock.now - (self._ends[num_ended - 1] if num_ended else self._started)

    @property
    def is_over(self) -> bool:
        self._run()
        return self._is_over and (not self._done or self._ends[-1] <= self._clock.now)

    def cancel(self) -> None:
        self._run()
        self._end()
        num_ended = self._num_by_now()
        self._done, self._ends, self._is_over = self._done[:num_ended], self._ends[:num_ended], True

    def stop(self) -> None:
        self._end()
        self._done, self._ends, self._is_over = [], [], True

    def _run(self) -> None:
        """Do all steps that begin by now."""
        while not self._is_over and self._own.now <= self._clock.now:
            self._step()

    def _step(self) -> None:
        step = next(self._steps, None)
        if step is None:
            self._is_over = True
        else:
            self._done.append(step)
            self._ends.append(self._own.now)

    def _num_by_now(self) -> int:
        return bisect_right(self._ends, self._clock.now)

    def _end(self) -> None:
        if self._done or not self._is_over:
            self._cancel.set()
            end = min(self._clock.now, self._own.now)
            self.intervals.append(Interval(self._name, self._work, self._started, end, self._num_by_now()))
