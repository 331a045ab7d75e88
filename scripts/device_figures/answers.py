"""Answers with a drafter on the CPU beside plain ones: their speed, and whether the text is the same."""

from typing import Any

from compare_with_cpu import compare_texts

from device_figures.pairs import Pair
from edgespec import load
from edgespec.runtimes.devices import Device

_STATS = ("tokens_per_pass", "acceptance_rate", "overlap", "schedule", "target_device")
_DRAFT_LENGTH = 3
_PROMPT = "The rain in the hall had stopped by the time that anyone thought of the roof."


def answer(pair: Pair, schedule: str, device: Device, num_tokens: int) -> dict[str, Any]:
    """Answers in a schedule with a drafter on the CPU, and plain ones, twice in turn; the faster of each."""
    how: dict[str, Any] = {"drafter": str(pair.drafter), "draft_length": _DRAFT_LENGTH, "schedule": schedule}
    with load(pair.target.folder, device=device.name, drafter_device="cpu", **how) as engine:
        engines = (engine.plain(), engine)
        rounds = [[each.generate(_PROMPT, max_tokens=num_tokens) for each in engines] for _ in range(2)]
        slow, fast = (max(answers, key=speed) for answers in zip(*rounds, strict=True))
        prompt = engine.encode(_PROMPT)
        text = compare_texts(prompt, slow.token_ids, fast.token_ids, engine.target, _DRAFT_LENGTH + 1)
    stats = fast.stats
    return {
        "plain_tokens_per_second": speed(slow),
        "tokens_per_second": speed(fast),
        **{name: getattr(stats, name) for name in _STATS},
        "text": text,
        "downgrades": list(stats.downgrades),
    }


def speed(answer: Any) -> float:
    return float(answer.stats.decode_tokens_per_second or 0.0)
