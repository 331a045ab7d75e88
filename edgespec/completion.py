"""What may stand in the place of a word that is being typed, by the parser of the command line itself.

A script asks for it at each key, so it is always that of the installed version and knows the models that are
prepared by now; static scripts would know neither.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence

from edgespec.drafter_names import SELF, TARGET, TEXT
from edgespec.options import OPTIONS
from edgespec.parser import CommandParser

Names = Callable[[], Iterable[str]]

# Whose values are models; of a drafter there are other words too.
_MODELS = {"model", "models", "target", "drafter", "exactness"}
_DEVICES = ("device", "drafter-device")
_DRAFTERS = ("none", *TARGET, *TEXT, SELF)

SCRIPTS = {
    "bash": """\
_edgespec() {
    local IFS=$'\\n'
    COMPREPLY=($(edgespec completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _edgespec edgespec
""",
    "zsh": """\
#compdef edgespec
_edgespec() {
    local -a found
    found=("${(@f)$(edgespec completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -- "${found[@]}"; else _files; fi
}
compdef _edgespec edgespec
""",
    "fish": """\
function __edgespec_words
    set -l typed (commandline -opc) (commandline -ct)
    edgespec completion words -- $typed[2..-1] 2>/dev/null
end
complete -c edgespec -a '(__edgespec_words)'
""",
}


def completions(
    parser: CommandParser, words: Sequence[str], models: Names, prepared: Names = tuple, devices: Names = tuple
) -> list[str]:
    """Words that begin as the last one does and fit its place; none where a file or a text is wanted.

    Args:
        words: After the name of the program; the last is being typed, and may be empty.
        models: Names of models, asked for where one is wanted.
        prepared: Of those that are here.
        devices: Names of devices.
    """
    *before, typed = [word for word in words if word != "="] or [""]  # bash parts --flag=value at the sign
    if before[:1] == ["help"] and parser.inner is not None:
        before = before[1:]
    if before[:2] == ["config", "set"] and len(before) == 3:
        return sorted(word for word in _set_values(before[2], models, devices) if word.startswith(typed))
    if before[:2] == ["models", "remove"]:
        models = prepared
    for word in before:
        if parser.inner is not None and word in parser.inner.choices:
            parser = parser.inner.choices[word]
    option = parser.option(before[-1]) if before else None
    if option is not None and option.nargs != 0:
        fitting = _values(option, models, devices)
    elif typed.startswith("-"):
        fitting = [flag for flag in parser.flags() if flag.startswith("--")]
    elif parser.inner is not None:
        fitting = list(parser.inner.choices)
    else:
        fitting = [value for action in parser.positionals() for value in _values(action, models, devices)]
    return sorted({word for word in fitting if word.startswith(typed)})


def _set_values(key: str, models: Names, devices: Names) -> list[str]:
    """What an option may be set to."""
    option = OPTIONS.get(key)
    if option is None:
        return []
    if option.kind == "switch":
        return ["false", "true"]
    named = [*models()] if key in _MODELS else []
    others = {"drafter": _DRAFTERS, "draft-length": ("auto",)}.get(key, ())
    places = ["auto", *devices()] if key in _DEVICES else []
    return [*option.choices, *others, *named, *places]


def _values(action: argparse.Action, models: Names, devices: Names) -> list[str]:
    if action.option_strings and action.option_strings[-1].removeprefix("--") in _DEVICES:
        return ["auto", *devices()]
    others = _DRAFTERS if action.option_strings == ["--drafter"] else ()
    named = models() if action.dest in _MODELS else ()
    return [*map(str, action.choices or ()), *others, *named]
