"""Locks between processes and threads."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from edgespec.system.disk import hold_lock

HOLDER = (
    "import sys; from pathlib import Path; from edgespec.system.disk import hold_lock\n"
    "with hold_lock(Path(sys.argv[1]), print):\n"
    "    print('held', flush=True); sys.stdin.readline()"
)


def test_lock_is_held_by_one_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "lock", 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with hold_lock(path, lambda holder: None):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_waiting_names_the_process_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        said: list[str] = []

        def waiting(who: str) -> None:
            said.append(who)
            holder.stdin.close()

        with hold_lock(path, waiting):
            pass
    assert said == [f"process {holder.pid}"]


def test_patience_ends_with_the_name_of_the_holder_and_the_lock_is_free_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock(path):
        with pytest.raises(TimeoutError, match=f"held by process {os.getpid()}"), hold_lock(path, timeout_s=0.03):
            pytest.fail("two hold it")
        assert path.exists()
    with hold_lock(path, timeout_s=0.03):
        assert path.exists()
    assert not path.exists()


def test_lock_that_is_given_up_within_the_patience_is_had(tmp_path: Path) -> None:
    path, said = tmp_path / "lock", list[str]()
    with ExitStack() as holding:
        holding.enter_context(hold_lock(path))

        def let_go(holder: str) -> None:
            said.append(holder)
            threading.Timer(0.02, holding.close).start()

        with hold_lock(path, let_go, timeout_s=120):
            assert path.exists()
    assert said == [f"process {os.getpid()}"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer, which Windows lacks")
def test_waiting_ends_with_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with hold_lock(path), pytest.raises(KeyboardInterrupt):  # noqa: PT012  the timer starts where that is caught
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with hold_lock(path, timeout_s=120):
                pytest.fail("two hold it")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert list(tmp_path.iterdir()) == []


def test_lock_that_a_killed_process_left_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    assert path.exists()
    with hold_lock(path, lambda who: pytest.fail(f"waited for {who}")):
        pass
    assert not path.exists()


def test_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold_lock(tmp_path / "lock", print):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_lock_is_never_followed_and_never_changed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    for name in ("precious", "link", "dangling", "pipe"):
        with pytest.raises(OSError, match="not a lock"), hold_lock(tmp_path / name, print):
            pass
    assert precious.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where no file can be made (Linux)")
def test_a_lock_that_cannot_be_made_is_an_error_and_no_endless_wait() -> None:
    waited = list[str]()
    with pytest.raises(OSError, match="/proc"), hold_lock(Path("/proc/edgespec.lock"), waited.append, 60):
        pass
    assert waited == []
