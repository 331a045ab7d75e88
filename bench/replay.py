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
(edgespec/simulation/machines.toml): with passes of any width, whose first use takes longer, and padded to the
widths that edgespec chooses there, of greedy answers, and of answers that copy whole rows of logits, as sampling
does. Between two passes lies the host's time. Gains are over plain decoding in passes of one row without padding.
Those of deterministic mode, and what reading a prompt takes with it and without, stand beside them.
"""

import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
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
from edgespec.runtimes.pass_shapes import PassShapes, choose_same_shapes, choose_shapes, same_cost
from edgespec.setup.row_proof import MOST_COST
from edgespec.simulation.machines import Card, CardForm, read_machines
from edgespec.system.clock import VirtualClock
from edgespec.types import TokenIds, append

# A pass by its tokens, one of one token being 1: on two cores in quiet minutes, and on an A100 by ORT's table.
COSTS = {
    "qwen": {1: 1.0, 2: 1.06, 3: 1.25, 4: 1.38, 8: 2.2, 16: 4.2},
    "smollm2": {1: 1.0, 2: 1.13, 3: 1.28, 4: 1.42, 8: 2.01, 16: 3.3},
    "gpu": {1: 1.0, 2: 1.03, 32: 1.93},
    "a100": {1: 1.0, 2: 1.19, 4: 1.39, 8: 2.0, 16: 3.3},
}
CARDS = [each.card for each in read_machines().values() if each.card]
FORMS: dict[str, tuple[Card, CardForm]] = {
    name: (card, form) for card in CARDS for name, form in card.forms.items()
}
CARDS_MS = {name: form.passes_ms for name, (_, form) in FORMS.items()}  # of a pass, by its rows
PROMPTS = (50, 200, 500, 1000, 1500)  # tokens
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
    gap_s: float = 0.0,
) -> Replayed:
    """An answer from its second token on; the first comes of the pass that reads the prompt.

    Args:
        step_s: Seconds of a pass of one token.
        added_s: What a pass of a width takes beside its cost.
        gap_s: Between two passes, in which the policy times nothing.
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
        clock.now += pass_s + gap_s
        begun = process_time()
        policy.observe(round, NO_LOGITS, emitted, pass_s)
        own_s += process_time() - begun
        taken += pass_s + gap_s if end > len(answer.prompt) else 0.0
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


class Paces(NamedTuple):
    """Seconds of passes of a form of a model on a card.

    taken: By rows. row: To copy a row to the host. gap, plain_gap: Between two passes, and where nothing drafts.
    """

    taken: dict[int, float]
    row: float
    gap: float
    plain_gap: float

    @property
    def plain(self) -> float:
        return self.taken[1] + self.row + self.plain_gap


def paces_of(name: str, is_sampled: bool) -> Paces:
    card, form = FORMS[name]
    row_s = 4 * form.vocab_size / (1e9 * card.copied_gb_s.value) if is_sampled else 0.0
    gaps = card.host_gap_ms.value / 1e3, card.plain_gap_ms.value / 1e3
    return Paces({width: each / 1e3 for width, each in form.passes_ms.items()}, row_s, *gaps)


def play_card(name: str, answers: Sequence[Answer], spread: float, is_sampled: bool = False) -> Played:
    """Answers with passes of any width, the first of which takes longer."""
    paces, seen = paces_of(name, is_sampled), {1}

    def added_s(width: int) -> float:
        is_new = width not in seen
        seen.add(width)
        return is_new * FORMS[name][0].first_use_ms.value / 1e3 + width * paces.row

    true, speculation = pass_costs(paces.taken), speculation_of(pass_costs(paces.taken).ratios)
    speculation.warm = set()
    noise, one_s = noises(spread), paces.taken[1]
    found = [replay(each, speculation, true, noise, one_s, added_s, paces.gap) for each in answers]
    return Played("any width", [each._replace(gain=each.gain * paces.plain / one_s) for each in found])


class CardShapes(NamedTuple):
    """The widths of passes on a card without deterministic mode and in it, and what it costs there."""

    fast: PassShapes
    same: PassShapes
    cost: float

    @property
    def is_deterministic(self) -> bool:
        """The default, where rows are proved equal."""
        return self.cost <= MOST_COST


def card_shapes(name: str) -> CardShapes:
    taken_ms = CARDS_MS[name]

    def seconds_of(width: int, num_rows: int) -> float:
        return taken_ms[width] / 1e3

    fast, same = choose_shapes(seconds_of, max(taken_ms)), choose_same_shapes(seconds_of, max(taken_ms))
    assert fast
    assert same
    return CardShapes(fast, same, same_cost(seconds_of, same, fast))


def prompt_ms(name: str, shapes: PassShapes, num_tokens: int) -> float:
    """Milliseconds of the passes that read a prompt, and give the row after it."""
    context_length = 2 * num_tokens + max(CARDS_MS[name])
    start, taken_ms, num_read = 0, 0.0, shapes.num_read(num_tokens, num_tokens - 1, context_length)
    while start < num_tokens:
        each = shapes.next_pass(start, num_tokens, 1, context_length, num_read=num_read)
        taken_ms += CARDS_MS[name][each.stop - each.start + each.num_padded] + FORMS[name][0].host_gap_ms.value
        start = each.stop
    return taken_ms


def play_padded_card(
    name: str, answers: Sequence[Answer], spread: float, is_sampled: bool = False, is_deterministic: bool = False
) -> Played:
    """Answers with passes that are padded to the widths that edgespec chooses, and ran once before."""
    paces = paces_of(name, is_sampled)
    taken_s, chosen = paces.taken, card_shapes(name)
    shapes = chosen.same if is_deterministic else chosen.fast
    narrow = shapes.rows[0]
    # A pass of each width takes what the next one takes that there is.
    padded_s = {width: taken_s[width] for width in shapes.rows} | {1: taken_s[narrow]}

    def added_s(width: int) -> float:
        """To copy rows: those that are wanted; but of the narrowest width, which is recorded, one or all."""
        return paces.row * (width if width == 1 or width > narrow else narrow)

    true, speculation = pass_costs(padded_s, shapes.rows), speculation_of(pass_costs(padded_s).ratios)
    speculation.widths = shapes.rows
    noise = noises(spread)
    found = [replay(each, speculation, true, noise, padded_s[1], added_s, paces.gap) for each in answers]
    found = [each._replace(gain=each.gain * paces.plain / padded_s[1]) for each in found]
    plain = paces.plain / (padded_s[1] + paces.row + paces.plain_gap)
    mode = "deterministic, " * is_deterministic
    return Played(f"{mode}padded to {', '.join(map(str, shapes.rows))}", found, plain)


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
        for name, is_sampled in product(CARDS_MS, (False, True)):
            for play in (play_card, play_padded_card, partial(play_padded_card, is_deterministic=True)):
                played = play(name, answers, options.noise, is_sampled)
                what = f"{name}{', whole rows' * is_sampled}, {played.how}"
                print(f"{what}: {report(answers, played.found)}; plain {played.plain:.3f}")
        for name in CARDS_MS:
            shapes = card_shapes(name)
            mode = "deterministic" if shapes.is_deterministic else "not deterministic"
            print(
                f"{name}: passes without a draft take {shapes.cost:.3f} in deterministic mode; by default {mode}"
            )
            for num_tokens in PROMPTS:
                fast_ms, same_ms = (prompt_ms(name, each, num_tokens) for each in (shapes.fast, shapes.same))
                print(f"{name}, a prompt of {num_tokens}: {fast_ms:.1f} ms, {same_ms:.1f} in deterministic mode")
        return
    if options.command == "record":
        record(options)
        return
    answers = read_answers(options.file, options.first)
    print(report(answers, run_all(answers, options)))


if __name__ == "__main__":
    main()
