"""Which placements are worth measuring, and which is the best: a search that measures as few as it can.

All are foreseen first. Only one that promises nearly as much as the best is measured, for that means to prepare
the model, which may write gigabytes. Knows nothing of how costs are foreseen or measured.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from edgespec.draft.limits import MIN_GAIN_OF_SCHEDULE
from edgespec.setup.plan_option import Plan
from edgespec.setup.planner import Weighed, decide

# What is foreseen is right to about a third: attention, the way of logits, and other programs are not in it.
_REACH = 0.7


class Where(NamedTuple):
    """Names of the devices of a target and its drafters."""

    device: str
    drafter_device: str


class Refusal(NamedTuple):
    """A device that does not run its model; where both are named, devices that do not run both models at once."""

    device: str | None
    drafter_device: str | None
    reason: str

    def hits(self, where: Where) -> bool:
        pairs = zip((self.device, self.drafter_device), where, strict=True)
        return all(refused in (None, name) for refused, name in pairs)


@dataclass(frozen=True, kw_only=True)
class Search:
    """How placements are weighed.

    foresee: Options of a placement, with what is known by then of its target.
    measure: Options of a placement whose models were measured there, or why there are none.
    is_wanted: Whether a placement is measured whatever it promises; asked again after each measurement, for which
        models may have been prepared.
    text_drafters: Names of drafters that draft from the text, wherever models run.
    """

    foresee: Callable[[Where], Sequence[Weighed]]
    measure: Callable[[Where], Sequence[Weighed] | Refusal]
    is_wanted: Callable[[Where], bool] = lambda where: False
    text_drafters: Sequence[str] = ("suffix",)

    def best_of(self, placements: Sequence[Where]) -> Plan:
        """The plan of all placements, of which the chosen one is always measured.

        Raises MemoryExhausted: No placement has room for the target.
        """
        options = {where: self.foresee(where) for where in placements}
        measured: set[Where] = set()
        refused: dict[Where, str] = {}
        while True:
            plan = decide(_in_order(options, measured), self.text_drafters)
            where = self._next(options, measured | refused.keys(), plan)
            if where is None:
                return plan
            found = self.measure(where)
            if isinstance(found, Refusal):
                refused |= {each: found.reason for each in options if found.hits(each)}
            else:
                options[where] = found
                measured.add(where)
            for each in options.keys() - measured:
                options[each] = [_refuse(one, refused.get(each, "")) for one in self.foresee(each)]

    def _next(
        self, options: Mapping[Where, Sequence[Weighed]], done: Collection[Where], plan: Plan
    ) -> Where | None:
        """The most promising placement that is not measured yet and may be the best one."""
        waiting = {where: _best_rate(weighed) for where, weighed in options.items() if where not in done}
        least = _REACH * plan.chosen.tokens_per_second
        in_reach = [where for where, rate in waiting.items() if rate >= least]
        if in_reach:
            return max(in_reach, key=waiting.__getitem__)
        return next(filter(self.is_wanted, waiting), None)


def _in_order(options: Mapping[Where, Sequence[Weighed]], measured: Collection[Where]) -> list[Weighed]:
    """Put measured options first: of equal options the first one counts."""
    ordered = sorted(options, key=lambda where: where not in measured)
    return [weighed for where in ordered for weighed in options[where]]


def _best_rate(weighed: Sequence[Weighed]) -> float:
    """The most tokens a second of what may be chosen and was not measured elsewhere; 0 where nothing may.

    A drafter has to promise a gain: one that is too slow to be of use leaves a pipelined target what it was.
    """
    able = [option for _, option in weighed if option.can_be_chosen]
    plain = max((option.tokens_per_second for option in able if option.drafter is None), default=0.0)
    useful = (
        option.tokens_per_second
        for option in able
        if not option.is_measured
        and (option.drafter is None or option.tokens_per_second > MIN_GAIN_OF_SCHEDULE * plain)
    )
    return max(useful, default=0.0)


def _refuse(weighed: Weighed, reason: str) -> Weighed:
    case, option = weighed
    return (case, replace(option, obstacle=reason)) if reason else weighed
