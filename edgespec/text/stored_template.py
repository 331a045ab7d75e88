"""One chat template for a model folder, of what the files of a model state."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

_IN_BRACKETS = tuple(map(re.compile, (r"<[^<>\s]+>", r"\[[/|]?\w++\|?\]")))
# Tokens that begin or end what somebody says; a template may put them together of parts.
_SPEAKERS = re.compile(
    r"[<\[]/?[|｜]?/?(?:system|sys|user|human|assistant|bot|model|ai|developer|turn|message|msg|inst)[|｜]?[>\]]",
    re.IGNORECASE,
)
_FOR_ALL, _FOR_TOOLS = "default", "tool_use"


def join_templates(stated: Any) -> Any:
    """One template of what a file states: a text, texts by name, or a list of objects with name and template.

    The one for tools is rendered where there are some. Without a default, the first of the others is taken.
    Anything else comes back as it is.
    """
    named = stated
    if isinstance(stated, list):
        named = {entry["name"]: entry["template"] for entry in stated}
    if not isinstance(named, Mapping) or not all(isinstance(text, str) for text in named.values()):
        return stated
    others = [text for name, text in named.items() if name != _FOR_TOOLS]
    whole = named.get(_FOR_ALL, next(iter(others), None))
    with_tools = named.get(_FOR_TOOLS, whole)
    if whole is None or whole == with_tools:
        return with_tools
    # Jinja drops one line end behind a template; the marks keep the white space beside the tags.
    first, second = (text.removesuffix("\n") for text in (with_tools, whole))
    return f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


def set_end_token(template: Any, ends: tuple[int, ...], eos: int | None, piece: str | None) -> Any:
    """The template, which sets eos_token itself where that is not the last of the model's end tokens."""
    return template if ends[-1:] == (eos,) else set_tokens(template, {"eos_token": piece})


def set_tokens(template: Any, pieces: Mapping[str, str | None]) -> Any:
    """The template, which sets those of these special tokens that it names."""
    if not isinstance(template, str):
        return template
    used = {name: piece for name, piece in pieces.items() if piece is not None and name in template}
    written = (f"{{% set {name} = {json.dumps(piece, ensure_ascii=False)} +%}}" for name, piece in used.items())
    return "".join([*written, template])


def turn_marks(template: Any, tokens: Collection[str]) -> frozenset[str]:
    """The tokens that a template writes around turns: in brackets, but no pair of tags, such as <think>."""
    if not isinstance(template, str):
        return frozenset()
    # Found in one walk: files made to harm have many tokens, and long templates.
    written = frozenset(tokens).intersection(each for one in _IN_BRACKETS for each in one.findall(template))
    return (written | frozenset(filter(_SPEAKERS.fullmatch, tokens))) - find_tags(tokens)


def find_tags(tokens: Collection[str]) -> frozenset[str]:
    """The tokens <x> and </x> of which both are there, and which name nobody who speaks."""
    ends = (token for token in tokens if token.startswith("</") and not _SPEAKERS.fullmatch(token))
    return frozenset(tag for end in ends if (start := "<" + end[2:]) in tokens for tag in (start, end))
