"""Tests of devices lie in one room, which is all that make collects for them."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_DEVICES = re.compile(r"pytest\.mark\.(?:webgpu|npu)\b")


def test_tests_of_gpus_and_npus_lie_in_the_room_that_make_collects() -> None:
    rooms = {
        path.relative_to(TESTS).parts[0]
        for path in TESTS.rglob("test_*.py")
        if OF_DEVICES.search(path.read_text("utf-8"))
    }
    assert rooms == {"hardware"}
