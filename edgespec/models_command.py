"""The command that keeps house: models list, pull, path, verify and remove."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from edgespec.arguments import add_option
from edgespec.catalog import CATALOG, CatalogEntry, HubRepository
from edgespec.errors import EdgeSpecError
from edgespec.printable import printable
from edgespec.talk import say_stage

if TYPE_CHECKING:
    from edgespec.models import Prepared


def add_models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    described = {
        "list": ("what is prepared on this machine, and the names that can be", _models_list),
        "pull": ("fetch and prepare a model, and the drafter that the catalogue has for it", _models_pull),
        "path": ("the folder of a prepared model", _models_path),
        "verify": ("compare every file with its hash, offline", _models_verify),
        "remove": ("delete a prepared model", _models_remove),
    }
    for name, (what, run) in described.items():
        action = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if name == "verify":
            action.add_argument("models", metavar="MODEL", nargs="*", help="a name or folder (default: all)")
        elif name != "list":
            action.add_argument("model", metavar="MODEL", help="a model, as for chat")
        if name == "pull":
            action.add_argument("--no-drafter", action="store_true", help="leave its drafter out")
            action.add_argument("--check", action="store_true", help="compare what is exported with its source")
            add_option(action, "offline")
        action.add_argument("--json", action="store_true", help="print one document")
        action.set_defaults(run=run)


def _models_list(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home
    from edgespec.models import prepared

    home = ModelHome(default_home(), offline=True)
    found = list(prepared(home))
    if options.json:
        catalogue = {name: _stated(entry) for name, entry in CATALOG.items()}
        print(json.dumps({"prepared": [asdict(model) for model in found], "catalogue": catalogue}))
        return 0
    if found:
        head = ["PREPARED", "SIZE", "MEMORY", "PRECISION", "LAST USED", "CHECK", "FROM"]
        print("\n".join([*_table([head, *map(_row, found)]), ""]))
    head = ["CAN BE PULLED", "TO FETCH", "MEMORY", "PRECISION", "DRAFTER", "LICENCE", "RUN SO FAR"]
    others = [name for name in CATALOG if name not in {model.name for model in found}]
    print("\n".join(_table([head, *(_catalog_row(name, CATALOG[name]) for name in others)])))
    return 0


def _stated(entry: CatalogEntry) -> dict[str, Any]:
    """An entry of the catalogue as a document."""
    from edgespec.forecast import file_bytes, memory_bytes

    source = entry.source
    at_hub = source if isinstance(source, HubRepository) else None
    return {
        "title": entry.title,
        "repository": at_hub and at_hub.repository,
        "revision": at_hub and at_hub.revision,
        "license": entry.license,
        "is_gated": entry.is_gated,
        "num_parameters": entry.num_parameters,
        "precision": entry.precision,
        "drafter": entry.drafter,
        "fetch_bytes": entry.fetch_bytes,
        "disk_bytes": file_bytes(entry),
        "memory_bytes": memory_bytes(entry),
        "was_run": entry.was_run or None,
    }


def _row(model: "Prepared") -> list[str]:
    if model.problem is not None:
        return [model.name, _size(model.bytes), "", "", "", "", f"PROBLEM: {model.problem}"]
    return [
        model.name,
        _size(model.bytes),
        _size(model.memory_bytes or 0),
        model.precision or "",
        (model.last_used or "never")[:10],
        model.check or "not compared",
        f"{'pair of ' if model.kind == 'pair' else ''}{model.architecture}, {model.source}",
    ]


def _catalog_row(name: str, entry: CatalogEntry) -> list[str]:
    from edgespec.forecast import memory_bytes

    return [
        name,
        _size(entry.fetch_bytes),
        _size(memory_bytes(entry)),
        entry.precision,
        entry.drafter or "",
        entry.license + (", gated" if entry.is_gated else ""),
        entry.was_run or "no, listed only",
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[printable(cell, keep="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _models_pull(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home, split_precision
    from edgespec.opening import open_decoder

    home = ModelHome(default_home(), options.offline, say_stage, open_decoder if options.check else None)
    entry = CATALOG.get(split_precision(options.model)[0])
    names = {"path": options.model}
    if entry is not None and entry.drafter is not None and not options.no_drafter:
        names["drafter"] = entry.drafter
    folders = {part: str(home.resolve(name)) for part, name in names.items()}
    print(json.dumps(folders) if options.json else "\n".join(folders.values()))
    return 0


def _models_path(options: argparse.Namespace) -> int:
    from edgespec.home import ModelHome, default_home
    from edgespec.models import located

    folder = located(ModelHome(default_home(), offline=True), options.model)
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
