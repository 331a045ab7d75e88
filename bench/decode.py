"""Decoding speed of edgespec relative to a bare ONNX Runtime loop over the same model folder.

    python bench/decode.py MODEL [MODEL …] [--tokens N] [--rounds N] [--threads N]

Both decode greedily from one prompt, one token a pass. They run in turn. Printed are medians over rounds. The last
column compares each model with the first one given.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime
from command_line import command_line
from interleaved import measure_in_turn, median_ratio

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Plain, speculative_decode
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.setup.home import ModelHome, default_home
from edgespec.system.system_info import physical_cores

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
        self.logits = np.empty((1, 1, manifest.vocab_size), np.float32)
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


def decode_with_edgespec(decoder: OnnxDecoder, num_tokens: int) -> float:
    steps = speculative_decode(PROMPT, decoder, GumbelSampler(SamplingParams()), Plain())
    for _ in range(1 + WARM_UP):
        next(steps)
    started = perf_counter()
    for _ in range(num_tokens):
        next(steps)
    return (perf_counter() - started) / num_tokens


def open_loops(folder: Path, num_threads: int, num_tokens: int) -> dict[str, Callable[[int], float]]:
    manifest = read_manifest(folder)
    decoder = OnnxDecoder(folder, manifest, find_device("cpu"), num_threads=num_threads)
    bare = BareLoop(folder, manifest, num_threads, len(PROMPT) + WARM_UP + num_tokens + 1)
    return {
        "bare": lambda _: bare.decode(num_tokens),
        "edgespec": lambda _: decode_with_edgespec(decoder, num_tokens),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    home = ModelHome(default_home(), report=print)
    loops = {
        (name, loop): run
        for name in options.models
        for loop, run in open_loops(home.resolve(name), options.threads, options.tokens).items()
    }
    # The first round warms up.
    times_s = {key: times[1:] for key, times in measure_in_turn(loops, options.rounds + 1).items()}
    width = max(map(len, options.models))
    print(f"{options.threads} threads, {options.tokens} tokens a run, {options.rounds} rounds, tokens/s, medians")
    print(f"{'model':{width}}  {'bare':>7}  {'edgespec':>8}  {'ratio':>5}  {'to first':>8}")
    first_s = times_s[options.models[0], "edgespec"]
    for name in options.models:
        bare_s, own_s = times_s[name, "bare"], times_s[name, "edgespec"]
        speeds = f"{1 / median(bare_s):7.1f}  {1 / median(own_s):8.1f}"
        print(f"{name:{width}}  {speeds}  {median_ratio(bare_s, own_s):5.3f}  {median_ratio(first_s, own_s):8.3f}")


if __name__ == "__main__":
    main()
