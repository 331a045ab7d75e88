"""The user's settings: a TOML file, over it the environment; the flags of a command come over both."""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from edgespec.config.options import OPTIONS, Option, Value
from edgespec.errors import UsageError
from edgespec.system.command_line import quote
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import explain_change, hold_lock, put_aside, replace_file
from edgespec.system.text_files import read_text
from edgespec.system.units import parse_bytes

_PREFIX = "EDGESPEC_"
_TESTS = "EDGESPEC_TEST_"  # variables that only tests read
_WANTED = {
    "text": "text",
    "whole": "a whole number, 0 or more",
    "limit": "a whole number from 1, or -1 for no limit",
    "number": "a number",
    "switch": "true or false",
    "size": "bytes, such as 2G or 512M",
    "length": "auto or a whole number, 0 or more",
}
_LARGEST_BYTES = 1 << 20
_LARGEST_NUMBER = 1e300
COMMENT = "# Options of edgespec; `edgespec config` lists them all.\n"


class Setting(NamedTuple):
    """A value, and the file and line or the variable that set it."""

    value: Value
    origin: str


def config_path() -> Path:
    """EDGESPEC_CONFIG, or config.toml in the platform's folder for settings."""
    import platformdirs  # which help can do without

    named = os.path.expanduser(os.environ.get("EDGESPEC_CONFIG", ""))  # systemd and Docker leave a ~ as it is
    return Path(named) if named else _user_folder(platformdirs.user_config_dir) / "config.toml"


def default_home() -> Path:
    """EDGESPEC_HOME, or home of the configuration file, or the platform's folder for data.

    A relative path in the file begins at the folder of the file, and so means one folder wherever one works.

    Raises UsageError: The configuration file is invalid.
    """
    import platformdirs

    if named := os.environ.get("EDGESPEC_HOME"):
        return Path(os.path.expanduser(named))
    if (chosen := read_file(config_path()).get("home")) and chosen.value:
        return config_path().parent / os.path.expanduser(str(chosen.value))
    return _user_folder(platformdirs.user_data_dir)


def _user_folder(find: Callable[..., str]) -> Path:
    """Raises UsageError: The user has no home folder, as in containers with a user that they do not know."""
    with suppress(RuntimeError):
        if os.path.isabs(found := find("edgespec", appauthor=False)):
            return Path(found)
    raise UsageError("this user has no home folder; set HOME, or both EDGESPEC_HOME and EDGESPEC_CONFIG")


def read_settings() -> dict[str, Setting]:
    """Every option that the file or the environment sets; the environment overrides the file.

    Raises UsageError: An unknown option or an invalid value, with its file and line or its variable.
    """
    return read_file(config_path()) | read_environment(os.environ)


def read_file(path: Path) -> dict[str, Setting]:
    """Every option that a file sets. A missing file sets nothing, unless EDGESPEC_CONFIG names it.

    Raises UsageError: The file cannot be read, is no TOML, or has an unknown option or an invalid value.
    """
    return {name: Setting(check_value(name, value, where), where) for name, value, where in _entries(path)}


def read_what_is_valid(path: Path) -> tuple[dict[str, Setting], list[str]]:
    """Every option that a file sets validly, and a line on each problem of the file."""
    found, problems = {}, []
    try:
        for name, value, where in _entries(path):
            try:
                found[name] = Setting(check_value(name, value, where), where)
            except UsageError as error:
                problems.append(str(error))
    except UsageError as error:
        problems.append(str(error))
    return found, problems


def _entries(path: Path) -> list[tuple[str, object, str]]:
    """The options of a file, unchecked: name, value, and file with line."""
    if not (text := _read(path)):
        return []
    with _toml_errors(path):
        document = tomllib.loads(text)
    return [(key, value, f"{path}:{_line_number(text, key)}") for key, value in document.items()]


def read_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Every option that a variable sets; an empty variable sets nothing, but for a key.

    Raises UsageError: An invalid value, or an option that only flags and the file may set.
    """
    found = {}
    for name in OPTIONS:
        variable = variable_name(name)
        # An empty variable is none, but an empty key is a mistake and not the wish to have none.
        if (text := environment.get(variable)) is None or not (text or OPTIONS[name].is_secret):
            continue
        if not OPTIONS[name].in_environment:
            raise UsageError(
                f"{variable} is set, but no variable may change what is sampled or drafted; "
                f"unset it and give --{name}, or run: edgespec config set {name} {quote(text[:40])}"
            )
        found[name] = Setting(parse_value(name, text, variable), variable)
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """One line per unknown variable that begins with EDGESPEC_."""
    known = {variable_name(name): name for name in (*OPTIONS, "config")}
    lines = []
    for variable in sorted(environment):
        if variable.startswith(_PREFIX) and variable not in known and not variable.startswith(_TESTS):
            near = _near(variable.removeprefix(_PREFIX), known.values())
            hint = f"did you mean {variable_name(near)}?" if near else "edgespec config lists the options"
            lines.append(f"the variable {variable} is unknown and has no effect; {hint}")
    return lines


def variable_name(name: str) -> str:
    """The environment variable of an option, such as EDGESPEC_DEVICE."""
    return _PREFIX + name.upper().replace("-", "_")


def parse_value(name: str, text: str, where: str) -> Value:
    """The value of an option that was given as text.

    Raises UsageError: There is no such option, or the value is invalid.
    """
    kind = _find_option(name, where).kind
    value: Value = text
    if kind == "switch":
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif kind in ("whole", "length") and text.isascii() and text.isdigit() and len(text) < 20:
        value = int(text)
    elif kind == "limit":
        with suppress(ValueError):
            value = int(text)
    elif kind == "number":
        with suppress(ValueError):
            value = float(text)
    return check_value(name, value, where)


def check_value(name: str, value: object, where: str) -> Value:
    """The value of an option as a file states it; raises UsageError as parse_value does."""
    option = _find_option(name, where)
    kind = "none" if isinstance(value, bool) and option.kind != "switch" else option.kind  # True is an int too
    match kind, value:
        case "switch", bool(found):
            return found
        case "text", str(found) if found in (option.choices or (found,)):
            return found
        case "whole" | "length", int(found) if found >= 0:
            return found
        case "limit", int(found) if found == -1 or found > 0:
            return found
        case "length", "auto":
            return "auto"
        case "number", (int() | float()) as found if abs(found) <= _LARGEST_NUMBER:
            return float(found)
        case "size", (int() | str()) as found:
            try:
                parse_bytes(found)
            except UsageError as error:
                raise UsageError(f"{where}: {name}: {error}") from None
            return str(found)
    wanted = " or ".join(option.choices) if option.choices else _WANTED[option.kind]
    raise UsageError(f"{where}: {name} is {str(value)[:40]!r}; wanted {wanted}")


def _near(word: str, names: Iterable[str]) -> str | None:
    """The name of an option that a word begins or is like."""
    word, names = word.lower().replace("_", "-"), [*names]
    begun = [each for each in names if each.startswith(word)] if len(word) > 1 else []
    return next(iter(begun or get_close_matches(word, names, n=1, cutoff=0.75)), None)


def _find_option(name: str, where: str) -> Option:
    if name in OPTIONS:
        return OPTIONS[name]
    hint = f"did you mean {near}? " if (near := _near(name, OPTIONS)) else ""
    raise UsageError(f"{where}: no option '{name[:40]}'; {hint}edgespec config lists them all")


def _line_number(text: str, key: str) -> int:
    """The line of a key, counted from 1; 1 where the key is written in an unusual way."""
    assignment = re.compile(rf"""\s*\[?\s*["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if assignment.match(line)), 1)


def _read(path: Path) -> str:
    if not path.exists() and not os.environ.get("EDGESPEC_CONFIG"):
        return ""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # which would be waited for
            raise UsageError(f"{path} is a pipe; put a file there, or name one with EDGESPEC_CONFIG")
        return read_text(path, _LARGEST_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}, which EDGESPEC_CONFIG names; edgespec config set NAME VALUE creates it"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); repair it or unset EDGESPEC_CONFIG") from None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


@contextmanager
def _toml_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # a plain ValueError for a number of thousands of digits
        raise UsageError(
            f"{path} is not TOML: {error}; correct that line (edgespec config edit), or start "
            "over (edgespec config reset)"
        ) from None


def set_option(path: Path, name: str, text: str | None) -> Value:
    """Set an option in the file, or remove it where text is None. Other lines, and comments, stay as they are.

    A new file, and one in which a secret is set, is for its owner alone.

    Raises:
        UsageError: The option is unknown, its value is invalid, or the file is no TOML.
        EdgeSpecError: The file cannot be written.
    """
    import tomlkit  # takes 30 ms to import, which other commands do not need

    if text is not None or not path.exists():
        _find_option(name, "config")  # while a line of an unknown option may be removed
    value = None if text is None else parse_value(name, text, "config set")
    if value is None and not path.exists():
        return None
    with explain_change(f"write {path}", "set EDGESPEC_CONFIG to a file that you may write"), ExitStack() as held:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # a file system without locks
            # Another command may set an option too.
            held.enter_context(hold_lock(path.with_name(f".{path.name}.lock")))
        before = _read(path) if path.exists() else COMMENT
        with _toml_errors(path):
            tomllib.loads(before)  # tomlkit lets some invalid files pass, and fails later
            document = tomlkit.parse(before)
        if value is None:
            if document.pop(name, None) is None:
                _find_option(name, "edgespec config unset")
        else:
            document[name] = value
        is_private = not path.exists() or (value is not None and OPTIONS[name].is_secret)
        replace_file(path, tomlkit.dumps(document).encode(), 0o600 if is_private else 0o666)
    return value


def reset_file(path: Path) -> Path | None:
    """Put the file aside under a new name, which is returned, and begin another; None where there is no file.

    Raises UsageError: It cannot be renamed.
    """
    if not path.exists():
        return None
    try:
        aside = put_aside(path)
        replace_file(path, COMMENT.encode())
    except OSError as error:
        raise UsageError(f"cannot rename {path} ({error.strerror}); remove it by hand") from None
    return aside
