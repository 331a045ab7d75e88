"""What keeps a provider from working, and what to do about it."""

from dataclasses import dataclass

from edgespec.errors import DeviceUnavailable


@dataclass(frozen=True, slots=True)
class Missing:
    """fix: a command, or what to install; None where nothing helps on this machine."""

    problem: str
    fix: str | None = None

    def as_error(self, device: str) -> DeviceUnavailable:
        fix = f". To fix that: {self.fix}" if self.fix else "; use --device cpu"
        return DeviceUnavailable(f"device '{device}': {self.problem}{fix}", device=device)
