"""The command that names a model with a system message and options: preset create, ls, show and rm."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import EdgeSpecError, ModelError, UsageError, in_flags
from edgespec.cli.arguments import (
    add_actions,
    add_option,
    attribute_name,
    checked_name,
    model_home,
    print_result,
    stated_flags,
)
from edgespec.cli.parser import CommandParser
from edgespec.config.options import LOAD_PARAMETERS, PRESET_OPTIONS
from edgespec.system.console import info
from edgespec.system.printable import one_line
from edgespec.system.tables import read_table
from edgespec.system.text_files import explain_unreadable, read_text

if TYPE_CHECKING:
    from edgespec.config.presets import Preset, PresetFolder

_LARGEST = 1 << 20  # bytes of a file


def add_preset(parser: CommandParser) -> None:
    table = read_table(__file__, "preset.toml")
    runs = {"create": _create, "list": _list, "show": _show, "remove": _remove}
    create = add_actions(parser, table, runs)["create"]
    for name in PRESET_OPTIONS:
        add_option(create, name)
    create.show_first(*table["first"])
    parser.default_command = "list"


def _create(options: argparse.Namespace) -> None:
    home = model_home()
    presets, name = home.presets, options.name
    if presets.has(name) and not options.overwrite:
        raise UsageError(f"there is a preset '{name}' already; give another name, or replace it: --overwrite")
    if not presets.has(name):
        edgespec.Inventory(home).require_free(name)
        if (now := home.current_name(name)) != name:
            raise UsageError(
                f"'{name}' is an earlier name of the model '{now}', which chats and settings may still use; give "
                "another name"
            )
    preset = _stated(options, presets)
    _require_model_file(edgespec.split_precision(preset.model)[0])
    folder = home.find(preset.model)  # raises ModelError where nothing has that name
    path = presets.write(preset)
    if folder is None:
        is_here = os.path.exists(edgespec.split_precision(preset.model)[0])
        who, when = ("a chat or a server", "now") if is_here else ("a chat", "for a server")
        info(
            f"{who} prepares its model when it is first used; to do so {when}: {home.advice.way_to(preset.model)}"
        )
    if loading := [option for option in preset.options if option in LOAD_PARAMETERS]:
        info(
            f"{name} sets {', '.join(loading)}, so a server loads a separate copy of the model for it. With "
            "--max-models 2 it keeps both loaded; otherwise it unloads one to load the other"
        )
    if preset.tools:
        info(
            f"its tools work in edgespec chat {name} only; in Python give tools=, and to a server --mcp, or "
            "tools with each request"
        )
    print_result(options, {"name": name, "path": str(path), **preset.document()}, path)


def _require_model_file(model: str) -> None:
    """Raises UsageError: It is a file that is no model."""
    if not os.path.isfile(model):
        return
    with explain_unreadable(Path(model), "a .gguf file"), open(model, "rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf:
        raise UsageError(f"{model} is not a model; name one, or a .gguf file. A Modelfile is given with --file")


def _stated(options: argparse.Namespace, presets: "PresetFolder") -> "Preset":
    """The preset of a command line. Raises UsageError: It has what it cannot have."""
    from edgespec.config.modelfile import read_modelfile
    from edgespec.config.presets import parse_preset

    stated: dict[str, Any] = {}
    if options.file:
        with explain_unreadable(options.file, "a Modelfile"):
            text = read_text(options.file, _LARGEST)

        def check(option: dict[str, Any]) -> None:
            edgespec.check_preset(edgespec.Preset(name=options.name, model=options.name, options=option))

        stated, notes = read_modelfile(text, options.file, model_home().whole_path, check)
        for note in notes:
            info(note)
    attributes = {name: attribute_name(name) for name in PRESET_OPTIONS}
    stated |= {name: getattr(options, own) for name, own in attributes.items() if own in stated_flags(options)}
    if "drafter" in stated:
        stated["drafter"] = checked_name("drafter", stated["drafter"])
    source = options.source and (model_home().whole_path(options.source) or options.source)
    lists = {"model": source, "stop": options.stop, "think": options.think}
    stated |= {name: value for name, value in lists.items() if value is not None}
    if options.tools:
        stated["tools"] = str(options.tools.resolve())
    if options.schema:
        with explain_unreadable(options.schema, "a JSON schema"):
            stated["schema"] = read_text(options.schema, _LARGEST)
    if "model" not in stated:
        begun = f"{options.file} has no FROM" if options.file else "no model is named"
        raise UsageError(f"{begun}; give the model with --from MODEL, or in a Modelfile as FROM MODEL")
    preset = parse_preset(options.name, stated, str(options.file or "preset create"))
    edgespec.check_preset(preset)
    return preset.over(presets.find(preset.model))


def _list(options: argparse.Namespace) -> None:
    home, lines = model_home(), []
    presets = home.presets
    document: dict[str, Any] = {}
    for name in (names := presets.names()):
        try:
            preset = presets.read(name)
            document[name], said = preset.document(), _in_words(preset)
            if problem := preset_problem(home, name):
                document[name]["problem"] = problem
                said += f"\n  PROBLEM: {problem}"
        except ModelError as error:
            document[name], said = {"problem": str(error)}, f"PROBLEM: {error}"
        lines.append(f"{name:<{max(map(len, names))}}  {said}")
    none = "there are no presets; make one: edgespec preset create NAME --from MODEL"
    print_result(options, document, *(lines or [none]))


def preset_problem(home: "edgespec.ModelHome", name: str) -> str:
    """The reason why a preset cannot be used as it is now; empty where it can."""
    try:
        preset = home.presets.read(name)
        edgespec.check_preset(preset)
        model = preset.model
        return "" if home.find(model) else f"{model} is not prepared yet: {home.advice.way_to(model)}"
    except EdgeSpecError as error:
        return in_flags(str(error))


def _in_words(preset: "Preset") -> str:
    num = len(preset.messages) // 2
    shown = {"messages": f"with {num} answer{'s' * (num != 1)}", "stop": " ".join(map(repr, preset.stop))}
    stated = {name: shown.get(name, value) for name, value in preset.document().items() if name != "model"}
    return ", ".join([preset.model, *(f"{name} {one_line(str(value), 40)}" for name, value in stated.items())])


def _show(options: argparse.Namespace) -> None:
    presets = model_home().presets
    preset, path = presets.read(options.name), presets.path / f"{options.name}.toml"
    document = {"name": preset.name, "path": str(path), **preset.document()}
    print_result(options, document, read_text(path, _LARGEST).rstrip())


def _remove(options: argparse.Namespace) -> None:
    presets = model_home().presets
    for name in options.names:
        presets.require(name)
    removed = [str(presets.remove(name)) for name in dict.fromkeys(options.names)]
    print_result(options, {"removed": removed}, *(f"removed {path}" for path in removed))
