import asyncio
import subprocess
import sys

import pytest

from edgespec.server.model_host import in_daemon
from edgespec.system.threads import hand_over_soon, in_thread


def test_a_thread_waits_less_than_a_pass_of_a_fast_gpu_for_the_interpreter() -> None:
    before = sys.getswitchinterval()
    try:
        hand_over_soon()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)


def test_an_iterator_without_more_ends_the_wait_for_a_thread() -> None:
    """asyncio's futures refuse a StopIteration, so that whoever waits for one would wait for ever."""

    async def wait_for_both() -> None:
        for run in (in_thread, in_daemon):
            with pytest.raises(RuntimeError, match="no more to give"):
                await asyncio.wait_for(run(lambda: next(iter(()))), 30)

    asyncio.run(wait_for_both())


FORGETFUL = """
from edgespec.system.threads import end_at_exit, has_ended

for each in ("first", "second"):
    end_at_exit(lambda each=each: print("ended", each))
gone = lambda: print("ended twice")
end_at_exit(gone)
has_ended(gone)
print("exit")
"""


def test_threads_that_run_native_code_are_ended_once_as_python_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=True
    )
    lines = ended.stdout.splitlines()
    assert lines[0] == "exit"
    assert sorted(lines[1:]) == ["ended first", "ended second"]
