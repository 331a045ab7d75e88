"""What it costs a recurrent layer to verify a draft, and to go back to the accepted token, in three ways.

    python bench/going_back.py [--heads 16] [--size 128] [--rounds 40]

For each number of guesses, the time of one layer's recurrence (LinearAttention) relative to a pass over one token:

    window    each row has an operator of its own, which gives the state behind it; the next pass reads one
    snapshot  the state is copied before the pass; what was accepted runs once more, for the state alone
    replay    the state behind the certain tokens is given; the next pass takes accepted rows in first

Half of the guesses are accepted. The ways run in turn, and the lower quartiles of their times are compared, since
a few take a hundred times as long on a busy machine. The last column says how many states each holds.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from command_line import command_line
from onnx import TensorProto, helper
from onnxruntime import InferenceSession, SessionOptions

DRAFTS = (0, 1, 3, 5, 7, 15)
LINE = "{:>7} {:>12} {:>12} {:>12} {:>16}"
Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    layer = Layer(options.heads, options.size)
    print(LINE.format("guesses", "window", "snapshot", "replay", "states held"))
    step_s: float | None = None
    for num_draft in DRAFTS:
        ways = layer.window, layer.snapshot, layer.replay
        taken = [[_seconds(way, num_draft) for way in ways] for _ in range(options.rounds)]
        quartiles = np.quantile(taken, 0.25, axis=0)
        step_s = step_s or float(quartiles[2])
        held = f"{num_draft + 1} / 2 / 2"
        print(LINE.format(num_draft, *(f"{each / step_s:.2f}" for each in quartiles), held), flush=True)


class Layer:
    """The recurrence of one layer, with a state at random."""

    def __init__(self, heads: int, size: int) -> None:
        self._heads, self._size = heads, size
        rng = np.random.default_rng(1)
        self._state = rng.standard_normal((1, heads, size, size), np.float32) * np.float32(0.1)
        self._copy = self._state.copy()
        self._plain = _session(heads, size, ["rows"])
        self._windows = {num: _session(heads, size, [1] * (num + 1)) for num in DRAFTS}
        self._rows: dict[int, Arrays] = {}
        for num in range(1, DRAFTS[-1] + 2):
            drawn = (rng.standard_normal((1, num, heads * size), np.float32) for _ in "qkv")
            rows = {f"{name}0": row / np.float32(size**0.5) for name, row in zip("qkv", drawn, strict=True)}
            shares = {"g0": -0.1, "b0": 0.5}
            self._rows[num] = rows | {
                name: np.full((1, num, heads), it, np.float32) for name, it in shares.items()
            }

    def window(self, num_draft: int) -> None:
        rows = self._rows[num_draft + 1].items()
        given = {f"{name[0]}{at}": row[:, at : at + 1] for name, row in rows for at in range(num_draft + 1)}
        self._windows[num_draft].run(None, {**given, "state": self._state})

    def snapshot(self, num_draft: int) -> None:
        self._copy[...] = self._state
        self._run(num_draft + 1)
        if num_draft:
            self._run(1 + num_draft // 2)

    def replay(self, num_draft: int) -> None:
        self._run(1 + num_draft // 2)
        if num_draft:
            self._run(num_draft)

    def _run(self, num: int) -> None:
        self._plain.run(None, {**self._rows[num], "state": self._state})


def _session(heads: int, size: int, lengths: Sequence[int | str]) -> Any:
    """A recurrence over parts of these lengths one after another, which gives the state behind each."""

    def value(name: str, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes, inputs, outputs, state = [], [value("state", 1, heads, size, size)], [], "state"
    rule: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"}
    for at, length in enumerate(lengths):
        q, k, v, g, b = (f"{name}{at}" for name in "qkvgb")
        read = [f"read{at}", f"state{at}"]
        nodes.append(
            helper.make_node("LinearAttention", [q, k, v, state, g, b], read, domain="com.microsoft", **rule)
        )
        inputs += [value(name, 1, length, heads * size) for name in (q, k, v)]
        inputs += [value(name, 1, length, heads) for name in (g, b)]
        outputs += [value(read[0], 1, length, heads * size), value(read[1], 1, heads, size, size)]
        state = read[1]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "layer", inputs, outputs), opset_imports=opsets, ir_version=10
    )
    settings = SessionOptions()
    settings.intra_op_num_threads = 2
    return InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def _seconds(way: Any, num_draft: int) -> float:
    started_s = perf_counter()
    way(num_draft)
    return perf_counter() - started_s


if __name__ == "__main__":
    main()
