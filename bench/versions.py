"""This installation of edgespec beside another one: decoding, first token, start-up, and a server at four.

    python bench/versions.py OTHER_PYTHON MODEL [--other-model FOLDER] [--processes N] [--tokens N] [--drafter D]
                             [--only PART]

OTHER_PYTHON is the interpreter of an environment that holds the other version. Each version has a process of its
own with the model loaded: plain, then with the drafter, then `edgespec serve`, which four clients ask at once. The
two answer the very same requests in turn, and the order changes with every round. One process of a version can be
several percent faster than the next one of the same version, and what is loaded first is slower than what comes
second, so all this is done with several pairs of processes, and every other pair loads the other version first.
Last are starts, in turn too: of --help, and of an engine up to its first token. Printed are ratios of this
version's speed to the other's (of the other's time to this one's): a pair of processes has the median of its
requests, two pairs that follow one another have their geometric mean, in which both orders count alike, and all of
them a median and, from twelve pairs on, its 95 % interval. Only the public names and commands are used, so that
any version can be measured.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import httpx2
from command_line import command_line
from interleaved import measure_in_turn
from serve_load import open_client
from server_process import Asked, ask, served

PROMPTS = (
    "Write a Python function that counts the words of a text, then write it again with type hints.",
    "Tell a long story about a lighthouse, a storm and a letter that came too late.",
    "Repeat these names in capital letters, one on each line: Anna, Ben, Clara, David, Emma, Felix, Greta, Hugo.",
)
# Long enough that their reading and their text overlap; a number before each keeps it out of all caches.
REQUESTS = (*PROMPTS, "Explain how a bicycle stays upright, and why it falls over when it stands still.")
WARM_UP = 2  # rounds
_LEAST_VALUES = 6  # the least and the greatest of so many have the median between them with a probability of 97 %
NAMES = "this", "other"
_PARTS = "plain", "drafts", "server", "starts"
WORKER = """
import json, sys
from time import perf_counter
from edgespec import SamplingParams, load
with load(sys.argv[1], drafter=sys.argv[2]) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, num_tokens = json.loads(line)
        started = perf_counter()
        first, num_tokens_after = None, 0
        for chunk in engine.stream(prompt, sampling=SamplingParams(), max_tokens=num_tokens):
            num_tokens_after += len(chunk.token_ids) if first else 0
            first = first or perf_counter()
        speed = num_tokens_after / (perf_counter() - first)
        print(json.dumps([speed, 1 / (first - started)]), flush=True)
"""

Speeds = list[float]  # of one measurement, in the order of its figures
Measure = Callable[[int], list[Speeds]]  # the number of the round → several measurements


class Installation(NamedTuple):
    """A version of edgespec: its interpreter, and the model that it runs."""

    python: str
    model: str


Versions = Mapping[str, Installation]
Opened = Callable[[int], AbstractContextManager[Mapping[str, Measure]]]  # by the number of the pair of processes


class Worker:
    """A process with one version and a loaded model."""

    def __init__(self, version: Installation, drafter: str) -> None:
        command = [version.python, "-P", "-c", WORKER, version.model, drafter]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def answer(self, prompt: str, num_tokens: int) -> Speeds:
        """Tokens a second behind the first pass, and first tokens a second."""
        assert self._process.stdin
        print(json.dumps([prompt, num_tokens]), file=self._process.stdin, flush=True)
        speeds: Speeds = json.loads(self._read())
        return speeds

    def answer_all(self, num_tokens: int, number: int) -> list[Speeds]:
        return [self.answer(prompt, num_tokens) for prompt in PROMPTS]

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended; see its error above")
        return line


def ask_at_once(client: httpx2.Client, num_tokens: int, number: int) -> list[Speeds]:
    """Tokens a second of all requests together, and first texts a second, by the median of the requests."""
    requests = [Asked(f"{number}.{i} {prompt}", num_tokens) for i, prompt in enumerate(REQUESTS)]
    with ThreadPoolExecutor(len(requests)) as pool:
        started = perf_counter()
        answers = list(pool.map(partial(ask, client), requests))
        seconds = perf_counter() - started
    num_made = sum(each.num_tokens for each in answers)
    return [[num_made / seconds, 1 / median(each.first_s for each in answers)]]


def start(version: Installation, number: int) -> list[Speeds]:
    """Starts of --help a second, and starts up to a first token a second."""
    started = perf_counter()
    subprocess.run([version.python, "-P", "-m", "edgespec", "--help"], check=True, stdout=subprocess.DEVNULL)
    helped = perf_counter()
    worker = Worker(version, "none")
    worker.answer(PROMPTS[0], 2)
    opened = perf_counter()
    worker.close()
    return [[1 / (helped - started), 1 / (opened - helped)]]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and two order statistics between which that of all lies with a probability of 95 %."""
    ranked = sorted(values)
    margin = int(0.98 * len(ranked) ** 0.5) + 1
    low, high = len(ranked) // 2 - margin, (len(ranked) - 1) // 2 + margin
    return median(ranked), ranked[max(low, 0)], ranked[min(high, len(ranked) - 1)]


def compare(opened: Opened, num_pairs: int, num_rounds: int, figures: Sequence[str], *, warm_up: int = 0) -> None:
    """Measure both versions in turn in so many pairs of processes, and print the ratio of each figure."""
    ratios: list[list[float]] = [[] for _ in figures]
    for number in range(num_pairs):
        with opened(number) as measures:
            found = measure_in_turn(measures, warm_up + num_rounds)
        ours, others = ([each for speeds in found[name][warm_up:] for each in speeds] for name in NAMES)
        for i, pairs in enumerate(ratios):
            pairs.append(median(our[i] / other[i] for our, other in zip(ours, others, strict=True)))
    for figure, pairs in zip(figures, ratios, strict=True):
        both_orders = [(one * two) ** 0.5 for one, two in zip(pairs[::2], pairs[1::2], strict=True)]
        middle, low, high = median_interval(both_orders)
        known = f"{low:.3f} to {high:.3f}" if len(both_orders) >= _LEAST_VALUES else "too few for an interval"
        print(f"{figure:>40} {middle:.3f}  ({known}; {len(pairs)} pairs)", flush=True)


def compare_answers(versions: Versions, drafter: str, num_tokens: int, num_pairs: int, num_rounds: int) -> None:
    @contextmanager
    def opened(number: int) -> Iterator[Mapping[str, Measure]]:
        workers = {name: Worker(versions[name], drafter) for name in in_turn(number)}
        yield {name: partial(worker.answer_all, num_tokens) for name, worker in workers.items()}
        for worker in workers.values():
            worker.close()

    figures = [f"--drafter {drafter}: decoding", f"--drafter {drafter}: first token"]
    compare(opened, num_pairs, num_rounds, figures, warm_up=WARM_UP)


def compare_servers(versions: Versions, num_tokens: int, num_pairs: int, num_rounds: int) -> None:
    at_once = len(REQUESTS)

    @contextmanager
    def opened(number: int) -> Iterator[Mapping[str, Measure]]:
        with ExitStack() as stack:
            measures: dict[str, Measure] = {}
            for name in in_turn(number):
                options = ["--max-parallel", str(at_once)]
                url, _ = stack.enter_context(served(versions[name].model, options, python=versions[name].python))
                client = stack.enter_context(open_client(url))
                measures[name] = partial(ask_at_once, client, num_tokens)
            yield measures

    figures = [f"server, {at_once} at once: tokens", f"server, {at_once} at once: first text"]
    compare(opened, num_pairs, num_rounds, figures, warm_up=WARM_UP)


def compare_starts(versions: Versions, num_pairs: int) -> None:
    def opened(number: int) -> AbstractContextManager[Mapping[str, Measure]]:
        return nullcontext({name: partial(start, versions[name]) for name in in_turn(number)})

    compare(opened, num_pairs, 1, ["start of --help", "start to a first token"])


def even(text: str) -> int:
    """A number of pairs, as half of them load this version first. Raises ValueError."""
    if (number := int(text)) < 2 or number % 2:
        raise ValueError
    return number


def in_turn(number: int) -> Sequence[str]:
    """The versions in the order of a pair of processes."""
    return NAMES[:: -1 if number % 2 else 1]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("python", metavar="OTHER_PYTHON")
    parser.add_argument("model", metavar="MODEL", help="a model folder")
    parser.add_argument("--other-model", metavar="FOLDER", help="a copy of it for the other version")
    parser.add_argument("--processes", type=even, default=12, metavar="N", help="pairs (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each pair (default: %(default)s)")
    parser.add_argument("--starts", type=even, default=20, metavar="N", help="pairs (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--only", choices=_PARTS, help="measure this part alone")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed version is compiled
    other = Installation(options.python, options.other_model or options.model)
    versions = dict(zip(NAMES, (Installation(sys.executable, options.model), other), strict=True))
    print(f"{Path(options.model).name}: speed of this version over that of the other, medians")
    often = options.processes, options.rounds
    parts = [options.only] if options.only else _PARTS
    if "plain" in parts:
        compare_answers(versions, "none", options.tokens, *often)
    if "drafts" in parts:
        compare_answers(versions, options.drafter, options.tokens, *often)
    if "server" in parts:
        compare_servers(versions, options.tokens, *often)
    if "starts" in parts:
        compare_starts(versions, options.starts)


if __name__ == "__main__":
    main()
