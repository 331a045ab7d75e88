"""A process that renders chat templates, and is ended if one takes too long or too much memory.

A template comes with a model. template_sandbox.py decides what it may touch; how long it may run and how much
memory it may hold can only be bounded from another process.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock, Thread
from time import monotonic
from typing import Any

import psutil

from edgespec.errors import ConversationError, ModelError
from edgespec.system.printable import one_line

_MAX_S = 10.0
_MAX_BYTES = 400 << 20
_BYTES_PER_CHARACTER = 40  # of the request; its escapes and copies take some 20
_POLL_S = 0.02
_MAX_WORDS = 300  # characters of what a template says
_MAX_ROLES = 8  # of messages, that are named
_REFUSED = "the chat template of this model does not take the conversation"


class TemplateProcess:
    """Starts with start(), while a model is being loaded, or with the first rendering."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                try:
                    self._process = _start_python()
                except OSError as error:
                    raise ModelError(f"cannot start Python to render the chat template ({error})") from None
                self._end = weakref.finalize(self, _kill, self._process)
            return self._process

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def render(self, template: str, **names: Any) -> str:
        """Render a template with these names, whose values JSON can hold.

        Raises:
            ConversationError: The template refuses the conversation.
            ModelError: The template is broken, does what the sandbox forbids, or takes more than 10 s or some
                400 MB.
        """
        request = json.dumps({"template": template, "names": names}).encode() + b"\n"
        with self._lock:
            try:
                answer = json.loads(_ask(self.start(), request))
            except BaseException:  # its late answer would be taken for the next request's
                self.close()
                raise
        if "refusal" in answer:
            said, roles = one_line(answer["refusal"], _MAX_WORDS), _roles(names.get("messages", ()))
            raise ConversationError(
                f"the chat template of this model refuses the conversation: {said} (the roles of its messages are "
                f"{roles}); send messages that the template takes"
            )
        if "error" in answer:
            raise ModelError(f"{_REFUSED}: {answer['error']}")
        return str(answer["text"])


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """The roles of messages in their order, the first of them."""
    shown = [one_line(str(each.get("role")), 20) for each in messages[:_MAX_ROLES]]
    num_more = len(messages) - len(shown)
    return ", ".join([*shown, *([f"and {num_more} more"] if num_more else [])]) or "none"


def _start_python() -> "subprocess.Popen[bytes]":
    # -P: no module of the script's folder hides one of Python's.
    return subprocess.Popen(
        [sys.executable or "python3", "-P", str(Path(__file__).with_name("template_sandbox.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the chat.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
    )


def _ask(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    answers: list[bytes] = []
    exchange = Thread(target=_exchange, args=(process, request, answers), daemon=True)
    exchange.start()
    started, most_bytes = monotonic(), _MAX_BYTES + _BYTES_PER_CHARACTER * len(request)
    while exchange.is_alive():
        exchange.join(_POLL_S)
        if monotonic() - started > _MAX_S:
            raise ModelError(f"{_REFUSED}: it does not finish within {_MAX_S:.0f} s")
        with suppress(psutil.Error):
            if psutil.Process(process.pid).memory_info().rss > most_bytes:
                raise ModelError(f"{_REFUSED}: it takes more than {most_bytes >> 20} MiB")
    if not answers or not answers[0]:
        raise ModelError(
            f"{_REFUSED}: {sys.executable}, which renders it, ended; was the engine closed, or is memory short?"
        )
    return answers[0]


def _exchange(process: "subprocess.Popen[bytes]", request: bytes, answers: list[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # the process ended, or was closed from another thread
        process.stdin.write(request)
        process.stdin.flush()
        answers.append(process.stdout.readline())


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # a request that was not sent whole
            if pipe is not None:
                pipe.close()
