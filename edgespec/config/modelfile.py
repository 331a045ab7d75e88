"""Modelfiles of ollama, read as what a preset says."""

import os
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from edgespec.config.options import OPTIONS
from edgespec.errors import UsageError
from edgespec.system.tables import read_table

_IN_MODELFILE = read_table(__file__, "modelfile.toml")
# The options of presets by the parameters that Modelfiles have for them.
PARAMETERS: dict[str, str] = _IN_MODELFILE["parameters"]
_LATEST = ":latest"
_QUOTED = re.compile(r'\A("""|")(.*)\1\Z', re.DOTALL)


def read_modelfile(
    text: str,
    path: Path,
    whole_path: Callable[[str, Path], str | None] = lambda model, folder: None,
    check: Callable[[dict[str, Any]], object] = lambda found: None,
) -> tuple[dict[str, Any], list[str]]:
    """The content of a preset by a Modelfile, without its name, and a note on each line that has no effect.

    path: Of the Modelfile.
    whole_path: The path of a model that is named by its path from a folder; None for any other name.
    check: Raises UsageError for an option that has a value that no preset can have.

    Raises UsageError: A line is no instruction, or one that cannot be followed.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for number, name, value in _instructions(text, path):
        where = f"{path}:{number}"
        if why := _IN_MODELFILE["refused"].get(name.upper()):
            raise UsageError(f"{where}: {name} is not for presets: {why}")
        match name.upper():
            case "FROM":
                if value.startswith((".", "~")):
                    value = str((path.parent / os.path.expanduser(value)).resolve())
                found["model"] = whole_path(value, path.parent) or value.removesuffix(_LATEST)
            case "SYSTEM":
                found["system"] = value.strip()
            case "PARAMETER":
                _take_parameter(found, value, where, notes, check)
            case "MESSAGE":
                role, content = _halves(value)
                if role == "system":
                    raise UsageError(f"{where}: a MESSAGE is of the role system; give it as SYSTEM")
                if role not in ("user", "assistant"):
                    raise UsageError(f"{where}: a MESSAGE is of the role '{role[:40]}'; wanted user or assistant")
                found.setdefault("messages", []).append({"role": role, "content": _unquoted(content)})
            case other if other in _IN_MODELFILE["ignored"]:
                notes.append(f"{where}: {name} has no effect")
            case _:
                raise UsageError(
                    f"{where}: '{name[:40]}' is not an instruction; known are FROM, SYSTEM, PARAMETER and MESSAGE"
                )
    return found, notes


def _take_parameter(
    found: dict[str, Any], value: str, where: str, notes: list[str], check: Callable[[dict[str, Any]], object]
) -> None:
    name, text = map(_unquoted, _halves(value))
    if why := _IN_MODELFILE["refused"].get(name):
        raise UsageError(f"{where}: {name} is not for presets: {why}")
    if name == "stop":
        found.setdefault("stop", []).append(text)
    elif name in PARAMETERS:
        option = PARAMETERS[name]
        is_float = OPTIONS[option].kind == "number"
        try:
            number = float(text) if is_float else int(text)
        except ValueError:
            raise UsageError(
                f"{where}: {name} is '{text[:40]}'; wanted a {'' if is_float else 'whole '}number"
            ) from None
        if name == "num_predict":
            number = max(number, -1)  # -2 fills the context, which is no limit here either
        if not (number < 0 and name == "seed"):  # which stands for any seed
            found[option] = number
            try:
                check({option: number})
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from None
    elif name not in _IN_MODELFILE["without_effect"]:
        near = get_close_matches(name, (*PARAMETERS, "stop", *_IN_MODELFILE["without_effect"]), n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join((*PARAMETERS, 'stop'))}"
        raise UsageError(f"{where}: the parameter '{name[:40]}' is unknown; {meant}")
    else:
        notes.append(f"{where}: the parameter {name[:40]} has no effect")


def _instructions(text: str, path: Path) -> Iterator[tuple[int, str, str]]:
    """The number of the line, the name and the value of each instruction."""
    lines = text.replace("\r\n", "\n").split("\n")
    i = 0
    while i < len(lines):
        number, line = i + 1, lines[i].strip()
        i += 1
        if not line or line.startswith("#"):
            continue
        name, value = _halves(line)
        if (begin := value.find('"""')) >= 0 and '"""' not in value[begin + 3 :]:
            value = lines[number - 1].lstrip()[len(name) + 1 :]
            while i < len(lines) and '"""' not in lines[i]:
                value, i = f"{value}\n{lines[i]}", i + 1
            if i == len(lines):
                raise UsageError(f'{path}:{number}: the text that begins with """ has no end; end it with """')
            value, i = f"{value}\n{lines[i].rstrip()}", i + 1
        value = value.strip()
        if not value:
            raise UsageError(f"{path}:{number}: {name[:40]} says nothing; give its value")
        yield number, name, value if name.upper() == "MESSAGE" else _unquoted(value)


def _halves(text: str) -> tuple[str, str]:
    """The first word of a text, and what comes after it."""
    first, *rest = text.split(None, 1)
    return first, "".join(rest)


def _unquoted(text: str) -> str:
    found = _QUOTED.match(text)
    return found[2] if found else text
