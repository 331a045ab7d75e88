"""Functions of a file, run in a process of their own."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from until import until

from edgespec import ToolCall, ToolProcess, UsageError
from edgespec.chat.tool_box import open_functions
from edgespec.engine import tool_process
from edgespec.engine.tool_process import MAX_RESULT
from edgespec.system.line_process import LineProcess

TOOLS = '''
import os, subprocess, sys, time
from dataclasses import dataclass
from datetime import date, timedelta
from json import dumps

import neighbour

seen = []


@dataclass
class Trip:
    city: str
    day: date


def next_day(trip: Trip) -> Trip:
    """Put a trip off by a day.

    Args:
        trip: Where to, and when.
    """
    return Trip(trip.city, trip.day + timedelta(days=1))


def remember(word: str, times: int = 1) -> list[str]:
    print("I remember", word)
    os.write(1, b"below Python\\n")
    subprocess.run([sys.executable, "-c", "print('in a child')"], check=True)
    seen.extend([word] * times)
    return seen


def fail() -> None:
    raise LookupError("no such thing")


def thing() -> object:
    return object()


def halves() -> str:
    return "\\ud800" + neighbour.NAME


def long() -> str:
    return "x" * 50_000


def ask() -> str:
    return input("Your password? ")


def leave() -> None:
    sys.exit(3)


def die() -> None:
    os._exit(4)


def shout() -> None:
    print("\\n".join(f"line {i}" for i in range(10_000)))


async def later() -> str:
    return "done"


def hang() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["CHILD_FILE"], "w") as file:
        file.write(str(child.pid))
    while True:
        time.sleep(600)


def _hidden() -> None:
    pass
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "neighbour.py").write_text("NAME = 'n'\n")
    (folder / "json.py").write_text("raise ImportError('the module of the folder hides that of Python')\n")
    (folder / "random.py").write_text(TOOLS)  # as one of Python's modules is called
    return folder / "random.py"


@pytest.fixture(scope="module")
def process(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHILD_FILE", str(tmp_path_factory.mktemp("child") / "pid"))
        process = open_functions(path)
        yield process
        process.close()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=json.dumps(arguments))


def test_its_public_functions_are_tools(process: ToolProcess) -> None:
    names = [tool.name for tool in process.tools]
    assert names[:2] == ["next_day", "remember"]
    assert "_hidden" not in names
    assert "dumps" not in names  # imported
    assert "Trip" not in names
    trip = process.tools[0]
    assert trip.description == "Put a trip off by a day."
    assert trip.parameters["properties"]["trip"]["description"] == "Where to, and when."


def test_arguments_and_results_have_types(process: ToolProcess) -> None:
    result = process.run(call("next_day", trip={"city": "Rome", "day": "2026-02-28"}))
    assert json.loads(result.text) == {"city": "Rome", "day": "2026-03-01"}
    assert process.run(call("later")).text == "done"


def test_what_is_printed_is_told_apart_and_state_lasts(process: ToolProcess) -> None:
    first = process.run(call("remember", word="red"))
    assert {*first.printed.split("\n")} == {"below Python", "in a child", "I remember red", ""}
    assert json.loads(process.run(call("remember", word="blue", times="2")).text) == ["red", "blue", "blue"]
    shouted = process.run(call("shout"))
    assert shouted.text == "null"
    assert shouted.printed.endswith("line 9999\n")
    assert len(shouted.printed) < 3_000


def test_functions_print_any_text_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose code page is cp1252, as here."""
    (tmp_path / "tools.py").write_text("def say(text: str) -> None: print(text)\n")
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252:strict")
    with closing(open_functions(tmp_path / "tools.py")) as process:
        result = process.run(call("say", text="→ 世界"))
    assert (result.text, result.printed) == ("null", "→ 世界\n")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("fail", {}, "error: LookupError: no such thing (line 36 of random.py)"),
        ("thing", {}, "error: TypeError: thing gave a object, which is not JSON"),
        ("ask", {}, "error: EOFError"),
        ("leave", {}, "error: SystemExit: 3"),
        ("remember", {}, "error: ValueError: remember needs the argument 'word'"),
        ("remember", {"word": "x", "times": "often"}, "error: ValueError: the argument 'times' is wrong"),
        ("nothing", {}, "error: KeyError: 'nothing'"),
        ("die", {}, "error: die was ended, or has ended its process"),
    ],
)
def test_what_goes_wrong_is_the_result(
    process: ToolProcess, name: str, arguments: dict[str, Any], said: str
) -> None:
    result = process.run(call(name, **arguments))
    assert result.is_error
    assert result.text.startswith(said)
    assert process.run(call("later")).text == "done"


def test_arguments_that_are_no_object_are_refused(process: ToolProcess) -> None:
    for text in ("[1]", "{", "", '"x"'):
        assert process.run(ToolCall(id="1", name="later", arguments=text)).is_error


def test_odd_and_long_texts_come_safely(process: ToolProcess) -> None:
    assert process.run(call("halves")).text == "?n"
    long = process.run(call("long")).text
    assert long.startswith("x" * MAX_RESULT)
    assert long.endswith("… (cut: it has 50000 characters)")


def test_a_call_that_hangs_is_ended_with_its_children(path: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHILD_FILE", str(pid_file))
        process = open_functions(path)

    def end_once_it_hangs() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.01)
        process.end_call()

    threading.Thread(target=end_once_it_hangs).start()
    assert process.run(call("hang")).text == "error: hang was ended, or has ended its process"
    child = int(pid_file.read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    assert process.run(call("later")).text == "done"
    process.close()


def test_a_call_after_the_process_has_ended_starts_it_anew(path: Path) -> None:
    process = open_functions(path)
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.run(call("later")).text == "done"
    process.close()


@pytest.mark.slow
def test_an_interrupted_call_leaves_no_reply_for_the_next_one(path: Path) -> None:
    def interrupted(process: LineProcess, request: bytes, *_: object) -> bytes:
        assert process.stdin is not None
        process.stdin.write(request)
        process.stdin.flush()
        raise KeyboardInterrupt

    process = open_functions(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_process, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.run(call("later"))
    assert process.run(call("remember", word="red")).text == '["red"]'
    process.close()


def test_it_ends_with_its_owner(path: Path) -> None:
    process = open_functions(path)
    assert process._process is not None
    python = psutil.Process(process._process.pid)
    assert process._process.stdin is not None
    process._process.stdin.close()  # as when the owner is killed
    python.wait(60)
    process.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "has no function; wanted at least one"),
        ("def f(:\n", "cannot be run: File .* SyntaxError"),
        ("import nowhere_at_all\n", r"cannot be run: ModuleNotFoundError: .*\(line 1 of tools.py\)"),
        ("raise SystemExit(2)\n", "cannot be run: SystemExit: 2"),
        ("import os\nos._exit(1)\n", "ends the process that runs it"),
        ("__all__ = ['f']\n", "has no function 'f', which its __all__ names"),
        ("def f(*words): pass\n", r"f has the argument \*words; wanted arguments that can be given by name"),
        ("def f(x: 'Nowhere'): pass\n", "the signature of f cannot be read"),
        ("def f(): pass\ng = f\n__all__ = ['f', 'g']", "two tools named 'f'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tools.py").write_text(text)
    with pytest.raises(UsageError, match=said):
        open_functions(tmp_path / "tools.py")


def test_a_slow_start_says_what_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_process, "_SLOW_S", 0.1)
    caplog.set_level("INFO")
    (path := tmp_path / "tools.py").write_text("import time\ntime.sleep(0.2)\ndef f(): pass\n")
    process = open_functions(path)
    assert caplog.messages == [f"waiting for the tools of {path}; Ctrl-C stops it"]
    process.run(call("f"))
    process.close()
    assert len(caplog.messages) == 1


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        open_functions(tmp_path)
    (tmp_path / "tools.txt").write_text("def f(): pass")
    with pytest.raises(UsageError, match=r"is not a Python file; its name must end with \.py"):
        open_functions(tmp_path / "tools.txt")


def test_a_file_that_breaks_meanwhile_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("import os\ndef die(): os._exit(1)\n")
    process = open_functions(path)
    assert process.run(call("die")).is_error
    path.write_text("def die(: pass\n")
    assert "cannot be run" in process.run(call("die")).text
    process.close()
