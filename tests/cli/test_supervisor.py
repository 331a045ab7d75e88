"""Commands in a worker: what a shell sees of one that crashes, is killed or is stopped."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from terminal import latest_chat

from edgespec.cli import supervisor
from edgespec.cli.supervisor import supervised_command
from edgespec.cli.worker import WorkerDeath, note_line
from edgespec.engine.transcript import Transcript

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="needs POSIX signals and terminals, which Windows lacks"
)
_WAIT_S = 120

# A command that has begun, and does not end by itself. Its worker runs the whole program too.
PROGRAM = """
import os, signal, sys, time
from edgespec.cli import main, supervisor, worker

def work(prepare):
    import argparse
    options = argparse.Namespace()
    prepare(options)
    options.note("chat", "begun")
    options.note("transcript", "a b")
    if sys.argv[1:]:
        options.note("log", sys.argv[1])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(os.getpid(), flush=True)
    time.sleep(60)
    return 0

main.main = work
if supervisor.WORKER in os.environ:
    sys.exit(worker.run_worker())
ended = supervisor._watch("bench", "")
print(ended if isinstance(ended, int) else (ended.status, ended.note("chat"), ended.note("transcript")))
"""


# The command with passes of 5 ms at least, so that there is time to end its answer.
UNHURRIED = """
import os, sys, time
from edgespec.cli.supervisor import WORKER
if WORKER in os.environ or "--no-supervisor" in sys.argv:
    from edgespec.runtimes.passes import Passes
    run = Passes.run
    def slowly(self, *arguments, **named):
        time.sleep(0.005)
        return run(self, *arguments, **named)
    Passes.run = slowly
"""
MAIN = "from edgespec.__main__ import main\nsys.exit(main())"


def started(*arguments: object, program: str | None = None, home: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "edgespec"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **({"EDGESPEC_HOME": str(home), "TMPDIR": str(home)} if home else {})},
    )


def worker_of(number: int) -> psutil.Process:
    """The one process below another."""
    deadline = time.monotonic() + _WAIT_S
    while not (children := psutil.Process(number).children()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return children[0]


def said_in(home: Path) -> list[str]:
    """By the user, in the conversation that was kept last."""
    return _said_in(home, "user")


def answered_in(home: Path) -> list[str]:
    return _said_in(home, "assistant")


def _said_in(home: Path, role: str) -> list[str]:
    path = latest_chat(home / "chats")
    return [each.content for each in Transcript.read(path).messages if each.role == role] if path else []


def death(name: str, *, written: str = "", is_out_of_memory: bool = False) -> WorkerDeath:
    return WorkerDeath(status=-getattr(signal, name), is_out_of_memory=is_out_of_memory, written=written)


@pytest.mark.parametrize(
    ("name", "is_out_of_memory", "code", "words"),
    [
        ("SIGSEGV", False, 1, "crashed (SIGSEGV, segmentation fault): a defect of native code"),
        ("SIGABRT", True, 1, "crashed (SIGABRT, "),
        ("SIGBUS", False, 1, "cut short, or its disk fails; edgespec models verify MODEL"),
        ("SIGKILL", True, 5, "with --memory, and export --no-check takes less"),
        ("SIGKILL", False, 137, "was killed (SIGKILL)"),
    ],
)
def test_each_death_has_its_words_and_exit_code(name: str, is_out_of_memory: bool, code: int, words: str) -> None:
    found = death(name, is_out_of_memory=is_out_of_memory)
    assert found.exit_code == code
    assert words in found.message()
    assert death("SIGTERM").cause is None


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (0xC0000005, 1, "the worker crashed (0xC0000005): a defect"),
        (0xC0000006, 1, "the worker crashed (0xC0000006): most likely a file"),
        (0xC000013A, 130, None),  # Ctrl-C before Python takes it
    ],
)
def test_each_death_on_windows_has_its_words_and_exit_code(status: int, code: int, words: str | None) -> None:
    found = WorkerDeath(status=status, is_out_of_memory=False, written="")
    assert (found.exit_code, found.cause) == (code, words and "crash")
    assert words is None or words in found.message()


def test_what_a_worker_wrote_is_read_back_and_kept_for_a_report(tmp_path: Path) -> None:
    notes = (note_line("chat", "begun") + note_line("transcript", "/a b/c")).decode()
    stacks = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/x/threading.py", line 3 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "/x/passes.py", line 112 in run\n  File "/x/onnx.py", line 9 in logits\n'
    )
    found = death("SIGSEGV", written=notes + stacks)
    assert (found.note("chat"), found.note("transcript"), found.note("other")) == ("begun", "/a b/c", None)
    assert "in run, passes.py line 112" in found.message()
    path = found.write(tmp_path / "home", "chat")
    assert stacks.strip() in path.read_text()
    assert "/a b/c" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_notes_with_line_ends_of_windows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which os.write makes there, as faulthandler does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "notes").write_bytes((note_line("transcript", "C:\\a b") + b"Fatal\n").replace(b"\n", b"\r\n"))
    assert death("SIGSEGV", written=supervisor._take("notes")).note("transcript") == "C:\\a b"
    assert not (tmp_path / "notes").exists()


def test_crash_is_seen_with_its_notes() -> None:
    with started(program=PROGRAM) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGSEGV)
        out, _ = process.communicate(timeout=_WAIT_S)
    assert out == f"({-signal.SIGSEGV}, 'begun', 'a b')\n"


def test_a_crash_is_told_in_the_log_that_the_worker_writes(tmp_path: Path) -> None:
    """Where launchd has opened the one that the worker has renamed since."""
    with started(tmp_path / "log", program=PROGRAM, home=tmp_path) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGSEGV)
        _, err = process.communicate(timeout=_WAIT_S)
    assert err == ""
    assert "the worker crashed (SIGSEGV" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "system", ["", "import signal; vars(signal).pop('sigwaitinfo', 0)"], ids=["here", "macos"]
)
def test_signals_sent_to_the_supervisor_end_the_worker_and_its_code_is_passed_on(system: str) -> None:
    with started(program=f"{system}\n{PROGRAM}") as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=_WAIT_S)
    assert (out, worker.is_running()) == ("143\n", False)


@pytest.mark.slow
def test_worker_ends_with_a_supervisor_that_was_killed() -> None:
    with started(program=PROGRAM) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert psutil.wait_procs([worker], timeout=60)[1] == []


@pytest.mark.slow
def test_a_worker_may_die_at_any_moment() -> None:
    for moment_ms in range(0, 120, 5):
        with started(program=PROGRAM) as process:
            worker = worker_of(process.pid)
            time.sleep(moment_ms / 1000)
            worker.send_signal(signal.SIGABRT)
            out, _ = process.communicate(timeout=_WAIT_S)
        assert out.splitlines()[-1].startswith(f"({-signal.SIGABRT}, "), moment_ms


def test_python_that_cannot_be_started_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError("no process")

    monkeypatch.setattr(supervisor, "run_child", refuse)
    assert supervisor.supervise("chat") == 1
    assert "(no process); close other programs, or give --no-supervisor" in capsys.readouterr().err


def test_crash_before_the_first_token_is_told_and_ends_with_1(tiny_model: Path, tmp_path: Path) -> None:
    with started("chat", tiny_model, "--prompt", "the", program=UNHURRIED + MAIN, home=tmp_path) as process:
        worker_of(process.pid).send_signal(signal.SIGSEGV)
        out, err = process.communicate(timeout=_WAIT_S)
    assert (process.returncode, out) == (1, "")
    assert "the worker crashed (SIGSEGV, " in err
    assert str(tmp_path / "crash.txt") in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_crash_in_an_answer_keeps_what_was_shown(tiny_model: Path, tmp_path: Path) -> None:
    limits = ["--max-tokens", 600, "--drafter", "none", "--no-answer-cache", "--deterministic"]
    asked = ["chat", tiny_model, "--prompt", "the in", *limits]
    with started(*asked, home=tmp_path) as whole:
        text, _ = whole.communicate(timeout=_WAIT_S)
    with started(*asked, program=UNHURRIED + MAIN, home=tmp_path) as process:
        assert process.stdout is not None
        worker = worker_of(process.pid)  # looked up before the answer, which is short
        shown = process.stdout.read(1)
        worker.send_signal(signal.SIGABRT)
        rest, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 1
    assert text.startswith(shown + rest)
    assert len(shown + rest) < len(text)
    # Writing the stacks of threads that go on working may crash in turn.
    assert "the worker crashed (SIGABRT, " in err or "the worker crashed (SIGSEGV, " in err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_stopped_command_ends_as_without_a_worker(tiny_model: Path, tmp_path: Path, name: str, code: int) -> None:
    for options in ([], ["--no-supervisor"]):
        asked = ["chat", tiny_model, "--prompt", "the in", "--max-tokens", 600, "--drafter", "none", *options]
        with started(*asked, program=UNHURRIED + MAIN, home=tmp_path) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(getattr(signal, f"SIG{name}"))
            _, err = process.communicate(timeout=_WAIT_S)
        assert process.returncode == code, options
        assert "crash" not in err
        assert psutil.wait_procs(below, timeout=60)[1] == []


def test_killed_worker_is_told_and_the_shell_sees_the_signal(tiny_model: Path, tmp_path: Path) -> None:
    with started("chat", tiny_model, "--prompt", "the", program=UNHURRIED + MAIN, home=tmp_path) as process:
        worker_of(process.pid).kill()
        _, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode in (-signal.SIGKILL, 5)  # the latter where the system killed another meanwhile
    assert "was killed (SIGKILL)" in err or "out of memory" in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*forkpty.*")
def test_chat_goes_on_once_after_a_crash_and_its_terminal_is_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pexpect", reason="needs a pseudo-terminal, which Windows lacks")
    import termios

    from terminal import Terminal

    # Nonsense takes more tokens when it is read back than it was made of.
    options = ("--max-tokens", 90, "--overflow", "drop-oldest")
    program = (sys.executable, "-c", UNHURRIED + MAIN)
    terminal = Terminal("chat", tiny_model, *options, home=tmp_path, program=program)
    modes = termios.tcgetattr(terminal.process.child_fd)
    at = terminal.ready()
    terminal.enter("first")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.ready(after=at)
    terminal.enter("/set max_tokens 600")
    at = terminal.ready(after=at)
    terminal.enter("the in")
    terminal.wait_until(lambda: len(answered_in(tmp_path)) == 2)
    answers = answered_in(tmp_path)
    worker_of(terminal.process.pid).send_signal(signal.SIGSEGV)
    at = terminal.wait_for("the chat starts again", after=at)
    at = terminal.wait_for("your last message: 'the in'", after=at)
    at = terminal.ready(after=at)
    terminal.enter("and more")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.ready(after=at)
    worker_of(terminal.process.pid).send_signal(signal.SIGSEGV)
    terminal.wait_for("edgespec chat --continue continues it", after=at)
    assert termios.tcgetattr(terminal.process.child_fd) == modes
    assert terminal.exit_code() == 1
    assert said_in(tmp_path) == ["first", "the in", "and more"]
    kept = answered_in(tmp_path)
    assert kept[0] == answers[0]
    assert kept[1].startswith(answers[1])
    assert answers[1]
    assert len(list((tmp_path / "chats").iterdir())) == 1
    again = Terminal("chat", "--continue", home=tmp_path)
    again.wait_for("your last message: 'and more'")
    again.ready()
    again.type("\x04")
    assert again.exit_code() == 0


@pytest.mark.slow
def test_commands_that_run_no_model_and_help_stay_in_one_process(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; from edgespec.__main__ import main\n"
        "class Popen(subprocess.Popen):\n"
        "    def __init__(self, *_, **__): print('started'); sys.exit(9)\n"
        "subprocess.Popen = Popen; sys.argv[1:] = sys.argv[1].split(); sys.exit(main())"
    )
    for words in ("--version", "--help", "models list", "config", "chat --help"):
        with started(words, program=program, home=tmp_path) as process:
            out, _ = process.communicate(timeout=_WAIT_S)
        assert (process.returncode, "started" in out) == (0, False), words
    with started("doctor", program=program, home=tmp_path) as process:
        assert process.communicate(timeout=_WAIT_S)[0] == "started\n"


def test_commands_that_run_a_model_are_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervised_command(["models", "pull", "a"]) == "models pull"
    assert supervised_command(["chat"]) == "chat"
    assert supervised_command(["models", "list"]) is None
    assert supervised_command(["chat", "a", "--no-supervisor"]) is None
    assert supervised_command([]) is None
    monkeypatch.setattr(sys, "executable", "")
    assert supervised_command(["chat"]) is None


# Every process of the command runs this first.
WITHOUT_FORK = """
import os, sys
def refuse(*_): sys.exit("it has forked")
os.fork = os.forkpty = refuse
from edgespec.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_nothing_forks_without_starting_a_new_interpreter(tiny_model: Path, tmp_path: Path) -> None:
    asked = ["chat", tiny_model, "--prompt", "the in", "--max-tokens", 600, "--drafter", "none"]
    with started(*asked, program=UNHURRIED + WITHOUT_FORK, home=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        worker_of(process.pid).send_signal(signal.SIGSEGV)
        _, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 1
    assert "the worker crashed (SIGSEGV, " in err
    assert list(tmp_path.glob("edgespec-*")) == [], "notes are left"
    with started(*asked[:-4], "--max-tokens", 3, program=WITHOUT_FORK, home=tmp_path) as process:
        _, err = process.communicate(timeout=_WAIT_S)
    assert (process.returncode, "forked" in err) == (0, False)
    assert list(tmp_path.glob("edgespec-*")) == [], "notes are left"


def test_next_to_nothing_is_imported_before_the_worker_ends() -> None:
    program = (
        "import logging, sys; own = set(sys.modules);"  # it brings dataclasses since Python 3.14
        "import edgespec.__main__, edgespec.cli.supervisor;"
        "heavy = ('argparse', 'json', 'numpy', 'onnxruntime', 'psutil', 'tempfile', 'dataclasses');"
        "print([name for name in heavy if name in sys.modules and name not in own])"
    )
    with started(program=program) as process:
        assert process.communicate(timeout=_WAIT_S)[0] == "[]\n"
