"""All that a caller of load() asks for: each option once, with its default and its check."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS, DrafterNames, parse
from edgespec.config.options import MAX_ANSWERS
from edgespec.draft.limits import MAX_FIXED_TOKENS
from edgespec.errors import UsageError
from edgespec.memory.free_memory import ReadFreeMemory, free_memory
from edgespec.runtimes.devices import THREADS_PER_CORE, max_threads
from edgespec.system.arguments import require_function, require_kind, require_path
from edgespec.system.progress import TERMINAL, ReportProgress
from edgespec.system.units import parse_bytes
from edgespec.types import Report, ScheduleChoice

AcceptanceName = Literal["equality", "rejection"]
ANSWERS = 4  # that are made at once where nothing is said
_LEAST_CONTEXT = 16  # tokens; fewer hold no message

_Check = Callable[[str, Any], None]  # takes an option's name and value; raises UsageError: It cannot have it
_is_text = partial(require_kind, kind=str, wanted="a text")
_is_text_or_path = partial(require_kind, kind=(str, Path), wanted="a text or a path")
_is_switch = partial(require_kind, kind=bool, wanted="True or False")
_is_switch_or_none = partial(require_kind, kind=(bool, NoneType), wanted="True, False or None")


def _is_one_of(choice: Any) -> _Check:
    def check(name: str, value: str) -> None:
        _is_text(name, value)
        if value not in get_args(choice):
            raise UsageError(f"{name} is {value!r}; wanted {' or '.join(get_args(choice))}")

    return check


def _is_length(name: str, value: int | str) -> None:
    is_number = type(value) is int or (isinstance(value, str) and value.isdecimal() and len(value) < 10)
    if value != "auto" and not (is_number and 0 <= int(value) <= MAX_FIXED_TOKENS):
        raise UsageError(
            f"the draft length (--draft-length) is {value!r:.40}; wanted auto or a whole number from 0 to "
            f"{MAX_FIXED_TOKENS}"
        )


def _are_drafters(name: str, value: str) -> None:
    _is_text(name, value)
    parse(value)


def _are_threads(name: str, value: object) -> None:
    most, flag = max_threads(), name.removeprefix("num_").replace("_", "-")
    if not (type(value) is int and 1 <= value <= most):
        raise UsageError(
            f"the number of threads (--{flag}) is {value!r}; wanted a whole number from 1 to {most}, which is "
            f"{THREADS_PER_CORE} for each logical core of the processor"
        )


def _are_answers(name: str, value: object) -> None:
    if not (type(value) is int and 1 <= value <= MAX_ANSWERS):
        raise UsageError(f"{name} is {value!r}; wanted a whole number from 1 to {MAX_ANSWERS}")


def _is_context(name: str, value: object) -> None:
    if not (type(value) is int and value >= _LEAST_CONTEXT):
        raise UsageError(f"{name} is {value!r}; wanted a whole number of tokens, {_LEAST_CONTEXT} at least")


def _is_domain(name: str, value: str) -> None:
    from edgespec.setup.learned_file import require_domain  # 10 ms

    require_domain(value)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The arguments of load(), which explains them, checked before any model is looked for.

    Raises UsageError: An option has a value that it cannot have.
    """

    model: Annotated[str | Path, _is_text_or_path]
    drafter: Annotated[str, _are_drafters] = "auto"
    draft_length: Annotated[int | str, _is_length] = "auto"
    acceptance: Annotated[AcceptanceName, _is_one_of(AcceptanceName)] = "equality"
    schedule: Annotated[ScheduleChoice, _is_one_of(ScheduleChoice)] = "auto"
    device: Annotated[str, _is_text] = "auto"
    drafter_device: Annotated[str, _is_text] = "auto"
    num_threads: Annotated[int | None, _are_threads] = None
    drafter_threads: Annotated[int | None, _are_threads] = None
    allow_fallback: Annotated[bool, _is_switch] = False
    cuda_graph: Annotated[bool, _is_switch] = True
    deterministic: Annotated[bool | None, _is_switch_or_none] = None
    exact: Annotated[bool, _is_switch] = False
    offline: Annotated[bool, _is_switch] = False
    keep_download: Annotated[bool, _is_switch] = False
    answer_cache: Annotated[bool, _is_switch] = False
    usage: Annotated[bool, _is_switch] = False
    learn: Annotated[str | None, _is_domain] = None
    memory_limit: Annotated[int | str | None, lambda name, value: parse_bytes(value)] = None
    max_parallel: Annotated[int | None, _are_answers] = None
    context: Annotated[int | None, _is_context] = None
    home: Annotated[str | Path | None, lambda name, value: require_path(name, value, "a folder")] = None
    report: Annotated[Report, require_function] = TERMINAL.report
    progress: Annotated[ReportProgress, require_function] = TERMINAL.progress

    def __post_init__(self) -> None:
        for name, kind in type(self).__annotations__.items():
            value = getattr(self, name)
            if name == "model" or value is not getattr(Wish, name):
                kind.__metadata__[0](name, value)
        if self.learn is not None and self.acceptance == "rejection":
            raise UsageError(
                "learn changes what a head drafts, and with acceptance='rejection' sampled text depends on that; "
                "leave out one of them"
            )

    @cached_property
    def names(self) -> DrafterNames:
        return parse(self.drafter)

    @property
    def length(self) -> int | None:
        """Tokens a draft; None to measure which length is fastest."""
        return None if self.draft_length == "auto" else int(self.draft_length)

    @property
    def when(self) -> ScheduleChoice:
        """The schedule; drafts of a fixed length are the same each time, also when auto is asked for."""
        return "serial" if self.schedule == "auto" and self.length is not None else self.schedule

    @property
    def free_memory(self) -> ReadFreeMemory:
        """Reads how much memory is free, of what the process may hold."""
        return partial(free_memory, None if self.memory_limit is None else parse_bytes(self.memory_limit))

    @property
    def max_draft_tokens(self) -> int:
        return max(MAX_DRAFT_TOKENS, self.length or 0)
