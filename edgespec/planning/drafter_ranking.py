"""Drafters that a target could have, in the order in which a user should consider them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from edgespec.models.known_drafters import Kind
from edgespec.policy.limits import MIN_GAIN_OF_PAIR

Basis = Literal["measured", "estimated", "unknown"]
_BASES: tuple[Basis, ...] = ("measured", "estimated", "unknown")
_KINDS: tuple[Kind, ...] = ("text", "model", "head", "self")


@dataclass(frozen=True, kw_only=True)
class PossibleDrafter:
    """A drafter, what it is expected to give here, and what it needs.

    basis: measured, on this machine with these models; estimated, from acceptance that was seen elsewhere or too
        seldom here, and costs that were measured here; or unknown.
    gain: Speed over plain decoding, 1 where no draft is expected to pay; None where it is unknown.
    num_draft: Tokens of a draft that has this gain.
    evidence: What the gain rests on, or why there is none.
    reported: What was measured with it elsewhere.
    was_run: Where edgespec has run it, as in "with SmolLM2-135M"; empty where it has not.
    download_bytes, disk_bytes, memory_bytes: What it takes beside what is here already; None where unknown.
    note: What is to be known before getting it.
    get, use: Commands; get is empty where nothing is missing.
    obstacle: Why it cannot draft here; empty where it can.
    """

    kind: Kind
    name: str
    basis: Basis = "unknown"
    gain: float | None = None
    num_draft: int | None = None
    evidence: str = ""
    reported: str = ""
    was_run: str = ""
    download_bytes: int | None = 0
    disk_bytes: int | None = 0
    memory_bytes: int | None = None
    note: str = ""
    get: str = ""
    use: str = ""
    obstacle: str = ""

    def __post_init__(self) -> None:
        assert (self.gain is None) == (self.basis == "unknown"), f"{self.name}: a gain has a basis"

    @property
    def pays(self) -> bool | None:
        """Whether the gain is more than the noise of a run; None where it is unknown."""
        return None if self.gain is None else self.gain >= MIN_GAIN_OF_PAIR


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Drafters of a target on two devices, ranked.

    model: The target as commands name it. target: Its own name, where it is prepared.
    has_costs: Whether it is known what passes of the target take there.
    """

    model: str
    target: str
    device: str
    drafter_device: str
    has_costs: bool
    drafters: tuple[PossibleDrafter, ...]


def rank(drafters: Iterable[PossibleDrafter]) -> tuple[PossibleDrafter, ...]:
    """Sort drafters: measured gains, then estimated ones, each from the highest, then those of unknown gain.

    Of unknown gain, what needs the smallest download comes first; of these text, models, heads, and the target's
    own layers. What cannot draft here comes last.
    """
    return tuple(sorted(drafters, key=_sort_key))


def _sort_key(drafter: PossibleDrafter) -> tuple[bool, int, float, float, int, str]:
    download_bytes = float("inf") if drafter.download_bytes is None else drafter.download_bytes
    return (
        bool(drafter.obstacle),
        _BASES.index(drafter.basis),
        -(drafter.gain or 0.0),
        download_bytes,
        _KINDS.index(drafter.kind),
        drafter.name,
    )
