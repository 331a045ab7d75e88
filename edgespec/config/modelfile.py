"""Modelfiles of ollama, read as what a preset says."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from edgespec.errors import UsageError

# Parameters, and the options that they are; those that a preset of edgespec cannot have say why.
_OPTIONS = {
    "temperature": ("temperature", float),
    "top_k": ("top-k", int),
    "top_p": ("top-p", float),
    "min_p": ("min-p", float),
    "seed": ("seed", int),
    "num_ctx": ("context", int),
    "num_predict": ("max-tokens", int),
    "repeat_penalty": ("repetition-penalty", float),
    "presence_penalty": ("presence-penalty", float),
    "frequency_penalty": ("frequency-penalty", float),
}
_REFUSED = {
    "TEMPLATE": "a model here has its own chat template; leave the line out",
    "ADAPTER": "merge it into a model of its own: edgespec export BASE --adapter ADAPTER --name NAME",
    "mirostat": "models here do not sample so; leave the line out",
    "typical_p": "models here do not sample so; leave the line out",
    "tfs_z": "models here do not sample so; leave the line out",
}
_IGNORED = ("LICENSE", "REQUIRES")
_WITHOUT_EFFECT = (
    *("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "num_gqa", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "repeat_last_n", "penalize_newline"),
    *("rope_frequency_base", "rope_frequency_scale", "mirostat_eta", "mirostat_tau"),
)
_LATEST = ":latest"
_QUOTED = re.compile(r'\A("""|")(.*)\1\Z', re.DOTALL)


def read_modelfile(
    text: str, path: Path, check: Callable[[dict[str, Any]], object] = lambda found: None
) -> tuple[dict[str, Any], list[str]]:
    """The content of a preset by a Modelfile, without its name, and a note on each line that has no effect.

    path: Of the Modelfile; files that it names are sought from there.
    check: Raises UsageError for an option that has a value that no preset can have.

    Raises UsageError: A line is no instruction, or one that cannot be followed.
    """
    found: dict[str, Any] = {}
    notes: list[str] = []
    for number, name, value in _instructions(text, path):
        where = f"{path}:{number}"
        if why := _REFUSED.get(name.upper()):
            raise UsageError(f"{where}: {name} is not for presets: {why}")
        match name.upper():
            case "FROM":
                beside = path.parent / Path(value).expanduser()
                is_path = beside.exists() or value.startswith((".", "~"))
                found["model"] = str(beside.resolve()) if is_path else value.removesuffix(_LATEST)
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
            case other if other in _IGNORED:
                notes.append(f"{where}: {name} has no effect")
            case _:
                raise UsageError(
                    f"{where}: '{name[:40]}' is no instruction; known are FROM, SYSTEM, PARAMETER and MESSAGE"
                )
    return found, notes


def parameter_lines(options: Mapping[str, Any], stop: Sequence[str] = ()) -> list[str]:
    """Options of a preset as a Modelfile states them, without the word before each."""
    stated = [f"{name} {options[option]}" for name, (option, _) in _OPTIONS.items() if option in options]
    return [*stated, *(f"stop {json.dumps(each, ensure_ascii=False)}" for each in stop)]


def _take_parameter(
    found: dict[str, Any], value: str, where: str, notes: list[str], check: Callable[[dict[str, Any]], object]
) -> None:
    name, text = map(_unquoted, _halves(value))
    if why := _REFUSED.get(name):
        raise UsageError(f"{where}: {name} is not for presets: {why}")
    if name == "stop":
        found.setdefault("stop", []).append(text)
    elif name in _OPTIONS:
        option, kind = _OPTIONS[name]
        try:
            number = kind(text)
        except ValueError:
            raise UsageError(
                f"{where}: {name} is '{text[:40]}'; wanted a {'whole ' if kind is int else ''}number"
            ) from None
        if not (number < 0 and name in ("num_predict", "seed")):  # which stand for no bound, and for any seed
            found[option] = number
            try:
                check({option: number})
            except UsageError as error:
                raise UsageError(f"{where}: {error}") from None
    elif name not in _WITHOUT_EFFECT:
        near = get_close_matches(name, (*_OPTIONS, "stop", *_WITHOUT_EFFECT), n=1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join((*_OPTIONS, 'stop'))}"
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
    """A text without the quotes around it."""
    found = _QUOTED.match(text)
    return found[2] if found else text
