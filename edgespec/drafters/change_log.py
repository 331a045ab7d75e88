"""Changes of who drafts, each reported once to the user and once in the figures of an answer."""

from dataclasses import dataclass, field

from edgespec.types import Report


@dataclass(slots=True)
class ChangeLog:
    """Collects lines while answers are made, and reports them between answers."""

    report: Report = lambda line: None
    _for_stats: list[str] = field(init=False, default_factory=list)
    _for_user: list[str] = field(init=False, default_factory=list)

    def add(self, line: str) -> None:
        self._for_stats.append(line)
        self._for_user.append(line)

    def add_for_user(self, lines: list[str]) -> None:
        self._for_user += lines

    def take(self) -> tuple[str, ...]:
        """Lines that were in the figures of no answer yet."""
        lines, self._for_stats = tuple(self._for_stats), []
        return lines

    def flush(self) -> None:
        """Report the lines that were not reported yet."""
        lines, self._for_user = self._for_user, []
        for line in lines:
            self.report(line)
