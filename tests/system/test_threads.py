import sys

from edgespec.system.threads import hand_over_soon


def test_a_thread_waits_less_than_a_pass_of_a_fast_gpu_for_the_interpreter() -> None:
    before = sys.getswitchinterval()
    try:
        hand_over_soon()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)
