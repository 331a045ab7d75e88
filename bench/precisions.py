"""What each precision of a GGUF file costs and keeps, beside llama.cpp on the same file.

    pip install -e ".[cpu,bench]"
    python bench/precisions.py FILE.gguf [FILE.gguf …] [--precisions source,int4] [--tokens N] [--rounds N]

Each model runs in a process of its own; every round lets them run in turn, forwards and backwards by turns, so
that a ratio compares neighbours in time. Printed are medians over rounds:

    decode       tokens/s one by one, greedy, after the same prompt
    verify 4     passes/s of four tokens behind the same past (llama.cpp computes logits of the last one alone)
    to llama     the same as a share of llama.cpp's, round by round
    nll          nats a token on this project's README and exporter, with what the dequantised file has
    export       seconds, and the most memory that the exporting process took, its check left out
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, PAST_TOKENS, WIDTH, WARM_UP = 32, 64, 4, 8
TEXT_TOKENS = 400  # of each of the two texts
SETTLE_S = 0.3  # the threads of the process that ran before spin for a while


# -- in processes of their own: commands on stdin, a number on stdout --------------------------------


def prompt_ids(num_tokens: int, shift: int = 0) -> list[int]:
    return [1000 + (37 * i + shift) % 5000 for i in range(num_tokens)]


def edgespec_worker(folder: str, threads: int) -> None:
    import numpy as np

    from edgespec.manifest import read_manifest
    from edgespec.runtimes.devices import find_device
    from edgespec.runtimes.onnx import OnnxDecoder

    decoder = OnnxDecoder(Path(folder), read_manifest(Path(folder)), find_device("cpu"), num_threads=threads)

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
        taken = []
        for i in range(WARM_UP + num_passes):
            tokens = np.append(past, np.array(prompt_ids(WIDTH, shift + 7 * i + 1), np.int32))
            started = perf_counter()
            decoder.logits(tokens, WIDTH)
            taken.append(perf_counter() - started)
        return statistics.median(taken[WARM_UP:])

    serve(decode, verify)


def llama_worker(path: str, threads: int) -> None:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_ctx, settings.n_parallel = 2048, 1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
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
        taken = []
        for i in range(WARM_UP + num_passes):
            timings = run(past + prompt_ids(WIDTH, shift + 7 * i + 1), 1)
            if timings["prompt_n"] == WIDTH:
                taken.append(timings["prompt_ms"] / 1000)
        return statistics.median(taken[WARM_UP:])

    serve(decode, verify)


def serve(decode: Any, verify: Any) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command, count, shift = line.split()
        print({"decode": decode, "verify": verify}[command](int(count), int(shift)), file=answers, flush=True)


class Worker:
    def __init__(self, kind: str, path: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", kind, str(path), str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} failed")  # type: ignore[arg-type]
        return line

    def ask(self, command: str, count: int, shift: int) -> float:
        assert self.process.stdin is not None
        sleep(SETTLE_S)
        self.process.stdin.write(f"{command} {count} {shift}\n")
        self.process.stdin.flush()
        return float(self._read())


# -- the table ---------------------------------------------------------------------------------------


def export(source: Path, folder: Path, precision: str) -> tuple[float, int]:
    """Seconds, and the largest resident size in bytes."""
    command = [sys.executable, "-m", "edgespec", "export", str(source), "--output", str(folder)]
    started = perf_counter()
    command += ["--precision", precision, "--no-check"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return perf_counter() - started, used.ru_maxrss * 1024


def losses(source: Path, folders: dict[str, Path]) -> tuple[float, dict[str, float]]:
    """Nats a token of the dequantised file and of each export, over the same tokens."""
    import numpy as np

    from edgespec.export.reference import reference_logits
    from edgespec.export.sources import read_source
    from edgespec.manifest import read_manifest
    from edgespec.opening import open_decoder
    from edgespec.scoring import negative_log_likelihood
    from edgespec.tokenizer import Tokenizer

    first = next(iter(folders.values()))
    tokenizer = Tokenizer(first / "tokenizer.json")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "export/graph.py")]
    tokens = np.concatenate([tokenizer.encode(text)[:TEXT_TOKENS] for text in texts])
    loaded = read_source(source)

    def mean(logits: Any) -> float:
        return float(negative_log_likelihood(logits[:-1], tokens[1:]).mean())

    reference = mean(reference_logits(loaded.config, loaded.tensors, tokens))
    found = {}
    for precision, folder in folders.items():
        found[precision] = mean(open_decoder(folder, read_manifest(folder)).logits(tokens, len(tokens)))
    return reference, found


def measure(source: Path, options: argparse.Namespace, scratch: Path) -> None:
    folders = {precision: scratch / f"{source.stem}-{precision}" for precision in options.precisions.split(",")}
    exports = {precision: export(source, folder, precision) for precision, folder in folders.items()}
    reference, nlls = losses(source, folders)
    workers = {precision: Worker("edgespec", folder, options.threads) for precision, folder in folders.items()}
    workers["llama.cpp"] = Worker("llama", source, options.threads)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
    for i in range(options.rounds):
        for name, worker in list(workers.items())[:: -1 if i % 2 else 1]:
            pair = worker.ask("decode", options.tokens, 101 * i), worker.ask("verify", 8, 101 * i)
            taken[name].append(pair)
    size = source.stat().st_size / 1e6
    print(f"\n{source.name}, {size:.0f} MB, {options.threads} threads, {options.rounds} rounds")
    print(f"dequantised: {reference:.4f} nats/token over {2 * TEXT_TOKENS} tokens")
    print("precision     decode  to llama  verify 4  to llama      nll    lost     MB  export s  peak MB")
    base = taken.pop("llama.cpp")
    print(f"{'llama.cpp':11} {_rate(base, 0):8.1f} {'':9} {_rate(base, 1):9.1f}")
    for name, pairs in taken.items():
        seconds, peak = exports[name]
        weights = (folders[name] / "model.onnx.data").stat().st_size
        print(
            f"{name:11} {_rate(pairs, 0):8.1f} {_ratio(base, pairs, 0):9.3f} {_rate(pairs, 1):9.1f} "
            f"{_ratio(base, pairs, 1):9.3f} {nlls[name]:8.4f} {nlls[name] - reference:+7.4f} {weights / 1e6:6.0f} "
            f"{seconds:9.1f} {peak / 1e6:8.0f}"
        )
    for worker in workers.values():
        worker.process.kill()
        worker.process.wait()


def _rate(pairs: list[tuple[float, float]], which: int) -> float:
    return 1 / statistics.median(pair[which] for pair in pairs)


def _ratio(base: list[tuple[float, float]], pairs: list[tuple[float, float]], which: int) -> float:
    return statistics.median(one[which] / other[which] for one, other in zip(base, pairs, strict=True))


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        kind, path, threads = sys.argv[2:]
        {"edgespec": edgespec_worker, "llama": llama_worker}[kind](path, int(threads))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
