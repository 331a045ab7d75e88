"""What doctor says of memory, for imitated readings."""

import pytest

from edgespec.cli.diagnosis import memory_document
from edgespec.cli.doctor import format_memory
from edgespec.memory.free_memory import FreeMemory, machine_reserve
from edgespec.memory.pressure import NO_PRESSURE, Level, Pressure

MIB = 1 << 20


@pytest.mark.parametrize(
    ("pressure", "said"),
    [
        (NO_PRESSURE, "memory pressure: none"),
        (
            Pressure(Level.SOME, "swap grows"),
            "memory pressure: some (swap grows); no drafter model is opened until it ends",
        ),
        (
            Pressure(Level.HIGH, "swap grows"),
            "memory pressure: high (swap grows); drafter models are closed until it ends",
        ),
    ],
)
def test_doctor_says_what_may_be_taken_what_stays_free_and_whether_programs_wait(
    pressure: Pressure, said: str
) -> None:
    free = FreeMemory(3000 * MIB, "the memory of this machine", reserve=machine_reserve(16 << 30))
    line = format_memory(memory_document(lambda: free, lambda: pressure))
    assert line.startswith("edgespec may take 3.1 GB within the memory of this machine; 1.1 GB are kept free")
    assert line.endswith(said)
