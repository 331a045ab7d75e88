"""From the records of answered turns to the document of a benchmark. Pure: no model, no clock."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles

from edgespec.evaluation.document import (
    AnswerRecord,
    BenchDocument,
    BenchSetup,
    Category,
    Figures,
    PeerCategory,
    PeerInfo,
    PeerRow,
    Position,
    PromptRatio,
    Sample,
    Summary,
    Texts,
    TurnRecord,
    Worst,
)
from edgespec.evaluation.exactness import Plausible
from edgespec.evaluation.intervals import Mean, mean_by_prompt, mean_of, mean_of_categories, simultaneous

Value = Callable[[TurnRecord], float | None]


@dataclass(slots=True)
class Totals:
    """Decoding in one way. The first pass of an answer reads the prompt and is not decoding."""

    tokens: int = 0
    passes: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    positions: list[Position] = field(default_factory=list)
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)  # passes and their seconds

    def add(self, answer: AnswerRecord, *, is_cold: bool) -> None:
        """Count an answer. Its time to the first token counts if nothing of its prompt was cached."""
        if passes := answer.get("passes", 0):
            self.tokens += answer["decoded"]
            self.passes += passes
        if is_cold and answer["first_token_s"]:
            self.first_tokens_s.append(answer["first_token_s"])
        for name, counts in answer.get("sources", {}).items():
            before = self.sources.get(name, {})
            self.sources[name] = {key: before.get(key, 0) + count for key, count in counts.items()}
        positions = answer.get("positions", [])
        missing = len(positions) - len(self.positions)
        self.positions += [{"drafted": 0, "kept": 0} for _ in range(missing)]
        for position, added in zip(self.positions, positions, strict=False):
            position["drafted"] += added["drafted"]
            position["kept"] += added["kept"]
        for width, each in answer.get("widths", {}).items():
            passes, seconds = self.widths.get(width, (0, 0.0))
            self.widths[width] = passes + each["passes"], seconds + each["seconds"]

    def count(self, name: str) -> int:
        """The sum over all sources of one of their counts, such as accepted."""
        return sum(counts.get(name, 0) for counts in self.sources.values())

    @property
    def first_token_s(self) -> float | None:
        return median(self.first_tokens_s) if self.first_tokens_s else None


def build_document(
    setup: BenchSetup, turns: Sequence[TurnRecord], peers: Sequence[PeerInfo] = (), sample: Sample | None = None
) -> BenchDocument:
    """The document of all turns; categories in which nothing was decoded are left out."""
    turns = sorted(turns, key=lambda turn: (turn["prompt"], turn["round"], turn["turn"]))
    compared = [turn for turn in turns if ratio_of(turn)]
    by_category = _group(compared, lambda turn: turn["category"])
    categories = {name: _category(each) for name, each in by_category.items()}
    slow, fast = _tallies(turns)
    ratios = [list(_by_prompt(each).values()) for each in by_category.values()]
    mean = mean_of_categories(ratios) if ratios else None
    worst = _worst(by_category)
    num_steps, steps_s = slow.widths.get(1, (0, 0.0))
    texts: Texts = {"equal": 0, "near_tie": 0, "different": 0, "not_judged": 0}
    for turn in turns:
        texts[turn["text"]] += 1
    return {
        **setup,
        **_figures(turns),
        "categories": categories,
        "mean_ratio": mean.ratio if mean else None,
        "mean_ratio_interval": mean.interval() if mean else None,
        "enough_prompts": mean.num_enough(len({turn["prompt"] for turn in compared})) if mean else None,
        "worst_ratio": worst["ratio"] if worst else None,
        "worst_ratio_interval": worst["ratio_interval"] if worst else None,
        "worst": worst,
        "below_one": [
            name for name, row in categories.items() if (interval := row["ratio_interval"]) and interval[1] < 1.0
        ],
        "by_prompt": _prompt_ratios(compared),
        "texts": texts,
        "answers": len(turns),
        "same_answers": texts["equal"],
        "passes": {
            "step_s": steps_s / num_steps if num_steps else None,
            "ratios": dict(sorted(setup.get("pass_ratios", {}).items())),
            "widths": {
                width: {"passes": passes, "seconds": taken_s}
                for width, (passes, taken_s) in sorted(fast.widths.items())
            },
        },
        "sample": sample,
        "peers": [_peer_row(peer, turns) for peer in peers],
        "turns": list(turns),
    }


def speed_of(answer: AnswerRecord) -> float | None:
    """Tokens per second from the first token to the last, as the reader saw them; None without such tokens."""
    return answer["decoded"] / answer["decode_s"] if answer["decoded"] and answer["decode_s"] else None


def ratio_of(turn: TurnRecord) -> float | None:
    """The speed of speculation in a turn relative to plain decoding; None where one of them has none."""
    return _ratio(speed_of(turn["speculative"]), speed_of(turn["plain"]))


def _ratio_in_passes(turn: TurnRecord) -> float | None:
    fast, slow = turn["speculative"], turn["plain"]
    return _ratio(fast.get("pass_tokens_per_second"), slow.get("pass_tokens_per_second"))


def _ratio(fast: float | None, slow: float | None) -> float | None:
    return fast / slow if fast and slow else None


def _group(turns: Sequence[TurnRecord], key: Callable[[TurnRecord], str]) -> dict[str, list[TurnRecord]]:
    grouped: dict[str, list[TurnRecord]] = defaultdict(list)
    for turn in turns:
        grouped[key(turn)].append(turn)
    return dict(grouped)


def _by_prompt(turns: Sequence[TurnRecord], value: Value = ratio_of) -> dict[int, list[float]]:
    """Values of answers by prompt, such as their ratios; those that have none are left out."""
    found: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        if found_value := value(turn):
            found[turn["prompt"]].append(found_value)
    return dict(found)


def _category(turns: Sequence[TurnRecord]) -> Category:
    ratios = _by_prompt(turns)
    mean = mean_by_prompt(list(ratios.values()))
    figures = _figures(turns)
    sources = figures["sources"]
    drafting = [name for name, counts in sources.items() if counts.get("drafted")]
    return {
        **figures,
        "plain_tokens_per_second": _mean_by_prompt(turns, lambda turn: speed_of(turn["plain"])),
        "speculative_tokens_per_second": _mean_by_prompt(turns, lambda turn: speed_of(turn["speculative"])),
        "ratio": mean.ratio,
        "ratio_interval": mean.interval(),
        "prompts": len(ratios),
        "drafters": sorted(drafting, key=lambda name: -sources[name].get("accepted", 0)),
    }


def _mean_by_prompt(turns: Sequence[TurnRecord], value: Value) -> float:
    """A geometric mean by prompt; the ratio of two mean speeds is the mean of the ratios."""
    return mean_by_prompt(list(_by_prompt(turns, value).values())).ratio


def _tallies(turns: Sequence[TurnRecord]) -> tuple[Totals, Totals]:
    """Figures of plain decoding and of speculation. A first turn has nothing of its prompt cached."""
    slow = add_up([(turn["plain"], turn["turn"] == 0) for turn in turns])
    return slow, add_up([(turn["speculative"], turn["turn"] == 0) for turn in turns])


def _figures(turns: Sequence[TurnRecord]) -> Figures:
    slow, fast = _tallies(turns)
    in_passes = _by_prompt(turns, _ratio_in_passes)
    drafted = fast.count("drafted")
    return {
        "ratios": summary([ratio for turn in turns if (ratio := ratio_of(turn))]),
        "ratio_in_passes": mean_by_prompt(list(in_passes.values())).ratio if in_passes else None,
        "tokens_per_pass": fast.tokens / fast.passes if fast.passes else None,
        "acceptance_rate": fast.count("accepted") / drafted if drafted else None,
        "acceptance_by_position": fast.positions,
        "time_to_first_token_s": {"plain": slow.first_token_s, "speculative": fast.first_token_s},
        "sources": fast.sources,
    }


def _worst(by_category: Mapping[str, Sequence[TurnRecord]]) -> Worst | None:
    """The category of the lowest ratio, with an interval that holds although the lowest of several was taken."""
    means = {name: mean_by_prompt(list(_by_prompt(turns).values())) for name, turns in by_category.items()}
    if not means:
        return None
    name = min(means, key=lambda name: means[name].value)
    interval = means[name].interval(simultaneous(len(means)))
    return {"category": name, "ratio": means[name].ratio, "ratio_interval": interval}


def _prompt_ratios(turns: Sequence[TurnRecord]) -> list[PromptRatio]:
    """The ratio of each prompt. Its observations are the rounds, each the mean of the prompt's turns."""
    found: list[PromptRatio] = []
    for prompt in sorted({turn["prompt"] for turn in turns}):
        mine = [turn for turn in turns if turn["prompt"] == prompt]
        rounds = _group(mine, lambda turn: str(turn["round"]))
        ratios = [mean_of(_by_prompt(each)[prompt]).ratio for each in rounds.values()]
        mean: Mean = mean_of(ratios)
        found.append(
            {
                "category": mine[0]["category"],
                "prompt": prompt,
                "answers": len(mine),
                "ratio": mean.ratio,
                "ratio_interval": mean.interval(),
            }
        )
    return found


def peer_key(name: str, way: str) -> str:
    return f"{name} ({way})"


def _peer_row(peer: PeerInfo, turns: Sequence[TurnRecord]) -> PeerRow:
    """A peer's speed next to plain decoding of the same turns; none where its text is nonsense."""
    key = peer_key(peer["name"], peer["way"])
    mine = [turn for turn in turns if key in turn["peers"]]
    answers = [turn["peers"][key] for turn in mine]
    judged = Plausible(
        sum(answer.get("judged", 0) for answer in answers), sum(answer.get("plausible", 0) for answer in answers)
    )
    failure = peer["failure"]
    if judged.is_nonsense:
        share = judged.plausible / judged.judged
        failure = f"its text is nonsense: this model finds {share:.0%} of its first tokens plausible; no speed"
    compared = {} if judged.is_nonsense else _group(mine, lambda turn: turn["category"])
    by_category = {name: row for name, each in compared.items() if (row := _peer_category(key, each))}
    mean = _mean_by_category(compared, partial(_peer_ratio, key))
    over_it = _mean_by_category(
        compared, lambda turn: _ratio(speed_of(turn["speculative"]), speed_of(turn["peers"][key]))
    )
    return {
        **peer,
        "failure": failure,
        "categories": {name: row["tokens_per_second"] for name, row in by_category.items()},
        "by_category": by_category,
        "mean_ratio": mean.ratio if mean else None,
        "mean_ratio_interval": mean.interval() if mean else None,
        "speculative_ratio": over_it.ratio if over_it else None,
        "speculative_ratio_interval": over_it.interval() if over_it else None,
        "time_to_first_token_s": add_up([(turn["peers"][key], turn["turn"] == 0) for turn in mine]).first_token_s,
        "answers": len(mine),
        "same_answers": sum(answer["is_equal"] for answer in answers),
    }


def _peer_ratio(key: str, turn: TurnRecord) -> float | None:
    return _ratio(speed_of(turn["peers"][key]), speed_of(turn["plain"]))


def _mean_by_category(groups: Mapping[str, Sequence[TurnRecord]], value: Value) -> Mean | None:
    """The mean over categories of a value of turns, such as a ratio; None where no turn has it."""
    found = [list(values.values()) for each in groups.values() if (values := _by_prompt(each, value))]
    return mean_of_categories(found) if found else None


def _peer_category(key: str, turns: Sequence[TurnRecord]) -> PeerCategory | None:
    """A peer in the turns of one category; None where none of its answers has a speed."""
    ratios = _by_prompt(turns, partial(_peer_ratio, key))
    if not ratios:
        return None
    mean, answers = mean_by_prompt(list(ratios.values())), add_up([(turn["peers"][key], False) for turn in turns])
    drafted = answers.count("drafted")
    return {
        "tokens_per_second": _mean_by_prompt(turns, lambda turn: speed_of(turn["peers"][key])),
        "ratio": mean.ratio,
        "ratio_interval": mean.interval(),
        "tokens_per_pass": answers.tokens / answers.passes if answers.passes else None,
        "acceptance_rate": answers.count("accepted") / drafted if drafted else None,
        "sources": answers.sources,
    }


def add_up(answers: Sequence[tuple[AnswerRecord, bool]]) -> Totals:
    """The figures of answers, each with whether nothing of its prompt was cached."""
    added = Totals()
    for answer, is_cold in answers:
        added.add(answer, is_cold=is_cold)
    return added


def summary(values: Sequence[float]) -> Summary | None:
    """Count, extremes, median and quartiles; None without values."""
    if not values:
        return None
    low, middle, high = quantiles(values, method="inclusive") if len(values) > 1 else 3 * [values[0]]
    return {
        "count": len(values),
        "min": min(values),
        "quartile_1": low,
        "median": middle,
        "quartile_3": high,
        "max": max(values),
    }
