"""Managers of services: systemd, launchd and the Task Scheduler, as files and commands.

Runs nothing.
"""

import ctypes
import os
import plistlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from edgespec import UsageError
from edgespec.config.config_file import default_home

Command = tuple[str, ...]

_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t"}
_SAM_COMPATIBLE = 2  # of EXTENDED_NAME_FORMAT: domain and user
_UNIT, _TASK = (Path(__file__).with_name(f"edgespec.{name}") for name in ("service", "task.xml"))


@dataclass(frozen=True, kw_only=True)
class ServiceManager:
    """How one system is told of a service.

    path: The file that describes the service.
    describe: Makes the content of this file, of the command that the service runs and the variables that it gets.
    install: Commands once the file is written; the service runs then.
    uninstall: Commands before the file is removed, once the service has stopped.
    reset: Commands before a start, for which earlier failures then do not count.
    forget: Commands once the file is removed. These and those of reset may fail.
    ask: A command that ends with 0 if the service runs, and has a certain text in its output.
    running: This text. Without it a service that ends with 0 is loaded, but does not run.
    wake: Starts a service that is loaded; none where start and stop do in any state.
    ending_codes: Exit codes of stop that are no failure: as after 0, the service is loaded until it has ended, and
        cannot be started. None where stop waits for its end.
    logs: The command that prints so many of the last lines, and goes on with new ones if it follows.
    """

    name: str
    path: Path
    describe: Callable[[Command, Mapping[str, str]], bytes]
    install: tuple[Command, ...]
    start: Command
    stop: Command
    uninstall: tuple[Command, ...]
    ask: Command
    logs: Callable[[int, bool], Command]
    reset: tuple[Command, ...] = ()
    forget: tuple[Command, ...] = ()
    running: str = ""
    wake: Command = ()
    ending_codes: tuple[int, ...] = ()


def find_manager(platform: str = sys.platform) -> ServiceManager:
    return {"win32": _task_scheduler, "darwin": _launchd}.get(platform, _systemd)()


def _systemd() -> ServiceManager:
    control, unit = ("systemctl", "--user"), "edgespec.service"
    reset = (*control, "reset-failed", unit)
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return ServiceManager(
        name="systemd",
        path=Path(folder) / "systemd" / "user" / unit,
        describe=_unit,
        install=((*control, "daemon-reload"), (*control, "enable", "--now", unit)),
        start=(*control, "start", unit),
        stop=(*control, "stop", unit),
        # --now: a service that waits for its next start is not active, and would be started all the same.
        uninstall=((*control, "disable", "--now", unit),),
        reset=(reset,),
        forget=(reset, (*control, "daemon-reload")),
        ask=(*control, "is-active", "--quiet", unit),
        logs=lambda num, follows: (
            *("journalctl", "--user", "--unit", unit, "--lines", str(num), "--no-pager"),
            *(["--follow"] if follows else []),
        ),
    )


def _unit(words: Command, environment: Mapping[str, str]) -> bytes:
    variables = (f"Environment={_in_unit(f'{name}={value}')}" for name, value in environment.items())
    # ":" has systemd leave "$" alone.
    start = f"ExecStart={' '.join(map(_in_unit, (':' + words[0], *words[1:])))}"
    return _UNIT.read_text(encoding="utf-8").replace("{service}", "\n".join([*variables, start])).encode()


def _in_unit(word: str) -> str:
    """A word of a unit file: no specifier of systemd, and whole."""
    if _PLAIN.fullmatch(word):
        return word
    return f'"{"".join(_ESCAPES.get(each, each) for each in word)}"'


def _launchd() -> ServiceManager:
    label, log = "edgespec.serve", Path.home() / "Library" / "Logs" / "edgespec.log"
    path = Path.home() / "Library" / "LaunchAgents" / f"{label}.plist"
    domain = f"gui/{os.getuid() if sys.platform != 'win32' else 0}"
    job = f"{domain}/{label}"
    # A stopped job would be restarted, since a signal is its end: so it is unloaded.
    begin, end = ("launchctl", "bootstrap", domain, str(path)), ("launchctl", "bootout", job)

    def describe(words: Command, environment: Mapping[str, str]) -> bytes:
        return plistlib.dumps(
            {
                "Label": label,
                "ProgramArguments": _with_log(words, log),
                "EnvironmentVariables": dict(environment),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": 30,
                "ExitTimeOut": 30,
                "ProcessType": "Interactive",  # others are slowed down
                "StandardOutPath": str(log),
                "StandardErrorPath": str(log),
            }
        )

    return ServiceManager(
        name="launchd",
        path=path,
        describe=describe,
        install=(begin,),
        start=begin,
        stop=end,
        uninstall=(),
        ask=("launchctl", "print", job),
        running="state = running",
        wake=("launchctl", "kickstart", job),
        ending_codes=(36, 37),  # EINPROGRESS and EALREADY of macOS
        logs=lambda num, follows: ("tail", "-n", str(num), *(["-F"] if follows else []), str(log)),
    )


def _task_scheduler() -> ServiceManager:
    task, log = ("/TN", "edgespec"), default_home() / "service.log"
    path = default_home() / "service.xml"
    shell = ("powershell", "-NoProfile", "-Command")
    quoted = str(log).replace("'", "''")
    running = "exit [int]((Get-ScheduledTask -TaskName edgespec -ErrorAction Stop).State -ne 'Running')"
    return ServiceManager(
        name="the Task Scheduler",
        path=path,
        describe=lambda words, environment: _task(_with_log(words, log)),
        install=(("schtasks", "/Create", *task, "/XML", str(path), "/F"), ("schtasks", "/Run", *task)),
        start=("schtasks", "/Run", *task),
        stop=("schtasks", "/End", *task),
        uninstall=(("schtasks", "/Delete", *task, "/F"),),
        ask=(*shell, running),
        logs=lambda num, follows: (
            *shell,
            f"Get-Content -LiteralPath '{quoted}' -Encoding UTF8 -Tail {num}{' -Wait' if follows else ''}",
        ),
    )


def _with_log(words: Command, log: Path) -> list[str]:
    # Right behind the command, as what follows a -- would be no option.
    behind = words.index("serve") + 1
    return [*words[:behind], "--log", str(log), *words[behind:]]


def _task(words: list[str]) -> bytes:
    """Raises UsageError: A word has what the Task Scheduler would replace, and cannot be written otherwise."""
    for word in words:
        if "%" in word or "$(" in word:
            raise UsageError(f"the Task Scheduler replaces % and $( in '{word}'; use a name or folder without it")
    # Without a user the trigger is the logon of anybody, which administrators alone may register.
    named = {"user": _account(), "command": words[0], "arguments": subprocess.list2cmdline(words[1:])}
    return (
        _TASK.read_text(encoding="utf-8")
        .format_map({name: escape(text) for name, text in named.items()})
        .encode("utf-16")
    )


def _account() -> str:
    """The user of this process, with the domain: over ssh the variable for that may have the workgroup.

    Raises UsageError: Windows does not say.
    """
    name, size = ctypes.create_unicode_buffer(512), ctypes.c_ulong(512)
    if sys.platform == "win32":
        ctypes.WinDLL("secur32").GetUserNameExW(_SAM_COMPATIBLE, name, ctypes.byref(size))
        if not name.value:
            raise UsageError(
                "Windows names no account for this session; log on as the service's user, and try again"
            )
    return name.value
