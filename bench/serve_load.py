"""Several requests at once to a server: tokens a second together, and passes until a short one has a token.

    python bench/serve_load.py MODEL [--requests 1,2,4,8] [--rounds 3] [--beside llama.cpp=URL] [-- SERVE OPTIONS]

Requests have prompts and answers of mixed lengths, four for each client. The clients ask at once, each for its own
list of requests one after another. Their lists have about as many tokens together, by the answers of each request
alone on the first server, so that they end at about the same time: with one list for all of them the last long
answers would run alone, and what is told would not be so many at once. Each client begins at another place of its
list, so that prompts seldom coincide. Before the first round each client asks its first request, untimed: a server
opens what so many at once need when they come. In each round each server answers the very same requests for one
client and for several, in alternating order, so that ratios compare neighbours in time. Lists are the same for all
servers.
Texts are greedy, and each is compared with that of its request alone on the same server. A short request beside
three long ones is timed in passes, as the server counts them, else in events of the long answer that had most of
them meanwhile. --beside adds a server that runs already, such as that of bench/llama_server.py, as often as it is
given.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from threading import Barrier, Event
from time import perf_counter
from typing import NamedTuple

import httpx2
from command_line import command_line, split_arguments
from interleaved import measure_in_turn
from load import read_requests
from server_process import TIMEOUT_S, Answered, Asked, ask, served

from edgespec.evaluation.intervals import mean_of

_PROMPTS = Path(__file__).with_name("prompts.jsonl")
_PER_CLIENT = 4  # requests
_LONG, _SHORT = 200, Asked("Why?", 1)
_NUM_LONG = 3


class Outcome(NamedTuple):
    """What several requests took together, and their answers."""

    seconds: float
    answers: tuple[Answered, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.answers) / self.seconds


def open_client(url: str) -> httpx2.Client:
    """A client with a connection for each request: servers close one that rests while another server is asked."""
    limits = httpx2.Limits(max_connections=100, max_keepalive_connections=0)
    return httpx2.Client(base_url=f"{url.rstrip('/')}/", timeout=TIMEOUT_S, limits=limits)


def share(requests: Sequence[Asked], num_tokens: Sequence[int], num_clients: int) -> list[list[Asked]]:
    """The list of each client: all requests, with about as many tokens in each list.

    The longest answers go first, each to the client that has the fewest tokens so far; then each client begins at
    another place of its list.
    """
    lists: list[list[Asked]] = [[] for _ in range(num_clients)]
    totals = [0] * num_clients
    for at in sorted(range(len(requests)), key=lambda at: -num_tokens[at]):
        fewest = totals.index(min(totals))
        lists[fewest].append(requests[at])
        totals[fewest] += num_tokens[at]
    return [own[i % len(own) :] + own[: i % len(own)] if own else own for i, own in enumerate(lists)]


def run(client: httpx2.Client, lists: Sequence[Sequence[Asked]]) -> Outcome:
    """Answers to the requests of several clients, which ask at once and each one after another."""
    with ThreadPoolExecutor(len(lists)) as pool:
        started = perf_counter()
        answers = tuple(chain(*pool.map(lambda own: [ask(client, asked) for asked in own], lists)))
        return Outcome(perf_counter() - started, answers)


def _measure(client: httpx2.Client, lists: Sequence[Sequence[Asked]], number: int) -> Outcome:
    return run(client, lists)


def passes_to_first_token(client: httpx2.Client, prompts: Sequence[str]) -> tuple[int, float]:
    """Passes and seconds until a short request has its first token beside long ones that are being answered."""
    counts, is_over = [0] * _NUM_LONG, Event()
    all_run = Barrier(_NUM_LONG + 1, timeout=TIMEOUT_S)

    def answer(number: int) -> None:
        def count() -> None:
            counts[number] += 1
            if counts[number] == 1:
                all_run.wait()
            if is_over.is_set():
                raise _Over

        try:
            ask(client, Asked(prompts[number], _LONG), count)
        except _Over:
            return

    with ThreadPoolExecutor(_NUM_LONG) as pool:
        try:
            running = [pool.submit(answer, number) for number in range(_NUM_LONG)]
            all_run.wait()
            before = list(counts)
            short = ask(client, _SHORT)
            events = max(now - then for now, then in zip(counts, before, strict=True))
            passes = events if short.waited_passes is None else short.waited_passes
        finally:
            is_over.set()
            all_run.abort()
        for each in running:
            each.result()
    return passes, short.first_s


class _Over(Exception):
    """A long answer is left."""


def compare(
    clients: dict[str, httpx2.Client], requests: Sequence[Asked], counts: Sequence[int], num_rounds: int
) -> bool:
    """Print the figures of each server; whether all texts of the first one are those of its requests alone."""
    requests = requests[: max(counts) * _PER_CLIENT]
    alone = {name: run(client, [requests]).answers for name, client in clients.items()}
    num_tokens = [each.num_tokens for each in alone[next(iter(clients))]]
    texts = {name: dict(zip(requests, answers, strict=True)) for name, answers in alone.items()}
    print("| server | requests | one after another | at once | ratio | 95 % interval | texts equal |")
    print("|---|---|---|---|---|---|---|")
    all_equal = True
    for count in counts:
        lists = share(requests[: count * _PER_CLIENT], num_tokens, count)
        asked = [*chain(*lists)]
        measures = {
            (name, at_once): partial(_measure, client, lists if at_once else [asked])
            for name, client in clients.items()
            for at_once in (False, True)
        }
        for client in clients.values():
            run(client, [own[:1] for own in lists])
        found = measure_in_turn(measures, num_rounds)
        for name in clients:
            turns, together = found[name, False], found[name, True]
            ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(together, turns, strict=True)]
            interval = mean_of(ratios).interval()
            equal = [
                answer.text == texts[name][each].text
                for outcome in (*turns, *together)
                for each, answer in zip(asked, outcome.answers, strict=True)
            ]
            all_equal &= all(equal) or name != next(iter(clients))
            shown = "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
            speeds = [median(each.tokens_per_s for each in outcomes) for outcomes in (turns, together)]
            print(
                f"| {name} | {count} | {speeds[0]:.1f} | {speeds[1]:.1f} | {mean_of(ratios).ratio:.2f} | {shown} "
                f"| {sum(equal)} of {len(equal)} |",
                flush=True,
            )
    for name, client in clients.items():
        passes, seconds = passes_to_first_token(client, [each.prompt for each in requests])
        print(f"{name}: a short request beside {_NUM_LONG} long ones has its first token in {passes} passes, "
              f"{seconds:.2f} s")  # fmt: skip
    return all_equal


def main() -> None:
    own, served_by = split_arguments(sys.argv[1:])
    parser = command_line(__doc__)
    parser.add_argument("model", help="as `edgespec serve` takes it")
    parser.add_argument("--requests", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--prompts", type=Path, default=_PROMPTS)
    asked = parser.parse_args(own)
    counts = [int(each) for each in asked.requests.split(",")]
    if wrong := [each for each in asked.beside if "=http" not in each]:
        parser.error(
            f"--beside is {wrong[0]!r}; wanted a name and a URL, such as llama.cpp=http://127.0.0.1:8081/v1"
        )
    options = served_by or ["--max-parallel", str(min(16, max(*counts, _NUM_LONG + 1)))]
    with ExitStack() as stack:
        url, _ = stack.enter_context(served(asked.model, options))
        urls = {"edgespec": url, **dict(each.split("=", 1) for each in asked.beside)}
        clients = {name: stack.enter_context(open_client(each)) for name, each in urls.items()}
        requests = [Asked(*each) for each in read_requests(asked.prompts, max(counts) * _PER_CLIENT)]
        if not compare(clients, requests, counts, asked.rounds):
            sys.exit("a text differs from that of its request alone")


if __name__ == "__main__":
    main()
