"""What a user has set: a file, over that the environment, over that the flags of a command.

Reads and writes the file; knows the options by their table alone and nothing of what they do.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import platformdirs

from edgespec.errors import UsageError
from edgespec.headroom import parse_bytes
from edgespec.options import OPTIONS, Option, Value

_PREFIX = "EDGESPEC_"
_TESTS = "EDGESPEC_TEST_"  # which only tests read
_WANTED = {
    "text": "a text",
    "whole": "a whole number, 0 or more",
    "number": "a number",
    "switch": "true or false",
    "size": "bytes, such as 2G or 512M",
    "length": "auto or a whole number, 0 or more",
}
_LARGEST_BYTES = 1 << 20
_LARGEST_NUMBER = 1e300
_COMMENT = "# Options of edgespec; `edgespec config` lists them all.\n"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it comes from, in words."""

    value: Value
    origin: str


def config_path() -> Path:
    """EDGESPEC_CONFIG, or the platform's place for it."""
    named = os.environ.get("EDGESPEC_CONFIG")
    return Path(named or Path(platformdirs.user_config_dir("edgespec", appauthor=False)) / "config.toml")


def default_home() -> Path:
    """EDGESPEC_HOME, or what the user's configuration says, or the platform's folder for data.

    Raises:
        UsageError: The configuration is unsound.
    """
    if named := os.environ.get("EDGESPEC_HOME"):
        return Path(named)
    if chosen := from_file(config_path()).get("home"):
        return Path(str(chosen.value)).expanduser()
    return Path(platformdirs.user_data_dir("edgespec", appauthor=False))


def settings() -> dict[str, Setting]:
    """What was set, by option: of file and environment the latter.

    Raises:
        UsageError: An unknown option or a value of another kind than it has, with file and line or variable.
    """
    return from_file(config_path()) | from_environment(os.environ)


def from_file(path: Path) -> dict[str, Setting]:
    """What a file sets; nothing where there is none, unless EDGESPEC_CONFIG names it.

    Raises:
        UsageError: It cannot be read, is no TOML, or sets what cannot be meant.
    """
    text = _read(path)
    try:
        stated = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}; mend that line") from None
    found = {}
    for name, value in stated.items():
        where = f"{path}:{_line(text, name)}"
        found[name] = Setting(_sound(name, value, where), where)
    return found


def from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """What variables set; an empty one sets nothing.

    Raises:
        UsageError: A value of another kind, or an option that only flags and file may set.
    """
    found = {}
    for name, option in OPTIONS.items():
        variable = variable_of(name)
        text = environment.get(variable)
        if not text:
            continue
        if not option.in_environment:
            raise UsageError(
                f"{variable} is set, and no variable changes what is sampled or drafted; "
                f"unset it and give --{name}, or: edgespec config set {name} {text[:40]}"
            )
        found[name] = Setting(parsed(name, text, variable), variable)
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that seems meant for edgespec and is none of its own."""
    known = {*map(variable_of, OPTIONS), _PREFIX + "CONFIG"}
    lines = []
    for variable in sorted(environment):
        if variable.startswith(_PREFIX) and variable not in known and not variable.startswith(_TESTS):
            near = get_close_matches(variable, known, n=1, cutoff=0.8)
            meant = f"; did you mean {near[0]}?" if near else "; edgespec config lists the options"
            lines.append(f"the variable {variable} is not known and changes nothing{meant}")
    return lines


def variable_of(name: str) -> str:
    return _PREFIX + name.upper().replace("-", "_")


def parsed(name: str, text: str, where: str) -> Value:
    """The value of an option that was given as text.

    Raises:
        UsageError: There is no such option, or its value is of another kind.
    """
    kind = _option(name, where).kind
    value: Value = text
    if kind == "switch":
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind in ("whole", "length") and text.isascii() and text.isdigit() and len(text) < 20:
        value = int(text)
    elif kind == "number":
        try:
            value = float(text)
        except ValueError:
            value = text
    return _sound(name, value, where)


def _sound(name: str, value: object, where: str) -> Value:
    """A value as its option wants it."""
    option = _option(name, where)
    kind = "none" if isinstance(value, bool) and option.kind != "switch" else option.kind  # True is an int too
    match kind, value:
        case "switch", bool(found):
            return found
        case "text", str(found) if found in (option.choices or (found,)):
            return found
        case "whole" | "length", int(found) if found >= 0:
            return found
        case "length", "auto":
            return "auto"
        case "number", (int() | float()) as found if abs(found) <= _LARGEST_NUMBER:
            return float(found)
        case "size", (int() | str()) as found:
            with _placed(where, name):
                parse_bytes(found)
            return str(found)
    wanted = " or ".join(option.choices) if option.choices else _WANTED[option.kind]
    raise UsageError(f"{where}: {name} is {str(value)[:40]!r}; wanted {wanted}")


@contextmanager
def _placed(where: str, name: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {name}: {error}") from None


def _option(name: str, where: str) -> Option:
    if name in OPTIONS:
        return OPTIONS[name]
    near = get_close_matches(name.replace("_", "-"), OPTIONS, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"{where}: no option '{name[:40]}'; {meant}edgespec config lists them all")


def _line(text: str, name: str) -> int:
    """Where a key stands, counted from 1; 1 where it is written in a way that is not foreseen."""
    key = _assignment(name)
    return next((number for number, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


def _assignment(name: str) -> re.Pattern[str]:
    return re.compile(rf"""\s*\[?\s*["']?{re.escape(name)}["']?\s*[=.\]]""")


def _read(path: Path) -> str:
    if not path.exists() and not os.environ.get("EDGESPEC_CONFIG"):
        return ""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise UsageError(f"{path} is larger than {_LARGEST_BYTES >> 20} MiB, so it is no configuration")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); mend it or unset EDGESPEC_CONFIG") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8; write it anew") from None


def put(path: Path, name: str, text: str) -> Value:
    """Set an option in the file; its other lines stay as they are.

    Raises:
        UsageError: The option or its value cannot be meant, or the file is unsound or cannot be written.
    """
    value = parsed(name, text, "edgespec config set")
    before = _read(path) if path.exists() else _COMMENT
    _write(path, _without(before, name) + f"{name} = {_as_toml(value)}\n", name, value)
    return value


def drop(path: Path, name: str) -> None:
    """Leave an option to its default.

    Raises:
        UsageError: No such option, or the file is unsound or cannot be written.
    """
    _option(name, "edgespec config unset")
    if path.exists():
        _write(path, _without(_read(path), name), name, None)


def _without(text: str, name: str) -> str:
    key = _assignment(name)
    lines = [line for line in text.splitlines() if not key.match(line)]
    return "\n".join([*lines, ""]) if lines else ""


def _as_toml(value: Value) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write(path: Path, text: str, name: str, value: Value) -> None:
    """Raises UsageError: What would be written does not say what is meant, or cannot be written."""
    try:
        is_sound = tomllib.loads(text).get(name) == value
    except tomllib.TOMLDecodeError:
        is_sound = False
    if not is_sound:
        raise UsageError(f"{name} spans several lines of {path}, or others are unsound; change it in an editor")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path} ({error.strerror}); set EDGESPEC_CONFIG to another place") from None
