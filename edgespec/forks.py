"""The process that an object belongs to. What works in threads does not survive a fork: they stay behind."""

import os

from edgespec.errors import EdgeSpecError


class Owner:
    """The process that made this."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a fork of it."""
        return os.getpid() == self._process_id

    def expect_here(self) -> None:
        """Raises EdgeSpecError: This is a fork of that process."""
        if not self.is_here:
            raise EdgeSpecError(
                f"this engine was loaded by process {self._process_id}, of which this one is a fork, and its "
                "threads stayed there; load the model in this process, or start processes with the method 'spawn'"
            )
