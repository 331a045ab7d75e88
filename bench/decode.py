"""Decoding speed of edgespec against a bare ONNX Runtime loop over the same model folder.

    python bench/decode.py MODEL [MODEL …] [--tokens N] [--rounds N] [--threads N]

Both decode greedily from one prompt, one token a pass. Every round runs the two loops of each model in turn,
in alternating order, so that a ratio compares neighbours in time; printed are medians over rounds. The last column
compares each model with the first one given.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import onnxruntime

from edgespec.home import ModelHome, default_home
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import find_device, physical_cores
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Plain, serial

PROMPT = np.arange(1000, 1032, dtype=np.int32)
# The threads of the session that ran before spin for a while and take a core from this one.
WARM_UP = 16


class BareLoop:
    """The least that ONNX Runtime needs: buffers bound once, one array changed a step."""

    def __init__(self, folder: Path, manifest: Manifest, num_threads: int, capacity: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        self.session = onnxruntime.InferenceSession(
            str(folder / manifest.graph), options, providers=["CPUExecutionProvider"]
        )
        self.binding = self.session.io_binding()
        self.vocab_size = manifest.vocab_size
        kv = manifest.kv_cache
        shape = [1, kv.num_kv_heads, capacity, kv.head_dim]
        self.caches = []
        for i in range(kv.num_layers):
            for part in ("key", "value"):
                cache = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, np.float32, "cpu", 0)
                self.binding.bind_ortvalue_input(f"past_key_values.{i}.{part}", cache)
                self.binding.bind_ortvalue_output(f"present.{i}.{part}", cache)
                self.caches.append(cache)
        self.ones = np.ones((1, capacity), np.int64)
        self.one = np.array([1], np.int64)
        self.logits = np.empty((1, 1, self.vocab_size), np.float32)
        self._bind("num_logits_to_keep", self.one, (1,))
        self.binding.bind_output("logits", "cpu", 0, np.float32, self.logits.shape, self.logits.ctypes.data)

    def _bind(self, name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
        self.binding.bind_input(name, "cpu", 0, np.int64, shape, array.ctypes.data)

    def step(self, ids: np.ndarray, total: int) -> int:
        self._bind("input_ids", ids, ids.shape)
        self._bind("attention_mask", self.ones, (1, total))
        self.session.run_with_iobinding(self.binding)
        return int(self.logits[0, 0].argmax())

    def decode(self, num_tokens: int) -> float:
        """Seconds a token after the prompt."""
        token = self.step(PROMPT.astype(np.int64)[None], len(PROMPT))
        started = 0.0
        for i in range(WARM_UP + num_tokens):
            started = perf_counter() if i == WARM_UP else started
            token = self.step(np.array([[token]], np.int64), len(PROMPT) + 1 + i)
        return (perf_counter() - started) / num_tokens


def edgespec_decode(decoder: OnnxDecoder, num_tokens: int) -> float:
    steps = serial(PROMPT, decoder, GumbelSampler(SamplingParams()), Plain())
    for _ in range(1 + WARM_UP):
        next(steps)
    started = perf_counter()
    for _ in range(num_tokens):
        next(steps)
    return (perf_counter() - started) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    home = ModelHome(default_home(), report=print)
    loops: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {}
    for name in options.models:
        folder = home.resolve(name)
        manifest = read_manifest(folder)
        decoder = OnnxDecoder(folder, manifest, find_device("cpu"), num_threads=options.threads)
        bare = BareLoop(folder, manifest, options.threads, len(PROMPT) + WARM_UP + options.tokens + 1)
        loops[name] = (bare.decode, lambda tokens, decoder=decoder: edgespec_decode(decoder, tokens))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for i in range(options.rounds + 1):
        for name, (bare_loop, own_loop) in loops.items():
            if i % 2:
                own = own_loop(options.tokens)
                pair = (bare_loop(options.tokens), own)
            else:
                pair = (bare_loop(options.tokens), own_loop(options.tokens))
            if i:  # the first round warms up
                taken[name].append(pair)
    first = next(iter(taken.values()))
    width = max(map(len, taken))
    print(f"{options.threads} threads, {options.tokens} tokens a run, {options.rounds} rounds, tokens/s, medians")
    print(f"{'model':{width}}  {'bare':>7}  {'edgespec':>8}  {'ratio':>5}  {'to first':>8}")
    for name, pairs in taken.items():
        bare_s = statistics.median(pair[0] for pair in pairs)
        own_s = statistics.median(pair[1] for pair in pairs)
        ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
        to_first = statistics.median(base[1] / pair[1] for base, pair in zip(first, pairs, strict=True))
        print(f"{name:{width}}  {1 / bare_s:7.1f}  {1 / own_s:8.1f}  {ratio:5.3f}  {to_first:8.3f}")


if __name__ == "__main__":
    main()
