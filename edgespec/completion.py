"""What may stand in the place of a word that is being typed, by the parser of the command line itself.

A script asks for it at each key, so it is always that of the installed version and knows the models that are
prepared by now; static scripts would know neither.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence

from edgespec.drafter_names import SELF, TARGET, TEXT
from edgespec.parser import CommandParser

# Whose values are models; of a drafter there are other words too.
_MODELS = {"model", "models", "target", "drafter", "exactness"}
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


def completions(parser: CommandParser, words: Sequence[str], models: Callable[[], Iterable[str]]) -> list[str]:
    """Words that begin as the last one does and fit its place; none where a file or a text is wanted.

    Args:
        words: After the name of the program; the last is being typed, and may be empty.
        models: Names of models, asked for where one is wanted.
    """
    *before, typed = [word for word in words if word != "="] or [""]  # bash parts --flag=value at the sign
    for word in before:
        if parser.inner is not None and word in parser.inner.choices:
            parser = parser.inner.choices[word]
    option = parser.option(before[-1]) if before else None
    if option is not None and option.nargs != 0:
        fitting = _values(option, models)
    elif typed.startswith("-"):
        fitting = [flag for flag in parser.flags() if flag.startswith("--")]
    elif parser.inner is not None:
        fitting = list(parser.inner.choices)
    else:
        fitting = [value for action in parser.positionals() for value in _values(action, models)]
    return sorted({word for word in fitting if word.startswith(typed)})


def _values(action: argparse.Action, models: Callable[[], Iterable[str]]) -> list[str]:
    others = _DRAFTERS if action.option_strings == ["--drafter"] else ()
    named = models() if action.dest in _MODELS else ()
    return [*map(str, action.choices or ()), *others, *named]
