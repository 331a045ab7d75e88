"""The process that an object was made in. Its threads do not exist in a fork of that process."""

import os

from edgespec.errors import EdgeSpecError


class Owner:
    """Remembers the process that it is made in."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """True if the current process is that one, and not a fork of it."""
        return os.getpid() == self._process_id

    def require_here(self) -> None:
        """Raises EdgeSpecError: The current process is a fork of that one."""
        if not self.is_here:
            raise EdgeSpecError(
                f"this engine was loaded by process {self._process_id}, of which this one is a fork, and its "
                "threads stayed there; load the model in this process, or start processes with the method 'spawn'"
            )
