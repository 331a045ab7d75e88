"""File < environment < flags, by one table."""

import argparse
import errno
import json
import os
import stat
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import platformdirs
import pytest

from edgespec.cli.main import command_parser, main
from edgespec.config.config_file import default_home, read_environment, read_file, read_settings, set_option
from edgespec.config.options import OPTIONS
from edgespec.errors import UsageError
from edgespec.system.disk import replace_file


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("EDGESPEC_CONFIG", str(path))
    return path


@cache
def actions(command: str) -> dict[str, argparse.Action]:
    (leaf, *_) = [leaf for leaf in command_parser().leaves() if leaf.get_default("command") == command]
    return {action.dest: action for action in leaf._actions}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_each_option_is_a_flag_of_its_commands_with_its_default(name: str) -> None:
    option = OPTIONS[name]
    for command in option.commands:
        action = actions(command)[name.replace("-", "_")]
        assert (action.default, tuple(action.choices or ())) == (option.default, option.choices), command


def test_flags_come_before_the_environment_and_that_before_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text('threads = 3\ndrafter = "ngram"\ntemperature = 1\n')
    monkeypatch.setenv("EDGESPEC_THREADS", "2")
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr("edgespec.cli.chat.load_engine", lambda options, **settings: seen.append(options))
    with pytest.raises(TypeError):  # nothing was loaded
        main(["chat", "m", "--prompt", "x", "--drafter", "suffix", "--verbose"])
    (options,) = seen
    assert (options.threads, options.drafter, options.temperature, options.model) == (2, "suffix", 1.0, "m")
    message = capsys.readouterr().err
    assert "default of --threads: 2 (EDGESPEC_THREADS)" in message
    assert f"default of --drafter: ngram ({path}:2)" in message


def test_color_of_the_file_sets_no_color(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    for color, variable in (("auto", ""), ("never", "1")):
        path.write_text(f'color = "{color}"\n')
        assert main(["models", "list"]) == 0
        assert os.environ["NO_COLOR"] == variable


def test_configured_model_stands_where_none_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text('model = "nothing-known"\n')
    assert main(["chat", "--prompt", "x"]) == 3
    assert "no model 'nothing-known'" in capsys.readouterr().err


def test_switch_of_the_file_is_undone_by_a_flag(path: Path) -> None:
    path.write_text("offline = true\n")
    parser = command_parser()
    leaf = parser.parse_args(["chat"]).parser
    leaf.set_defaults(offline=read_settings()["offline"].value)
    assert [parser.parse_args(["chat", *flags]).offline for flags in ([], ["--no-offline"])] == [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# mine\ntemperatur = 1\n", ":2: no option 'temperatur'; did you mean temperature?"),
        ("temp = 1\n", ":1: no option 'temp'; did you mean temperature?"),
        ('\n\nthreads = "4"\n', ":3: threads is '4'; wanted a whole number"),
        ("threads = true\n", ":1: threads is 'True'; wanted a whole number"),
        ("threads = -1\n", ":1: threads is '-1'"),
        ("offline = 1\n", ":1: offline is '1'; wanted true or false"),
        ('schedule = "best"\n', ":1: schedule is 'best'; wanted auto or serial or pipelined or hedged"),
        ("temperature = nan\n", ":1: temperature is 'nan'; wanted a number"),
        ("temperature = " + "9" * 400, ":1: temperature is"),
        ('memory = "much"\n', ":1: memory: the memory limit (--memory) is 'much'"),
        ("memory = true\n", ":1: memory is 'True'; wanted bytes"),
        ('draft-length = "long"\n', ":1: draft-length is 'long'; wanted auto"),
        ("[chat]\nseed = 1\n", ":1: no option 'chat'"),
        ("seed = \n", "not TOML: Invalid value (at line 1"),
    ],
)
def test_invalid_settings_are_refused_with_their_line(
    path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert main(["models", "list"]) == 2
    assert message in capsys.readouterr().err


def test_file_that_is_named_must_be_there(path: Path) -> None:
    with pytest.raises(UsageError, match="config set NAME VALUE creates it"):
        read_file(path)


def test_environment_sets_what_tells_of_a_machine_alone() -> None:
    found = read_environment({"EDGESPEC_MEMORY": "2G", "EDGESPEC_OFFLINE": "1", "EDGESPEC_DEVICE": ""})
    assert {name: each.value for name, each in found.items()} == {"memory": "2G", "offline": True}
    assert read_environment({"EDGESPEC_API_KEY": ""})["api-key"].value == "", "for the server to refuse"
    with pytest.raises(UsageError, match="no variable may change what is sampled"):
        read_environment({"EDGESPEC_TEMPERATURE": "1"})
    with pytest.raises(UsageError, match="EDGESPEC_THREADS: threads is 'many'"):
        read_environment({"EDGESPEC_THREADS": "many"})


VALUES = {
    "text": "a \"b\" \\ 'c' ü\t\x7f",
    "whole": "4",
    "limit": "-1",
    "number": "0.5",
    "switch": "true",
    "size": "2G",
    "length": "auto",
}


def test_every_option_that_is_set_is_read_back_and_unset_again(path: Path) -> None:
    path.write_text("# mine\n")
    for name, option in OPTIONS.items():
        value = set_option(path, name, option.choices[0] if option.choices else VALUES[option.kind])
        assert read_file(path)[name].value == value
    assert list(read_file(path)) == list(OPTIONS)
    for name in OPTIONS:
        set_option(path, name, None)
    assert path.read_text() == "# mine\n"


def test_set_changes_its_own_line_alone(path: Path) -> None:
    path.write_text("# mine\nseed = 1 # one\nthreads = 2\n")
    set_option(path, "seed", "5")
    assert path.read_text() == "# mine\nseed = 5 # one\nthreads = 2\n"
    path.write_text('system = """\nseed = 3\n"""\n[mine]\nx = 1\n')
    set_option(path, "system", "x")
    set_option(path, "seed", "4")
    assert path.read_text() == 'system = "x"\nseed = 4\n\n[mine]\nx = 1\n'
    assert list(path.parent.iterdir()) == [path]


def test_file_that_is_no_toml_is_refused_and_left_as_it_is(path: Path) -> None:
    for text in (
        "seed = \n",
        "seed = 1\nseed = 2\n",
        "[[t]]\nseed = 1\nseed = 1\n",
        "x = " + "[" * 5000,
        "seed = " + "9" * 5000,
        "\ufeff[[[",
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match="is not TOML"):
            read_file(path)
        with pytest.raises(UsageError, match="is not TOML"):
            set_option(path, "threads", "2")
        assert path.read_text() == text
    path.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UsageError, match="has more than 1 MB"):
        set_option(path, "threads", "2")


@pytest.mark.parametrize(
    "text",
    [
        '"seed" = 5\n[[t]]\nx = 1',
        "seed.x = 1\nthreads = 2\n",
        "list = [\n 1,\n # seed = 4\n 2]\n[a]\nseed = 3\n",
        't = {seed = 1}\r\n\t seed=7\r\nsystem = """\r\nseed = 3\r\n"""',
    ],
)
def test_one_option_changes_in_any_valid_file(path: Path, text: str) -> None:
    path.write_text(text)
    others = {name: value for name, value in tomllib.loads(path.read_text()).items() if name != "seed"}
    set_option(path, "seed", "42")
    assert tomllib.loads(path.read_text()) == others | {"seed": 42}
    set_option(path, "seed", None)
    assert tomllib.loads(path.read_text()) == others


def test_names_may_be_spelled_as_the_chat_spells_its_settings(path: Path) -> None:
    assert main(["config", "set", "max_tokens", "41"]) == 0
    assert path.read_text().splitlines()[-1] == "max-tokens = 41"
    assert main(["config", "unset", "max_tokens"]) == 0
    assert "max-tokens" not in path.read_text()


def test_config_says_where_each_value_comes_from(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "set", "threads", "3"]) == 0
    assert main(["config", "set", "threads", "three"]) == 2
    capsys.readouterr()
    assert main(["config", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(path)
    assert list(document["options"]) == list(OPTIONS)
    for action in ("show", "path"):  # which --json before it would not reach
        with pytest.raises(SystemExit):
            main(["config", "--json", action])
    assert "unrecognized arguments: path" in capsys.readouterr().err
    assert document["options"]["threads"] == {"value": 3, "origin": f"{path}:2"}
    assert document["options"]["seed"] == {"value": 0, "origin": "default"}
    assert main(["config", "get", "threads"]) == main(["config", "get", "overflow"]) == 0
    assert capsys.readouterr() == ("3\nerror\n", "")
    assert main(["config", "get", "drafter_threads"]) == 0
    assert capsys.readouterr() == (
        "",
        "edgespec: drafter-threads is not set: CPU threads for a drafter model (default: as many as MODEL has)\n",
    )
    assert main(["config", "unset", "threads"]) == 0
    assert main(["config"]) == 0
    assert str(path) in capsys.readouterr().out.splitlines()[0]
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{path}\n"


@pytest.mark.parametrize(
    ("text", "word"),
    [("threads = 3\nthreads = = 4\n", "is not TOML"), ('threads = 3\nsead = 4\ntemperature = "hot"\n', "sead")],
)
def test_a_broken_file_is_shown_edited_and_reset(
    path: Path,
    tmp_path: Path,
    text: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path.write_text(text)
    assert main(["config"]) == 2
    shown = capfd.readouterr()
    assert word in shown.err
    assert "config edit" in shown.err
    assert "temperature" in shown.out
    rows = [line.split() for line in shown.out.splitlines()]
    assert (["threads", "3", f"{path}:1"] in rows) == ("sead" in text)
    assert main(["config", "path"]) == 0
    monkeypatch.setenv(
        "VISUAL", f'{sys.executable} -c \'import sys; open(sys.argv[1], "w").write("threads = 4")\''
    )
    assert main(["config", "edit"]) == 0
    assert read_settings()["threads"].value == 4
    monkeypatch.setenv("VISUAL", f"{sys.executable} -c 'raise SystemExit(4)'")
    assert main(["config", "edit"]) == 2
    assert "(it ended with exit code 4); set EDITOR" in capfd.readouterr().err
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    assert main(["config", "edit"]) == 2
    assert "with '/no/such/editor' (No such file or directory); set EDITOR" in capfd.readouterr().err
    editor = tmp_path / "my editor"
    editor.write_text(f"#!{sys.executable}\nraise SystemExit(5)")
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    assert main(["config", "edit"]) == 2
    assert sys.platform == "win32" or "(it ended with exit code 5)" in capfd.readouterr().err
    path.write_text(text)
    assert main(["config", "reset"]) == 0
    assert (read_file(path), path.with_name("config.toml.bak").read_text()) == ({}, text)
    path.write_text("seed = 1")
    assert main(["config", "reset"]) == 0
    assert path.with_name("config.toml.bak1").read_text() == "seed = 1"
    assert main(["config"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs file modes, which Windows lacks")
def test_a_secret_is_for_the_owner_of_the_file_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mode() -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert main(["config", "set", "threads", "2"]) == 0
    assert mode() == 0o600
    path.chmod(0o644)
    assert main(["config", "set", "threads", "3"]) == 0
    assert mode() == 0o644, "which its owner may want"
    capsys.readouterr()
    assert main(["config", "set", "api-key", "hunter2"]) == 0
    assert (mode(), read_file(path)["api-key"].value) == (0o600, "hunter2")
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    assert f'api-key is "…" in {path}' in shown.out
    for change in (["set", "threads", "4"], ["reset"]):
        assert main(["config", *change]) == 0
        assert mode() == 0o600


def test_an_unknown_line_may_be_removed(path: Path) -> None:
    path.write_text("sead = 4\nthreads = 3\n")
    assert main(["config", "unset", "sead"]) == 0
    assert path.read_text() == "threads = 3\n"
    assert main(["config", "unset", "sead"]) == 2


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("model", "nope", 3),
        ("drafter", "suffix+nope", 3),
        ("device", "cup", 2),
        ("drafter-device", "gpx", 2),
        ("top-p", "2.0", 2),
        ("threads", "0", 2),
        ("drafter-threads", "99999", 2),
        ("context", "1", 2),
        ("draft-length", "100000", 2),
        ("learn", "a/b", 2),
        ("learn", "", 2),
        ("drafter", "", 2),
        ("model", "", 3),
        ("device", "", 2),
        ("drafter-device", "", 2),
        ("port", "99999", 2),
        ("max-models", "0", 2),
        ("max-parallel", "50", 2),
        ("idle-timeout", "-1", 2),
    ],
)
def test_what_every_command_would_refuse_is_not_stored(
    path: Path, key: str, value: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "set", key, value]) == code
    assert not path.exists()
    assert value.split("+")[-1] in capsys.readouterr().err


def test_names_that_may_be_are_stored_and_folders_by_their_whole_path(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mine", "suffix", "c++/in", "smollm2-135m"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine" / "config.json").touch()
    (tmp_path / "c++" / "one.gguf").touch()
    monkeypatch.chdir(tmp_path)
    wanted = {"model": "mine:int8", "drafter": "suffix+mine,./mine,smollm2-135m,suffix", "device": "webgpu"}
    for key, value in wanted.items():
        assert main(["config", "set", key, value]) == 0
    mine = str(tmp_path / "mine")
    drafter = f"suffix+{mine},{mine},smollm2-135m,suffix"  # a folder that is no model has the last one's name
    stored = {"model": f"{mine}:int8", "drafter": drafter, "device": "webgpu"}
    assert {key: read_settings()[key].value for key in wanted} == stored
    monkeypatch.chdir(tmp_path / "c++")
    assert main(["config", "set", "drafter", "suffix+./one.gguf"]) == 2
    assert f"would split suffix+{tmp_path}/c++/one.gguf at each + and comma" in capsys.readouterr().err
    assert main(["config", "set", "drafter", "./one.gguf"]) == 0
    assert main(["config", "set", "drafter", "suffix+./in"]) == 3
    monkeypatch.chdir(tmp_path)
    assert main(["config", "set", "model", "smollm2-360m"]) == 0
    assert main(["config", "set", "drafter", "self"]) == 0
    assert main(["config", "set", "home", "own/models"]) == 0  # which need not be there
    monkeypatch.delenv("EDGESPEC_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "mine")
    assert default_home() == tmp_path / "own" / "models"
    path.write_text('home = "beside"\n')
    assert default_home() == path.parent / "beside"
    path.write_text('home = "~nobody-here/models"\n')
    assert default_home() == path.parent / "~nobody-here" / "models"
    path.write_text('home = ""\n')
    assert default_home() == Path(platformdirs.user_data_dir("edgespec", appauthor=False))


@pytest.mark.skipif(sys.platform == "win32", reason="hides HOME and the list of users, which Windows does not use")
def test_a_user_without_a_home_folder_is_told(path: Path, tmp_path: Path) -> None:
    """HOME is not set, and the system does not know the user, as in some containers: exit code 2, no traceback."""
    program = """
import os, pwd, sys
def getpwuid(number): raise KeyError(number)
pwd.getpwuid = getpwuid
from edgespec.cli.main import main
sys.exit(main(["models", "list", "--json"]))
"""
    path.touch()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HOME", "XDG_", "EDGESPEC_"))
    }
    named = {"EDGESPEC_HOME": str(tmp_path), "EDGESPEC_CONFIG": str(path)}
    for more, code, said in (({}, 2, "set HOME"), (named, 0, "")):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment | more, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
        assert said in done.stderr
    assert not (tmp_path / "~").exists()


def test_options_that_two_commands_set_at_once_are_both_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Thread(target=set_option, args=(path, "top-k", "5"))

    def write(*given: Any) -> None:
        if other.ident is None:
            other.start()
            other.join(0.2)
        replace_file(*given)

    monkeypatch.setattr("edgespec.config.config_file.replace_file", write)
    set_option(path, "seed", "7")
    other.join()
    assert tomllib.loads(path.read_text()) == {"seed": 7, "top-k": 5}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_option_is_set_on_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr("edgespec.config.config_file.hold_lock", lacking)
    set_option(path, "seed", "7")
    assert tomllib.loads(path.read_text()) == {"seed": 7}


def test_a_full_disk_is_no_wrong_command_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("edgespec.config.config_file.replace_file", full)
    assert main(["config", "set", "seed", "1"]) == 1
    assert f"cannot write {path} (No space left on device); free some space" in capsys.readouterr().err


def test_a_later_error_names_the_line_that_set_the_value(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text('seed = 1\nmodel = "gone"\n')
    assert main(["chat", "--prompt", "hello", "--offline"]) == 3
    assert f"model is set in {path}:2" in capsys.readouterr().err
    path.write_text('model = "/gone/away.gguf"\n')
    assert main(["chat", "--prompt", "hello", "--offline"]) == 3
    assert "there is no file or folder /gone/away.gguf (seen from" in (said := capsys.readouterr().err)
    assert said.endswith(f"; check its name (model is set in {path}:1)\n")
    assert main(["chat", "other", "--prompt", "hello", "--offline"]) == 3
    assert "is set in" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "refused"),
    [("temperature = -1", "--temperature is -1.0; wanted"), ("top-p = 2.5", "--top-p is 2.5; wanted")],
)
def test_a_number_out_of_its_range_is_refused_with_the_line_that_set_it(
    path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], line: str, refused: str
) -> None:
    path.write_text(f"{line}\n")
    assert main(["chat", str(tiny_model), "--prompt", "the"]) == 2
    message = capsys.readouterr().err
    assert refused in message
    assert f"is set in {path}:1" in message


def test_home_may_be_configured(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EDGESPEC_HOME")
    path.write_text(f"home = {json.dumps(str(tmp_path / 'mine'))}\n")
    main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out)["home"]["path"] == str(tmp_path / "mine")


@pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes, which Windows lacks")
def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UsageError, match="is a pipe; put a file there"):
        read_file(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs devices of Linux")
def test_a_device_is_read_no_further_than_a_file_may_be() -> None:
    assert read_file(Path("/dev/null")) == {}
    with pytest.raises(UsageError, match="has more than 1 MB"):
        read_file(Path("/dev/zero"))
