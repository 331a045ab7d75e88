"""The draft policy on recorded answers, with passes that take what was measured: its speed over plain decoding.

    python bench/replay.py record MODEL FILE PROMPTS … [--per-category N] [--tokens N]
    python bench/replay.py run FILE [--costs qwen|smollm2|gpu|a100] [--believed WIDTH:RATIO,…] [--noise SD]
        [--learned] [--first N]
    python bench/replay.py cards FILE [--noise SD]

`record` writes plain answers to prompts as tokens. `run` has the policy draft from the text of each with the
suffix automaton, in virtual time: a pass takes its cost by width, times a noise. The policy starts each answer
fresh, or with what the answers before it taught (--learned). --believed gives it other costs than the true ones.
Printed are the mean over categories, the worst, the share of answers that lose more than 2 % and, with `--first`,
all of it for the first N tokens of each answer alone. `cards` plays NVIDIA cards by what passes took on them
(docs/log/devices.md): with passes of any width, whose first use takes longer, and padded to the widths that
edgespec chooses there. Gains are over a pass of one row that is not padded.
"""

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
from command_line import command_line

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.draft.costs import PassCosts, pass_costs
from edgespec.draft.measured import MeasuredPolicy
from edgespec.draft.speculation import Speculation
from edgespec.draft.suffix import SuffixDrafter
from edgespec.runtimes.pass_shapes import choose_shapes
from edgespec.system.clock import VirtualClock
from edgespec.types import TokenIds, append

# A pass by its tokens, one of one token being 1: on two cores in quiet minutes, and on an A100 by ORT's table.
COSTS = {
    "qwen": {1: 1.0, 2: 1.06, 3: 1.25, 4: 1.38, 8: 2.2, 16: 4.2},
    "smollm2": {1: 1.0, 2: 1.13, 3: 1.28, 4: 1.42, 8: 2.01, 16: 3.3},
    "gpu": {1: 1.0, 2: 1.03, 32: 1.93},
    "a100": {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3},
}
# Milliseconds of a pass by its rows on an H100, without the search for the likeliest token (docs/log/devices.md).
# Of the 7B on an H200 those of one row, and of others as its matrix products alone have it.
CARDS_MS = {
    "SmolLM2 fp16": {1: 2.75, 2: 2.80, 4: 2.77, 8: 2.80, 16: 2.91, 32: 3.1, 64: 3.4, 256: 5.0},
    "SmolLM2 int4": {1: 1.91, 2: 2.05, 4: 2.27, 8: 4.55, 16: 3.33, 32: 3.6, 64: 4.2, 256: 6.0},
    "SmolLM2 source": {1: 4.38, 2: 4.91, 4: 4.44, 8: 4.44, 16: 5.20, 32: 5.6, 64: 6.2, 256: 8.0},
    "1.5B int4": {1: 2.50, 2: 2.84, 4: 2.80, 8: 3.82, 16: 6.07, 32: 6.16, 64: 6.6, 256: 10.0},
    "1.5B int4, fpA_intB": {1: 2.76, 2: 2.61, 4: 2.60, 8: 3.19, 16: 4.02, 32: 5.05, 64: 6.0, 256: 9.0},
    "7B int4": {1: 3.87, 2: 6.46, 4: 5.22, 8: 9.71, 16: 19.9, 32: 15.6, 64: 15.7, 256: 30.0},
    "7B int4, fpA_intB": {1: 5.74, 2: 4.76, 4: 4.25, 8: 6.66, 16: 6.83, 32: 8.0, 64: 8.78, 256: 20.0},
}
FIRST_USE_S = 0.055  # what the first pass of a width takes more
STEP_S = 0.02
GREEDY = GumbelSampler(SamplingParams())
NO_LOGITS = np.zeros((0, 0), np.float32)


class Answer(NamedTuple):
    category: str
    prompt: TokenIds
    tokens: TokenIds


class Replayed(NamedTuple):
    gain: float
    num_passes: int
    own_s: float  # processor seconds of the policy and its drafter


def read_answers(path: Path, first: int | None) -> list[Answer]:
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    arrays = (
        (each["category"], np.array(each["prompt"], np.int32), np.array(each["answer"][:first], np.int32))
        for each in documents
    )
    return [Answer(*each) for each in arrays if len(each[2]) > 4]


def replay(
    answer: Answer,
    speculation: Speculation,
    true: PassCosts,
    noise: Iterator[float],
    step_s: float = STEP_S,
    added_s: Callable[[int], float] = lambda width: 0.0,
) -> Replayed:
    """An answer from its second token on; the first comes of the pass that reads the prompt.

    Args:
        step_s: Seconds of a pass of one token.
        added_s: What a pass of a width takes beside its cost.
    """
    clock = VirtualClock()
    policy = speculation.policy()
    assert isinstance(policy, MeasuredPolicy)
    policy.clock = clock
    text, end, taken, num_passes, own_s = append(answer.prompt, answer.tokens), len(answer.prompt), 0.0, 0, 0.0
    while end < len(text):
        begun = process_time()
        round = policy.propose(text[:end], len(text) - end - 1, GREEDY)
        own_s += process_time() - begun
        guesses, truth = round.draft.tokens, text[end : end + len(round.draft.tokens)]
        wrong = np.flatnonzero(guesses[: len(truth)] != truth)
        emitted = text[end : end + 1 + (int(wrong[0]) if len(wrong) else len(truth))]
        pass_s = step_s * true.ratio(len(guesses) + 1) * next(noise) + added_s(len(guesses) + 1)
        clock.now += pass_s
        begun = process_time()
        policy.observe(round, NO_LOGITS, emitted, pass_s)
        own_s += process_time() - begun
        taken += pass_s if end > len(answer.prompt) else 0.0
        end, num_passes = end + len(emitted), num_passes + 1
    num_first = 1 if num_passes else 0
    policy.close()
    speculation.learn_from(policy)
    return Replayed((len(answer.tokens) - num_first) * step_s / taken, num_passes, own_s)


def noises(spread: float, seed: int = 0) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield float(np.exp(rng.normal(0.0, spread))) if spread else 1.0


def speculation_of(believed: dict[int, float]) -> Speculation:
    drafter = SuffixDrafter
    return Speculation(lambda: [drafter()], ratios=dict(believed))


def run_all(answers: Sequence[Answer], options: Namespace) -> list[Replayed]:
    true = PassCosts(dict(COSTS[options.costs]))
    believed = options.believed or COSTS[options.costs]
    noise, speculation, found = noises(options.noise), speculation_of(believed), []
    for answer in answers:
        if not options.learned:
            speculation = speculation_of(believed)
        found.append(replay(answer, speculation, true, noise))
    return found


class Played(NamedTuple):
    """Answers on a card; plain: the speed of plain decoding there over passes of one row that are not padded."""

    how: str
    found: list[Replayed]
    plain: float = 1.0


def play_card(name: str, answers: Sequence[Answer], spread: float) -> Played:
    """Answers with passes of any width, the first of which takes longer."""
    taken_s = {width: each / 1e3 for width, each in CARDS_MS[name].items()}
    seen = {1}

    def first_use_s(width: int) -> float:
        is_new = width not in seen
        seen.add(width)
        return FIRST_USE_S if is_new else 0.0

    true, speculation = pass_costs(taken_s), speculation_of(pass_costs(taken_s).ratios)
    speculation.warm = set()
    noise = noises(spread)
    found = [replay(each, speculation, true, noise, taken_s[1], first_use_s) for each in answers]
    return Played("any width", found)


def play_padded_card(name: str, answers: Sequence[Answer], spread: float) -> Played:
    """Answers with passes that are padded to the widths that edgespec chooses, and ran once before."""
    taken_s = {width: each / 1e3 for width, each in CARDS_MS[name].items()}
    shapes = choose_shapes(lambda width, num_rows: taken_s[width], max(taken_s))
    assert shapes is not None
    # A pass of each width takes what the next one takes that there is.
    padded_s = {width: taken_s[width] for width in shapes.rows} | {1: taken_s[shapes.rows[0]]}
    true, speculation = pass_costs(padded_s, shapes.rows), speculation_of(pass_costs(padded_s).ratios)
    speculation.widths = shapes.rows
    noise = noises(spread)
    found = [replay(each, speculation, true, noise, padded_s[1]) for each in answers]
    share = taken_s[1] / padded_s[1]
    found = [each._replace(gain=each.gain * share) for each in found]
    return Played(f"padded to {', '.join(map(str, shapes.rows))}", found, share)


def category_means(answers: Sequence[Answer], found: Sequence[Replayed]) -> dict[str, float]:
    """The mean gain of each category."""
    by_category = defaultdict(list)
    for answer, each in zip(answers, found, strict=True):
        by_category[answer.category].append(each.gain)
    return {name: float(np.mean(gains)) for name, gains in by_category.items()}


def report(answers: Sequence[Answer], found: Sequence[Replayed]) -> str:
    means = category_means(answers, found)
    gains = np.array([each.gain for each in found])
    worst = min(means, key=means.__getitem__)
    mean = float(np.mean(list(means.values())))
    error = float(np.std(gains) / len(gains) ** 0.5)
    own_ms = 1e3 * sum(each.own_s for each in found) / sum(each.num_passes for each in found)
    return (
        f"mean {mean:.3f} (± {error:.3f}), worst {means[worst]:.3f} ({worst}), of {len(gains)} answers "
        f"{(gains < 0.98).mean():.0%} below 0.98, worst {gains.min():.3f}; {own_ms:.3f} ms a round"
    )


def record(options: Namespace) -> None:
    import edgespec

    prompts = defaultdict(list)
    for path in options.prompts:
        for line in path.read_text().splitlines():
            document = json.loads(line)
            prompts[document["category"]].append(document["turns"][0])
    with edgespec.load(options.model, drafter="none") as engine, options.file.open("a") as file:
        for category, texts in prompts.items():
            for text in texts[: options.per_category]:
                answer = engine.generate(text, max_tokens=options.tokens, temperature=0.0)
                prompt = engine.encode(text)
                file.write(json.dumps({"category": category, "prompt": prompt, "answer": answer.token_ids}) + "\n")


def parse_costs(text: str) -> dict[int, float]:
    return {int(width): float(ratio) for width, _, ratio in (each.partition(":") for each in text.split(","))}


def main() -> None:
    parser = command_line(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recorded = commands.add_parser("record")
    recorded.add_argument("model")
    recorded.add_argument("file", type=Path)
    recorded.add_argument("prompts", type=Path, nargs="+")
    recorded.add_argument("--per-category", type=int, default=5)
    recorded.add_argument("--tokens", type=int, default=128)
    replayed = commands.add_parser("run")
    replayed.add_argument("file", type=Path)
    replayed.add_argument("--costs", choices=COSTS, default="qwen")
    replayed.add_argument("--believed", type=parse_costs)
    replayed.add_argument("--noise", type=float, default=0.0)
    replayed.add_argument("--learned", action="store_true")
    replayed.add_argument("--first", type=int)
    cards = commands.add_parser("cards")
    cards.add_argument("file", type=Path)
    cards.add_argument("--noise", type=float, default=0.02)
    options = parser.parse_args()
    if options.command == "cards":
        answers = read_answers(options.file, None)
        for name in CARDS_MS:
            for play in (play_card, play_padded_card):
                played = play(name, answers, options.noise)
                print(f"{name}, {played.how}: {report(answers, played.found)}; plain {played.plain:.3f}")
        return
    if options.command == "record":
        record(options)
        return
    answers = read_answers(options.file, options.first)
    print(report(answers, run_all(answers, options)))


if __name__ == "__main__":
    main()
