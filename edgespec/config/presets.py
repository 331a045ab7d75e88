"""Presets: a model with a system message, options and examples under a name of its user, each in a TOML file."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.config.config_file import check_value
from edgespec.config.options import LOAD_PARAMETERS, PRESET_OPTIONS, SAMPLING_OPTIONS, Value
from edgespec.errors import ModelError, UsageError
from edgespec.system.disk import explain_change, replace_file
from edgespec.system.text_files import decode_text, read_plain

_NAME = re.compile(r"\w[\w.+-]{0,95}")
_MOST_BYTES = 1 << 20
_WANTED = {"model": str, "stop": list, "think": bool, "schema": str, "tools": str, "messages": list}
_WORDS = {str: "a text", list: "a list", bool: "true or false"}
_EXAMPLE_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model by another name, and what answers are made by unless a request says otherwise.

    options: Values of PRESET_OPTIONS.
    schema: A JSON schema that answers match, as text.
    tools: A file of functions that the chat lets the model call.
    messages: Examples that come before each conversation, by role and content: a user's, and the answer to it.
    """

    name: str
    model: str
    options: Mapping[str, Value] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    think: bool | None = None
    schema: str | None = None
    tools: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()

    @property
    def system(self) -> str | None:
        found = self.options.get("system")
        return None if found is None else str(found)

    @property
    def load_arguments(self) -> dict[str, Any]:
        """Arguments of load() by their names."""
        return {LOAD_PARAMETERS[name]: value for name, value in self.options.items() if name in LOAD_PARAMETERS}

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        return {name.replace("-", "_"): self.options[name] for name in SAMPLING_OPTIONS if name in self.options}

    @property
    def answer_options(self) -> dict[str, Any]:
        """Options of an answer beside its sampling and its system message."""
        schema = self.schema and {"type": "json_schema", "schema": json.loads(self.schema)}
        found = {
            "max_tokens": None if (limit := self.options.get("max-tokens")) == -1 else limit,
            "stop": self.stop,
            "thinking": self.think,
            "response_format": schema,
        }
        return {name: value for name, value in found.items() if value not in (None, ())}

    @property
    def note_on_tools(self) -> str:
        """Where its tools hold; empty where it has none."""
        return (
            f"{self.name} has the tools of {self.tools} in edgespec chat {self.name} alone" if self.tools else ""
        )

    def over(self, base: "Preset | None") -> "Preset":
        """This preset with what it leaves open taken from another one, whose model it is then of."""
        if base is None:
            return self
        others = {
            name: getattr(self, name) or getattr(base, name) for name in ("stop", "schema", "tools", "messages")
        }
        think = base.think if self.think is None else self.think
        return replace(self, model=base.model, options={**base.options, **self.options}, think=think, **others)

    def parameters(self, suggested: Mapping[str, Value]) -> list[str]:
        """Parameters as a Modelfile names them, a line each.

        suggested: What the model's own files say, as options.
        """
        from edgespec.config.modelfile import PARAMETERS  # which reads a table

        options = {**suggested, **self.options}
        stated = [f"{name} {options[option]}" for name, option in PARAMETERS.items() if option in options]
        return [*stated, *(f"stop {json.dumps(each, ensure_ascii=False)}" for each in self.stop)]

    def modelfile(self) -> str:
        """The text of a Modelfile with the model, parameters, system message and examples; it holds no more."""
        lines = [f"FROM {self.model}", *(f"PARAMETER {each}" for each in self.parameters({}))]
        lines += [f'SYSTEM """{self.system}"""'] if self.system else []
        lines += [f'MESSAGE {each["role"]} """{each["content"]}"""' for each in self.messages]
        return "".join(f"{line}\n" for line in lines)

    def document(self) -> dict[str, Any]:
        """What its file says."""
        named = {name: getattr(self, name) for name in ("think", "schema", "tools")}
        lists = {"stop": list(self.stop), "messages": [dict(each) for each in self.messages]}
        return {
            "model": self.model,
            **self.options,
            **{name: value for name, value in named.items() if value is not None},
            **{name: value for name, value in lists.items() if value},
        }


@dataclass(frozen=True, slots=True)
class PresetFolder:
    """The presets of a model home."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / "presets"

    def names(self) -> list[str]:
        return sorted(each.stem for each in self.path.glob("*.toml") if self.has(each.stem))

    def has(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name)) and os.path.isfile(self._file(name))

    def find(self, name: str) -> Preset | None:
        """The preset of a name; None where there is none. Raises ModelError: Its file cannot be used."""
        return self.read(name) if self.has(name) else None

    def model_of(self, name: str) -> str:
        """The model of a preset; any other name is itself. Raises ModelError: The preset cannot be read."""
        return preset.model if (preset := self.find(name)) else name

    def require(self, name: str) -> None:
        """Raises ModelError: There is no preset of a name, whether or not it can be read."""
        if not self.has(name):
            known = ", ".join(self.names()) or "none"
            raise ModelError(f"there is no preset '{name[:100]}'; there are: {known}")

    def read(self, name: str) -> Preset:
        """Raises ModelError: There is no such preset, or its file cannot be used."""
        self.require(name)
        path = self._file(name)
        try:
            return parse_preset(name, tomllib.loads(decode_text(read_plain(path, _MOST_BYTES))), str(path))
        except (OSError, ValueError, RecursionError, UsageError) as error:
            what = str(error).removeprefix(f"{path}: ")
            raise ModelError(f"{path}: {what}; correct it, or remove it: edgespec preset rm {name}") from None

    def __iter__(self) -> Iterator[Preset]:
        """The presets that can be read."""
        for name in self.names():
            with suppress(ModelError):
                yield self.read(name)

    def write(self, preset: Preset) -> Path:
        """Raises EdgeSpecError: It cannot be written."""
        import tomlkit  # takes 30 ms to import

        path = self._file(preset.name)
        with explain_change(f"write {path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(path, tomlkit.dumps(preset.document()).encode(), 0o666)
        return path

    def remove(self, name: str) -> Path:
        """Raises ModelError: There is no such preset; EdgeSpecError: Its file cannot be deleted."""
        self.require(name)
        path = self._file(name)
        with explain_change(f"delete {path}"):
            path.unlink()
        return path

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.toml"


def parse_preset(name: str, stated: Mapping[str, Any], where: str) -> Preset:
    """A preset from what its file says, or a command line; raises UsageError: It has what it cannot have."""
    known = (*_WANTED, *PRESET_OPTIONS)
    if unknown := [key for key in stated if key not in known]:
        raise UsageError(f"{where}: '{unknown[0][:40]}' is unknown; known are {', '.join(known)}")
    for key, kind in _WANTED.items():
        if key in stated and not isinstance(stated[key], kind):
            raise UsageError(f"{where}: {key} is {stated[key]!r:.60}; wanted {_WORDS[kind]}")
    if not stated.get("model"):
        raise UsageError(f"{where}: it names no model; give one")
    stop: Sequence[Any] = stated.get("stop", ())
    if not all(isinstance(each, str) and each for each in stop):
        raise UsageError(f"{where}: stop is {stop!r:.60}; wanted texts")
    return Preset(
        name=name,
        model=stated["model"],
        options={key: check_value(key, stated[key], where) for key in PRESET_OPTIONS if key in stated},
        stop=tuple(stop),
        think=stated.get("think"),
        schema=_require_json(stated.get("schema"), where),
        tools=stated.get("tools"),
        messages=_require_examples(stated.get("messages", ()), where),
    )


def _require_json(schema: str | None, where: str) -> str | None:
    try:
        if schema is not None and not isinstance(json.loads(schema), dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: schema is not a JSON schema ({error}); give one as text") from None
    return schema


def _require_examples(stated: Sequence[Any], where: str) -> tuple[Mapping[str, str], ...]:
    for i, each in enumerate(stated):
        fits = isinstance(each, dict) and each.keys() == {"role", "content"}
        if not fits or not isinstance(each["content"], str) or each["role"] != _EXAMPLE_ROLES[i % 2]:
            role = each.get("role") if isinstance(each, dict) else None
            found = f"of the role {role}" if role in _EXAMPLE_ROLES else "none of user and assistant"
            raise UsageError(
                f"{where}: message {i + 1} is {found}, or has no text; wanted a message of the user "
                "and the answer of the assistant, in turn"
            )
    if len(stated) % 2:
        raise UsageError(f"{where}: the last message has no answer; give one of the assistant")
    return tuple(stated)
