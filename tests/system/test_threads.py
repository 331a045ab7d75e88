import asyncio
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
