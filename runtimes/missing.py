"""What keeps a provider from working, and what to do about it."""

from dataclasses import dataclass

from edgespec.errors import DeviceUnavailable


@dataclass(frozen=True, slots=True)
class Missing:
    """fix: a command, or what to install; None where nothing helps on this machine."""

    problem: str
    fix: str | None = None

    def as_error(self, device: str, option: str = "--device") -> DeviceUnavailable:
        """The error for a user who named the device with an option."""
        fix = f". To fix that: {self.fix}" if self.fix else f"; use {option} cpu"
        return DeviceUnavailable(f"device '{device}': {self.problem}{fix}", device=device)
