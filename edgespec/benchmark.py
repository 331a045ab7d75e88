"""Speculation against plain decoding of the same model, on somebody's prompts.

Every turn is answered by both, one right after the other and each first every other time, so that a ratio
compares neighbours in time on a machine whose speed moves. Both are told the same conversation: where there are
more turns, that of plain decoding.
"""

import json
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.answers import Completion
from edgespec.chat_template import Message
from edgespec.engine import Engine
from edgespec.errors import ContextOverflow, UsageError
from edgespec.sampling import SamplingParams

_LARGEST_BYTES = 1 << 26  # of a prompts file


class BenchPrompt(NamedTuple):
    category: str
    turns: tuple[str, ...]


@dataclass(slots=True)
class _Tally:
    """Decoding of one category by one of the two; the first pass of an answer is not decoding."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    kept: float = 0.0
    drafted: float = 0.0
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, answer: Completion) -> None:
        stats = answer.stats
        if stats.decode_tokens_per_second:
            self.tokens += stats.num_decoded
            self.seconds += stats.num_decoded / stats.decode_tokens_per_second
            self.passes += stats.passes - 1
        if stats.num_drafted:
            self.kept += stats.num_accepted
            self.drafted += stats.num_drafted
        for name, counts in stats.sources.items():
            mine = self.sources.setdefault(name, dict.fromkeys(counts, 0))
            for key, count in counts.items():
                mine[key] += count

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def read_prompts(path: Path, per_category: int | None) -> list[BenchPrompt]:
    """Prompts from JSON Lines with category and turns, or prompt.

    Raises:
        UsageError: The file cannot be read, or a line is none of these.
    """
    counts: dict[str, int] = defaultdict(int)
    found = []
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise UsageError(f"{path} holds more than {_LARGEST_BYTES >> 20} MiB; give a shorter prompts file")
        for line in content.decode("utf-8-sig").split("\n"):
            if not line.strip():
                continue
            stated = json.loads(line)
            category = stated.get("category", "all")
            if not isinstance(category, str) or not category.isprintable():
                raise TypeError(f"a category is {category!r}, wanted a text on one line")
            turns = [stated["prompt"]] if "prompt" in stated else stated["turns"]
            if not isinstance(turns, list) or not turns:
                raise TypeError(f"turns are {turns!r}")
            for text in turns:
                if not isinstance(text, str):
                    raise TypeError(f"a prompt is {text!r}")
            counts[category] += 1
            if per_category is None or counts[category] <= per_category:
                found.append(BenchPrompt(category, tuple(turns)))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no prompts file ({error!r}); wanted JSON Lines with turns or prompt"
        ) from None
    if not found:
        raise UsageError(f"{path} holds no prompts")
    return found


def measure(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Decoding speed by category, plain and speculative, as the document of `edgespec bench --json`."""
    plain, speculative = (defaultdict[str, _Tally](_Tally) for _ in range(2))
    first = True
    for i, prompt in enumerate(prompts):
        messages: list[Message] = []
        for turn in prompt.turns:
            messages.append(Message("user", turn))
            first = not first
            try:
                answers = _both(engine, messages, first, max_tokens, sampling)
            except ContextOverflow as error:
                report(f"left out one prompt of {prompt.category}: {error}")
                break
            plain[prompt.category].add(answers[0])
            speculative[prompt.category].add(answers[1])
            messages.append(Message("assistant", answers[0].text))
        report(f"{i + 1} of {len(prompts)} prompts")
    if not speculative:
        raise UsageError("every prompt was left out; none fits the context of this model")
    categories = dict(_rows(plain, speculative))
    for name in speculative.keys() - categories.keys():
        report(f"nothing to compare in {name}: no answer went beyond its first pass, which is not decoding")
    ratios = [row["ratio"] for row in categories.values()]
    return {
        "model": engine.manifest.name,
        "categories": categories,
        "mean_ratio": sum(ratios) / len(ratios) if ratios else None,
        "worst_ratio": min(ratios, default=None),
        "machine": f"{platform.machine()} {platform.system()}, {engine.device_names[0]}",
    }


def _both(
    engine: Engine, messages: Sequence[Message], plain_first: bool, max_tokens: int, sampling: SamplingParams
) -> tuple[Completion, Completion]:
    """Of plain decoding and of the engine as it is."""
    order = [engine.plain(), engine] if plain_first else [engine, engine.plain()]
    answers = [which.generate(messages, max_tokens=max_tokens, sampling=sampling) for which in order]
    return (answers[0], answers[1]) if plain_first else (answers[1], answers[0])


def _rows(plain: dict[str, _Tally], speculative: dict[str, _Tally]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, fast in speculative.items():
        slow = plain[name]
        if not slow.tokens_per_second or not fast.tokens_per_second:
            continue
        yield (
            name,
            {
                "plain_tokens_per_second": slow.tokens_per_second,
                "speculative_tokens_per_second": fast.tokens_per_second,
                "ratio": fast.tokens_per_second / slow.tokens_per_second,
                "tokens_per_pass": fast.tokens / fast.passes if fast.passes else None,
                "acceptance_rate": fast.kept / fast.drafted if fast.drafted else None,
                "drafters": _by_accepted(fast.sources),
                "sources": fast.sources,
            },
        )


def _by_accepted(sources: dict[str, dict[str, int]]) -> list[str]:
    drafting = [name for name, counts in sources.items() if counts["drafted"]]
    return sorted(drafting, key=lambda name: -sources[name]["accepted"])


def table(document: dict[str, Any]) -> str:
    """The document for reading."""
    if not document["categories"]:
        return "nothing was decoded: no answer went beyond its first pass; allow more with --max-tokens"
    width = max(map(len, document["categories"]))
    lines = [
        f"{'':{width}}  {'plain':>7}  {'drafted':>7}  {'ratio':>5}  {'a pass':>6}  {'kept':>5}  rounds by source"
    ]
    for name, row in document["categories"].items():
        kept = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"
        lines.append(
            f"{name:{width}}  {row['plain_tokens_per_second']:7.1f}  {row['speculative_tokens_per_second']:7.1f}  "
            f"{row['ratio']:5.2f}  {row['tokens_per_pass']:6.2f}  {kept:>5}  {_shares(row['sources'])}"
        )
    return "\n".join([*lines, f"mean ratio {document['mean_ratio']:.3f}, worst {document['worst_ratio']:.3f}"])


def _shares(sources: dict[str, dict[str, int]]) -> str:
    rounds = {name: counts["rounds"] for name, counts in sources.items()}
    ordered = sorted(rounds, key=lambda name: -rounds[name])
    return ", ".join(f"{name} {rounds[name] / sum(rounds.values()):.0%}" for name in ordered)
