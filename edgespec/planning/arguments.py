"""Why an option is chosen, and what speaks against the others, in words. Pure."""

from edgespec.planning.case import Case, branching_cost
from edgespec.planning.option import Option


def argument_for(chosen: Option, plain: float, has_models: bool) -> str:
    if chosen.schedule != "plain":
        return f"{chosen.tokens_per_second / plain:.2f} times plain decoding"
    return "no drafter is expected to be faster" if has_models else "no drafter model is named"


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
