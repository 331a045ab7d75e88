"""What is believed of the time of passes."""

from edgespec.draft.costs import PassCosts
from edgespec.draft.speculation import Speculation

STEP_S = 0.01


def test_the_first_pass_of_a_width_counts_for_nothing_on_a_device_that_compiles_for_it() -> None:
    speculation = Speculation(ratios={1: 1.0, 2: 1.1, 8: 1.6}, warm=set())
    for answer in range(3):
        policy = speculation.policy()
        costs = policy.costs  # type: ignore[union-attr]
        for width, ratio in ((1, 1.0), (5, 1.3), (8, 1.6), (5, 1.3)):
            is_first = not answer and width not in (speculation.warm or ())
            costs.observe(width, ratio * STEP_S * (40 if is_first else 1))
        speculation.learn_from(policy)
    assert speculation.warm == {1, 5, 8}
    assert abs(costs.ratio(5) - 1.3) < 0.02
    assert abs(costs.ratio(8) - 1.6) < 0.02
    assert abs(costs.pass_s(1) - STEP_S) < 0.0005


def test_it_counts_where_the_first_pass_is_like_the_others() -> None:
    costs = PassCosts({1: 1.0})
    costs.observe(1, STEP_S)
    costs.observe(4, 1.5 * STEP_S)
    assert abs(costs.ratio(4) - 1.5) < 0.02
