"""The rounds of a real pair, read from a file that `edgespec chat --log-rounds FILE` wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from msgspec import Meta

from edgespec.errors import UsageError
from edgespec.system.text_files import decode_text, explain_unreadable, read_plain
from edgespec.system.typed_json import read_lines_as

_LARGEST_BYTES = 1 << 28
_WANTED = "a JSON object a line with num_draft, num_accepted, draft_ms and verify_ms, as chat --log-rounds writes"


_Count = Annotated[int, Meta(ge=0, le=1024)]
_Milliseconds = Annotated[float, Meta(ge=0, lt=1e9)]


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A line of the file: tokens that were drafted and accepted, and the times of both models.

    round: Counts the rounds of an answer from 1; the first reads the prompt.
    ahead: The draft was made while the target worked, so draft_ms is only the time that the target waited for it.
    """

    num_draft: _Count
    num_accepted: _Count
    draft_ms: _Milliseconds
    verify_ms: _Milliseconds
    round: int = 0
    ahead: bool = False
    source: str = "model"

    def __post_init__(self) -> None:
        if self.num_accepted > self.num_draft:
            raise ValueError(f"num_accepted is {self.num_accepted}, wanted at most num_draft, {self.num_draft}")


@dataclass(frozen=True, slots=True)
class Recording:
    """Rounds of one or more answers, in order."""

    rounds: Sequence[RecordedRound]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_accepted + 1 for each in self.rounds)

    @property
    def outcomes(self) -> list[bool | None]:
        """For each token of the text, True if the drafter guessed it; None where that is unknown.

        A round of three drafted tokens of which one was accepted gives True, False.
        """
        found: list[bool | None] = []
        for each in self.rounds:
            found += [True] * each.num_accepted
            found.append(False if each.num_accepted < each.num_draft else None)
        return found

    @property
    def acceptance(self) -> float | None:
        """The share of known outcomes that are right; None where none is known."""
        judged = [is_right for is_right in self.outcomes if is_right is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of tokens accepted at each position of a draft, where all before them were."""
        return [
            sum(each.num_accepted > i for each in self.rounds) / tried
            for i in range(max(self.lengths, default=0))
            if (tried := sum(each.num_draft > i and each.num_accepted >= i for each in self.rounds))
        ]

    @property
    def draft_ms(self) -> float | None:
        """Median time of a drafted token that was not drafted ahead; None where there is none."""
        timed = [each for each in self.rounds if each.num_draft and each.draft_ms > 0 and not each.ahead]
        return median(each.draft_ms / each.num_draft for each in timed) if timed else None

    @property
    def verify_ms(self) -> dict[int, float]:
        """Median time of a pass by the number of drafted tokens, without passes that read a prompt."""
        by_length: dict[int, list[float]] = {}
        for each in self.rounds:
            if each.round != 1 and each.verify_ms > 0:
                by_length.setdefault(each.num_draft, []).append(each.verify_ms)
        return {length: median(times) for length, times in sorted(by_length.items())}

    @property
    def lengths(self) -> list[int]:
        """Drafted tokens of each round."""
        return [each.num_draft for each in self.rounds]


def read_recording(path: Path) -> Recording:
    """The rounds of a file of JSON Lines.

    Raises UsageError: The file cannot be read, or a line is no round, or several drafters drafted.
    """
    with explain_unreadable(path, _WANTED):
        rounds = list(read_lines_as(RecordedRound, decode_text(read_plain(path, _LARGEST_BYTES))))
    if not rounds:
        raise UsageError(f"{path} holds no round; wanted {_WANTED}")
    sources = {each.source for each in rounds if each.num_draft}
    if len(sources) > 1:
        raise UsageError(
            f"{path} holds drafts of {', '.join(sorted(sources))}; wanted drafts of one model: record with "
            "--drafter and that model alone"
        )
    return Recording(rounds)
