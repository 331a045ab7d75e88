"""Installs packages with pip, and tells meanwhile in one line what it fetches, how much and for how long.

    python scripts/pip_install.py -e ".[cpu]"

pip alone is either silent for minutes or writes some lines for each package. What it wrote is shown if it fails.
Needs nothing but Python, since it runs before anything is installed.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread

_LINE = re.compile(r"\s*(Collecting|Downloading|Using cached|Obtaining|Building wheel for|Preparing metadata|"
                   r"Installing collected packages:|Installing build dependencies)\s*(.*)")  # fmt: skip
_SIZE = re.compile(r"\(([\d.]+) (bytes|kB|MB|GB)\)")
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_TICK_S = 0.5


class PipProgress:
    """What pip is doing, from the lines that it writes."""

    def __init__(self) -> None:
        self._num_packages = 0
        self._fetched_bytes = 0.0
        self._step = "starting"

    def read(self, line: str) -> bool:
        """Take a line; return whether it says something new."""
        if not (match := _LINE.match(line)):
            return False
        act, what = match[1], match[2]
        size = _SIZE.search(what)
        name = what.rpartition("/")[2].split("-")[0].split(" ")[0]
        if act == "Collecting":
            self._num_packages += 1
            self._step = f"looking for {re.split('[<>=!;( ]', what)[0]}"
        elif act in ("Downloading", "Using cached") and size:
            self._fetched_bytes += float(size[1]) * _UNITS[size[2]]
            self._step = (
                f"{'fetching' if act == 'Downloading' else 'taking from the cache'} {name} ({size[0][1:-1]})"
            )
        elif act.startswith("Installing collected"):
            self._step = f"writing {what.count(',') + 1} packages to disk"
        else:
            self._step = f"{act[0].lower()}{act[1:]} {name}".strip()
        return True

    def text(self, elapsed_s: float) -> str:
        parts = [f"installing, {elapsed_s:.0f} s: {self._step}"]
        if self._num_packages:
            parts.append(f"{self._num_packages} packages, {self._fetched_bytes / 1e6:.0f} MB so far")
        return " · ".join(parts)


def main(arguments: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: SimpleQueue[str | None] = SimpleQueue()
    Thread(target=_read, args=(process, lines), daemon=True).start()
    progress, written = PipProgress(), []
    is_terminal = sys.stderr.isatty()
    while True:
        try:
            line = lines.get(timeout=_TICK_S)
        except Empty:
            line = ""
        if line is None:
            break
        if line:
            written.append(line)
        is_new = progress.read(line)
        if is_terminal:
            _show(progress.text(time.monotonic() - began))
        elif is_new and "Downloading" in line:  # a log gets a line for each file
            print(line.strip(), file=sys.stderr, flush=True)
    code = process.wait()
    if is_terminal:
        _show("")
    if code:
        print("".join(written), file=sys.stderr, end="")
    return code


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str | None]") -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _show(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
