"""A browser without a window, driven over a pipe by the DevTools protocol."""

import fcntl
import json
import os
import shutil
import signal
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-dev-shm-usage --no-first-run"
)
_PATIENCE_S = 60


class Page:
    """The page of the tab that the browser shows."""

    def __init__(self, from_browser: int, to_browser: int) -> None:
        self._reader, self._writer = os.fdopen(from_browser, "rb"), os.fdopen(to_browser, "wb", buffering=0)
        self._number, self._rest = 0, b""
        self._session = self._new_tab()

    def _new_tab(self) -> dict[str, str]:
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        return {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    @contextmanager
    def in_another_tab(self, url: str) -> Iterator[None]:
        """Everything within the block is done in a new tab, which stays open."""
        first = self._session
        self._session = self._new_tab()
        self.open(url)
        try:
            yield
        finally:
            self._session = first

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression of the page; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, element: str) -> None:
        """Click as a user does; only in the five seconds after that a page may copy."""
        answer = self._call("Runtime.evaluate", expression=f"{element}.click()", userGesture=True)
        assert "exceptionDetails" not in answer, answer

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self.evaluate(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Into what has the focus; a line break is Enter."""
        for part in text.splitlines(keepends=True):
            self._call("Input.insertText", text=part.rstrip("\n"))
            if part.endswith("\n"):
                for kind in ("keyDown", "keyUp"):
                    self._call(
                        "Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13
                    )

    def press(self, key: str, *, is_composing: bool = False) -> None:
        """A key by its name, such as Escape; is_composing: with the code of keys that an input method takes."""
        more = {"windowsVirtualKeyCode": 229} if is_composing else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def before_each_page(self, script: str) -> None:
        """Run a script in each page that is opened, before its own."""
        self._call("Page.enable")
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def look(self, width: int, height: int, *, is_dark: bool, path: Path | None = None) -> None:
        """Take a size and a colour scheme, and a picture of the page if a path is given."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        if path is not None:
            path.write_bytes(b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        self._writer.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._reader.fileno(), 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        document: dict[str, Any] = json.loads(message)
        return document


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A new browser with a new profile; it reads its orders from descriptor 3 and answers on 4."""
    assert PROGRAM is not None
    (orders, to_browser), (from_browser, answers) = ([_high(end) for end in os.pipe()] for _ in range(2))
    null = _high(os.open(os.devnull, os.O_RDWR))
    actions = [(os.POSIX_SPAWN_DUP2, orders, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
    actions += [(os.POSIX_SPAWN_DUP2, null, each) for each in (0, 1, 2)]
    command = [PROGRAM, *_FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = os.posix_spawn(PROGRAM, command, os.environ, file_actions=actions)
    for end in (orders, answers, null):
        os.close(end)
    page = Page(from_browser, to_browser)
    try:
        yield page
    finally:
        page.close()  # which ends it
        _end(process)


def _high(descriptor: int) -> int:
    """Move a descriptor to a number that nothing else needs."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


def _end(process: int) -> None:
    deadline = time.monotonic() + 10
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
