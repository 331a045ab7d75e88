"""This installation of edgespec beside another one: decoding, first token and start-up.

    python bench/versions.py OTHER_PYTHON MODEL [--other-model FOLDER] [--rounds N] [--tokens N] [--drafter D]

OTHER_PYTHON is the interpreter of an environment that holds the other version. Each version has a process of its
own with the model loaded, once plain and once with the drafter; the two answer each prompt in turn, and the
order changes with every round. Printed are ratios of this version's speed to the other's (of the other's time to
this one's): the median over rounds, and the 95 % interval of that median.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from command_line import command_line
from interleaved import measure_in_turn

PROMPTS = (
    "Write a Python function that counts the words of a text, then write it again with type hints.",
    "Tell a long story about a lighthouse, a storm and a letter that came too late.",
    "Repeat these names in capital letters, one on each line: Anna, Ben, Clara, David, Emma, Felix, Greta, Hugo.",
)
# Public names of edgespec alone, so that it runs in any version.
WORKER = """
import json, sys
from time import perf_counter
from edgespec import load
with load(sys.argv[1], drafter=sys.argv[2]) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        prompt, num_tokens = json.loads(line)
        started = perf_counter()
        first, num_tokens_after = None, 0
        for chunk in engine.stream(prompt, max_tokens=num_tokens):
            num_tokens_after += len(chunk.token_ids) if first else 0
            first = first or perf_counter()
        speed = num_tokens_after / (perf_counter() - first)
        print(json.dumps([speed, 1 / (first - started)]), flush=True)
"""


class Version:
    """A process with one version and a loaded model."""

    def __init__(self, python: str, model: str, drafter: str) -> None:
        self._process = subprocess.Popen(
            [python, "-P", "-c", WORKER, model, drafter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def answer(self, prompt: str, num_tokens: int) -> list[float]:
        """Tokens a second behind the first pass, and first tokens a second."""
        assert self._process.stdin
        print(json.dumps([prompt, num_tokens]), file=self._process.stdin, flush=True)
        speeds: list[float] = json.loads(self._read())
        return speeds

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended; see its error above")
        return line


def answer_all(version: Version, num_tokens: int, _: int) -> list[list[float]]:
    return [version.answer(prompt, num_tokens) for prompt in PROMPTS]


def start(python: str, _: int) -> float:
    """Starts a second."""
    started = perf_counter()
    subprocess.run([python, "-P", "-m", "edgespec", "--help"], check=True, stdout=subprocess.DEVNULL)
    return 1 / (perf_counter() - started)


def print_ratios(name: str, ours: Sequence[float], others: Sequence[float]) -> None:
    ratios = sorted(our / other for our, other in zip(ours, others, strict=True))
    # Order statistics: the median lies between these two with a probability of 95 %.
    margin = int(0.98 * len(ratios) ** 0.5) + 1
    low, high = len(ratios) // 2 - margin, (len(ratios) - 1) // 2 + margin
    interval = f"{ratios[max(low, 0)]:.3f} to {ratios[min(high, len(ratios) - 1)]:.3f}"
    print(f"{name:>24} {median(ratios):.3f}  ({interval}; {len(ratios)} pairs)", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("python", metavar="OTHER_PYTHON")
    parser.add_argument("model", metavar="MODEL", help="a model folder")
    parser.add_argument("--other-model", metavar="FOLDER", help="a copy of it for the other version")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafter", default="suffix")
    options = parser.parse_args()
    pythons = {"this": sys.executable, "other": options.python}
    models = {"this": options.model, "other": options.other_model or options.model}
    for drafter in ("none", options.drafter):
        versions = {name: Version(pythons[name], models[name], drafter) for name in pythons}
        measures = {name: partial(answer_all, version, options.tokens) for name, version in versions.items()}
        measure_in_turn(measures, 2)  # warm up
        found = measure_in_turn(measures, options.rounds)
        for i, figure in enumerate(("decoding", "first token")):
            ours, others = ([speeds[i] for each in found[name] for speeds in each] for name in pythons)
            print_ratios(f"{Path(options.model).name} {drafter} {figure}", ours, others)
        for version in versions.values():
            version.close()
    starts = measure_in_turn({name: partial(start, python) for name, python in pythons.items()}, 20)
    print_ratios("start of --help", starts["this"], starts["other"])


if __name__ == "__main__":
    main()
