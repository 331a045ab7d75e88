"""The command that manages models: models list, pull, show, rename, verify, remove, prune and so on."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import edgespec
from edgespec import EdgeSpecError, UsageError, in_flags
from edgespec.cli.arguments import add_actions, model_home, print_result, require_host
from edgespec.cli.parser import CommandParser
from edgespec.cli.table import table
from edgespec.system.command_line import quote
from edgespec.system.console import info
from edgespec.system.printable import one_line, printable
from edgespec.system.tables import read_table
from edgespec.system.terminal import terminal_width
from edgespec.system.units import format_bytes

_LONG_S = 1e9  # as far off as what is kept for good
_WAIT_S, _MOST_BYTES = 3.0, 1 << 20  # of an answer of a server


def add_models(parser: CommandParser) -> None:
    runs = {
        "list": _list,
        "pull": _pull,
        "show": _show,
        "ps": _loaded,
        "rename": _rename,
        "path": _path,
        "verify": _verify,
        "remove": _remove,
        "prune": _prune,
        "learned": _learned,
        "forget": _forget,
    }
    add_actions(parser, read_table(__file__, "models.toml"), runs)
    parser.default_command = "list"


def _list(options: argparse.Namespace) -> None:
    from edgespec import models

    found, downloads = models.list(), list(model_home().downloads)
    known = {model.name for model in found}
    catalogue = models.catalog()
    head = ["CAN BE PULLED", "DOWNLOAD", "MEMORY", "PRECISION", "DRAFTER", "LICENCE", "TESTED"]
    width = terminal_width(sys.stdout)
    others = [*map(_catalog_row, (each for each in catalogue if each.name not in known))]
    lines = [f"edgespec models list --all lists the {len(others)} models that can be pulled"]
    if options.all:
        lines = table(width, [], head, *others)
    head = ["TO BEGIN WITH", "ON", "MEMORY", "WHY", "DRAFTER"]
    advised = sorted((each for each in catalogue if each.machine_gb), key=lambda each: each.machine_gb)
    lines = [*table(width, [], head, *map(_advice_row, advised)), "", *lines]
    if of_ollama := [f"ollama:{name}" for name in edgespec.pulled_names()]:
        lines = [f"models of ollama, which can be used from there: {', '.join(of_ollama)}", "", *lines]
    if downloads:
        head = ["DOWNLOADED", "SIZE", "STATE"]
        note = "edgespec models prune deletes these downloads; prepared models do not need them"
        lines = [*table(width, [], head, *map(_download_row, downloads)), note, "", *lines]
    if presets := model_home().presets.names():
        lines = [f"presets (edgespec preset ls): {', '.join(presets)}", "", *lines]
    if found:
        head = ["PREPARED", "SIZE", "MEMORY", "FORM", "PRECISION", "LAST USED", "CHECK", "FROM"]
        below = [
            f"  PROBLEM: {printable(in_flags(each.problem), keep='')}" if each.problem else "" for each in found
        ]
        lines = [*table(width, below, head, *map(_row, found)), "", *lines]
    document = {
        "prepared": [asdict(model) for model in found],
        "presets": presets,
        "downloads": [asdict(download) for download in downloads],
        "ollama": of_ollama,
        "catalogue": {each.name: asdict(each) for each in catalogue},
    }
    print_result(options, document, *lines)


def _download_row(download: "edgespec.Download") -> list[str]:
    state = "not exported yet" if download.is_new else "complete" if download.is_whole else "interrupted"
    return [download.source, format_bytes(download.bytes), state]


def _row(model: "edgespec.PreparedModel") -> list[str]:
    if model.problem is not None:
        return [model.name, format_bytes(model.bytes), "", "", "", "", "", ""]
    return [
        model.name,
        format_bytes(model.bytes),
        format_bytes(model.memory_bytes or 0),
        model.form or "",
        model.precision or "",
        (model.last_used or "never")[:10],
        model.check or "not compared",
        f"{'pair of ' if model.kind == 'pair' else ''}{model.architecture}, {model.source}",
    ]


def _catalog_row(model: "edgespec.CatalogModel") -> list[str]:
    return [
        model.name,
        format_bytes(model.fetch_bytes),
        format_bytes(model.memory_bytes),
        model.precision,
        _drafters(model),
        model.license + (", gated" if model.is_gated else ""),
        model.was_run or "no",
    ]


def _advice_row(model: "edgespec.CatalogModel") -> list[str]:
    size = format_bytes(model.memory_bytes)
    return [model.name, f"{model.machine_gb} GB", size, model.reason, _drafters(model)]


def _drafters(model: "edgespec.CatalogModel") -> str:
    return ", ".join(filter(None, (model.drafter, model.head)))


def _pull(options: argparse.Namespace) -> None:
    from edgespec import models
    from edgespec.evaluation.prompts import own_prompts

    name, precision = model_home().split_name(options.model)
    wanted = {"path": (options.model, options.device, options.name)}
    if (entry := edgespec.CATALOG.get(name)) and entry.drafter and not options.no_drafter:
        wanted["drafter"] = (entry.drafter, options.drafter_device, None)
    folders = {
        part: models.pull(
            model,
            name=own_name,
            device=device,
            check=options.check,
            calibration=[each.turns[0] for each in own_prompts()] if precision == "w8a16" else None,
            offline=options.offline,
            keep_download=options.keep_download,
            report=info,
            progress=lambda at: None,  # the command shows its own
        ).path
        for part, (model, device, own_name) in wanted.items()
    }
    print_result(options, folders, *folders.values())


def _show(options: argparse.Namespace) -> None:
    from edgespec import models

    model = models.show(options.model)
    document = asdict(model)
    shown = {
        **document,
        "bytes": format_bytes(model.bytes),
        "memory_bytes": None if model.memory_bytes is None else format_bytes(model.memory_bytes),
    }
    lines = [f"{name.removesuffix('_bytes').replace('_', ' ')}: {value}" for name, value in shown.items() if value]
    print_result(options, document, *(printable(line, keep="") for line in lines))


def _loaded(options: argparse.Namespace) -> None:
    url, models = _loaded_models(options.host, options.port, options.api_key)
    head = ["LOADED", "MEMORY", "DEVICE", "CONTEXT", "CLOSES"]
    lines = table(None, [], head, *map(_loaded_row, models))
    document = {"url": url, "loaded": [each["name"].removesuffix(":latest") for each in models], "models": models}
    print_result(options, document, *(lines if models else [f"the server at {url} has loaded no model"]))


def _loaded_models(host: str, port: int, key: str | None) -> tuple[str, list[dict[str, Any]]]:
    """The address of a server, and the models that it has loaded, as ollama's API tells of them.

    Raises EdgeSpecError: No server answers there, or it refuses the key, or no header can hold that.
    """
    from http.client import HTTPException  # what no other command needs
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener

    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            "--api-key or EDGESPEC_API_KEY has a character that an HTTP header cannot contain; give the key of "
            "the server"
        )
    require_host(host)
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host).strip("[]")
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        asked, direct = Request(f"{url}/api/ps", headers=headers), build_opener(ProxyHandler({}))
        with direct.open(asked, timeout=_WAIT_S) as answer:
            found = list(json.loads(answer.read(_MOST_BYTES))["models"])
        if not all("device" in each for each in found):
            raise ValueError("another program does, such as ollama")
        return url, found
    except (URLError, OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError) and error.code == 401:
            wrong = "refuses the API key" if key else "wants a key"
            raise EdgeSpecError(f"the server at {url} {wrong}; give the key in EDGESPEC_API_KEY") from None
        why = getattr(error, "reason", error)
        why = one_line(str(getattr(why, "strerror", None) or why))
        raise EdgeSpecError(
            f"no server of edgespec answers at {url} ({why}); start one with: edgespec serve, or give the port of "
            "one that runs with --port"
        ) from None


def _loaded_row(model: dict[str, Any]) -> list[str]:
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    closes = "never" if left_s > _LONG_S else f"in {max(left_s, 0) / 60:.0f} min"
    name, size, device = model["name"].removesuffix(":latest"), format_bytes(model["size"]), model["device"]
    return [printable(name, keep=""), size, device, str(model["context_length"]), closes]


def _rename(options: argparse.Namespace) -> None:
    from edgespec import Inventory, models

    presets = [each.name for each in Inventory(model_home()).presets_of(options.model)]
    folder = models.rename(options.model, options.name).path
    if options.name == options.model:
        info(f"{options.name} has that name already; nothing was changed")
    elif presets:
        info(f"presets that use {options.name} now: {', '.join(presets)}")
    print_result(options, {"path": folder}, folder)


def _path(options: argparse.Namespace) -> None:
    folder = edgespec.Inventory(model_home()).find(options.model)
    print_result(options, {"path": str(folder)}, folder)


def _verify(options: argparse.Namespace) -> int:
    inventory = edgespec.Inventory(model_home())
    document, lines, code = {}, [], 0
    for name in options.models or [model.name for model in inventory.models()]:
        try:
            num_files, others = inventory.verify(name)
            document[name] = {"files": num_files, "others": others, "problem": None}
            extra = f"; not part of the model: {', '.join(others)}" if others else ""
            lines.append(f"{name}: {num_files} files unchanged since their export{extra}")
        except EdgeSpecError as error:
            document[name] = {"files": None, "others": None, "problem": in_flags(str(error))}
            lines.append(f"{name}: {in_flags(str(error))}")
            code = max(code, error.exit_code)
    print_result(options, document, *lines)
    return code


def _remove(options: argparse.Namespace) -> int:
    inventory = edgespec.Inventory(model_home())
    names = [*dict.fromkeys(options.models)]
    for name in names:
        inventory.require_unused(name)
    removed = [(name, *inventory.remove(name)) for name in names if options.yes or _may_remove(inventory, name)]
    lines = [
        f"removed {folder}" + (f" and its download ({format_bytes(num_bytes)})" if num_bytes else "")
        for _, folder, num_bytes in removed
    ]
    document = {
        "removed": [str(folder) for _, folder, _ in removed],
        "download_bytes": sum(num_bytes for *_, num_bytes in removed),
    }
    if removed or options.json:
        print_result(options, document, *lines)
    return int(len(removed) < len(names))


def _may_remove(inventory: "edgespec.Inventory", model: str) -> bool:
    """Ask whether to remove a model that presets need; without a terminal it stays."""
    from edgespec.chat.first_model import ask

    if not (presets := ", ".join(each.name for each in inventory.presets_of(model))):
        return True
    way = inventory.home.advice.way_to(model)
    info(f"presets of {model}, which need it: {presets}" + (f"; to get it back: {way}" if way else ""))
    show = partial(print, end="", file=sys.stderr, flush=True)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        info(f"{model} stays; to remove it without being asked: edgespec models remove {quote(model)} --yes")
        return False
    if ask("remove it? [y/N] ", sys.stdin.readline, show):
        return True
    info(f"{model} stays")
    return False


def _prune(options: argparse.Namespace) -> int:
    home = model_home()
    num_before = len([*home.downloads])
    downloads, num_bytes = edgespec.Inventory(home).prune(is_dry=options.dry_run)
    verb = "would delete" if options.dry_run else "deleted"
    lines = [f"{verb} {each.source} ({format_bytes(each.bytes)})" for each in downloads]
    lines += [f"{verb} the remains of killed exports ({format_bytes(num_bytes)})"] if num_bytes else []
    deleted = "would_delete" if options.dry_run else "deleted"
    document = {deleted: [asdict(each) for each in downloads], "export_bytes": num_bytes}
    if lines or not num_before or options.json:
        print_result(options, document, *(lines or ["there are no downloads"]))
    return int(len(downloads) < num_before)


def _learned(options: argparse.Namespace) -> None:
    inventory = edgespec.Inventory(model_home())
    names = [options.model] if options.model else [model.name for model in inventory.models()]
    found = [each for name in names for each in _learned_of(inventory, name)]
    head = ["MODEL", "NAME", "ROWS", "WITHOUT", "WITH", "IN USE SINCE", "ON TRIAL", "SIZE"]
    none = (
        f"no drafting head of {options.model} has learned from use yet"
        if options.model
        else f"no drafting head in {inventory.home.models} has learned from use yet; name a pair that lies "
        "elsewhere: edgespec models learned PAIR"
    )
    lines = table(None, [], head, *map(_learned_row, found)) if found else [none]
    print_result(options, found, *lines)


def _learned_of(inventory: "edgespec.Inventory", model: str) -> Iterator[dict[str, Any]]:
    """The files of heads that learned: shares of rows where their draft was right, and what is in use."""
    for file in edgespec.learned_files(inventory.find(model)):
        problems: list[str] = []
        learned = file.read(problems.append)
        num_rows = learned.tally.num_rows if learned else 0
        yield {
            "model": model,
            "name": file.domain,
            "path": str(file.path),
            "rows": num_rows,
            "right_without": learned.tally.num_plain / num_rows if learned and num_rows else None,
            "right_with": learned.tally.num_used / num_rows if learned and num_rows else None,
            "in_use_since": learned.changed if learned and learned.active else None,
            "is_on_trial": learned is not None and learned.candidate is not None,
            "bytes": file.path.stat().st_size,
            "problem": problems[0] if problems else None,
        }


def _learned_row(found: dict[str, Any]) -> list[str]:
    if found["problem"] is not None:
        return [found["model"], found["name"], "", "", "", "", "", f"PROBLEM: {found['problem']}"]
    shares = ["" if found[key] is None else f"{found[key]:.1%}" for key in ("right_without", "right_with")]
    since = (found["in_use_since"] or "not in use")[:10]
    trial = "yes" if found["is_on_trial"] else "no"
    return [found["model"], found["name"], str(found["rows"]), *shares, since, trial, format_bytes(found["bytes"])]


def _forget(options: argparse.Namespace) -> None:
    files = [*edgespec.learned_files(edgespec.Inventory(model_home()).find(options.model))]
    chosen = [file for file in files if options.domain in (None, file.domain)]
    if not chosen:
        learned = ", ".join(sorted({file.domain for file in files})) or "nothing"
        wanted = f"under the name '{options.domain}'" if options.domain else "from use"
        raise UsageError(f"{options.model} has learned nothing {wanted}; it has learned: {learned}")
    for file in chosen:
        file.forget()
    removed = [str(file.path) for file in chosen]
    print_result(options, {"removed": removed}, *(f"removed {path}" for path in removed))
