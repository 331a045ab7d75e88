"""The times of many widths at once are those of each."""

from hypothesis import given
from hypothesis import strategies as st

from edgespec.draft.costs import ContextCosts, PassCosts

RATIOS = st.dictionaries(st.integers(2, 40), st.floats(1.0, 9.0), max_size=6)
CONTEXTS = st.builds(
    ContextCosts, st.integers(0, 500), st.lists(st.floats(0, 0.01), min_size=1, max_size=70).map(tuple)
)


@given(
    ratios=RATIOS,
    step_s=st.none() | st.floats(1e-4, 1.0),
    context_costs=CONTEXTS,
    context_length=st.integers(0, 5000),
    num_widths=st.integers(1, 65),
)
def test_the_times_of_many_widths_are_those_of_each_to_the_bit(
    ratios: dict[int, float],
    step_s: float | None,
    context_costs: ContextCosts,
    context_length: int,
    num_widths: int,
) -> None:
    costs = PassCosts({1: 1.0} | ratios, step_s, context_costs, context_length)
    assert costs.pass_times_s(num_widths) == [costs.pass_s(width) for width in range(1, num_widths + 1)]
