"""A drafting head, or a drafter model, beside a target on a GPU that is not here: tokens a second, and bounds.

    python bench/head_beside_gpu.py MODEL ANSWERS [--drafter D] [--prompts FILE …] [--per-category N]
        [--tokens N] [--rows flat,a100] [--places cpu,gpu] [--steps cpu=C,gpu=C] [--target-ms T] [--text]
        [--threads N] [--json FILE]

MODEL is a pair folder, or a model with --drafter, which may be a cascade of a model and a text drafter. ANSWERS
holds the target's own greedy answers; where there is no such file it is written first, as by `bench/replay.py
record`. The target reads them once, for its hidden states; then they are replayed, and the drafter runs for real
on this machine's CPU. All time is virtual (paced_pair.py): figures repeat, and need no quiet machine.

A pass of the target takes --target-ms, and more for further rows: 3 % of a step each (flat), or by ONNX Runtime's
table of an A100 (schedules.py). A step of the drafter takes a share of that (--steps) and, as it reads tokens that
were accepted, more for further rows. On the "gpu" both share one device: while both work, each has half of it. The
shares by default are those of an EAGLE-3 head for an 8B target in 4 bits: 0.43 of 7.5 billion weights are read for
a token, which is 0.06 of a step on the GPU, and four times that on a CPU with a quarter of its bandwidth.

Schedules are those of edgespec, by its own policy: serial; nodes, which is serial with next best choices verified
beside the draft; pipelined; and hedged, where the drafter runs trees. Printed for each are tokens a second, the
speed over plain decoding (the mean over categories), tokens a pass, and two bounds of that speed: of drafts in a
chain by mean acceptance at each position with both devices always busy (simulate's), and of drafts that cost
nothing and have the best length each time, which chains do not exceed. The exit code is 1 where a text differs.
"""

import json
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import replay
from command_line import command_line
from paced_pair import (
    DraftPace,
    PacedDrafter,
    PacedTarget,
    RecordedAnswer,
    ReplayedTarget,
    acceptance_by_position,
    drafted_right,
    least_steps,
)
from schedules import ROWS, ratios_by_width

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.decoding.decoder import Decoder
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.decoding.scheduler import speculative_decode
from edgespec.draft.acceptance_rates import AcceptanceRates
from edgespec.draft.costs import PassCosts
from edgespec.draft.cross_vocabulary import TranslatedDecoder, respell
from edgespec.draft.draft_model import DraftCosts, DraftModelStats, RowCosts
from edgespec.draft.drafter import Drafter, DraftRequest
from edgespec.draft.lane_drafter import LaneDrafter
from edgespec.draft.limits import MAX_BRANCHES
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.draft.option import probe_budget
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.draft.text_source import make_text_drafters
from edgespec.errors import EdgeSpecError, UsageError
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.tree import can_run_trees
from edgespec.setup.open_model import (
    ModelFolder,
    layers_read,
    load_translation,
    open_drafter,
    open_model,
    read_tokenizer,
)
from edgespec.setup.resolve import resolve
from edgespec.setup.wish import Wish
from edgespec.simulation.machines import Machine, bound
from edgespec.simulation.schedules import VirtualLane
from edgespec.system.clock import VirtualClock
from edgespec.system.console import print_stderr
from edgespec.types import TokenIds, append

SCHEDULES = ("serial", "nodes", "pipelined", "hedged")
LONGEST = 16  # drafts whose tokens are counted for the bounds
# Time of a step in passes of the target, and what a further row adds to one on a CPU (docs/log/draft-policy.md).
STEPS = {"cpu": 0.24, "gpu": 0.06}
CPU_ROWS = (1.0, 1.13)
# Rows of passes of other widths differ in their last bits, which swaps near-ties in a few tokens of a thousand.
LEAST_OWN = 0.95


class Place(NamedTuple):
    """A machine and where on it the drafter runs."""

    rows: str
    place: str
    machine: Machine

    @property
    def is_shared(self) -> bool:
        return self.place == "gpu"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target that replays its answers, and drafters that read its hidden states.

    right: What drafted_right gives of each answer.
    with_trees: The drafter over its graph for trees; None where it has none.
    respell: As ModelDrafter has it, for a drafter of another vocabulary.
    text: What drafts from the text for the drafter, in a cascade.
    """

    name: str
    target: ReplayedTarget
    answers: Sequence[RecordedAnswer]
    right: Sequence[Sequence[int]]
    drafter: Decoder
    with_trees: Decoder | None
    respell: Callable[[list[int]], list[int]] | None = None
    text: str | None = None


class Row(NamedTuple):
    """A schedule on a machine. Bounds are speeds over plain decoding."""

    rows: str
    place: str
    schedule: str
    tokens_per_second: float
    over_plain: float
    tokens_per_pass: float
    chain_bound: float
    free_bound: float
    num_equal: int
    num_answers: int


class Decoded(NamedTuple):
    """An answer in virtual time, without its first pass, which reads the prompt."""

    gain: float  # over plain decoding
    num_tokens: int
    num_passes: int
    is_equal: bool


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        pair = open_pair(options)
    except EdgeSpecError as error:
        print_stderr(f"head_beside_gpu: {error}")
        return error.exit_code
    by_position = acceptance_by_position(pair.right, LONGEST)
    print(f"{pair.name}: {len(pair.answers)} answers, {sum(each.num_answered for each in pair.answers)} tokens")
    print("right by position, where all before are:", " ".join(f"{rate:.3f}" for rate in by_position[:8]))
    print("rows   place  schedule   tokens/s  over plain  tokens/pass  chain bound  free bound  texts", flush=True)
    found = []
    for place in places(options):
        for schedule in SCHEDULES:
            if schedule == "hedged" and pair.with_trees is None:
                continue
            row = measure(pair, place, schedule, by_position, has_text=options.text)
            found.append(row)
            print(_line(row), flush=True)
    if pair.with_trees is None:
        print(f"hedged is left out: {pair.name} has no tree graph")
    if options.json:
        document = {"drafter": pair.name, "by_position": by_position, "rows": [row._asdict() for row in found]}
        options.json.write_text(json.dumps(document, indent=1))
    return 0 if all(row.num_equal == row.num_answers for row in found) else 1


def places(options: Namespace) -> list[Place]:
    found = []
    for rows in options.rows:
        ratios = ratios_by_width(rows)
        for place in options.places:
            machine = Machine(
                target_s=options.target_ms / 1e3,
                draft_s=options.steps[place] * options.target_ms / 1e3,
                ratios=ratios,
                draft_ratios=ratios if place == "gpu" else CPU_ROWS,
            )
            found.append(Place(rows, place, machine))
    return found


def measure(
    pair: Pair, place: Place, schedule: str, by_position: Sequence[float], *, has_text: bool = False
) -> Row:
    """Decode all answers by a schedule."""
    machine = place.machine
    decoded = decode_all(pair, place, schedule, has_text=has_text)
    over_plain = _mean_by_category(pair.answers, [each.gain for each in decoded])
    free = [len(right) / least_steps(right, machine.ratio) for right in pair.right]
    return Row(
        place.rows,
        place.place,
        schedule,
        over_plain / machine.target_s,
        over_plain,
        sum(each.num_tokens for each in decoded) / sum(each.num_passes for each in decoded),
        bound(machine, lambda position: by_position[min(position, len(by_position) - 1)]) * machine.target_s,
        _mean_by_category(pair.answers, free),
        sum(each.is_equal for each in decoded),
        len(decoded),
    )


def decode_all(pair: Pair, place: Place, schedule: str, *, has_text: bool = False) -> list[Decoded]:
    """Decode the answers in turn, each with what the earlier ones taught, as a session does."""
    machine, clock, own = place.machine, VirtualClock(), VirtualClock()
    lane, pace = VirtualLane("drafter", clock, own), DraftPace(machine, own, place.is_shared)
    decoder = pair.drafter
    if schedule == "hedged":
        assert pair.with_trees is not None
        decoder = pair.with_trees
    inner = make_text_drafters([pair.text] if pair.text else [], None)
    drafter = LaneDrafter(
        ModelDrafter(
            PacedDrafter(decoder, pace, own),
            pair.target.vocab_size,
            pair.name,
            Speculation(lambda: inner, ratios=_draft_ratios(machine)) if inner else None,
            pair.respell,
            clock=own,
        ),
        lane,
        can_run_ahead=schedule in ("pipelined", "hedged"),
        max_rows=MAX_BRANCHES if schedule == "hedged" else 0,
    )
    target = PacedTarget(pair.target, pace, clock, lane)
    widths = range(1, MAX_DRAFT_TOKENS + 2)
    stats = DraftModelStats(
        DraftCosts(machine.step, machine.step * (machine.draft_ratio(2) - 1)),
        rows=RowCosts(_draft_ratios(machine)),
    )
    rates, budget, decoded = AcceptanceRates(), probe_budget(), []
    for answer in pair.answers:
        pair.target.replay(answer)
        if decoder.cache:
            decoder.cache.forget()
        stats.text.forget()
        drafters: list[Drafter] = [SuffixDrafter(), drafter] if has_text else [drafter]
        policy = MeasuredPolicy(
            drafters,
            PassCosts({width: machine.ratio(width - 1) for width in widths}, machine.target_s),
            rates,
            {drafter.name: stats},
            clock=clock,
            probe_budget=budget,
            has_trees=schedule == "nodes",
        )
        decoded.append(_decode(answer, target, policy, clock, machine.target_s))
        rates = AcceptanceRates(dict(policy.rates.snapshot()))
    return decoded


def _draft_ratios(machine: Machine) -> dict[int, float]:
    """What a pass of the drafter over several rows takes, over one row."""
    return {num_rows: machine.draft_ratio(num_rows) for num_rows in range(1, MAX_BRANCHES + 1)}


def _decode(
    answer: RecordedAnswer, target: PacedTarget, policy: MeasuredPolicy, clock: VirtualClock, step_s: float
) -> Decoded:
    prompt, num_passes = answer.text[: answer.num_prompt], 0
    emitted: list[int] = []
    num_first, since_s = 0, 0.0
    passes = speculative_decode(prompt, target, replay.GREEDY, policy, max_tokens=answer.num_answered, clock=clock)
    with closing(passes):
        while len(emitted) < answer.num_answered:
            emitted += next(passes).tokens.tolist()
            if not num_first:
                num_first, since_s = len(emitted), clock.now
            else:
                num_passes += 1
        taken_s = clock.now - since_s
    num_tokens = len(emitted) - num_first
    is_equal = emitted == answer.text[answer.num_prompt :].tolist()
    return Decoded(num_tokens * step_s / taken_s, num_tokens, num_passes, is_equal)


def open_pair(options: Namespace) -> Pair:
    """Open the models, and record the answers first if there are none.

    Raises EdgeSpecError: A model cannot be opened, or the answers are not those of this target.
    """
    named = options.drafter or options.model
    found = resolve(
        Wish(model=options.model, drafter=named, device="cpu", drafter_device="cpu", report=print_stderr)
    )
    if not found.drafters:
        raise UsageError(f"{named} is no drafter model; name a pair folder, or a model or a head with --drafter")
    target, chosen = found.target, found.drafters[0]
    if len(chosen.models) > 1:
        raise UsageError(
            f"{named} is a cascade of {len(chosen.models)} models; wanted one, and a text drafter if any"
        )
    (model,) = chosen.models
    translate = load_translation(target, model, print_stderr)
    if not options.answers.exists():
        replay.record(
            Namespace(
                model=target.folder,
                file=options.answers,
                prompts=options.prompts,
                per_category=options.per_category,
                tokens=options.tokens,
            )
        )
    answers, store = read_target(target, layers_read([model.manifest]), options.answers)
    open_one = partial(open_drafter, model, find_device("cpu"), store, num_threads=options.threads)
    drafter, respelled, with_trees = open_one(), None, None
    if translate:
        drafter = TranslatedDecoder(drafter, translate)
        respelled = partial(respell, tokenizer=read_tokenizer(*target), spellings=translate.target_bytes)
    elif can_run_trees(model.manifest, find_device("cpu")):
        with_trees = open_one(has_trees=True)
    replayed = ReplayedTarget(target.manifest.vocab_size, target.manifest.context_length, store)
    guess = guesses_of(ModelDrafter(drafter, replayed.vocab_size))
    right = [drafted_right(replayed, answer, guess, LONGEST) for answer in answers]
    return Pair(model.manifest.name, replayed, answers, right, drafter, with_trees, respelled, chosen.text)


def read_target(
    target: ModelFolder, layers: tuple[int, ...], path: Path
) -> tuple[list[RecordedAnswer], HiddenStates | None]:
    """Run the target once over each of its answers, and an empty store for its hidden states.

    Raises UsageError: The file holds answers of another model.
    """
    decoder = open_model(target, find_device("cpu"), hidden_layers=layers)
    kept, answers, num_own, num_tokens = decoder.hidden_states, [], 0, 0
    for prompt in replay.read_answers(path, None):
        text = append(prompt.prompt, prompt.tokens)
        if int(text.max()) >= decoder.vocab_size or len(text) > decoder.context_length:
            raise UsageError(f"{path} has tokens or texts that {target.manifest.name} does not; name another file")
        rows = decoder.logits(text[:-1], len(prompt.tokens))
        num_own += int((rows.argmax(axis=1) == prompt.tokens).sum())
        num_tokens += len(prompt.tokens)
        states = kept.read(text[:-1], 0) if kept and layers else None
        answers.append(RecordedAnswer(prompt.category, text, len(prompt.prompt), states))
    if num_own < LEAST_OWN * num_tokens:
        raise UsageError(
            f"{num_own} of {num_tokens} tokens in {path} are those of {target.manifest.name}; name another file, "
            "which is then written"
        )
    return answers, HiddenStates(kept.layers, kept.hidden_size) if kept and layers else None


def guesses_of(drafter: ModelDrafter) -> Callable[[TokenIds, int], Iterator[int]]:
    """The likeliest tokens behind a text, drafted as they are asked for."""
    return lambda tokens, num_tokens: (
        each.token for each in drafter.guesses(tokens, DraftRequest(num_tokens), replay.GREEDY)
    )


def _mean_by_category(answers: Sequence[RecordedAnswer], values: Sequence[float]) -> float:
    by_category: dict[str, list[float]] = {}
    for answer, value in zip(answers, values, strict=True):
        by_category.setdefault(answer.category, []).append(value)
    return fmean(map(fmean, by_category.values()))


def _line(row: Row) -> str:
    return (
        f"{row.rows:6} {row.place:6} {row.schedule:10} {row.tokens_per_second:8.1f} {row.over_plain:11.3f} "
        f"{row.tokens_per_pass:12.2f} {row.chain_bound:12.3f} {row.free_bound:11.3f}  "
        f"{row.num_equal} of {row.num_answers}"
    )


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = command_line(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("answers", metavar="ANSWERS", type=Path)
    parser.add_argument("--drafter", metavar="D", help="a head or a drafter model (default: that of the pair)")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        default=[Path(__file__).with_name("prompts.jsonl")],
        metavar="FILE",
        help="JSON Lines with category and turns (default: bench/prompts.jsonl)",
    )
    parser.add_argument("--per-category", type=int, default=2, metavar="N", help="prompts (default 2)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of an answer (default 96)")
    named_rows, named_places = partial(_names, known=ROWS), partial(_names, known=STEPS)
    parser.add_argument("--rows", type=named_rows, default=("flat", "a100"), metavar="R,…")
    parser.add_argument("--places", type=named_places, default=tuple(STEPS), metavar="P,…")
    parser.add_argument("--steps", type=_steps, default=STEPS, metavar="P=C,…", help="of the drafter, by place")
    parser.add_argument("--target-ms", type=float, default=30.0, metavar="T", help="ms of a pass (default 30)")
    parser.add_argument("--text", action="store_true", help="drafts from the text too, beside the drafter")
    parser.add_argument("--threads", type=int, metavar="N", help="of the drafter here, which changes no figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args(arguments)


def _names(text: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise ArgumentTypeError(f"it names '{unknown[0]}'; wanted some of {', '.join(known)}, with commas between")
    return names


def _steps(text: str) -> dict[str, float]:
    given = dict(each.partition("=")[::2] for each in text.split(","))
    try:
        steps = {name: float(value) for name, value in given.items()}
    except ValueError:
        steps = {}
    if not steps or not steps.keys() <= STEPS.keys() or not all(0 < step < np.inf for step in steps.values()):
        wanted = ",".join(f"{name}={step:g}" for name, step in STEPS.items())
        raise ArgumentTypeError(f"it is '{text}'; wanted such as {wanted}")
    return STEPS | steps


if __name__ == "__main__":
    sys.exit(main())
