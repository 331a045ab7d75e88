"""Commands in a worker: what a shell sees of one that crashes, is killed or is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from edgespec.crash import Death, note_line
from edgespec.supervisor import can_fork
from edgespec.transcript import latest, read_transcript

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork, and no worker")
_WAIT_S = 30

# A work that has begun, and one of its own that does not end by itself.
PROGRAM = """
import os, signal, sys, time
from edgespec.supervisor import supervise

def work(note):
    note("chat", "begun")
    note("transcript", "a b")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    print(os.getpid(), flush=True)
    time.sleep(60)
    return 0

ended = supervise(work)
print(ended if isinstance(ended, int) else (ended.name, ended.note("chat"), ended.note("transcript")))
"""


def started(*arguments: object, program: str | None = None, home: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "edgespec"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **({"EDGESPEC_HOME": str(home)} if home else {})},
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
    path = latest(home / "chats")
    return [each.content for each in read_transcript(path).messages if each.role == role] if path else []


def death(name: str, *, written: str = "", is_out_of_memory: bool = False) -> Death:
    return Death(number=getattr(signal, name), is_out_of_memory=is_out_of_memory, written=written)


@pytest.mark.parametrize(
    ("name", "is_out_of_memory", "code", "words"),
    [
        ("SIGSEGV", False, 1, "crashed (SIGSEGV, segmentation fault): a defect of native code"),
        ("SIGABRT", True, 1, "crashed (SIGABRT, "),
        ("SIGKILL", True, 5, "out of memory"),
        ("SIGKILL", False, 137, "was killed (SIGKILL)"),
    ],
)
def test_each_death_has_its_words_and_exit_code(name: str, is_out_of_memory: bool, code: int, words: str) -> None:
    found = death(name, is_out_of_memory=is_out_of_memory)
    assert found.exit_code == code
    assert words in found.words()
    assert death("SIGTERM").cause is None


def test_what_a_worker_wrote_is_read_back_and_kept_for_a_report(tmp_path: Path) -> None:
    notes = (note_line("chat", "begun") + note_line("transcript", "/a b/c")).decode()
    stacks = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/x/threading.py", line 3 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "/x/passes.py", line 112 in run\n  File "/x/onnx.py", line 9 in logits\n'
    )
    found = death("SIGSEGV", written=notes + stacks)
    assert (found.note("chat"), found.note("transcript"), found.note("other")) == ("begun", "/a b/c", None)
    assert "in run, passes.py line 112" in found.words()
    path = found.write(tmp_path / "home", "chat")
    assert stacks.strip() in path.read_text()
    assert "/a b/c" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_crash_is_seen_with_its_notes() -> None:
    with started(program=PROGRAM) as process:
        assert process.stdout is not None
        os.kill(int(process.stdout.readline()), signal.SIGSEGV)
        out, _ = process.communicate(timeout=_WAIT_S)
    assert out == "('SIGSEGV', 'begun', 'a b')\n"


def test_signals_sent_to_the_supervisor_end_the_worker_and_its_code_is_passed_on() -> None:
    with started(program=PROGRAM) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=_WAIT_S)
    assert (out, worker.is_running()) == ("143\n", False)


def test_worker_ends_with_a_supervisor_that_was_killed() -> None:
    with started(program=PROGRAM) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert psutil.wait_procs([worker], timeout=5)[1] == []


def test_process_with_other_threads_is_not_forked() -> None:
    from threading import Event, Thread

    end = Event()
    thread = Thread(target=end.wait)
    thread.start()
    try:
        assert not can_fork()
    finally:
        end.set()
        thread.join()


def test_crash_before_the_first_token_is_told_and_ends_with_1(tiny_model: Path, tmp_path: Path) -> None:
    with started("chat", tiny_model, "--prompt", "the", home=tmp_path) as process:
        worker_of(process.pid).send_signal(signal.SIGSEGV)
        out, err = process.communicate(timeout=_WAIT_S)
    assert (process.returncode, out) == (1, "")
    assert "the worker crashed (SIGSEGV, " in err
    assert str(tmp_path / "crash.txt") in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_crash_in_an_answer_keeps_what_was_shown(tiny_model: Path, tmp_path: Path) -> None:
    asked = ["chat", tiny_model, "--prompt", "the in", "--max-tokens", 600, "--drafter", "none", "--no-memory"]
    with started(*asked, home=tmp_path) as whole:
        text, _ = whole.communicate(timeout=_WAIT_S)
    with started(*asked, home=tmp_path) as process:
        assert process.stdout is not None
        shown = process.stdout.read(1)
        worker_of(process.pid).send_signal(signal.SIGABRT)
        rest, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 1
    assert text.startswith(shown + rest)
    assert len(shown + rest) < len(text)
    assert "the worker crashed (SIGABRT, " in err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_stopped_command_ends_as_without_a_worker(tiny_model: Path, tmp_path: Path, name: str, code: int) -> None:
    for options in ([], ["--no-supervisor"]):
        asked = ["chat", tiny_model, "--prompt", "the in", "--max-tokens", 600, "--drafter", "none", *options]
        with started(*asked, home=tmp_path) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            below = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(getattr(signal, f"SIG{name}"))
            _, err = process.communicate(timeout=_WAIT_S)
        assert process.returncode == code, options
        assert "crash" not in err
        assert psutil.wait_procs(below, timeout=5)[1] == []


def test_killed_worker_is_told_and_the_shell_sees_the_signal(tiny_model: Path, tmp_path: Path) -> None:
    with started("chat", tiny_model, "--prompt", "the", home=tmp_path) as process:
        worker_of(process.pid).kill()
        _, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode in (-signal.SIGKILL, 5)  # the latter where the system killed another meanwhile
    assert "was killed (SIGKILL)" in err or "out of memory" in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*forkpty.*")
def test_chat_goes_on_once_after_a_crash_and_its_terminal_is_as_it_was(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("pexpect", reason="pseudo-terminals are POSIX")
    import termios

    from terminal import Terminal

    terminal = Terminal("chat", tiny_model, "--max-tokens", 90, home=tmp_path)
    modes = termios.tcgetattr(terminal.process.child_fd)
    at = terminal.ready()
    terminal.enter("first")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.ready(after=at)
    terminal.enter("/set max_tokens 600")
    at = terminal.ready(after=at)
    terminal.enter("the in")
    while len(answers := answered_in(tmp_path)) < 2:
        terminal.settle(0.01)
    worker_of(terminal.process.pid).send_signal(signal.SIGSEGV)
    at = terminal.wait_for("the chat begins once more", after=at)
    at = terminal.wait_for("you said last: 'the in'", after=at)
    at = terminal.ready(after=at)
    terminal.enter("and more")
    at = terminal.wait_for("tokens/s", after=at)
    at = terminal.ready(after=at)
    worker_of(terminal.process.pid).send_signal(signal.SIGSEGV)
    terminal.wait_for("edgespec chat --continue goes on with it", after=at)
    assert termios.tcgetattr(terminal.process.child_fd) == modes
    assert terminal.exit_code() == 1
    assert said_in(tmp_path) == ["first", "the in", "and more"]
    kept = answered_in(tmp_path)
    assert kept[0] == answers[0]
    assert kept[1].startswith(answers[1])
    assert answers[1]
    assert len(list((tmp_path / "chats").iterdir())) == 1
    again = Terminal("chat", "--continue", home=tmp_path)
    again.wait_for("you said last: 'and more'")
    again.ready()
    again.type("\x04")
    assert again.exit_code() == 0


@pytest.mark.slow
def test_light_commands_stay_in_one_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; from edgespec.cli import main\n"
        "def fork(): print('forked'); sys.exit(9)\n"
        "os.fork = fork; sys.argv[1:] = sys.argv[1].split(); sys.exit(main())"
    )
    for words, code in (("models list", 0), ("config", 0), ("simulate --help", 0), ("doctor", 9)):
        with started(words, program=program, home=tmp_path) as process:
            out, _ = process.communicate(timeout=_WAIT_S)
        assert (process.returncode, "forked" in out) == (code, code == 9), words


def test_nothing_heavy_and_no_thread_is_there_before_the_fork() -> None:
    program = (
        "import sys, threading, edgespec.cli; heavy = ('numpy', 'onnxruntime', 'psutil');"
        "print([name for name in heavy if name in sys.modules], threading.active_count())"
    )
    with started(program=program) as process:
        assert process.communicate(timeout=_WAIT_S)[0] == "[] 1\n"
