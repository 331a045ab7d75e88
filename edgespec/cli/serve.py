"""The command that answers programs over HTTP, by OpenAI's API and ollama's."""

import argparse
import os
import sys
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import EdgeSpecError, UsageError
from edgespec.cli.arguments import (
    add_flags,
    add_mcp,
    add_model,
    add_options,
    load_any_engine,
    model_home,
    print_result,
    require_host,
    require_positive,
)
from edgespec.cli.parser import CommandParser
from edgespec.cli.preset import preset_problem
from edgespec.config.drafter_names import parse
from edgespec.config.options import MAX_ANSWERS
from edgespec.system.console import info
from edgespec.system.disk import open_read

if TYPE_CHECKING:
    from edgespec.server.model_names import ModelNames

_LARGE_BYTES = 16 << 20  # of a log


def add_serve(parser: CommandParser) -> None:
    add_model(parser, is_optional=True)
    add_options(parser)
    add_mcp(parser, "let clients list and run the tools of an MCP server")
    log = "write messages to the end of FILE, and none to the terminal; one above 16 MB is renamed to FILE.old"
    add_flags(parser, {"--log": {"kind": "file", "help": log}})
    parser.show_first(
        *("--host", "--port", "--api-key", "--allow-origin", "--no-web", "--max-models", "--max-parallel"),
        *("--idle-timeout", "--max-tokens", "--drafter", "--device", "--memory", "--offline"),
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    require_servable(options)
    if options.log:
        _write_messages_to(options.log)
        options.note("log", str(options.log.absolute()))
    import asyncio

    from edgespec.server.answers import Services
    from edgespec.server.app import make_app
    from edgespec.server.kept_prefixes import KeptPrefixes
    from edgespec.server.limits import Limits
    from edgespec.server.model_host import ModelHost
    from edgespec.server.model_names import ModelNames
    from edgespec.server.security import parse_origins
    from edgespec.server.serving import make_server, open_socket, run_server, url_of, within_open_files

    origins = parse_origins(options.allow_origin)
    limits = within_open_files(Limits(num_tokens=None if options.max_tokens == -1 else options.max_tokens))
    names = ModelNames(model_home(), options.model, options.context)
    if names.own_name is None and parse(options.drafter).cascades:
        info(f"the drafter '{options.drafter}' is not used: a model drafts only for the MODEL given to serve")
    with ExitStack() as opened:
        listening = opened.enter_context(open_socket(options.host, options.port))
        servers = edgespec.McpServers(*options.mcp, allow="all", report=info) if options.mcp else None
        tools = opened.enter_context(servers).tools if servers else ()
        first = None
        if names.own_name is not None:
            own, _ = names.loaded_as(names.own_name)
            first = own, load_any_engine(options, model=names.source(own))
        host = ModelHost(
            partial(_open_engine, options, names),
            options.max_models,
            options.idle_timeout or None,
            _is_memory_short,
            prefixes=KeptPrefixes(edgespec.default_home() / "prefixes") if options.keep_prefix else None,
        )
        services = Services(limits, names, host, tools)
        url = url_of(listening)

        def tell() -> None:
            served = names.names()
            print_result(options, {"url": url, "models": served}, url)
            sys.stdout.flush()  # a program may wait for it
            page = "" if options.no_web else f"; chat page at {url.removesuffix('/v1')}"
            info(f"serving {', '.join(served) or 'no model: none is prepared'}{page}; Ctrl-C ends the server")
            _tell_of_unusable(names)

        app = make_app(services, options.host, options.api_key, origins, has_page=not options.no_web)
        server = make_server(app, services, tell)
        return asyncio.run(run_server(server, listening, services, first))


def _tell_of_unusable(names: "ModelNames") -> None:
    """Name the models and presets that clients cannot use, or not as they are in a chat or at once."""
    for name, problem in names.damages().items():
        info(f"the model '{name}' cannot be used: {problem}")
    home, later = names.home, {preset.name for preset in names.unprepared()}
    for name in home.presets.names():
        if name in later:
            way = home.advice.way_to(home.presets.read(name).model)
            info(f"the model of the preset '{name}' is prepared at its first request; to prepare it now: {way}")
        elif problem := preset_problem(home, name):
            what = f"the preset '{name}'"
            info(f"{what} cannot be used: {problem.removeprefix(f'{what}: ')}")
        elif tools := home.presets.read(name).tools:
            info(f"the preset '{name}' is served without its tools ({tools}), which only edgespec chat runs")


def require_servable(options: argparse.Namespace) -> None:
    """Raises EdgeSpecError: The packages of the server are missing, or an option has an impossible value."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise EdgeSpecError(
            f"serve lacks the package {' and '.join(missing)}; install what it needs with: "
            'pip install "edgespec[serve]"'
        )
    from edgespec.server.security import parse_origins, require_key_on_network

    require_bounds(options)
    require_key_on_network(options.host, options.api_key)
    parse_origins(options.allow_origin)


def require_bounds(options: argparse.Namespace) -> None:
    """Raises UsageError: A number of the server's options is one that it cannot have."""
    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port is {options.port}; wanted 0 to 65535")
    require_host(options.host)
    require_positive(options, "max-models")
    if options.max_parallel is not None and not 1 <= options.max_parallel <= MAX_ANSWERS:
        raise UsageError(f"--max-parallel is {options.max_parallel}; wanted 1 to {MAX_ANSWERS}")
    if not 0 <= options.idle_timeout < 1e9:
        raise UsageError(f"--idle-timeout is {options.idle_timeout}; wanted seconds, or 0 to keep models")


def _write_messages_to(path: Path) -> None:
    """Have stderr, also that of native code, go to the end of a file, or of a new one where that is large.

    Raises UsageError: It cannot be written.
    """
    with suppress(OSError):  # there is none yet, or Windows does not rename it while it is read
        if path.stat().st_size > _LARGE_BYTES:
            path.replace(f"{path}.old")
    try:
        with open(path, "ab", opener=open_read) as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror})") from None


def _open_engine(options: argparse.Namespace, names: "ModelNames", name: str) -> "edgespec.Engine":
    """Load a model that a client named. It is prepared, or lies here: nothing is downloaded for a request."""
    is_own = names.own_name is not None and name == names.loaded_as(names.own_name)[0]
    settings: dict[str, Any] = {"model": names.source(name), "offline": True}
    if not is_own and parse(options.drafter).cascades:  # which are for the own model
        preset = names.home.presets.find(name)
        settings["drafter"] = preset.load_arguments.get("drafter", "auto") if preset else "auto"
    return load_any_engine(options, **settings)


def _is_memory_short() -> bool:
    found = edgespec.free_memory()
    return found.free_bytes < found.reserve.floor_bytes
