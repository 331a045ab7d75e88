"""The command that keeps house: models list, pull, verify and remove."""

import argparse
import json
from dataclasses import asdict

from edgespec.catalog import CATALOG
from edgespec.errors import EdgeSpecError
from edgespec.talk import say_stage


def add_models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    described = {
        "list": ("what is prepared on this machine, and the names that can be", _models_list),
        "pull": ("fetch and prepare a model", _models_pull),
        "verify": ("compare every file with its hash, offline", _models_verify),
        "remove": ("delete a prepared model", _models_remove),
    }
    for name, (what, run) in described.items():
        action = actions.add_parser(name, help=what)
        if name == "verify":
            action.add_argument("models", metavar="MODEL", nargs="*", help="a name or folder (default: all)")
        elif name != "list":
            action.add_argument("model", metavar="MODEL", help="a model, as for chat")
        action.add_argument("--json", action="store_true", help="print one document")
        action.set_defaults(run=run)


def _models_list(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home
    from edgespec.models import not_prepared, prepared

    home = ModelHome(default_home(), offline=True)
    found = list(prepared(home))
    if options.json:
        print(json.dumps({"prepared": [asdict(model) for model in found], "catalogue": list(CATALOG)}))
        return 0
    for model in found:
        kind = "pair of " if model.kind == "pair" else ""
        about = (
            model.problem
            if model.problem is not None
            else f"{kind}{model.architecture}, {model.precision}, from {model.source}"
        )
        print(f"{model.name}  {model.bytes / 1e6:.0f} MB  {about}")
    for name in not_prepared(home):
        print(f"{name}  {CATALOG[name].bytes / 1e6:.0f} MB to fetch  {CATALOG[name].title}")
    return 0


def _models_pull(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home

    folder = ModelHome(default_home(), report=say_stage).resolve(options.model)
    print(json.dumps({"path": str(folder)}) if options.json else folder)
    return 0


def _models_verify(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home
    from edgespec.models import prepared, verify

    home = ModelHome(default_home(), offline=True)
    names = options.models or [model.name for model in prepared(home)]
    document, lines, code = {}, [], 0
    for name in names:
        try:
            num_files, others = verify(home, name)
            document[name] = {"files": num_files, "others": others, "problem": None}
            besides = f"; not part of it: {', '.join(others)}" if others else ""
            lines.append(f"{name}: {num_files} files as they were exported{besides}")
        except EdgeSpecError as error:
            document[name] = {"files": None, "others": None, "problem": str(error)}
            lines.append(f"{name}: {error}")
            code = max(code, error.exit_code)
    print(json.dumps(document) if options.json else "\n".join(lines))
    return code


def _models_remove(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home
    from edgespec.models import remove

    folder = remove(ModelHome(default_home(), offline=True), options.model)
    print(json.dumps({"removed": str(folder)}) if options.json else f"removed {folder}")
    return 0
