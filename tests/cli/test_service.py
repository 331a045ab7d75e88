"""edgespec service, with an imitated systemctl, and what is written for each system."""

import ctypes
import json
import os
import plistlib
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgespec import UsageError
from edgespec.cli import serve, service_manager
from edgespec.cli.main import command_parser, main
from edgespec.cli.service_manager import ServiceManager, find_manager

ODD = ("/opt/a b/python", "serve", "--x=%n $HOME \"q\" 'a' \\ ü", "tab\there", ";", "<&>")
TASKS = "http://schemas.microsoft.com/windows/2004/02/mit/task"
NO_BUS = "Failed to connect to bus: No medium found"


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("EDGESPEC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "a home"))
    monkeypatch.setattr(service_manager, "find_manager", lambda: find_manager("linux"))


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """A systemctl that notes what it is asked, and fails at the word that the variable FAILS names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "journalctl"):
        (folder / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> "{folder}/log"\n'
            f'case "$*" in *"${{FAILS:-nothing}}"*) echo "{NO_BUS}" >&2; exit 1;; esac\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return lambda: (folder / "log").read_text().splitlines()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def unit_words(unit: str) -> list[str]:
    """The words of ExecStart, as systemd reads them."""
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    words, rest = [], line.removeprefix("ExecStart=")
    while rest := rest.lstrip(" "):
        if rest[0] != '"':
            word, _, rest = rest.partition(" ")
        else:
            end = next(i for i in range(1, len(rest)) if rest[i] == '"' and not ends_with_escape(rest[:i]))
            word, rest = rest[1:end], rest[end + 1 :]
            word = word.replace("\\t", "\t").replace('\\"', '"').replace("\\\\", "\\")
        words.append(word.replace("%%", "%"))
    return words


def ends_with_escape(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


needs_shell = pytest.mark.skipif(sys.platform == "win32", reason="the imitated systemctl is a shell script")


@needs_shell
def test_a_service_is_installed_asked_and_removed(
    systemctl: Callable[[], list[str]],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    path = tmp_path / "settings" / "systemd" / "user" / "edgespec.service"
    assert main(["service", "status"]) == 1
    stated = ["--port", str(port), "--no-web", "--drafter", "auto"]  # which comes before that of a preset
    assert main(["service", "install", os.path.relpath(tiny_model), *stated]) == 0
    said = capfd.readouterr()
    assert f"http://127.0.0.1:{port}/v1" in said.out
    assert "loginctl enable-linger" in said.err
    assert path.stat().st_mode & 0o777 == 0o600
    unit = path.read_text()
    assert f'Environment="EDGESPEC_HOME={tmp_path / "a home"}"' in unit
    reset = "systemctl --user reset-failed edgespec.service"  # else systemd refuses a start after ten failures
    assert systemctl() == [
        reset,
        "systemctl --user daemon-reload",
        "systemctl --user enable --now edgespec.service",
    ]

    words = unit_words(unit)
    assert words[:4] == [f":{sys.executable}", "-P", "-m", "edgespec"]
    assert "--drafter=auto" in words
    started = command_parser().parse_args(words[4:])
    assert (started.command, started.model) == ("serve", str(tiny_model))
    assert (started.port, started.no_web, started.no_supervisor) == (port, True, True)

    assert main(["service", "install", "--port", str(port)]) == 2
    assert "edgespec service uninstall" in capfd.readouterr().err
    assert main(["service", "status", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["running"]
    for action in (["stop"], ["start"], ["logs", "--lines", "3"]):
        assert main(["service", *action]) == 0
    monkeypatch.setenv("FAILS", "is-active")  # as while it waits for its next start
    assert main(["service", "uninstall"]) == 0
    assert systemctl()[4:] == [
        "systemctl --user stop edgespec.service",
        reset,
        "systemctl --user start edgespec.service",
        "journalctl --user --unit edgespec.service --lines 3 --no-pager",
        "systemctl --user is-active --quiet edgespec.service",
        "systemctl --user disable --now edgespec.service",
        reset,
        "systemctl --user daemon-reload",
    ]
    assert not path.exists()
    monkeypatch.setenv("FAILS", "reset-failed")  # as where nothing has failed
    for action in (["install", "--port", str(port)], ["start"], ["uninstall"]):
        assert main(["service", *action]) == 0
    capfd.readouterr()
    assert main(["service", "stop"]) == 2
    assert "edgespec service install" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the imitated journalctl is that of systemd")
def test_the_log_goes_where_stdout_goes(
    systemctl: Callable[[], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = tmp_path / "settings" / "systemd" / "user" / "edgespec.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    (tmp_path / "bin" / "journalctl").write_text("#!/bin/sh\necho served\n")
    done = subprocess.run([sys.executable, "-m", "edgespec", "service", "logs"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", "")
    assert main(["service", "logs", "--json"]) == 2
    assert "leave out --json" in capsys.readouterr().err


@needs_shell
@pytest.mark.parametrize("fails", ["daemon-reload", "enable"])
def test_a_session_without_systemd_leaves_nothing_and_says_what_to_do(
    systemctl: Callable[[], list[str]],
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS", fails)
    assert main(["service", "install", "--port", str(free_port())]) == 1
    said = capsys.readouterr().err
    assert NO_BUS in said
    assert "loginctl enable-linger" in said
    assert not (tmp_path / "settings" / "systemd" / "user" / "edgespec.service").exists()
    assert systemctl()[-4:] == [
        "systemctl --user stop edgespec.service",
        "systemctl --user disable --now edgespec.service",
        "systemctl --user reset-failed edgespec.service",
        "systemctl --user daemon-reload",
    ]


@needs_shell
def test_launchd_is_asked_for_the_state_before_and_after_it_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, tool = tmp_path / "state", tmp_path / "launchctl"
    tool.write_text(
        f'#!/bin/sh\nstate=$(cat "{state}")\n'
        'case "$1 $state" in\n'
        f'"bootstrap none"|kickstart*waiting) echo running > "{state}";;\n'
        f'"bootout running"|"bootout waiting") echo ending > "{state}"; [ $state = waiting ] || exit 36;;\n'
        '"print running"|"print waiting") echo "state = $state";;\n'
        f'"print ending") echo "state = running"; echo none > "{state}";;\n'
        "*) exit 5;;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    manager = find_manager("darwin")
    monkeypatch.setattr(service_manager, "find_manager", lambda: manager)
    state.write_text("none\n")
    assert main(["service", "install", "--port", str(free_port())]) == 0
    for before, action, code, then in [
        ("running", "start", 0, "running"),
        ("waiting", "status", 1, "waiting"),
        ("waiting", "start", 0, "running"),
        ("running", "status", 0, "running"),
        ("waiting", "stop", 0, "none"),
        ("none", "stop", 0, "none"),
        ("running", "stop", 0, "none"),
        ("none", "start", 0, "running"),
        ("waiting", "uninstall", 0, "none"),
    ]:
        state.write_text(f"{before}\n")
        assert (before, action, main(["service", action])) == (before, action, code)
        assert state.read_text() == f"{then}\n"
    assert not manager.path.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--port", "0"], 2, "give a port"),
        (["--port", "70000"], 2, "--port is 70000"),
        (["no-such-model"], 3, "no model 'no-such-model'"),
        (["--device", "nothing"], 2, "nothing"),
        (["--api-key", "s3cret"], 2, "edgespec config set api-key"),
        (["--host", "0.0.0.0"], 2, "key"),
    ],
)
def test_what_would_not_run_is_not_installed(
    arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", *arguments]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "settings").exists()


def test_help_offers_no_key_as_install_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["service", "install", "--help"])
    assert "--api-key" not in capsys.readouterr().out


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["service", "install", "--port", str(port)]) == 1
    assert f"cannot listen on port {port}" in capsys.readouterr().err
    assert not (tmp_path / "settings").exists()


def test_a_machine_without_systemd_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["service", "install", "--port", str(free_port())]) == 1
    assert "systemctl is not there" in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_dry_run_shows_file_and_commands_and_changes_nothing(
    platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = find_manager(platform)
    monkeypatch.setattr(service_manager, "find_manager", lambda: manager)
    monkeypatch.setenv("EDGESPEC_API_KEY", "k")
    for action in ("install", "uninstall"):
        assert main(["service", action, "--dry-run", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["path"] == str(manager.path)
        assert document["commands"]
        assert action == "uninstall" or "edgespec" in document["content"]
        assert [each.name for each in tmp_path.iterdir()] == []


def test_a_task_of_windows_is_a_command_that_serve_takes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = find_manager("win32")
    monkeypatch.setattr(service_manager, "find_manager", lambda: manager)
    assert main(["service", "install", str(tiny_model), "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["commands"][0].endswith(" /F")  # over what an install that was killed has left
    written = next(each.text for each in ElementTree.fromstring(document["content"]).iter() if "Arg" in each.tag)
    started = command_parser().parse_args(shlex.split(written or "")[3:])
    assert (started.command, started.model) == ("serve", str(tiny_model))
    assert str(started.log) == str(manager.path.with_name("service.log"))


def test_a_task_of_windows_is_for_its_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Secur32:
        def __init__(self, name: str) -> None: ...
        def GetUserNameExW(self, kind: int, name: Any, size: object) -> int:
            name.value = account
            return bool(account)

    account, manager = r"DESK\Ann Lee", find_manager("win32")
    monkeypatch.setenv("USERDOMAIN", "WORKGROUP")  # as OpenSSH has it
    monkeypatch.setenv("USERNAME", "Ann Lee")
    monkeypatch.setattr(ctypes, "WinDLL", Secur32, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    root = ElementTree.fromstring(content(manager, (*ODD[:1], "serve")))
    users = {path: root.findtext(path, None, {"": TASKS}) for path in ("Triggers//UserId", "Principals//UserId")}
    assert users == dict.fromkeys(users, account)  # otherwise only an administrator may register it
    account = ""
    with pytest.raises(UsageError, match="names no account"):
        content(manager, (ODD[0], "serve"))


def test_a_drafter_of_the_environment_is_written_as_a_whole_path(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    monkeypatch.setenv("EDGESPEC_DRAFTER", f"./{tiny_model.name}")
    assert main(["service", "install", str(tiny_model), "--dry-run"]) == 0
    assert f"EDGESPEC_DRAFTER={tiny_model}" in capsys.readouterr().out


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_service_finds_the_programs_of_mcp_servers_where_its_user_has_them(
    platform: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service_manager, "find_manager", partial(find_manager, platform))
    monkeypatch.setenv("PATH", "/opt/homebrew/bin:/usr/bin")  # launchd has /usr/bin:/bin:/usr/sbin:/sbin
    for options in ([], ["--mcp", "uvx mcp-server-time"]):
        assert main(["service", "install", "--dry-run", *options]) == 0
        assert ("/opt/homebrew/bin:/usr/bin" in capsys.readouterr().out) == bool(options)
    monkeypatch.setenv("PATH", "/caf\udce9:/usr/bin")
    assert main(["service", "install", "--dry-run", "--mcp", "uvx mcp-server-time"]) == 2
    assert "PATH has bytes that are no UTF-8" in capsys.readouterr().err


def content(manager: ServiceManager, words: tuple[str, ...]) -> bytes:
    return manager.describe(words, {"EDGESPEC_HOME": "/a b/100%"})


def test_odd_words_reach_each_system_whole() -> None:
    unit = content(find_manager("linux"), ODD).decode()
    assert unit_words(unit) == [f":{ODD[0]}", *ODD[1:]]
    assert 'Environment="EDGESPEC_HOME=/a b/100%%"' in unit
    listed = plistlib.loads(content(find_manager("darwin"), ODD))
    assert listed["ProgramArguments"] == [*ODD[:2], "--log", listed["StandardErrorPath"], *ODD[2:]]
    assert listed["EnvironmentVariables"] == {"EDGESPEC_HOME": "/a b/100%"}
    assert listed["ProcessType"] == "Interactive"  # macOS slows jobs of other types down
    task = find_manager("win32")
    with pytest.raises(Exception, match="replaces %"):
        content(task, ODD)
    root = ElementTree.fromstring(content(task, (ODD[0], "serve", 'a "b" <&>', "ü")))
    found = {each.tag.rpartition("}")[2]: each.text for each in root.iter()}
    assert found["Command"] == ODD[0]
    assert (found["Arguments"] or "").startswith("serve --log ")
    assert (found["Arguments"] or "").endswith(' "a \\"b\\" <&>" ü')
    assert found["ExecutionTimeLimit"] == "PT0S"
    assert found["Priority"] == "4"  # 7 where none is stated, below that of programs


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze on the PATH")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "edgespec.service"
    path.write_bytes(content(find_manager("linux"), (sys.executable, *ODD[1:])))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if path.name in line]) == (0, [])


@pytest.mark.slow
def test_messages_of_the_server_go_to_a_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    command = [sys.executable, "-P", "-m", "edgespec", "serve", "--no-supervisor", "nothing", "--port", "0"]
    done = subprocess.run([*command, "--log", str(log)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert log.read_text().startswith("before\nedgespec: no model 'nothing'")


def test_a_large_log_is_renamed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_LARGE_BYTES", 7)
    monkeypatch.setattr(os, "dup2", lambda *files: None)
    log = tmp_path / "serve.log"
    for written, found in (("", ""), ("before\n", "before\n"), ("and more\n", "")):
        log.write_text(written)
        serve._write_messages_to(log)
        assert log.read_text() == found
    assert (tmp_path / "serve.log.old").read_text() == "and more\n"
