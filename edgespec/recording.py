"""What a real pair did, round by round, read back from what `edgespec chat --log-rounds FILE` wrote.

Knows nothing of models and clocks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from edgespec.errors import UsageError

_LONGEST_DRAFT = 1024
_LONGEST_MS = 1e9
_LARGEST_BYTES = 1 << 28
_COUNTS = ("num_draft", "num_accepted")
_TIMES = ("draft_ms", "verify_ms")
_KEYS = {"number": "round"}
_WANTED = "a JSON object a line with num_draft, num_accepted, draft_ms and verify_ms, as chat --log-rounds writes"


class Round(NamedTuple):
    """What was drafted and kept, and what that took.

    number: Of its answer; the first reads the prompt.
    ahead: It was drafted while the target worked, so draft_ms is only what the target waited for it.
    """

    num_draft: int
    num_accepted: int
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    number: int = 0
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Recording:
    """Rounds of one answer or several, one after the other."""

    rounds: Sequence[Round]

    @property
    def num_tokens(self) -> int:
        """Tokens that these rounds yielded."""
        return sum(each.num_accepted + 1 for each in self.rounds)

    @property
    def known(self) -> list[bool | None]:
        """For each token that was yielded whether the drafter would have said it; None where nobody knows.

        Of a round of three drafted tokens of which one was kept: right, wrong.
        """
        found: list[bool | None] = []
        for each in self.rounds:
            found += [True] * each.num_accepted
            found.append(False if each.num_accepted < each.num_draft else None)
        return found

    @property
    def acceptance(self) -> float | None:
        """Share of the tokens that were judged, of which the drafter was right; None where none was."""
        judged = [is_right for is_right in self.known if is_right is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def chances(self) -> list[float]:
        """By position in a draft, how many of its tokens were kept where all before them were."""
        longest = max((each.num_draft for each in self.rounds), default=0)
        tried = [
            sum(each.num_draft > i and each.num_accepted >= i for each in self.rounds) for i in range(longest)
        ]
        kept = [sum(each.num_accepted > i for each in self.rounds) for i in range(longest)]
        return [k / t for k, t in zip(kept, tried, strict=True) if t]

    @property
    def draft_ms(self) -> float | None:
        """Of a drafted token, in the middle of all that the target waited for; None where there is none."""
        timed = [each for each in self.rounds if each.num_draft and each.draft_ms > 0 and not each.ahead]
        taken = [each.draft_ms / each.num_draft for each in timed]
        return median(taken) if taken else None

    @property
    def verify_ms(self) -> dict[int, float]:
        """Of a pass by how many tokens it verified, in the middle of all but those that read a prompt."""
        later = [each for each in self.rounds if each.number != 1 and each.verify_ms > 0]
        by_length = {length: [e.verify_ms for e in later if e.num_draft == length] for length in self.lengths}
        return {length: median(taken) for length, taken in sorted(by_length.items()) if taken}

    @property
    def lengths(self) -> list[int]:
        """Tokens drafted in each round."""
        return [each.num_draft for each in self.rounds]


def read_recording(path: Path) -> Recording:
    """The rounds of a file of JSON Lines.

    Raises:
        UsageError: The file cannot be read, or holds something else, or rounds of several drafters.
    """
    try:
        if path.exists() and not path.is_dir() and not (path.is_file() and path.stat().st_size <= _LARGEST_BYTES):
            raise UsageError(f"cannot read {path}: it is no regular file of at most {_LARGEST_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    rounds, sources = [], set()
    for number, line in enumerate(lines, 1):
        if line.strip():
            fields = _fields(line, f"{path}, line {number}")
            rounds.append(Round(**{name: fields.get(_KEYS.get(name, name), 0) for name in Round._fields}))
            if fields["num_draft"]:
                sources.add(str(fields.get("source", "model")))
    if not rounds:
        raise UsageError(f"{path} holds no round; wanted {_WANTED}")
    if len(sources) > 1:
        raise UsageError(
            f"{path} holds drafts of {', '.join(sorted(sources))}; wanted those of one, so record with --drafter "
            "and a model alone"
        )
    return Recording(rounds)


def _fields(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UsageError(f"{where} is no JSON object; wanted {_WANTED}")
    for name in (*_COUNTS, *_TIMES):
        value = fields.get(name)
        kinds = (int,) if name in _COUNTS else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < _LONGEST_MS:
            raise UsageError(f"{where} has {name} {value!r}; wanted {_WANTED}")
    if fields["num_draft"] > _LONGEST_DRAFT:
        raise UsageError(f"{where} drafts more than {_LONGEST_DRAFT} tokens; wanted {_WANTED}")
    if fields["num_accepted"] > fields["num_draft"]:
        raise UsageError(
            f"{where} keeps {fields['num_accepted']} of {fields['num_draft']} drafted tokens; wanted no more "
            "than there are"
        )
    return fields
