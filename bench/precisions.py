"""What each precision of a GGUF file costs and loses, beside llama.cpp on the same file.

    pip install -e ".[cpu,bench]"
    python bench/precisions.py FILE.gguf [FILE.gguf …] [--precisions source,int4] [--tokens N] [--rounds N]

Each model runs in a process of its own, and all run in turn. Printed are medians over rounds:

    decode       tokens/s one by one, greedy, after the same prompt
    verify 4     passes/s over four tokens after the same text (llama.cpp computes logits of the last one alone)
    to llama     this speed as a share of llama.cpp's, round by round
    nll          nats a token on this project's README and exporter; lost: relative to the dequantised file
    export       seconds, and the most memory of the exporting process, without its check
"""

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
from command_line import command_line
from interleaved import measure_in_turn, median_ratio

from edgespec.decoding.logprobs import negative_log_likelihood
from edgespec.export.reference import reference_logits
from edgespec.export.sources import read_source
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.setup.open_model import open_decoder
from edgespec.text.tokenizer import Tokenizer
from edgespec.types import Logits

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, PAST_TOKENS, WIDTH, WARM_UP = 32, 64, 4, 8
TEXT_TOKENS = 400  # of each of the two texts
NUM_PASSES = 8
SETTLE_S = 0.3  # the threads of the process that ran before spin for a while
SPAWN = get_context("spawn")

# Takes a number of tokens or passes and a shift of their ids; returns the seconds of one.
Measure = Callable[[int, int], float]


def prompt_ids(num_tokens: int, shift: int = 0) -> list[int]:
    return [1000 + (37 * i + shift) % 5000 for i in range(num_tokens)]


def open_edgespec(folder: Path, num_threads: int) -> dict[str, Measure]:
    decoder = OnnxDecoder(folder, read_manifest(folder), find_device("cpu"), num_threads=num_threads)

    def decode(num_tokens: int, shift: int) -> float:
        tokens = np.array(prompt_ids(PROMPT_TOKENS, shift), np.int32)
        started = 0.0
        for i in range(WARM_UP + num_tokens):
            started = perf_counter() if i == WARM_UP else started
            tokens = np.append(tokens, np.int32(decoder.logits(tokens, 1)[0].argmax()))
        return (perf_counter() - started) / num_tokens

    def verify(num_passes: int, shift: int) -> float:
        past = np.array(prompt_ids(PAST_TOKENS, shift), np.int32)
        decoder.logits(past, 1)
        times_s = []
        for i in range(WARM_UP + num_passes):
            tokens = np.append(past, np.array(prompt_ids(WIDTH, shift + 7 * i + 1), np.int32))
            started = perf_counter()
            decoder.logits(tokens, WIDTH)
            times_s.append(perf_counter() - started)
        return median(times_s[WARM_UP:])

    return {"decode": decode, "verify": verify}


def open_llama(path: Path, num_threads: int) -> dict[str, Measure]:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel = 2048, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = num_threads
    server = xllamacpp.Server(settings)

    def run(tokens: list[int], num_tokens: int) -> dict[str, float]:
        request = {"prompt": tokens, "n_predict": num_tokens, "temperature": 0, "cache_prompt": True}
        timings: dict[str, float] = server.handle_completions({**request, "ignore_eos": True})["timings"]
        return timings

    def decode(num_tokens: int, shift: int) -> float:
        run(prompt_ids(PROMPT_TOKENS, shift), WARM_UP)
        timings = run(prompt_ids(PROMPT_TOKENS, shift), num_tokens)
        return timings["predicted_ms"] / timings["predicted_n"] / 1000

    def verify(num_passes: int, shift: int) -> float:
        past = prompt_ids(PAST_TOKENS, shift)
        run(past, 1)
        times_s = []
        for i in range(WARM_UP + num_passes):
            timings = run(past + prompt_ids(WIDTH, shift + 7 * i + 1), 1)
            if timings["prompt_n"] == WIDTH:
                times_s.append(timings["prompt_ms"] / 1000)
        return median(times_s[WARM_UP:])

    return {"decode": decode, "verify": verify}


def serve(connection: Connection, kind: str, path: Path, num_threads: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    measures = {"edgespec": open_edgespec, "llama": open_llama}[kind](path, num_threads)
    connection.send(0.0)  # ready
    while True:
        name, count, shift = connection.recv()
        connection.send(measures[name](count, shift))


class Worker:
    """A process that measures one model. It ends with this program."""

    def __init__(self, kind: str, path: Path, num_threads: int) -> None:
        self._name = f"{kind} with {path}"
        self._connection, other = SPAWN.Pipe()
        SPAWN.Process(target=serve, args=(other, kind, path, num_threads), daemon=True).start()
        other.close()
        self._receive()

    def _receive(self) -> float:
        try:
            return float(self._connection.recv())
        except EOFError:
            raise SystemExit(f"{self._name} ended early; is the extra bench installed?") from None

    def ask(self, name: str, count: int, shift: int) -> float:
        sleep(SETTLE_S)
        self._connection.send((name, count, shift))
        return self._receive()

    def measure(self, num_tokens: int, round_number: int) -> tuple[float, float]:
        """Seconds for a decoded token, and for a pass over four tokens."""
        shift = 101 * round_number
        return self.ask("decode", num_tokens, shift), self.ask("verify", NUM_PASSES, shift)


def export(source: Path, folder: Path, precision: str) -> tuple[float, int]:
    """The seconds that an export takes, and its largest resident size in bytes."""
    command = [sys.executable, "-m", "edgespec", "export", str(source), "--output", str(folder)]
    started = perf_counter()
    command += ["--precision", precision, "--no-check"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return perf_counter() - started, usage.ru_maxrss * 1024


def measure_losses(source: Path, folders: dict[str, Path]) -> tuple[float, dict[str, float]]:
    """Nats a token of the dequantised file and of each export, over the same tokens."""
    tokenizer = Tokenizer(next(iter(folders.values())) / "tokenizer.json")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "export/graph.py")]
    tokens = np.concatenate([tokenizer.encode(text)[:TEXT_TOKENS] for text in texts])
    loaded = read_source(source)

    def mean_loss(logits: Logits) -> float:
        return float(negative_log_likelihood(logits[:-1], tokens[1:]).mean())

    losses = {
        precision: mean_loss(open_decoder(folder, read_manifest(folder)).logits(tokens, len(tokens)))
        for precision, folder in folders.items()
    }
    return mean_loss(reference_logits(loaded.config, loaded.tensors, tokens)), losses


def measure(source: Path, options: Namespace, scratch: Path) -> None:
    folders = {precision: scratch / f"{source.stem}-{precision}" for precision in options.precisions.split(",")}
    exports = {precision: export(source, folder, precision) for precision, folder in folders.items()}
    reference, losses = measure_losses(source, folders)
    workers = {precision: Worker("edgespec", folder, options.threads) for precision, folder in folders.items()}
    workers["llama.cpp"] = Worker("llama", source, options.threads)
    times_s = measure_in_turn(
        {name: partial(worker.measure, options.tokens) for name, worker in workers.items()}, options.rounds
    )
    size = source.stat().st_size / 1e6
    print(f"\n{source.name}, {size:.0f} MB, {options.threads} threads, {options.rounds} rounds")
    print(f"dequantised: {reference:.4f} nats/token over {2 * TEXT_TOKENS} tokens")
    print("precision     decode  to llama  verify 4  to llama      nll    lost     MB  export s  peak MB")
    llama_decode, llama_verify = zip(*times_s.pop("llama.cpp"), strict=True)
    print(f"{'llama.cpp':11} {1 / median(llama_decode):8.1f} {'':9} {1 / median(llama_verify):9.1f}")
    for name, pairs in times_s.items():
        decode, verify = zip(*pairs, strict=True)
        seconds, peak = exports[name]
        weights = (folders[name] / "model.onnx.data").stat().st_size
        print(
            f"{name:11} {1 / median(decode):8.1f} {median_ratio(llama_decode, decode):9.3f} "
            f"{1 / median(verify):9.1f} {median_ratio(llama_verify, verify):9.3f} {losses[name]:8.4f} "
            f"{losses[name] - reference:+7.4f} {weights / 1e6:6.0f} {seconds:9.1f} {peak / 1e6:8.0f}"
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("sources", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--precisions", default="source,int4,int8")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for source in options.sources:
            measure(source, options, Path(scratch))


if __name__ == "__main__":
    main()
