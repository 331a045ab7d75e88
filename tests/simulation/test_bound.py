import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.simulation.machines import Machine, bound


def machine(step: float, *ratios: float) -> Machine:
    return Machine(target_s=0.1, draft_s=0.1 * step, ratios=ratios or (1.0,))


def test_a_pass_goes_on_costing_as_its_last_token_did() -> None:
    sloped = machine(0.1, 1, 1.03, 1.05, 1.08)
    assert [sloped.ratio(n) for n in range(4)] == [1, 1.03, 1.05, 1.08]
    assert sloped.ratio(7) == pytest.approx(1.08 + 4 * 0.03)
    assert sloped.verify_s(3) == pytest.approx(0.105)


@pytest.mark.parametrize("ratios", [(1.0,), (1.0, 1.2, 1.1)])
def test_a_wider_pass_is_never_foreseen_to_be_cheaper(ratios: tuple[float, ...]) -> None:
    assert machine(0.1, *ratios).ratio(9) == ratios[-1]


def test_without_a_right_draft_nothing_beats_plain_decoding() -> None:
    assert bound(machine(0.3, 1, 1.1), lambda position: 0.0) == pytest.approx(10.0)


def test_a_perfect_drafter_is_held_up_by_its_own_pace() -> None:
    # A pass costs the same whatever it verifies; half a drafted token fits beside it, and one is the target's.
    assert bound(machine(2.0), lambda position: 1.0) == pytest.approx(15.0)


@given(
    step=st.floats(0.01, 2),
    acceptance=st.floats(0, 1),
    slope=st.floats(0, 0.5),
    length=st.integers(0, 20),
)
def test_no_length_in_sequence_passes_the_bound(step: float, acceptance: float, slope: float, length: int) -> None:
    pair = machine(step, 1, 1 + slope)
    total = sum(acceptance**i for i in range(length + 1))
    most = bound(pair, lambda position: acceptance)
    serial = total / (pair.ratio(length) + length * step) / pair.target_s
    overlapped = total / max(pair.ratio(length), length * step) / pair.target_s
    assert max(serial, overlapped) <= most * (1 + 1e-9)
