"""The speeds that a plan foresees, beside the speeds of its options when they are run.

    python bench/plan_check.py MODEL --drafter D [--tokens N] [--rounds N] [--prompts N] [--threads N]

Costs are measured in each placement, and the acceptance of drafts beforehand on the prompts themselves, in drafts
of four tokens. Then each option of the plan that can run is run as planned, with its draft length and its waits,
greedily. All options run in turn within a round, and in the opposite order in the next. Speeds leave out the first
pass, which reads the prompt. At the end stands whether options that were foreseen to be faster by more than 5 %
were faster.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from time import perf_counter

import numpy as np
from command_line import command_line

from edgespec import load
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, DraftPolicy, Plain, Proposal, speculative_decode
from edgespec.decoding.tree import NO_DRAFT
from edgespec.draft.acceptance_rates import AcceptanceRates, Key
from edgespec.draft.draft_model import UNKNOWN_WORTH
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.engine.drafter_chain import open_chain
from edgespec.evaluation.prompts import own_prompts
from edgespec.runtimes.devices import find_device
from edgespec.setup.device_choice import Placement
from edgespec.setup.measure import LONGEST
from edgespec.setup.measured_placements import MeasuredPlacements, splits_of
from edgespec.setup.open_model import ModelFolder, open_model
from edgespec.setup.planner import PlannedOption, draft_rates, plan_on
from edgespec.setup.profile import Place
from edgespec.setup.resolve import Chain, resolve
from edgespec.setup.wish import Wish
from edgespec.system.cancel import Cancel
from edgespec.system.console import info, log_to_stderr
from edgespec.types import Logits, Sampler, Schedule, TokenIds

Past = Mapping[Key, tuple[float, float]]

GREEDY = GumbelSampler(SamplingParams())
CALIBRATION = 4  # tokens a draft while acceptance is counted
LEAST_DIFFERENCE = 1.05


@dataclass
class PlannedPolicy:
    """Drafts a fixed number of tokens, and waits for a fixed number of them where the drafter runs ahead."""

    drafter: Drafter
    length: int
    wait: int

    def propose(self, tokens: TokenIds, max_tokens: int, sampler: Sampler) -> Proposal:
        length = min(self.length, max_tokens)
        if not self.drafter.can.run_ahead:
            draft = self.drafter.draft(tokens, DraftRequest(length), sampler) if length else NO_DRAFT
            return Proposal(tokens, draft)
        is_hedged = self.drafter.can.num_alternatives > 0
        request = DraftRequest(length, is_ahead=True, worth=UNKNOWN_WORTH if is_hedged else None)
        num_ready = len(self.drafter.draft_ahead(tokens, request, sampler).draft.tokens)
        least = min(max(num_ready, self.wait), length)
        return Proposal(
            tokens, self.drafter.draft(tokens, replace(request, num_tokens=least, min_tokens=least), sampler)
        )

    def observe(self, round: Proposal, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        pass

    def close(self) -> None:
        self.drafter.pause()


class OpenPlacement:
    """The open models of a placement: one target, and one drafter for each schedule."""

    def __init__(
        self, target: ModelFolder, drafter: ModelFolder, placement: Placement, schedules: Sequence[Schedule]
    ) -> None:
        self.decoder = open_model(target, placement.device, num_threads=placement.num_threads, shares_cores=True)
        self._open = {
            each: open_chain(Chain((drafter,), schedule=each), target, placement, Cancel(), lambda line: None)
            for each in schedules
        }

    def policy(self, option: PlannedOption) -> DraftPolicy:
        if option.schedule == "plain":
            return Plain()
        return PlannedPolicy(self._open[option.schedule].drafter, option.draft_length, option.wait)

    def blocks(self, option: PlannedOption, prompt: TokenIds, num_tokens: int) -> Iterator[Block]:
        """The block whose pass reads the prompt, then blocks until these hold num_tokens."""
        num_decoded = 0
        with closing(
            speculative_decode(prompt, self.decoder, GREEDY, self.policy(option), max_tokens=num_tokens + 1)
        ) as blocks:
            yield next(blocks)
            for block in blocks:
                yield block
                num_decoded += len(block.tokens)
                if num_decoded >= num_tokens:
                    return

    def stop(self) -> None:
        for each in self._open.values():
            each.lane.stop()


def count_acceptance(
    opened: OpenPlacement, option: PlannedOption, prompts: Sequence[TokenIds], num_tokens: int
) -> Past:
    """The share of drafted tokens that are accepted, by position in the draft."""
    rates = AcceptanceRates()
    option = replace(option, schedule="serial", draft_length=CALIBRATION)
    for prompt in prompts:
        for block in opened.blocks(option, prompt, num_tokens):
            for i in range(min(block.num_draft, len(block.tokens))):
                rates.observe(block.draft.source, i, i < block.num_accepted)
    return rates.snapshot()


def measure_speeds(
    opened: Mapping[Place, OpenPlacement],
    options: Sequence[PlannedOption],
    prompts: Sequence[TokenIds],
    num_tokens: int,
    num_rounds: int,
) -> list[list[float]]:
    """Tokens a second of each option in each round, all tokens over all their time."""
    speeds: list[list[float]] = [[] for _ in options]
    for round_number in range(num_rounds):
        num_decoded, decode_s = [0] * len(options), [0.0] * len(options)
        for prompt in prompts:
            for i in range(len(options))[:: -1 if round_number % 2 else 1]:
                blocks = opened[options[i].target].blocks(options[i], prompt, num_tokens)
                next(blocks)
                started = perf_counter()
                num_decoded[i] += sum(len(block.tokens) for block in blocks)
                decode_s[i] += perf_counter() - started
        for i, times in enumerate(speeds):
            times.append(num_decoded[i] / decode_s[i])
    return speeds


def find_misorders(options: Sequence[PlannedOption], measured: Sequence[float]) -> list[str]:
    """A line for each pair of options of which the one foreseen to be faster was slower."""
    lines = []
    pairs = sorted(zip(options, measured, strict=True), key=lambda each: -each[0].tokens_per_second)
    for (one, one_speed), (other, other_speed) in combinations(pairs, 2):
        foreseen = one.tokens_per_second / other.tokens_per_second
        if foreseen > LEAST_DIFFERENCE and one_speed < other_speed:
            lines.append(
                f"{describe(one)} was {one_speed / other_speed:.2f}, not {foreseen:.2f} times {describe(other)}"
            )
    return lines


def describe(option: PlannedOption) -> str:
    if option.drafter_place is None:
        return f"plain on {option.target}"
    waits = "" if option.schedule == "serial" else f", {option.wait} waited for"
    return f"{option.schedule} of {option.draft_length}{waits}, {option.target} and {option.drafter_place}"


def print_comparison(weighed: list[PlannedOption], speeds: list[list[float]]) -> None:
    """Print the speed that was foreseen for each option beside the speeds of its runs."""
    print("foreseen  measured  (least to most)  measured / foreseen")
    medians = [median(each) for each in speeds]
    for option, speed, each in zip(weighed, medians, speeds, strict=True):
        foreseen = option.tokens_per_second
        spread = f"({min(each):.1f} to {max(each):.1f})"
        print(f"{foreseen:8.1f}  {speed:8.1f}  {spread}  {speed / foreseen:4.2f}  {describe(option)}")
    misorders = find_misorders(weighed, medians)
    print(
        "\n".join(
            misorders or [f"the order is as foreseen, except for differences below {LEAST_DIFFERENCE - 1:.0%}"]
        )
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model")
    parser.add_argument("--drafter", required=True, metavar="D", help="the drafter, a model")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens of each run (default 48)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument(
        "--prompts", type=int, default=3, metavar="N", help="number of edgespec's own prompts (default 3)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads for both models (default: all cores)")
    options = parser.parse_args()
    named = resolve(
        Wish(
            model=options.model,
            drafter=options.drafter,
            device="cpu",
            drafter_device="cpu",
            offline=True,
            report=info,
        )
    )
    target, drafter = named.target, named.drafters[0].models[0]
    cpu = find_device("cpu")
    placement = Placement(device=cpu, drafter_device=cpu, num_threads=options.threads)
    with load(target.folder, drafter="none") as engine:
        prompts = [
            np.array(engine.encode(prompt.turns[0]), np.int32) for prompt in own_prompts(1)[: options.prompts]
        ]
    placements = MeasuredPlacements(
        target=target, drafters=[drafter], placement=placement, longest=LONGEST, report=info
    )
    layouts, took = placements.layouts(remeasure=True)
    info(f"measured in {sum(took):.1f} s, of which opening models took {took.opening_s:.1f} s")
    has_target_vocabulary = drafter.manifest.vocab_sha256 == target.manifest.vocab_sha256
    schedules: list[Schedule] = ["serial", "pipelined"]
    if drafter.manifest.tree_graph and has_target_vocabulary:
        schedules.append("hedged")
    opened = {
        each.target_place: OpenPlacement(target, drafter, each, schedules) for each in splits_of(placement, True)
    }

    def plan_options(past: Past) -> list[PlannedOption]:
        plan = plan_on(layouts, target.manifest, drafter.manifest, past)
        return [option for option in plan.options if option.context_length]

    info("counting how many drafted tokens are accepted")
    first = opened[layouts[0].target]
    past = count_acceptance(first, plan_options({})[0], prompts, options.tokens)
    weighed = sorted(plan_options(past), key=lambda option: -option.tokens_per_second)
    info(f"running {len(weighed)} options; load {os.getloadavg()[0]:.1f}")
    speeds = measure_speeds(opened, weighed, prompts, options.tokens, options.rounds)
    info(f"load {os.getloadavg()[0]:.1f}")
    rates = draft_rates(past, drafter.manifest.name).accepted[:CALIBRATION]
    accepted = ", ".join(f"{rate:.0%}" for rate in rates)
    print(f"share of drafted tokens accepted, by position, where the tokens before were: {accepted}")
    print_comparison(weighed, speeds)
    for placed in opened.values():
        placed.stop()


if __name__ == "__main__":
    with log_to_stderr():
        main()
