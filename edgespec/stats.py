"""What a request cost and what speculation yielded: a fold over its blocks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edgespec import trees
from edgespec.costs import PassCosts
from edgespec.scheduler import Block
from edgespec.types import Draft, TokenIds

# With fewer nothing is said of what plain decoding would have taken.
_FEWEST_PASSES = 4
_COUNTS = ("rounds", "drafted", "verified", "accepted")


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
    num_verified: int  # drafted tokens on which there was a verdict: all before them were kept
    num_accepted: int
    num_corrections: int  # passes whose last token took the place of a drafted one
    num_bonuses: int  # passes that kept all there was on their branch, and gave one more
    num_emitted: int  # tokens that the user got
    num_decoded: int  # those of them that came after the first pass, which reads the prompt
    sources: dict[str, dict[str, int]]  # rounds, drafted, verified and accepted of each; none is plain decoding
    counts_by_position: tuple[tuple[int, int], ...]  # drafts that reached it, and those of them kept up to it
    widths: dict[int, tuple[int, float]]  # passes and their seconds, by tokens run; the first pass left out
    drafter: str
    draft_length: str
    target_device: str
    drafter_device: str | None
    schedule: str = "serial"
    overlap: float = 0.0  # share of the time in which both lanes worked
    estimated_gain: float | None = None  # over plain decoding, by what these passes take for their widths
    undrafted: dict[str, int] = field(default_factory=dict)  # why passes had no draft, and how many
    downgrades: tuple[str, ...] = ()  # what was given up for want of memory or for a fault, and what came back

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes them."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Counts as blocks arrive. The first block's pass reads the prompt and is not decoding."""

    passes: int = 0
    corrections: int = 0
    tokens: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    num_read: int = 0
    first_s: float | None = None
    drafted: list[int] = field(default_factory=list)  # by position: how many drafts reached it, a tree counts once
    accepted: list[int] = field(default_factory=list)
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    widths: dict[int, tuple[int, float]] = field(default_factory=dict)

    def prompt_read(self, num_read: int, first_s: float) -> None:
        """The first pass ran num_read tokens, the rest being held, and took first_s."""
        self.num_read, self.first_s = num_read, first_s

    def add(self, block: Block, num_kept: int) -> None:
        """Count a block of which the user gets num_kept tokens."""
        if self.passes:
            self.decode_tokens += num_kept
            self.decode_s += block.draft_s + block.verify_s
            passes, seconds = self.widths.get(block.num_draft + 1, (0, 0.0))
            self.widths[block.num_draft + 1] = passes + 1, seconds + block.verify_s
        self.passes += 1
        self.tokens += num_kept
        verified, is_correction = verdicts(block.draft, block.tokens)
        self.corrections += is_correction
        source = self.sources.setdefault(block.draft.source, dict.fromkeys(_COUNTS, 0))
        for name, count in zip(_COUNTS, (1, block.num_draft, verified, block.num_accepted), strict=True):
            source[name] += count
        parents = block.draft.parents
        depth = block.num_draft if parents is None else int(trees.depths(parents).max(initial=0))
        missing = depth - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for i in range(depth):
            self.drafted[i] += 1
            self.accepted[i] += i < block.num_accepted

    def stats(
        self,
        *,
        drafter: str,
        draft_length: str,
        target_device: str,
        drafter_device: str | None,
        downgrades: tuple[str, ...] = (),
        schedule: str = "serial",
        overlap: float = 0.0,
        costs: PassCosts | None = None,
        undrafted: Mapping[str, int] | None = None,
    ) -> Stats:
        """The figures; costs are what passes of the target take by width."""
        drafted, verified, accepted = (sum(each[name] for each in self.sources.values()) for name in _COUNTS[1:])
        by_position = tuple(zip(self.drafted, self.accepted, strict=True))
        return Stats(
            decode_tokens_per_second=self.decode_tokens / self.decode_s if self.decode_tokens else None,
            prefill_tokens_per_second=self.num_read / self.first_s if self.first_s else None,
            time_to_first_token_s=self.first_s,
            tokens_per_pass=self.tokens / self.passes if self.passes else 0.0,
            acceptance_rate=accepted / drafted if drafted else None,
            acceptance_by_position=tuple(kept / reached for reached, kept in by_position),
            passes=self.passes,
            num_drafted=drafted,
            num_verified=verified,
            num_accepted=accepted,
            num_corrections=self.corrections,
            num_bonuses=self.passes - self.corrections,
            num_emitted=self.tokens,
            num_decoded=self.decode_tokens,
            sources=self.sources,
            counts_by_position=by_position,
            widths=self.widths,
            drafter=drafter,
            draft_length=draft_length,
            target_device=target_device,
            drafter_device=drafter_device,
            downgrades=downgrades,
            schedule=schedule,
            overlap=overlap,
            estimated_gain=self._estimated_gain(costs) if costs and drafted else None,
            undrafted=dict(undrafted or {}),
        )

    def _estimated_gain(self, costs: PassCosts) -> float | None:
        """Tokens times a pass of one token, over the time that they took.

        Such a pass takes what these passes took on average, each in units of its width by measured ratios.
        """
        known = {width: each for width, each in self.widths.items() if width <= max(costs.ratios)}
        steps = sum(passes * costs.ratio(width) for width, (passes, _) in known.items())
        if sum(passes for passes, _ in known.values()) < _FEWEST_PASSES or not self.decode_s:
            return None
        return self.decode_tokens * sum(seconds for _, seconds in known.values()) / steps / self.decode_s


def verdicts(draft: Draft, emitted: TokenIds) -> tuple[int, bool]:
    """How many drafted tokens a pass gave a verdict on, and whether its last token took the place of one.

    There is a verdict on each token that hangs on what was kept: of a chain, on those kept and on the first that
    was not.
    """
    parents = range(-1, len(draft.tokens) - 1) if draft.parents is None else draft.parents
    judged = trees.judged(draft.tokens, parents, emitted)
    last = trees.followed(draft.tokens, parents, emitted[:-1])
    return len(judged), any(parents[node] == (last[-1] if last else -1) for node, _ in judged)
