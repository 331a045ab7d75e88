"""Many requests to a server, of which clients leave some: is memory flat, and is every text its own?

    python bench/serve_endurance.py MODEL [--requests 10000] [--at-once 6] [--leaving 0.4] [-- SERVE OPTIONS]

Requests are chats and completions, streamed and whole, of a few prompts whose texts are known from requests alone.
A share of the clients leaves, at once or after some events. In pauses, ten times, the memory, the threads and the
open files of the server's processes are read. The exit code is 1 if a text is not that of its request alone, or no
beginning of it where the client left, if something grows, or if a request fails.
"""

import json
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import psutil
from command_line import command_line, split_arguments
from load import read_requests
from server_process import TIMEOUT_S, events, served

from edgespec.system.units import format_bytes

_PROMPTS = Path(__file__).with_name("prompts.jsonl")
_NUM_PROMPTS, _NUM_PAUSES, _IDLE_S = 6, 10, 60.0
_PATHS = ("chat/completions", "completions")
# What may be added from the third pause to the last: caches of the allocator, and what is just being opened.
_GROWTH_BYTES, _GROWTH_SHARE, _GROWTH_THREADS, _GROWTH_FILES = 48 << 20, 0.08, 3, 4


class Use(NamedTuple):
    """What the processes of a server hold."""

    memory_bytes: int
    num_threads: int
    num_files: int


class Call(NamedTuple):
    """A request: number of the prompt, address, whether it is streamed, and events until its client leaves."""

    prompt: int
    path: str
    is_stream: bool
    leaves_after: int | None


def use_of(pid: int) -> Use:
    """What a process and all below it hold."""
    own = psutil.Process(pid)
    parts = []
    for process in (own, *own.children(recursive=True)):
        try:
            count_files = getattr(process, "num_fds", None) or getattr(process, "num_handles")  # noqa: B009, Windows
            parts.append((process.memory_info().rss, process.num_threads(), count_files()))
        except psutil.NoSuchProcess:
            continue
    return Use(*map(sum, zip(*parts, strict=True)))


def calls(num: int, leaving: float, seed: int) -> Iterator[Call]:
    chance = random.Random(seed)
    for _ in range(num):
        leaves = chance.randrange(12) if chance.random() < leaving else None
        yield Call(chance.randrange(_NUM_PROMPTS), chance.choice(_PATHS), chance.random() < 0.6, leaves)


class Endurance:
    """Requests to a server of which the texts are known."""

    def __init__(self, client: httpx2.Client, requests: Sequence[Any]) -> None:
        self._client, self._requests = client, requests
        self.faults: list[str] = []
        self._texts = {
            (number, path): self._whole(Call(number, path, False, None))
            for number in range(len(requests))
            for path in _PATHS
        }

    def make(self, call: Call) -> None:
        """Ask, read or leave, and note a fault."""
        wanted = self._texts[call.prompt, call.path]
        try:
            if call.leaves_after is not None and (not call.is_stream or call.leaves_after == 0):
                self._leave_at_once(call)
            elif call.is_stream:
                text = "".join(islice(self._stream(call), call.leaves_after))
                if text != wanted and (call.leaves_after is None or not wanted.startswith(text)):
                    self.faults.append(f"{call}: {text!r} is not of {wanted!r}")
            elif (text := self._whole(call)) != wanted:
                self.faults.append(f"{call}: {text!r} is not {wanted!r}")
        except Exception as error:  # any is a fault
            self.faults.append(f"{call}: {type(error).__name__}: {error}")

    def _document(self, call: Call) -> dict[str, Any]:
        prompt, max_tokens = self._requests[call.prompt]
        asked = (
            {"prompt": prompt}
            if call.path == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        return {**asked, "max_tokens": max_tokens // 4, "temperature": 0, "stream": call.is_stream}

    def _whole(self, call: Call) -> str:
        answer = self._client.post(call.path, json=self._document(call))
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text}")
        (choice,) = answer.json()["choices"]
        return str(choice["text"] if call.path == "completions" else choice["message"]["content"])

    def _stream(self, call: Call) -> Iterator[str]:
        with self._client.stream("POST", call.path, json=self._document(call)) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read()!r}")
            for each in events(answer.iter_lines()):
                for choice in each["choices"]:
                    yield choice["text"] if call.path == "completions" else choice["delta"].get("content") or ""

    def _leave_at_once(self, call: Call) -> None:
        """Send a request and close the connection, soon or a little later."""
        url = urlsplit(str(self._client.base_url))
        body = json.dumps(self._document(call)).encode()
        head = (
            f"POST {url.path}{call.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with closing(socket.create_connection((url.hostname, url.port), TIMEOUT_S)) as connection:
            connection.sendall(head.encode() + body)
            sleep(0.01 * (call.leaves_after or 0))


def endure(
    client: httpx2.Client, endurance: Endurance, pid: int, num: int, num_at_once: int, leaving: float, seed: int,
    tell: Callable[[str], None] = print,
) -> list[str]:  # fmt: skip
    """Make requests; returns what was wrong."""
    uses = list[Use]()
    tell("| requests | memory | threads | files | faults |\n|---|---|---|---|---|")
    for number in range(_NUM_PAUSES):
        begin, end = (num * each // _NUM_PAUSES for each in (number, number + 1))
        with ThreadPoolExecutor(num_at_once) as pool:
            list(pool.map(endurance.make, calls(end - begin, leaving, seed + number)))
        wait_until_idle(client)
        uses.append(use_of(pid))
        use = uses[-1]
        tell(
            f"| {end} | {format_bytes(use.memory_bytes)} | {use.num_threads} | {use.num_files} "
            f"| {len(endurance.faults)} |"
        )
    return [*endurance.faults, *growth(uses)]


def growth(uses: Sequence[Use]) -> list[str]:
    """What was more in the last pauses than in the third, beyond what may be."""
    before = uses[2]
    last = Use(*(min(values) for values in zip(*uses[-3:], strict=True)))
    found = []
    if last.memory_bytes > before.memory_bytes * (1 + _GROWTH_SHARE) + _GROWTH_BYTES:
        found.append(f"memory grew from {format_bytes(before.memory_bytes)} to {format_bytes(last.memory_bytes)}")
    if last.num_threads > before.num_threads + _GROWTH_THREADS:
        found.append(f"threads grew from {before.num_threads} to {last.num_threads}")
    if last.num_files > before.num_files + _GROWTH_FILES:
        found.append(f"open files grew from {before.num_files} to {last.num_files}")
    return found


def wait_until_idle(client: httpx2.Client) -> None:
    """Wait until no answer is made or waits; raises RuntimeError: some never end."""
    deadline_s = monotonic() + _IDLE_S
    url = str(client.base_url).replace("/v1/", "/metrics")
    while "edgespec_answers 0" not in client.get(url).text.splitlines():
        if monotonic() > deadline_s:
            raise RuntimeError(f"answers are still being made {_IDLE_S:g} s after the last client has gone")
        sleep(0.05)


def main() -> None:
    own, options = split_arguments(sys.argv[1:])
    parser = command_line(__doc__)
    parser.add_argument("model", help="as `edgespec serve` takes it")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=6, help="clients")
    parser.add_argument("--leaving", type=float, default=0.4, help="the share of clients that leave")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, default=_PROMPTS)
    asked = parser.parse_args(own)
    with (
        served(asked.model, options) as (url, process),
        httpx2.Client(base_url=f"{url}/", timeout=TIMEOUT_S) as client,
    ):
        endurance = Endurance(client, read_requests(asked.prompts, _NUM_PROMPTS))
        wrong = endure(
            client, endurance, process.pid, asked.requests, asked.at_once, asked.leaving, asked.seed, _print_now
        )
    if wrong:
        sys.exit("\n".join([f"{len(wrong)} things are wrong:", *wrong[:20]]))
    print("every text is its own, and nothing grew")


def _print_now(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
