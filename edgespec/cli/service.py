"""The command that has the system run the server by itself: service install, start, stop, status and so on."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec import EdgeSpecError, UsageError
from edgespec.cli.arguments import (
    add_actions,
    add_mcp,
    add_model,
    attribute_name,
    checked_name,
    is_given,
    print_result,
    require_positive,
    stated_flags,
)
from edgespec.cli.parser import CommandParser
from edgespec.cli.serve import require_servable
from edgespec.config.config_file import variable_name
from edgespec.config.options import OPTIONS
from edgespec.system.command_line import join_words
from edgespec.system.console import info
from edgespec.system.disk import explain_change, replace_file
from edgespec.system.printable import HALF
from edgespec.system.tables import read_table

if TYPE_CHECKING:
    from edgespec.cli.service_manager import Command, ServiceManager

_WAIT_S = 60.0  # for a command of the system, and for the end of the server
_ASK_S = 0.2  # between two looks at the server while it ends


def add_service(parser: CommandParser) -> None:
    table = read_table(__file__, "service.toml")
    runs = {
        "install": _install,
        "start": _start,
        "stop": _stop,
        "status": _status,
        "logs": _logs,
        "uninstall": _uninstall,
    }
    install = add_actions(parser, table, runs)["install"]
    add_model(install, is_optional=True)
    add_mcp(install, "let clients list and run the tools of an MCP server")
    install.show_first(*table["first"])


def _install(options: argparse.Namespace) -> None:
    manager = _find()
    require_servable(options)
    if options.port == 0:
        raise UsageError("--port 0 takes another port at each start; give a port, or leave it out for 8080")
    content = manager.describe(_words(options), _variables(manager, has_programs=bool(options.mcp)))
    commands = [join_words(command) for command in (*manager.reset, *manager.install)]
    if options.dry_run:
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8")
        document = {"path": str(manager.path), "content": text, "commands": commands}
        print_result(options, document, f"# {manager.path}", text, "# then", *commands)
        return
    if manager.path.exists():
        raise UsageError(f"a service is installed already ({manager.path}); first: edgespec service uninstall")
    from edgespec.server.serving import open_socket, url_of

    with open_socket(options.host, options.port) as listening:  # raises where the port is in use
        url = url_of(listening)
    with explain_change(f"write {manager.path}"):
        manager.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(manager.path, content)  # for its owner alone, as it may have a key
    try:
        _try(*manager.reset)
        for command in manager.install:
            _run(command)
    except BaseException:  # Ctrl-C too: half a service is none
        try:
            with suppress(EdgeSpecError):
                _halt(manager)
            _try(*manager.uninstall)
        finally:
            manager.path.unlink(missing_ok=True)
        _try(*manager.forget)
        raise
    print_result(options, {"path": str(manager.path), "url": url}, url)
    info(f"installed {manager.path}; edgespec service status tells whether it runs, edgespec service logs why not")
    if manager.name == "systemd" and not Path("/var/lib/systemd/linger", _user()).exists():
        info(f"it ends when you log out; to keep it running: loginctl enable-linger {_user()}")


def _words(options: argparse.Namespace) -> "Command":
    """The command line of the server: absolute, since a service starts in another folder."""
    program = Path(sys.executable)
    if (windowless := program.with_name("pythonw.exe")).exists():
        program = windowless
    # -P: a folder edgespec where the service starts is not imported.
    words = [str(program), "-P", "-m", "edgespec", "serve", "--no-supervisor"]
    for name, option in OPTIONS.items():
        attribute = attribute_name(name)
        if option.is_secret or "serve" not in option.commands:
            continue
        if attribute not in stated_flags(options) and not is_given(options, name):
            continue
        value = getattr(options, attribute)
        if option.kind == "switch":
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={checked_name(name, str(value))}")
    if options.api_key and is_given(options, "api-key"):
        raise UsageError(
            "--api-key would be in a command line, which others can read; store it with: edgespec config set "
            "api-key KEY"
        )
    words += [f"--mcp={os.path.abspath(each) if os.path.exists(each) else each}" for each in options.mcp]
    return (*words, *(["--", checked_name("model", options.model)] if options.model else []))


def _variables(manager: "ServiceManager", *, has_programs: bool) -> dict[str, str]:
    """The variables that are set here, which a service does not inherit: those of edgespec, PATH for programs."""
    names = [variable_name(name) for name, option in OPTIONS.items() if option.in_environment]
    if has_programs and manager.name != "the Task Scheduler":
        names.append("PATH")
    found = {name: os.environ[name] for name in ("EDGESPEC_CONFIG", *names) if name in os.environ}
    found |= {
        name: os.path.abspath(os.path.expanduser(found[name]))
        for name in ("EDGESPEC_CONFIG", "EDGESPEC_HOME")
        if found.get(name)
    }
    if found.get("EDGESPEC_DRAFTER"):
        found["EDGESPEC_DRAFTER"] = checked_name("drafter", found["EDGESPEC_DRAFTER"])
    if broken := [name for name, value in found.items() if HALF.search(value)]:
        raise UsageError(f"{broken[0]} has bytes that are no UTF-8, which a service cannot have")
    if found and manager.name == "the Task Scheduler":
        info(f"a task sees only the variables of your account; set these with setx: {', '.join(found)}")
    return found


def _start(options: argparse.Namespace) -> None:
    manager = _installed()
    is_loaded, is_running = _state(manager) if manager.wake else (False, False)
    if not is_running:
        _try(*manager.reset)
        _run(manager.wake if is_loaded else manager.start)
    _print_done(options, "started")


def _stop(options: argparse.Namespace) -> None:
    manager = _installed()
    if not manager.wake or _state(manager)[0]:
        _halt(manager)
    _print_done(options, "stopped")


def _print_done(options: argparse.Namespace, done: str) -> None:
    print_result(options, {"done": done}, f"the server is {done}")


def _status(options: argparse.Namespace) -> int:
    manager = _find()
    is_installed = manager.path.exists()
    is_running = is_installed and _state(manager)[1]
    document = {
        "manager": manager.name,
        "path": str(manager.path),
        "installed": is_installed,
        "running": is_running,
    }
    state = "running" if is_running else "not running" if is_installed else "not installed"
    hint = "" if is_running else "; why: edgespec service logs" if is_installed else ""
    print_result(options, document, f"the server is {state} ({manager.name}, {manager.path}){hint}")
    return 0 if is_running else 1


def _logs(options: argparse.Namespace) -> int:
    require_positive(options, "lines")
    if options.json:
        raise UsageError("the log is plain text, not JSON; leave out --json")
    command = _installed().logs(options.lines, options.follow)
    try:
        # Not to file 1, which is stderr here: native libraries print to it.
        code = subprocess.call(command, stdout=sys.stdout)
    except OSError as error:
        raise EdgeSpecError(f"{command[0]} cannot be run ({error.strerror})") from None
    return max(0, code)  # below 0 where the reader has left


def _uninstall(options: argparse.Namespace) -> None:
    manager = _find() if options.dry_run else _installed()
    if options.dry_run:
        commands = [join_words(command) for command in (manager.stop, *manager.uninstall, *manager.forget)]
        document = {"path": str(manager.path), "commands": commands}
        first = len(commands) - len(manager.forget)
        print_result(options, document, *commands[:first], f"# then {manager.path} is removed", *commands[first:])
        return
    if _state(manager)[0]:
        _halt(manager)
    for command in manager.uninstall:
        _run(command)
    manager.path.unlink(missing_ok=True)
    _try(*manager.forget)
    print_result(options, {"removed": str(manager.path)}, f"removed {manager.path}")


def _find() -> "ServiceManager":
    from edgespec.cli import service_manager  # whose packages take 40 ms to import

    return service_manager.find_manager()


def _installed() -> "ServiceManager":
    """Raises UsageError: No service is installed."""
    manager = _find()
    if not manager.path.exists():
        raise UsageError(
            f"no service is installed ({manager.path} is not there); edgespec service install does that"
        )
    return manager


def _state(manager: "ServiceManager") -> tuple[bool, bool]:
    """Whether the service is loaded, and whether it runs."""
    done = _call(manager.ask)
    is_loaded = done.returncode == 0
    return is_loaded, is_loaded and manager.running in done.stdout


def _halt(manager: "ServiceManager") -> None:
    """Stop the service, and wait until it is unloaded where that takes a while.

    Raises EdgeSpecError: The command fails, or the service is loaded for too long.
    """
    _run(manager.stop, manager.ending_codes)
    deadline = time.monotonic() + _WAIT_S
    while manager.ending_codes and _state(manager)[0]:
        if time.monotonic() > deadline:
            raise EdgeSpecError(f"the server is still ending after {_WAIT_S:.0f} s; wait, and try again")
        time.sleep(_ASK_S)


def _try(*commands: "Command") -> None:
    for command in commands:
        with suppress(EdgeSpecError):
            _call(command)


def _run(command: "Command", accepted: Collection[int] = ()) -> None:
    """Raises EdgeSpecError: The command fails, with a code that is not accepted."""
    done = _call(command)
    if done.returncode and done.returncode not in accepted:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise EdgeSpecError(f"{join_words(command)} failed: {said[-1]}{_advice(done.stderr)}")


def _call(command: "Command") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_WAIT_S
        )
    except FileNotFoundError:
        raise EdgeSpecError(
            f"{command[0]} is not there, which a service needs; have this machine start `edgespec serve` in "
            "another way"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeSpecError(f"{join_words(command)} failed: {error}") from None


def _advice(said: str) -> str:
    if "to bus" not in said and "XDG_RUNTIME_DIR" not in said:
        return ""
    return (
        "; this session has no systemd of yours: log in as yourself (not by su or sudo), or have one run always: "
        f"loginctl enable-linger {_user()}, and then: export XDG_RUNTIME_DIR=/run/user/$(id -u)"
    )


def _user() -> str:
    import getpass

    return getpass.getuser()
