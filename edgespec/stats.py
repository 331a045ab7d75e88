"""What a request cost and what speculation yielded: a fold over its blocks."""

from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec import trees
from edgespec.scheduler import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Figures of one answer. Rates are None where nothing was measured."""

    decode_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    time_to_first_token_s: float | None
    tokens_per_pass: float
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]  # of a tree by depth
    passes: int
    num_drafted: int
    num_accepted: int
    sources: dict[str, dict[str, int]]  # rounds, drafted and accepted tokens of each; none is plain decoding
    drafter: str
    draft_length: str
    target_device: str
    drafter_device: str | None
    schedule: str = "serial"
    overlap: float = 0.0  # share of the time in which both lanes worked
    downgrades: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Counts as blocks arrive. The first block's pass reads the prompt and is not decoding."""

    passes: int = 0
    tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    num_drafted: int = 0
    num_read: int = 0
    first_s: float | None = None
    drafted: list[int] = field(default_factory=list)  # by position: how many drafts reached it
    accepted: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def prompt_read(self, num_read: int, first_s: float) -> None:
        """The first pass ran num_read tokens, the rest being held, and took first_s."""
        self.num_read, self.first_s = num_read, first_s

    def add(self, block: Block, num_kept: int) -> None:
        """Count a block of which num_kept tokens belong to the answer."""
        if self.passes:
            self.decode_tokens += num_kept
            self.decode_s += block.draft_s + block.verify_s
        self.passes += 1
        self.tokens += num_kept
        source = self.sources.setdefault(block.draft.source, dict.fromkeys(("rounds", "drafted", "accepted"), 0))
        source["rounds"] += 1
        source["drafted"] += block.num_draft
        source["accepted"] += block.num_accepted
        self.num_drafted += block.num_draft
        parents = block.draft.parents
        longest = block.num_draft if parents is None else int(trees.depths(parents).max(initial=0))
        missing = longest - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(longest):
            self.drafted[i] += 1
            self.accepted[i] += i < block.num_accepted

    def stats(self, *, drafter: str, draft_length: str, target_device: str, drafter_device: str | None) -> Stats:
        pairs = zip(self.accepted, self.drafted, strict=True)
        return Stats(
            decode_tokens_per_second=self.decode_tokens / self.decode_s if self.decode_tokens else None,
            prefill_tokens_per_second=self.num_read / self.first_s if self.first_s else None,
            time_to_first_token_s=self.first_s,
            tokens_per_pass=self.tokens / self.passes if self.passes else 0.0,
            acceptance_rate=sum(self.accepted) / self.num_drafted if self.num_drafted else None,
            acceptance_by_position=tuple(kept / tried for kept, tried in pairs),
            passes=self.passes,
            num_drafted=self.num_drafted,
            num_accepted=sum(self.accepted),
            sources=self.sources,
            drafter=drafter,
            draft_length=draft_length,
            target_device=target_device,
            drafter_device=drafter_device,
        )
