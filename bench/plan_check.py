"""What a plan foresees beside what its options yield when they are run.

    python bench/plan_check.py MODEL --drafter D [--tokens N] [--rounds N] [--prompts N] [--threads N]

Costs are measured anew in each placement, and how often drafts are kept on the prompts themselves, in drafts of
four tokens beforehand. Then each option of the plan that can be run is run as the plan has it, with drafts of its
length and its waits, greedily, all options in turn within a round and in the other order in the next. Speeds are
those behind the first pass: all tokens over all the time that they took. Last comes whether what was foreseen to
be faster by more than 5 % was faster.
"""

import argparse
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations
from time import perf_counter

from edgespec import load
from edgespec.cancel import Cancel
from edgespec.chances import Chances, Key
from edgespec.drafter_names import parse
from edgespec.drafting import Chain, cascade
from edgespec.home import ModelHome, default_home
from edgespec.loading import find_models, model_drafting
from edgespec.opening import ModelFolder, open_model
from edgespec.placements import Placements, splits_of
from edgespec.planner import Memory, Option, Schedule, chances_of, make_plan
from edgespec.profile import Place
from edgespec.profiling import LONGEST
from edgespec.prompts import own_prompts
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, Gate, Plain, serial
from edgespec.setting import Setting
from edgespec.talk import heard, say_stage
from edgespec.types import NOTHING, AheadDrafter, Ask, Draft, Drafter, Logits, Sampler, TokenIds

Past = Mapping[Key, tuple[float, float]]

GREEDY = GumbelSampler(SamplingParams())
CALIBRATION = 4  # tokens a draft, while it is counted how many are kept
LEAST_DIFFERENCE = 1.05


@dataclass
class Planned:
    """A gate that does as a plan says: so many tokens, and so many waited for where the drafter goes ahead."""

    drafter: Drafter
    length: int
    wait: int

    def draft(self, tokens: TokenIds, room: int, sampler: Sampler) -> Draft:
        length = min(self.length, room)
        if not isinstance(self.drafter, AheadDrafter) or not self.drafter.can_run_ahead:
            return self.drafter.draft(tokens, Ask(length), sampler) if length else NOTHING
        hedged = self.drafter.num_outcomes > 0
        ready = self.drafter.follow(tokens, Ask(length, ahead=True, hedged=hedged), sampler)
        least = min(max(len(ready.tokens), self.wait), length)
        return self.drafter.draft(tokens, Ask(least, ahead=True, least=least, hedged=hedged), sampler)

    def observe(self, tokens: TokenIds, draft: Draft, logits: Logits, emitted: TokenIds, verify_s: float) -> None:
        pass

    def close(self) -> None:
        if isinstance(self.drafter, AheadDrafter):
            self.drafter.rest()


class Rig:
    """The models of a placement, open: one target, and the drafter once for each schedule."""

    def __init__(
        self, target: ModelFolder, drafter: ModelFolder, setting: Setting, schedules: Sequence[Schedule]
    ) -> None:
        self.decoder = open_model(target, setting.device, setting.num_threads, False, True)
        chains = [
            Chain(
                target=target,
                models=(drafter,),
                text=None,
                setting=setting,
                is_drawn_alike=False,
                schedule=schedule,
            )
            for schedule in schedules
        ]
        self._open = {chain.schedule: cascade(chain, Cancel(), lambda line: None) for chain in chains}

    def gate(self, option: Option) -> Gate:
        if option.schedule == "plain":
            return Plain()
        return Planned(self._open[option.schedule].drafter, option.draft_length, option.wait)

    def blocks(self, option: Option, prompt: TokenIds, num_tokens: int) -> Iterator[Block]:
        """The first, before which the prompt is read, and more until these hold num_tokens."""
        made = 0
        with closing(serial(prompt, self.decoder, GREEDY, self.gate(option), max_tokens=num_tokens + 1)) as blocks:
            yield next(blocks)
            for block in blocks:
                yield block
                made += len(block.tokens)
                if made >= num_tokens:
                    return

    def stop(self) -> None:
        for each in self._open.values():
            each.lane.stop()


def chances_kept(rig: Rig, option: Option, prompts: Sequence[TokenIds], num_tokens: int) -> Past:
    """How often drafted tokens are kept, by their place."""
    chances = Chances()
    option = replace(option, schedule="serial", draft_length=CALIBRATION)
    for prompt in prompts:
        for block in rig.blocks(option, prompt, num_tokens):
            for i in range(min(block.num_draft, len(block.tokens))):
                chances.judge(block.draft.source, i, i < block.num_accepted)
    return chances.learned()


def speeds(
    rigs: Mapping[Place, Rig], options: Sequence[Option], prompts: Sequence[TokenIds], num_tokens: int, rounds: int
) -> list[list[float]]:
    """Tokens a second of each option in each round."""
    found: list[list[float]] = [[] for _ in options]
    for i in range(rounds):
        made, taken_s = Counter[int](), Counter[int]()
        for prompt in prompts:
            order = range(len(options))
            for each in order if i % 2 == 0 else reversed(order):
                blocks = rigs[options[each].target].blocks(options[each], prompt, num_tokens)
                next(blocks)
                started = perf_counter()
                made[each] += sum(len(block.tokens) for block in blocks)
                taken_s[each] += perf_counter() - started
        for each in range(len(options)):
            found[each].append(made[each] / taken_s[each])
    return found


def misorders(options: Sequence[Option], measured: Sequence[float]) -> list[str]:
    """What was foreseen to be faster and was not."""
    found = []
    pairs = sorted(zip(options, measured, strict=True), key=lambda each: -each[0].tokens_per_second)
    for (one, one_speed), (other, other_speed) in combinations(pairs, 2):
        foreseen = one.tokens_per_second / other.tokens_per_second
        if foreseen > LEAST_DIFFERENCE and one_speed < other_speed:
            found.append(
                f"{named(one)} was {one_speed / other_speed:.2f}, not {foreseen:.2f} times {named(other)}"
            )
    return found


def named(option: Option) -> str:
    if option.drafter_place is None:
        return f"plain on {option.target}"
    waits = "" if option.schedule == "serial" else f", {option.wait} waited for"
    return f"{option.schedule} of {option.draft_length}{waits}, {option.target} and {option.drafter_place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--drafter", required=True, metavar="D", help="a model")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="of each run (default 48)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--prompts", type=int, default=3, metavar="N", help="of edgespec's own (default 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="for both (default: all cores)")
    options = parser.parse_args()
    models = ModelHome(default_home(), True, say_stage)
    target, _ = find_models(models, options.model, parse("none"))
    drafter = model_drafting(models, target, options.drafter)
    setting = Setting.named("cpu", "cpu", options.threads)
    with load(target.folder, drafter="none") as engine:
        prompts = [engine.encode(prompt.turns[0]) for prompt in own_prompts(1)[: options.prompts]]
    placements = Placements(target=target, drafters=[drafter], setting=setting, longest=LONGEST, report=say_stage)
    layouts, took = placements.layouts(measures_anew=True)
    say_stage(f"measured in {sum(took):.1f} s, of which opening models took {took.opening_s:.1f} s")
    can_hedge = drafter.manifest.tree_graph and drafter.manifest.vocab_sha256 == target.manifest.vocab_sha256
    schedules: list[Schedule] = ["serial", "pipelined", *(["hedged"] if can_hedge else [])]
    rigs = {each.target_place: Rig(target, drafter, each, schedules) for each in splits_of(setting, True)}
    unbounded = Memory(lambda manifest, context, device: {}, {})

    def planned(past: Past) -> list[Option]:
        plan = make_plan(target.manifest, {drafter.manifest.name: drafter.manifest}, layouts, past, unbounded)
        return [option for option in (plan.chosen, *plan.refused) if option.context_length]

    say_stage("counting how many drafted tokens are kept")
    first = rigs[layouts[0].target]
    past = chances_kept(first, planned({})[0], prompts, options.tokens)
    weighed = sorted(planned(past), key=lambda option: -option.tokens_per_second)
    say_stage(f"running {len(weighed)} options; load {os.getloadavg()[0]:.1f}")
    found = speeds(rigs, weighed, prompts, options.tokens, options.rounds)
    say_stage(f"load {os.getloadavg()[0]:.1f}")
    kept = ", ".join(f"{chance:.0%}" for chance in chances_of(past, drafter.manifest.name).kept[:CALIBRATION])
    print(f"kept of the drafted tokens, where those before were: {kept}")
    print("foreseen  measured  (least to most)  measured / foreseen")
    medians = [statistics.median(each) for each in found]
    for option, median, each in zip(weighed, medians, found, strict=True):
        share = median / option.tokens_per_second
        print(
            f"{option.tokens_per_second:8.1f}  {median:8.1f}  ({min(each):.1f} to {max(each):.1f})  {share:4.2f}  "
            f"{named(option)}"
        )
    wrong = misorders(weighed, medians)
    print(
        "\n".join(wrong)
        if wrong
        else f"in the order that was foreseen, but for less than {LEAST_DIFFERENCE - 1:.0%}"
    )
    for rig in rigs.values():
        rig.stop()


if __name__ == "__main__":
    with heard():
        main()
