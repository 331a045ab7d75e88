"""Where a target and its drafters run."""

from typing import Any

import pytest

from edgespec.runtimes.devices import Device
from edgespec.setup import device_choice as module
from edgespec.setup.device_choice import Placement

CPU, GPU = Device("cpu", "CPUExecutionProvider"), Device("cuda", "CUDAExecutionProvider", "cuda")


@pytest.mark.parametrize(
    ("device", "named", "expected"),
    [
        (CPU, {}, 8),
        (GPU, {}, 7),
        (GPU, {"num_threads": 4}, 4),
        (GPU, {"num_threads": 4, "drafter_threads": 8}, 8),
    ],
)
def test_a_drafter_leaves_a_core_to_what_starts_the_target_on_another_device(
    monkeypatch: pytest.MonkeyPatch, device: Device, named: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(module, "physical_cores", lambda: 8)
    place = Placement(device=device, drafter_device=CPU, **named).drafter_place
    assert (place.device, place.num_threads) == ("cpu", expected)


def test_one_core_is_not_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "physical_cores", lambda: 1)
    assert Placement(device=GPU, drafter_device=CPU).drafter_place.num_threads == 1
