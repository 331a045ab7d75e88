"""How often threads of Python give up the interpreter to each other, and which go before others."""

import os
import sys
import threading

# By default a thread that computes keeps the interpreter for 5 ms at a time; a pass of a fast GPU takes 3.
# Not less than this: what Python does between two passes would be interrupted itself.
_SWITCH_S = 2e-4
_IDLE_NICENESS = 10


def hand_over_soon() -> None:
    """Let a thread get the interpreter soon after its pass while others compute, in the whole process."""
    sys.setswitchinterval(_SWITCH_S)


def lower_priority() -> None:
    """Let other threads and programs go before this thread, where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE_NICENESS)
