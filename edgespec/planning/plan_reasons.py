"""Why an option is chosen, and what speaks against the others, as sentences. Pure."""

from collections.abc import Iterator, Sequence

from edgespec.config.speed import format_speed
from edgespec.planning.case import Case, branching_cost
from edgespec.planning.plan_option import Option


def argument_for(chosen: Option, plain: float, options: Sequence[Option]) -> str:
    """What the other devices of the target promise, and what the drafter is worth."""
    reasons = list(_other_devices(chosen, options))
    if chosen.schedule != "plain":
        reasons.append(f"{chosen.tokens_per_second / plain:.2f} times plain decoding")
    elif any(option.drafter for option in options):
        reasons.append("no drafter is expected to be faster")
    return "; ".join(reasons) or "no drafter model is named"


def _other_devices(chosen: Option, options: Sequence[Option]) -> Iterator[str]:
    """A reason for each device on which the target would be slower, or may not run."""
    there = dict.fromkeys(option.target.device for option in options)
    for device in (name for name in there if name != chosen.target.device):
        on_it = [option for option in options if option.target.device == device and option.context_length]
        best = max(on_it, key=lambda option: option.tokens_per_second, default=None)
        if best is None:
            yield f"there is no room for the model on {_name(device)}"
            continue
        if best.tokens_per_second < chosen.tokens_per_second:
            basis = "measured" if best.is_measured else "estimated"
            about = "" if best.is_measured else "about "
            rate = f"{about}{format_speed(best.tokens_per_second)} tokens/s, {basis}"
            yield f"{_name(chosen.target.device)} is faster than {_name(device)} ({rate})"
        if best.obstacle:
            yield best.obstacle


def _name(device: str) -> str:
    return "the CPU" if device == "cpu" else device


def argument_against(case: Case, option: Option, chosen: Option) -> str:
    """The reasons against an option, the strongest first."""
    if not option.context_length:
        return case.no_branches if case.fit.context_length else case.fit.shortage
    share = option.tokens_per_second / chosen.tokens_per_second
    if share > 1 and not option.obstacle:
        return f"promises only {share - 1:.0%} more and is more involved"
    reasons = [option.obstacle] if option.obstacle else []
    if option.target != chosen.target:
        reasons.append(f"a pass takes the target {1e3 * case.step_s:.1f} ms there")
    if option.schedule == "plain":
        reasons.append("drafts pay" if chosen.schedule != "plain" else "fewer tokens a second")
    if option.schedule == "serial":
        reasons.append(f"a drafted token takes {case.step:.0%} of a pass")
    if option.schedule == "hedged":
        cost = branching_cost(case.drafter)
        reasons.append(
            f"a step with the alternatives that pay takes the drafter {cost.step:.1f} times as long and covers "
            f"{cost.coverage:.0%} of its misses"
        )
    if option.schedule in ("pipelined", "hedged"):
        verify, draft = case.drafter.slowed
        reasons.append(f"beside each other passes take {verify:.2f} and draft steps {draft:.2f} times as long")
    return "; ".join(reasons)
