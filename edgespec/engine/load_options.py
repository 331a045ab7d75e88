"""Options of load() that the models do not depend on, checked before any model is looked for."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import NamedTuple, cast, get_args

from edgespec.decoding.acceptance import equality
from edgespec.decoding.rejection import rejection
from edgespec.drafters.learned_file import require_domain
from edgespec.errors import UsageError
from edgespec.planning.choice import ScheduleChoice
from edgespec.policy.limits import MAX_DRAFT_TOKENS, MAX_FIXED_TOKENS

ACCEPTANCES = {"equality": equality, "rejection": rejection}
# Answers that are made at once, at most and where nothing is said.
MAX_ANSWERS, _ANSWERS = 16, 4
_LEAST_CONTEXT = 16  # tokens; fewer hold no message


class LoadOptions(NamedTuple):
    """How the models that are found are opened, and how they draft."""

    schedule: ScheduleChoice
    length: int | None  # tokens a draft, if fixed
    acceptance: str
    has_answer_cache: bool
    deterministic: bool | None  # as asked
    domain: str | None  # in which a drafting head learns
    max_parallel: int | None  # answers at once, if the user says
    context: int | None  # the most tokens of prompt and answer, if the user says

    @property
    def max_answers(self) -> int:
        """How many answers are made at once if memory allows."""
        return self.max_parallel or _ANSWERS

    @property
    def max_draft_tokens(self) -> int:
        return max(MAX_DRAFT_TOKENS, self.length or 0)


def check_options(
    *,
    draft_length: int | str,
    acceptance: str,
    schedule: str,
    answer_cache: bool,
    deterministic: bool | None,
    learn: str | None,
    max_parallel: int | None = None,
    context: int | None = None,
) -> LoadOptions:
    """The options as load() uses them.

    Raises UsageError: One of them has a value that it cannot have.
    """
    length = _parse_length(draft_length)
    require_texts(acceptance=acceptance, schedule=schedule)
    _require_one_of("acceptance", acceptance, list(ACCEPTANCES))
    _require_one_of("schedule", schedule, get_args(ScheduleChoice))
    _require_kinds({"deterministic": deterministic}, (bool, NoneType), "True, False or None")
    is_number = type(max_parallel) is int and 1 <= max_parallel <= MAX_ANSWERS
    if max_parallel is not None and not is_number:
        raise UsageError(f"max_parallel is {max_parallel!r}; wanted 1 to {MAX_ANSWERS} answers at once, or None")
    if context is not None and not (type(context) is int and context >= _LEAST_CONTEXT):
        raise UsageError(f"context is {context!r}; wanted at least {_LEAST_CONTEXT} tokens, or None")
    if learn is not None:
        require_domain(learn)
        if acceptance == "rejection":
            raise UsageError(
                "learn changes what a head drafts, and with acceptance='rejection' sampled text depends on that; "
                "leave out one of them"
            )
    # Drafts of a fixed length are the same each time.
    choice = "serial" if schedule == "auto" and length is not None else cast(ScheduleChoice, schedule)
    return LoadOptions(choice, length, acceptance, answer_cache, deterministic, learn, max_parallel, context)


def require_texts(**settings: str) -> None:
    """Raises UsageError: One of the settings is no text."""
    _require_kinds(settings, str, "a text")


def require_switches(**settings: bool) -> None:
    """Raises UsageError: One of the settings is neither True nor False."""
    _require_kinds(settings, bool, "True or False")


def require_folder(**settings: str | Path | None) -> None:
    """Raises UsageError: One of the settings is no path and not None."""
    _require_kinds(settings, (str, Path, NoneType), "a folder")


def require_paths(**settings: str | Path) -> None:
    """Raises UsageError: One of the settings is no text and no path."""
    _require_kinds(settings, (str, Path), "a text or a path")


def require_functions(**settings: object) -> None:
    """Raises UsageError: One of the settings cannot be called."""
    for name, value in settings.items():
        if not callable(value):
            raise UsageError(f"{name} is {value!r}; wanted a function")


def _require_kinds(settings: Mapping[str, object], kind: type | tuple[type, ...], wanted: str) -> None:
    for name, value in settings.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} is {value!r}; wanted {wanted}")


def _require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; wanted {' or '.join(known)}")


def _parse_length(asked: int | str) -> int | None:
    """Tokens a draft; None to measure which length is fastest."""
    if asked == "auto":
        return None
    is_number = (isinstance(asked, int) and not isinstance(asked, bool)) or (
        isinstance(asked, str) and asked.isdecimal() and len(asked) < 10
    )
    if not is_number or not 0 <= int(asked) <= MAX_FIXED_TOKENS:
        raise UsageError(f"draft length is {str(asked)[:40]!r}; wanted auto or 0 to {MAX_FIXED_TOKENS} tokens")
    return int(asked)
