"""A process that renders chat templates, and is ended when one takes too long or too much memory.

A template comes with a model. What it may touch is sandbox's affair; how long it may run and how much it may hold
can only be bounded from outside.
"""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from threading import RLock, Thread
from time import monotonic
from typing import Any

import psutil

from edgespec.errors import ModelError

_MAX_S = 10.0
_MAX_BYTES = 400 << 20
_BYTES_PER_CHARACTER = 40  # that a rendering may hold for what it is given; escapes and copies take some 20
_POLL_S = 0.02
_REFUSED = "the chat template of this model does not take the conversation"


class TemplateProcess:
    """Started ahead, so that it is ready when a model has been loaded, or by the first rendering."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                try:
                    self._process = _started()
                except OSError as error:
                    raise ModelError(f"cannot start Python to render the chat template ({error})") from None
                self._end = weakref.finalize(self, _end, self._process)
            return self._process

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def render(self, template: str, **names: Any) -> str:
        """The template's text for these names, which are what JSON holds.

        Raises:
            ModelError: The template is broken, refuses the conversation, does what the sandbox forbids, or takes
                more than 10 s or some 400 MB.
        """
        request = json.dumps({"template": template, "names": names}).encode() + b"\n"
        with self._lock:
            try:
                answer = json.loads(_answer(self.start(), request))
            except BaseException:  # what is still to come would answer the wrong question
                self.close()
                raise
        if "error" in answer:
            raise ModelError(f"{_REFUSED}: {answer['error']}")
        return str(answer["text"])


def _started() -> "subprocess.Popen[bytes]":
    # -P: the folder of the script holds a types.py, which is not Python's.
    return subprocess.Popen(
        [sys.executable or "python3", "-P", str(Path(__file__).with_name("sandbox.py")), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the chat
    )


def _answer(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    answers: list[bytes] = []
    asking = Thread(target=_exchange, args=(process, request, answers), daemon=True)
    asking.start()
    started, most_bytes = monotonic(), _MAX_BYTES + _BYTES_PER_CHARACTER * len(request)
    while asking.is_alive():
        asking.join(_POLL_S)
        if monotonic() - started > _MAX_S:
            raise ModelError(f"{_REFUSED}: it does not finish within {_MAX_S:.0f} s")
        if _resident_bytes(process.pid) > most_bytes:
            raise ModelError(f"{_REFUSED}: it takes more than {most_bytes >> 20} MiB")
    if not answers or not answers[0]:
        raise ModelError(
            f"{_REFUSED}: {sys.executable}, which renders it, ended; was the engine closed, or is memory short?"
        )
    return answers[0]


def _exchange(process: "subprocess.Popen[bytes]", request: bytes, answers: list[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answers.append(process.stdout.readline())
    except (OSError, ValueError):  # the process ended, or was closed from another thread
        return


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not sent is of no use any more
                continue
