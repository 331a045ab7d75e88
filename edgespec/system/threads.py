"""How threads of Python share the interpreter."""

import sys

# A pass of a fast GPU takes 3 ms; by default a thread that computes keeps the interpreter for 5 ms at a time.
_SWITCH_S = 1e-4


def hand_over_soon() -> None:
    """Let a thread have the interpreter soon after its pass ends, though others compute: for the whole process."""
    sys.setswitchinterval(_SWITCH_S)
