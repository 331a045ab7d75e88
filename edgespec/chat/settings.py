"""Settings of a chat that /set shows and changes: sampling, limits, and what happens when the context is full."""

import difflib
import json
import re
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from edgespec import Conversation, SamplingParams, UsageError
from edgespec.system.printable import one_line
from edgespec.system.tables import read_table

_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name != "logit_bias")
# What users of other programs type behind /set or as a command, and where it lies here.
_ELSEWHERE: dict[str, str] = read_table(__file__, "other_names.toml")["settings"]
SETTINGS = (*_SAMPLING, "max_tokens", "stop", "overflow", "loops")


def find_setting(name: str) -> str:
    """How to change what a user calls by a name, or its beginning, as a command; empty where it is no setting."""
    name = name.replace("-", "_")
    if said := _ELSEWHERE.get(name):
        return said
    return next((f"/set {each} changes that" for each in SETTINGS if len(name) > 3 and each.startswith(name)), "")


def format_settings(conversation: Conversation) -> list[str]:
    """One line for each setting, in the order of SETTINGS."""
    stop, ends_loops = conversation.stop or (), conversation.ends_loops
    if ends_loops is None:
        ends_loops = conversation.max_tokens in (None, -1)
    values = [
        *(getattr(conversation.sampling, name) for name in _SAMPLING),
        conversation.max_tokens or "-1 (no limit: until the context is full)",
        " ".join(map(repr, [stop] if isinstance(stop, str) else stop)) or "-",
        conversation.overflow,
        "stop" if ends_loops else "keep",
    ]
    return [f"{name} {value}" for name, value in zip(SETTINGS, values, strict=True)]


def format_sampling(sampling: SamplingParams) -> str:
    """The values that differ from greedy decoding, behind commas."""
    plain = SamplingParams()
    names = [name for name in _SAMPLING if getattr(sampling, name) != getattr(plain, name)]
    return "".join(f", {name} {getattr(sampling, name):g}" for name in names)


def apply_setting(conversation: Conversation, argument: str) -> str:
    """Change what "name value" or "name=value" says, if there is a value; return the setting's line.

    Raises UsageError: there is no such setting, or it cannot have this value.
    """
    name, *value = re.split(r"\s*=\s*|\s+", argument, maxsplit=1)
    name = name.replace("-", "_")
    if name in _ELSEWHERE:
        raise UsageError(f"there is no setting '{name}'; {_ELSEWHERE[name]}")
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no setting '{one_line(name, 40)}'; {hint}known are {', '.join(SETTINGS)}")
    if any(value):
        _change(conversation, name, value[0])
    return format_settings(conversation)[SETTINGS.index(name)]


def _change(conversation: Conversation, name: str, value: Any) -> None:
    if name in _SAMPLING:
        changed: dict[str, Any] = {name: _parse_number(name, value)}
        conversation.sampling = replace(conversation.sampling, **changed)
    elif name == "overflow":
        conversation.overflow = value
    elif name == "loops":
        if value not in ("stop", "keep"):
            raise UsageError(f"loops is {one_line(value, 40)!r}; wanted stop or keep")
        conversation.ends_loops = value == "stop"
    elif name == "stop":
        with suppress(ValueError):  # else it is no text in quotes, which may have \n
            value = json.loads(value) if value.startswith('"') else value
        conversation.stop = () if value == "-" else (value,)
    else:
        if not re.fullmatch(r"-1|[1-9]\d{0,17}", value, re.ASCII):
            value = one_line(value, 40)
            raise UsageError(f"max_tokens is {value}; wanted a whole number from 1, or -1 for no limit")
        conversation.max_tokens = int(value)


def _parse_number(name: str, value: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    raise UsageError(f"{name} is {one_line(value, 40)!r}; wanted a number")
