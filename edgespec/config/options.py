"""Every option that the command line, the configuration file and the environment share, declared in options.toml.

Flags and their help, `edgespec config`, the arguments of `load` and the tables in docs/ follow from this table.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from edgespec.config.drafter_names import TEXT
from edgespec.errors import PARAMETERS
from edgespec.system.tables import read_table

MAX_ANSWERS = 16  # that one model makes at once
Value = str | int | float | bool | None
Kind = Literal["text", "whole", "limit", "number", "switch", "size", "length"]

_DRAFTING = "drafting"
_SAMPLING = "sampling"
_DEVICES = "devices and memory"
_TABLE = read_table(__file__, "options.toml")
# What help says above the flags of a group, where it says something.
GROUP_HELP = _TABLE.pop("GROUP_HELP")
_SEVERAL = _TABLE.pop("SEVERAL")  # names of several commands


@dataclass(frozen=True, slots=True)
class Option:
    """A key of the configuration file, and the flag of the same name.

    kind: text, whole (a count), limit (a count, or -1 for none), number, switch (true or false), size (bytes, or
        2G) or length (auto, or a count).
    commands: Commands that have the flag and obey the configuration.
    group: The title under which help lists the flag.
    in_environment: Whether EDGESPEC_NAME sets it too.
    is_secret: Whether its value is never shown.
    """

    kind: Kind
    help: str
    default: Value = None
    _: KW_ONLY
    commands: tuple[str, ...] = ()
    group: str | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    in_environment: bool = False
    is_secret: bool = False


def _read(help: str, commands: tuple[str, ...] = (), **stated: Any) -> Option:
    found = [name for word in commands for name in _SEVERAL.get(word, (word,))]
    found += ["service install"] if "serve" in found else []
    shown = help.replace("TEXT_DRAFTERS", " or ".join(TEXT)).replace("MAX_ANSWERS", str(MAX_ANSWERS))
    return Option(help=shown, commands=tuple(found), **stated)


OPTIONS = {name: _read(**stated) for name, stated in _TABLE.items()}
DEFAULT_MODEL = str(OPTIONS["model"].default)
# The argument of `load` that takes an option's value.
LOAD_PARAMETERS = {
    name: PARAMETERS.get(name, name.replace("-", "_"))
    for name, option in OPTIONS.items()
    if option.group in (_DRAFTING, _DEVICES) or name in ("home", "offline", "keep-download", "max-parallel")
}
SAMPLING_OPTIONS = [
    name for name, option in OPTIONS.items() if option.group == _SAMPLING and name != "model-sampling"
]
# The options that a preset may have.
PRESET_OPTIONS = (
    *("system", "max-tokens", "context", *SAMPLING_OPTIONS),
    *(name for name, option in OPTIONS.items() if option.group == _DRAFTING),
)
